/** `dsec policy`: who may do what on which projects. */
import { ACTIONS, ROLES } from '../../iam/actions.ts';
import type { Policy } from '../../iam/administration.ts';
import { apiConnection } from '../api-connection.ts';
import type { CommandDefinition } from '../command.ts';
import { withExamples } from '../examples.ts';
import { withApi } from '../sandbox-client-of.ts';
import { type JsonOption, withJson } from '../store-option.ts';
import { timeText, timeToCome } from '../time-text.ts';

interface GrantOptions extends JsonOption {
  readonly on: string;
  readonly for?: string;
}

export const definition: CommandDefinition = {
  description:
    'A policy lets a principal do something on a project and all below it. Nobody gives what he does not have himself, nor for longer. ' +
    `Roles: ${Object.keys(ROLES).join(', ')}. Actions: ${ACTIONS.join(', ')}.`,
  examples: [
    { line: 'dsec policy grant ann developer --on root/team', what: 'she may make and use sandboxes there' },
    {
      line: 'dsec policy grant trainer sandbox.create sandbox.exec --on root/team/run --for 7d',
      what: 'an agent, for a week',
    },
    { line: 'dsec policy rm p1c0d8b6f2a49e35d77', what: 'takes it away, at once' },
  ],
  json: 'ls: an array, grant: an object: `id`, `principal`, `project`, `grants`, `actions`, `expiresAtMs`, `createdAtMs`, `grantedBy`; rm: `removed`',
  configure(command, context) {
    const { output } = context;
    const api = (name: string) => apiConnection(context, `dsec policy ${name}`);

    const ls = command
      .command('ls')
      .description("Lists the caller's policies, and those of projects where he has policy.admin.");
    withExamples(withJson(ls), [{ line: 'dsec policy ls --project root/team', what: 'those of a project and below' }])
      .option('--project <path>', 'only of this project and those below it')
      .option('--principal <name>', 'only of this one')
      .action(async ({ json, ...query }: JsonOption & { project?: string; principal?: string }) => {
        const { policies } = await api('ls').json<{ policies: Policy[] }>('GET', '/v1/policies', { query });
        if (json) return output.json(policies);
        await output.table(
          ['ID', 'PRINCIPAL', 'PROJECT', 'MAY', 'UNTIL', 'BY'].map((title) => ({ title })),
          policies.map((one) => [
            one.id,
            one.principal,
            one.project,
            one.grants.join(' '),
            timeText(one.expiresAtMs),
            one.grantedBy,
          ]),
        );
      });

    const grant = command
      .command('grant')
      .description('Lets a principal do something. Needs policy.admin there, and what is given.');
    withExamples(withJson(grant), [
      { line: 'dsec policy grant ann developer --on root/team', what: 'a role on a project' },
    ])
      .argument('<principal>', 'as `dsec principal ls` shows it')
      .argument('<grants...>', 'roles and actions')
      .requiredOption('--on <path>', 'the project; it holds for all below it too')
      .option('--for <time>', 'how long: 90s, 15m, 1h, 7d (default: as long as the caller has it himself)')
      .action(async (principal: string, grants: string[], options: GrantOptions) => {
        const body = { principal, project: options.on, grants, expiresAtMs: timeToCome('--for', options.for) };
        const policy = await api('grant').json<Policy>('POST', '/v1/policies', { body });
        if (options.json) return output.json(policy);
        const until = policy.expiresAtMs === undefined ? '' : `, until ${timeText(policy.expiresAtMs)}`;
        await output.line(`${policy.id}: ${principal} may ${policy.grants.join(' ')} on ${policy.project}${until}`);
      });

    const rm = command.command('rm').description('Takes a policy away, at once. Needs policy.admin on its project.');
    withExamples(withJson(rm), [{ line: 'dsec policy rm p1c0d8b6f2a49e35d77', what: 'one' }])
      .argument('<id>', 'as `dsec policy ls` shows it')
      .action(async (id: string, { json }: JsonOption) => {
        await api('rm').json('DELETE', `/v1/policies/${encodeURIComponent(id)}`);
        if (json) return output.json({ removed: id });
        await output.line(`${id}: removed`);
      });
    withApi(command, context);
  },
};
