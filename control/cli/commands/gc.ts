/** `dsec gc`: blobs that nothing needs, and caches of them. */
import { type Digest, humanSize } from '#base';
import { collectCaches, collectNode, type SweptCaches } from '#imagesvc';
import { blobsInUse } from '../../blobs-in-use.ts';
import { sweepDiskCaches } from '../../disk-images/sweep-disk-caches.ts';
import { diskCacheDir } from '../../disk-layers.ts';
import type { CommandDefinition } from '../command.ts';
import { parseDuration } from '../duration.ts';
import { type JsonOption, openChosenStore, type StoreOption, withJson, withStore } from '../store-option.ts';

interface Options extends StoreOption, JsonOption {
  readonly dryRun?: boolean;
  readonly grace: string;
  readonly caches?: boolean;
}

export const definition: CommandDefinition = {
  description:
    'Deletes the blobs of the store that no name leads to. What is younger than the grace period stays, and so does what a running command may ' +
    'need, what is mounted on this machine, what kept sandboxes ran on, and what disks of this machine lie on. Then proofs, copies of metadata and cached chunks on this machine go, ' +
    'where their blobs have gone. With --caches only those go, also where the store cannot be written.',
  examples: [
    { line: 'dsec gc --dry-run', what: 'what would be deleted' },
    { line: 'dsec gc --grace 1d', what: 'only what is older than a day' },
    {
      line: 'dsec gc --caches --store docker://registry/team/web',
      what: 'what this machine cached of blobs that are gone there',
    },
  ],
  json: 'an object: `dryRun`, `deleted` (digests), `freedBytes`, `kept` (how many), `traces` (how many went with their images), `caches` (`proofs`, `metaCopies`, `chunkBlobs`, `freedBytes`, `busy`); with --caches only `dryRun` and `caches`',
  configure(command, { output }) {
    withJson(withStore(command))
      .option('-n, --dry-run', 'only say what would be deleted')
      .option('--grace <time>', 'leave alone what is younger: 90s, 15m, 1h, 7d', '1h')
      .option('--caches', 'leave the store alone: only what this machine has cached of blobs that are gone')
      .action(async (options: Options) => {
        const { dryRun = false } = options;
        const graceMs = parseDuration('--grace', options.grace);
        const store = await openChosenStore(options);
        const verb = dryRun ? 'would free' : 'freed';
        const showCaches = async ({ proofs, metaCopies, chunkBlobs, freedBytes, busy }: SweptCaches) => {
          const swept = proofs + metaCopies + chunkBlobs;
          if (swept > 0 || options.caches)
            await output.line(`${verb} ${count(swept, 'cache file')}, ${humanSize(freedBytes)}`);
          if (busy) output.note('dsec: the chunk cache is in use by a process that does not answer: left alone');
        };
        const inUse = await blobsInUse(store);
        const cacheDir = diskCacheDir();
        const how = { dryRun, graceMs, inUse, cacheDir };
        const withDisks = async (caches: SweptCaches, gone: readonly Digest[]): Promise<SweptCaches> => {
          const swept = await sweepDiskCaches(store, cacheDir, { dryRun, inUse, gone: new Set(gone) });
          const chunkBlobs = caches.chunkBlobs + swept.chunkBlobs;
          return { ...caches, chunkBlobs, freedBytes: caches.freedBytes + swept.freedBytes };
        };
        if (options.caches) {
          const caches = await withDisks(await collectCaches(store, how), []);
          return options.json ? output.json({ dryRun, caches }) : showCaches(caches);
        }
        const collected = await collectNode(store, how);
        const { deleted, freedBytes, kept, traces } = collected;
        const caches = await withDisks(collected.caches, deleted);
        if (options.json) return output.json({ dryRun, ...collected, caches });
        await output.line(
          `${verb} ${count(deleted.length, 'blob')}, ${humanSize(freedBytes)}; ${stayText(kept, options.grace)}`,
        );
        if (traces > 0) await output.line(`${verb} ${count(traces, 'trace')} of images that are gone`);
        await showCaches(caches);
      });
  },
};

function stayText(kept: number, grace: string): string {
  const why = kept === 0 ? '' : `: in use, or younger than --grace ${grace}`;
  return `${kept} without a name ${kept === 1 ? 'stays' : 'stay'}${why}`;
}

function count(n: number, what: string): string {
  return `${n} ${what}${n === 1 ? '' : 's'}`;
}
