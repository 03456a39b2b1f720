/** `dsec project`: the tree of projects of a cluster. */
import type { Project } from '../../iam/administration.ts';
import { apiConnection } from '../api-connection.ts';
import type { CommandDefinition } from '../command.ts';
import { withExamples } from '../examples.ts';
import { withApi } from '../sandbox-client-of.ts';
import { type JsonOption, withJson } from '../store-option.ts';
import { timeText } from '../time-text.ts';

export const definition: CommandDefinition = {
  description:
    'Projects hold sandboxes, principals, tokens and quotas, and other projects, to any depth: root/team/run. What a policy or a quota says of a project ' +
    'goes for all below it (docs/iam.md).',
  examples: [
    { line: 'dsec project create root/team', what: 'a project; its parent has to be there' },
    { line: 'dsec project ls root/team', what: 'it and all below it' },
  ],
  json: 'ls: an array, create: an object: `path`, `createdAtMs`, `createdBy`; rm: `removed`',
  configure(command, context) {
    const { output } = context;
    const api = (name: string) => apiConnection(context, `dsec project ${name}`);

    const ls = command.command('ls').description('Lists the projects that the caller may read.');
    withExamples(withJson(ls), [{ line: 'dsec project ls', what: 'all of them' }])
      .argument('[path]', 'only this one and those below it')
      .action(async (project: string | undefined, { json }: JsonOption) => {
        const { projects } = await api('ls').json<{ projects: Project[] }>('GET', '/v1/projects', {
          query: { project },
        });
        if (json) return output.json(projects);
        if (projects.length === 0) return output.note('no projects that this token may read');
        await output.table(
          [{ title: 'PROJECT' }, { title: 'CREATED' }, { title: 'BY' }],
          projects.map(({ path, createdAtMs, createdBy }) => [path, timeText(createdAtMs), createdBy]),
        );
      });

    const create = command.command('create').description('Makes a project. Needs project.admin on its parent.');
    withExamples(withJson(create), [{ line: 'dsec project create root/team/run', what: 'below root/team' }])
      .argument('<path>', 'root/... ; each part is of a-z, 0-9, dots, dashes, underscores')
      .action(async (path: string, { json }: JsonOption) => {
        const project = await api('create').json<Project>('POST', '/v1/projects', { body: { path } });
        if (json) return output.json(project);
        await output.line(project.path);
      });

    const rm = command.command('rm');
    rm.description(
      'Removes an empty project; policies on it go, and tokens for it are revoked. Needs project.admin on its parent.',
    );
    withExamples(withJson(rm), [{ line: 'dsec project rm root/team/run', what: 'one without sandboxes and projects' }])
      .argument('<path>', 'as `dsec project ls` shows it')
      .action(async (path: string, { json }: JsonOption) => {
        await api('rm').json('DELETE', '/v1/projects', { query: { path } });
        if (json) return output.json({ removed: path });
        await output.line(`${path}: removed`);
      });
    withApi(command, context);
  },
};
