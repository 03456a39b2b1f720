/** `dsec sandbox`: the containers of this machine that run or were kept. */
import { listSandboxes, reclaimSandboxes, removeSandbox } from '#runtime';
import type { CommandDefinition } from '../command.ts';
import { type JsonOption, withJson } from '../store-option.ts';

export const definition: CommandDefinition = {
  description:
    'Lists and removes the containers of `dsec run` that run now or were kept with --keep. Listing as root first ends what killed processes have left.',
  examples: [
    { line: 'dsec sandbox ls', what: 'what there is' },
    { line: 'dsec sandbox rm work', what: 'a kept one and its changes' },
  ],
  configure(command, { output }) {
    withJson(command.command('ls').description('Lists containers.')).action(async (options: JsonOption) => {
      const reclaimed = process.geteuid?.() === 0 ? await reclaimSandboxes() : undefined;
      for (const problem of reclaimed?.problems ?? []) output.note(problem);
      const sandboxes = listSandboxes();
      if (options.json) return output.json(sandboxes);
      if (sandboxes.length === 0) return output.note('no containers run or are kept');
      await output.table(
        [
          { title: 'NAME' },
          { title: 'STATE' },
          { title: 'BASE' },
          { title: 'WORKSPACE' },
          { title: 'TOOLKITS' },
          { title: 'SINCE' },
        ],
        sandboxes.map(({ name, state, base, workspace, toolkits, createdAt }) => [
          name,
          state,
          base.name,
          workspace?.name ?? '',
          toolkits.map((toolkit) => toolkit.name).join(' '),
          createdAt,
        ]),
      );
    });
    withJson(command.command('rm').description('Removes kept containers and their changes.'))
      .argument('<names...>', 'as `dsec sandbox ls` shows them')
      .action(async (names: string[], options: JsonOption) => {
        for (const name of names) {
          await removeSandbox(name);
          if (!options.json) await output.line(`${name}: removed`);
        }
        if (options.json) await output.json({ removed: names });
      });
  },
};
