/** `dsec principal`: users, services and agents of a cluster. */
import type { Principal } from '../../iam/administration.ts';
import { KINDS } from '../../iam/iam.ts';
import { apiConnection } from '../api-connection.ts';
import { choice } from '../choice.ts';
import type { CommandDefinition } from '../command.ts';
import { withExamples } from '../examples.ts';
import { withApi } from '../sandbox-client-of.ts';
import { type JsonOption, withJson } from '../store-option.ts';
import { timeText } from '../time-text.ts';

interface CreateOptions extends JsonOption {
  readonly kind: string;
  readonly project?: string;
}

export const definition: CommandDefinition = {
  description:
    'Principals are who calls: users, services and agents. One may do what policies let it (dsec policy), with a token (dsec token). They are disabled, never removed: ' +
    'the audit log names them.',
  examples: [
    { line: 'dsec principal create ann --project root/team', what: 'a user, who can do nothing yet' },
    { line: 'dsec principal create trainer --kind agent --project root/team', what: 'an agent' },
    { line: 'dsec principal disable trainer', what: 'all its tokens are refused from now on' },
  ],
  json: 'ls: an array, the others: an object: `name`, `kind` (user, service, agent), `project`, `disabled`, `createdAtMs`, `createdBy`',
  configure(command, context) {
    const { output } = context;
    const api = (name: string) => apiConnection(context, `dsec principal ${name}`);

    const ls = command.command('ls').description('Lists principals of projects that the caller may read, and himself.');
    withExamples(withJson(ls), [
      { line: 'dsec principal ls --project root/team', what: 'those of a project and below' },
    ])
      .option('--project <path>', 'only of this project and those below it')
      .action(async ({ json, project }: JsonOption & { project?: string }) => {
        const answer = await api('ls').json<{ principals: Principal[] }>('GET', '/v1/principals', {
          query: { project },
        });
        if (json) return output.json(answer.principals);
        await output.table(
          [{ title: 'NAME' }, { title: 'KIND' }, { title: 'PROJECT' }, { title: 'STATE' }, { title: 'CREATED' }],
          answer.principals.map((one) => [
            one.name,
            one.kind,
            one.project,
            one.disabled ? 'disabled' : 'enabled',
            timeText(one.createdAtMs),
          ]),
        );
      });

    const create = command.command('create').description('Makes a principal. Needs policy.admin on its project.');
    withExamples(withJson(create), [{ line: 'dsec principal create ann --project root/team', what: 'a user' }])
      .argument('<name>', 'unique in the cluster')
      .option('--kind <kind>', `what it is: ${KINDS.join(', ')}`, 'user')
      .option('--project <path>', "where it belongs (default: the token's project)")
      .action(async (name: string, { json, kind, project }: CreateOptions) => {
        choice('--kind', kind, KINDS);
        const made = await api('create').json<Principal>('POST', '/v1/principals', { body: { name, kind, project } });
        if (json) return output.json(made);
        await output.line(`${made.name}: ${made.kind} of ${made.project}`);
      });

    for (const disabled of [true, false]) {
      const name = disabled ? 'disable' : 'enable';
      const one = command.command(name);
      one.description(
        disabled
          ? 'Refuses all tokens of a principal, at once. Needs policy.admin on its project.'
          : 'Takes that back. Needs policy.admin on its project, and all that its policies give it.',
      );
      withExamples(withJson(one), [{ line: `dsec principal ${name} trainer`, what: `${name}s it` }])
        .argument('<name>', 'as `dsec principal ls` shows it')
        .action(async (principal: string, { json }: JsonOption) => {
          const path = `/v1/principals/${encodeURIComponent(principal)}`;
          const now = await api(name).json<Principal>('PATCH', path, { body: { disabled } });
          if (json) return output.json(now);
          await output.line(`${now.name}: ${now.disabled ? 'disabled' : 'enabled'}`);
        });
    }
    withApi(command, context);
  },
};
