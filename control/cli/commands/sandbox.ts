/** `dsec sandbox`: the sandboxes of this machine that run or were kept. */
import {
  forceRemoveSandbox,
  listSandboxes,
  reclaimSandboxes,
  reclaimTraces,
  removeSandbox,
  type StopResult,
  stopSandbox,
} from '#runtime';
import type { CommandDefinition } from '../command.ts';
import { parseDuration } from '../duration.ts';
import { withExamples } from '../examples.ts';
import { type JsonOption, withJson } from '../store-option.ts';

export const definition: CommandDefinition = {
  description:
    'Lists, stops and removes the sandboxes of `dsec run` that run now or were kept with --keep. Listing as root first ends what killed processes have left.',
  examples: [
    { line: 'dsec sandbox ls', what: 'what there is' },
    { line: 'dsec sandbox stop work', what: 'end a running one; with --keep its changes stay' },
    { line: 'dsec sandbox rm work', what: 'a kept one and its changes' },
  ],
  json: 'ls: an array: `name`, `id`, `state`, `keep`, `createdAt`, `backend`, `store`, `base`, `workspace`, `toolkits`, `exitCode`; rm: an object: `removed`',
  configure(command, { output }) {
    const ls = withExamples(command.command('ls').description('Lists sandboxes that run or were kept.'), [
      { line: 'dsec sandbox ls', what: 'what there is' },
      { line: 'dsec sandbox ls --json | jq -r \'.[] | select(.state == "kept") | .name\'', what: 'names of kept ones' },
    ]);
    withJson(ls).action(async (options: JsonOption) => {
      const reclaimed = process.geteuid?.() === 0 ? await reclaimSandboxes() : undefined;
      for (const problem of [...(reclaimed?.problems ?? []), ...(await reclaimTraces())]) output.note(problem);
      const sandboxes = listSandboxes();
      if (options.json) return output.json(sandboxes);
      if (sandboxes.length === 0) return output.note('no sandboxes run or are kept');
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
    const stop = withExamples(
      command
        .command('stop')
        .description(
          'Ends running sandboxes: SIGTERM to the command, which ends it at once unless it has a handler (exit status 143), then SIGKILL (137) ' +
            'when it has not ended in time. Changes stay where it was run with --keep. One that has ended already is no error.',
        ),
      [
        { line: 'dsec sandbox stop work', what: 'one, within ten seconds' },
        { line: 'dsec sandbox stop work1 work2 --time 1m', what: 'several, each within a minute' },
      ],
    );
    withJson(stop)
      .argument('<names...>', 'as `dsec sandbox ls` shows them')
      .option('--time <time>', 'from SIGTERM to SIGKILL: seconds, or a time as 500ms, 1m; 0: SIGKILL at once', '10s')
      .action(async (names: string[], options: JsonOption & { readonly time: string }) => {
        const { time } = options;
        const timeMs = parseDuration('--time', /^\d+$/.test(time) ? `${time}s` : time);
        for (const name of names) {
          const stopped = await stopSandbox(name, { timeMs });
          if (options.json) await output.json(stopped);
          else await output.line(`${name}: ${stopText(stopped)}`);
        }
      });
    const rm = withExamples(command.command('rm').description('Removes kept sandboxes and their changes.'), [
      { line: 'dsec sandbox rm work', what: 'one' },
      { line: 'dsec sandbox rm work1 work2', what: 'several' },
      { line: 'dsec sandbox rm --force work', what: 'one that still runs: it is killed' },
    ]);
    withJson(rm)
      .argument('<names...>', 'as `dsec sandbox ls` shows them')
      .option('-f, --force', 'those that run too: ended with SIGKILL')
      .action(async (names: string[], options: JsonOption & { readonly force?: boolean }) => {
        for (const name of names) {
          await (options.force === true ? forceRemoveSandbox(name) : removeSandbox(name));
          if (!options.json) await output.line(`${name}: removed`);
        }
        if (options.json) await output.json({ removed: names });
      });
  },
};

function stopText({ name, was, killed, kept }: StopResult): string {
  if (was === 'not-running') return 'had ended already';
  const how = killed ? 'killed' : 'stopped';
  return kept ? `${how}; kept: dsec pack-diff ${name}, or dsec sandbox rm ${name}` : how;
}
