/** `dsec gc`: blobs that nothing needs, and caches of them. */
import { humanSize } from '#base';
import { collectNode } from '#imagesvc';
import { blobsInUse } from '../../blobs-in-use.ts';
import type { CommandDefinition } from '../command.ts';
import { parseDuration } from '../duration.ts';
import { type JsonOption, openChosenStore, type StoreOption, withJson, withStore } from '../store-option.ts';

interface Options extends StoreOption, JsonOption {
  readonly dryRun?: boolean;
  readonly grace: string;
}

export const definition: CommandDefinition = {
  description:
    'Deletes the blobs of the store that no name leads to. What is younger than the grace period stays, and so does what a running command may ' +
    'need, what is mounted on this machine, and what kept sandboxes ran on. Then proofs and copies of metadata in the local cache go, where their ' +
    'blobs have gone.',
  examples: [
    { line: 'dsec gc --dry-run', what: 'what would be deleted' },
    { line: 'dsec gc --grace 1d', what: 'only what is older than a day' },
  ],
  json: 'an object: `dryRun`, `deleted` (digests), `freedBytes`, `kept` (how many), `caches`',
  configure(command, { output }) {
    withJson(withStore(command))
      .option('-n, --dry-run', 'only say what would be deleted')
      .option('--grace <time>', 'leave alone what is younger: 90s, 15m, 1h, 7d', '1h')
      .action(async (options: Options) => {
        const { dryRun = false } = options;
        const graceMs = parseDuration('--grace', options.grace);
        const store = await openChosenStore(options);
        const collected = await collectNode(store, { dryRun, graceMs, inUse: await blobsInUse(store) });
        if (options.json) return output.json({ dryRun, ...collected });
        const { deleted, freedBytes, kept, caches } = collected;
        const verb = dryRun ? 'would free' : 'freed';
        await output.line(
          `${verb} ${count(deleted.length, 'blob')}, ${humanSize(freedBytes)}; ${kept} without a name stay`,
        );
        const swept = caches.proofs + caches.metaCopies;
        if (swept > 0) await output.line(`${verb} ${count(swept, 'cache file')}, ${humanSize(caches.freedBytes)}`);
      });
  },
};

function count(n: number, what: string): string {
  return `${n} ${what}${n === 1 ? '' : 's'}`;
}
