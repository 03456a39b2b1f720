/** `dsec diff`: how the trees of two images differ. */
import { type Change, changeJson, changeText, diffTrees, openImage, openTree } from '#imagesvc';
import type { CommandDefinition } from '../command.ts';
import { openChosenStore, type StoreOption, withStore } from '../store-option.ts';

interface Options extends StoreOption {
  readonly json?: boolean;
  readonly ignoreMtime?: boolean;
  readonly exitCode?: boolean;
}

/** Lines are written together: a write for each would be most of the work. */
const PIECE_CHARS = 64 * 1024;

export const definition: CommandDefinition = {
  description:
    'Compares the merged trees of two images without mounting them: A added, C changed (and in what), D deleted, with sizes. Files that lie in ' +
    'the same blob are known to be equal without reading them. With --json one object a line.',
  examples: [
    { line: 'dsec diff web:1 web:2', what: 'what version 2 changed' },
    { line: 'dsec diff --ignore-mtime --exit-code web:1 web:2', what: 'for a script: status 1 when they differ' },
  ],
  json: 'an object a change: `path`, `change` (A, C, D), `kind`, `what`, `sizeBefore`, `sizeAfter`',
  configure(command, context) {
    withStore(command)
      .argument('<before>', 'name or digest')
      .argument('<after>', 'name or digest')
      .option('--ignore-mtime', 'times alone make no difference')
      .option('--exit-code', 'exit with 1 when there are differences')
      .option('--json', 'print one JSON object a line')
      .action(async (before: string, after: string, options: Options) => {
        const { output, signal } = context;
        const store = await openChosenStore(options);
        const a = await openTree(store, await openImage(store, before));
        context.defer(() => a.close());
        const b = await openTree(store, await openImage(store, after));
        context.defer(() => b.close());
        const lineOf = (change: Change) => (options.json ? JSON.stringify(changeJson(change)) : changeText(change));
        let changes = 0;
        let piece = '';
        for await (const change of diffTrees(a, b, { ignoreMtime: options.ignoreMtime })) {
          if (signal.aborted) return;
          changes++;
          piece += `${lineOf(change)}\n`;
          if (piece.length < PIECE_CHARS) continue;
          await output.write(piece);
          piece = '';
        }
        await output.write(piece);
        if (options.exitCode && changes > 0) context.exitCode = 1;
      });
  },
};
