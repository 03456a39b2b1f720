/** `dsec audit`: who did what in a cluster. */
import { fail } from '../../errors.ts';
import type { AuditRecord } from '../../iam/administration.ts';
import { apiConnection } from '../api-connection.ts';
import type { CommandDefinition } from '../command.ts';
import { withApi } from '../sandbox-client-of.ts';
import { type JsonOption, withJson } from '../store-option.ts';

interface Options extends JsonOption {
  readonly project?: string;
  readonly principal?: string;
  readonly action?: string;
  readonly before?: string;
  readonly limit: string;
}

export const definition: CommandDefinition = {
  description:
    'Shows the audit log, newest first: what was done and what was denied. Nothing in it can be changed, and no token is in it. Needs audit.read on the project.',
  examples: [
    { line: 'dsec audit --project root/team', what: 'the last hundred entries of a project and below' },
    { line: 'dsec audit --principal trainer --action sandbox.create', what: 'what one principal made' },
    { line: 'dsec audit --before 4711', what: 'the page before that entry' },
  ],
  json: 'an array: `id`, `atMs`, `principal`, `tokenId`, `action`, `project`, `target`, `outcome` (done, denied, failed), `requestId`, `detail`',
  configure(command, context) {
    const { output } = context;
    withJson(command)
      .option('--project <path>', "of this project and those below it (default: the token's)")
      .option('--principal <name>', 'only what this one did')
      .option('--action <action>', 'only this: sandbox.create, token.revoke, ...')
      .option('--before <id>', 'only entries older than this one')
      .option('--limit <n>', 'how many, up to 1000', '100')
      .action(async ({ json, limit, before, ...query }: Options) => {
        for (const [option, text] of [
          ['--limit', limit],
          ['--before', before],
        ] as const) {
          if (text !== undefined && !/^[1-9]\d{0,14}$/.test(text)) {
            throw fail('CLI_USAGE', { problem: `${option} ${text}: not a number`, program: 'dsec audit' });
          }
        }
        const api = apiConnection(context, 'dsec audit');
        const asked = { query: { ...query, limit, before } };
        const { records } = await api.json<{ records: AuditRecord[] }>('GET', '/v1/audit', asked);
        if (json) return output.json(records);
        await output.table(
          [
            { title: 'ID', right: true },
            ...['TIME', 'PRINCIPAL', 'ACTION', 'PROJECT', 'TARGET', 'OUTCOME'].map((title) => ({ title })),
          ],
          records.map((one) => [
            String(one.id),
            new Date(one.atMs).toISOString().slice(0, 19).replace('T', ' '),
            one.principal,
            one.action,
            one.project,
            one.target ?? '',
            one.outcome,
          ]),
        );
      });
    withApi(command, context);
  },
};
