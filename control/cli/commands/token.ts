/** `dsec token`: what callers show the API. */
import { rmSync, writeFileSync } from 'node:fs';
import { messageOf, systemCode } from '#base';
import { fail } from '../../errors.ts';
import type { MadeToken, Policy, Token } from '../../iam/administration.ts';
import { apiConnection } from '../api-connection.ts';
import type { CommandDefinition } from '../command.ts';
import { withExamples } from '../examples.ts';
import { repeated } from '../repeated.ts';
import { withApi } from '../sandbox-client-of.ts';
import { type JsonOption, withJson } from '../store-option.ts';
import { timeText, timeToCome } from '../time-text.ts';

interface CreateOptions extends JsonOption {
  readonly principal?: string;
  readonly project?: string;
  readonly grant?: string[];
  readonly for?: string;
  readonly note?: string;
  readonly file?: string;
}

interface WhoAmI {
  readonly principal: string;
  readonly kind: string;
  readonly project: string;
  readonly tokenId: string;
  readonly actions: readonly string[];
  readonly expiresAtMs?: number;
  readonly policies: readonly Policy[];
}

export const definition: CommandDefinition = {
  description:
    'A token stands for a principal, narrowed to a project and to some actions, until it expires or is revoked. It is shown once, when it is made; ' +
    'the cluster keeps a hash alone. Nobody makes one that can do more than he can himself, or for longer.',
  examples: [
    {
      line: 'dsec token create --for 30d --file ~/.dsec-token',
      what: 'one for the caller himself, in a file for him alone',
    },
    {
      line: 'dsec token create --principal trainer --project root/team/run --grant developer --for 12h',
      what: 'one for an agent',
    },
    { line: 'dsec token revoke t5be1f0c94d21aa7c30', what: 'refused from now on' },
  ],
  json:
    'ls: an array, create and revoke: an object: `id`, `principal`, `project`, `grants`, `actions`, `note`, `expiresAtMs`, `createdAtMs`, `createdBy`, `revokedAtMs`, and of create `secret`, the token itself, ' +
    'or `file`; whoami: `principal`, `kind`, `project`, `tokenId`, `actions`, `expiresAtMs`, `policies` (as dsec policy ls)',
  configure(command, context) {
    const { output } = context;
    const api = (name: string) => apiConnection(context, `dsec token ${name}`);

    const ls = command
      .command('ls')
      .description(
        "Lists the caller's tokens, and those of projects where he has token.admin; never the tokens themselves.",
      );
    withExamples(withJson(ls), [{ line: 'dsec token ls --project root/team', what: 'those of a project and below' }])
      .option('--project <path>', 'only of this project and those below it')
      .option('--principal <name>', 'only of this one')
      .option('--ended', 'also those that are revoked or expired')
      .action(async ({ json, ...query }: JsonOption & { project?: string; principal?: string; ended?: boolean }) => {
        const { tokens } = await api('ls').json<{ tokens: Token[] }>('GET', '/v1/tokens', { query });
        if (json) return output.json(tokens);
        await output.table(
          ['ID', 'PRINCIPAL', 'PROJECT', 'MAY', 'UNTIL', 'NOTE'].map((title) => ({ title })),
          tokens.map((one) => [
            one.id,
            one.principal,
            one.project,
            one.grants.length > 3 ? `${one.grants.length} actions` : one.grants.join(' '),
            one.revokedAtMs === undefined ? timeText(one.expiresAtMs) : 'revoked',
            one.note ?? '',
          ]),
        );
      });

    const create = command
      .command('create')
      .description('Makes a token and prints it. Needs token.admin on its project.');
    withExamples(withJson(create), [
      { line: 'dsec token create --for 30d --file ~/.dsec-token', what: 'for the caller himself' },
    ])
      .option('--principal <name>', 'whose it is (default: the caller)')
      .option('--project <path>', "where and below which it works (default: the caller's token's)")
      .option(
        '--grant <grant>',
        'a role or an action that it lets through; several times (default: all that the caller has there)',
        repeated,
      )
      .option('--for <time>', 'how long: 90s, 15m, 1h, 7d (default: as long as the caller has it himself)')
      .option('--note <text>', 'what it is for')
      .option('--file <file>', 'write it there, for this user alone, and print its id')
      .action(async ({ json, grant, for: time, file, ...asked }: CreateOptions) => {
        const body = { ...asked, grants: grant, expiresAtMs: timeToCome('--for', time) };
        // Before anything is made that would then be lost.
        if (file !== undefined) writeNew(file, '');
        const made = await api('create')
          .json<MadeToken>('POST', '/v1/tokens', { body })
          .catch((error) => {
            if (file !== undefined) rmSync(file, { force: true });
            throw error;
          });
        const { secret, ...token } = made;
        if (file !== undefined) writeNew(file, `${secret}\n`, 'w');
        if (json) return output.json(file === undefined ? { ...token, secret } : { ...token, file });
        const until = token.expiresAtMs === undefined ? 'without an end' : `until ${timeText(token.expiresAtMs)}`;
        output.note(`${token.id}: ${token.principal} on ${token.project}, ${until}`);
        await output.line(file === undefined ? secret : token.id);
      });

    const revoke = command
      .command('revoke')
      .description("Has a token refused, at once: the caller's own, or with token.admin on its project.");
    withExamples(withJson(revoke), [{ line: 'dsec token revoke t5be1f0c94d21aa7c30', what: 'one' }])
      .argument('<id>', 'as `dsec token ls` shows it')
      .action(async (id: string, { json }: JsonOption) => {
        const token = await api('revoke').json<Token>('DELETE', `/v1/tokens/${encodeURIComponent(id)}`);
        if (json) return output.json(token);
        await output.line(`${token.id}: revoked`);
      });

    const whoami = command.command('whoami').description('Shows whose token this is, and what it may do.');
    withExamples(withJson(whoami), [{ line: 'dsec token whoami', what: 'of the context that is in force' }]).action(
      async ({ json }: JsonOption) => {
        const who = await api('whoami').json<WhoAmI>('GET', '/v1/whoami');
        if (json) return output.json(who);
        await output.line(`${who.principal} (${who.kind}), token ${who.tokenId}, until ${timeText(who.expiresAtMs)}`);
        await output.line(`token:  ${who.actions.join(' ')} on ${who.project}`);
        for (const policy of who.policies) {
          await output.line(
            `policy: ${policy.grants.join(' ')} on ${policy.project}, until ${timeText(policy.expiresAtMs)}`,
          );
        }
      },
    );
    withApi(command, context);
  },
};

/** @throws CLI_OUTPUT_EXISTS, CLI_OUTPUT_FILE */
function writeNew(path: string, text: string, flag = 'wx'): void {
  try {
    writeFileSync(path, text, { mode: 0o600, flag });
  } catch (error) {
    if (systemCode(error) === 'EEXIST') throw fail('CLI_OUTPUT_EXISTS', { path });
    throw fail('CLI_OUTPUT_FILE', { path, reason: messageOf(error) }, error);
  }
}
