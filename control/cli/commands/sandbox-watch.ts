/** `dsec sandbox watch`: what happens to files of a sandbox, as it happens. */
import type { Command } from 'commander';
import type { Context } from '../context.ts';
import { withExamples } from '../examples.ts';
import { sandboxClient } from '../sandbox-client-of.ts';
import { type JsonOption, withJson } from '../store-option.ts';

interface WatchCommand extends JsonOption {
  readonly recursive?: boolean;
}

export function addWatch(command: Command, context: Context): void {
  const { output, signal } = context;
  const watch = withExamples(
    command
      .command('watch')
      .description(
        'Prints what happens to a file or folder of a sandbox made by `dsec sandbox create`, a line an event: made, changed, written (it was open for writing and is closed), removed, ' +
          'moved-from, moved-to, attributes. `overflow` says that events were lost, `gone` that what was watched is there no more: the last line. Runs until then, or until it is interrupted.',
      ),
    [
      { line: 'dsec sandbox watch work /workspace --recursive', what: 'a tree, with folders that come later' },
      {
        line: 'dsec sandbox watch work /tmp --json | jq -r \'select(.event == "written").path\'',
        what: 'files that are done',
      },
    ],
  );
  withJson(watch)
    .argument('<name>', 'as `dsec sandbox ls` shows it')
    .argument('<path>', 'a file or folder of the sandbox')
    .option('-r, --recursive', 'all folders below too, but for other file systems')
    .action(async (name: string, path: string, { recursive, json }: WatchCommand) => {
      for await (const news of sandboxClient(context).watch(name, { path, recursive }, signal)) {
        if (json) await output.line(JSON.stringify(news));
        else if (news.event === 'watching') output.note(`dsec: watching ${path}`);
        else await output.line(`${news.event}\t${news.path}${news.directory ? '/' : ''}`);
      }
    });
}
