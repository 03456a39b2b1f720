/** `dsec sync`: a set of images, into another store. */
import { readFile } from 'node:fs/promises';
import { addAbortSignal } from 'node:stream';
import { text as textOf } from 'node:stream/consumers';
import { humanSize } from '#base';
import { isImageName, openStore, syncImages, type TraceCoverage, tracedNames } from '#imagesvc';
import { fail } from '../../errors.ts';
import type { CommandDefinition } from '../command.ts';
import { counted } from '../counted.ts';
import { inputError } from '../input-error.ts';
import { type JsonOption, openChosenStore, type StoreOption, withJson, withStore } from '../store-option.ts';

interface Options extends StoreOption, JsonOption {
  readonly to: string;
  readonly images?: string;
  readonly traces?: boolean;
}

export const definition: CommandDefinition = {
  description:
    'Copies images with all their blobs to another store, under the same names. A blob that several images share is copied once, one that is there ' +
    'already not at all; every byte is verified. An image gets its name when all its blobs are there, and brings its traces. After an interruption the same command goes on. ' +
    'With --traces it also says how much of what all traces of the store name the copied images hold; without --images it copies the images that have traces.',
  examples: [
    { line: 'dsec sync --to /mnt/other/store --images images.txt', what: 'the images that the file names, one a line' },
    {
      line: "dsec images --json | jq -r '.[].name' | dsec sync --to /mnt/other/store --images -",
      what: 'all images',
    },
    { line: 'dsec sync --to s3://overflow/dsec --traces', what: 'those whose starts were traced' },
  ],
  json: 'an object: `from`, `to`, `images`, `blobs`, `bytes`, `copiedBlobs`, `copiedBytes`, `unsharedBytes`, `copiedTraces`, `coverage` (`tracedImages`, `coveredImages`, `accesses`, `coveredAccesses`, `accessedBytes`, `coveredBytes`), `notes`',
  configure(command, { output, progress, signal }) {
    withJson(withStore(command))
      .requiredOption('--to <url>', 'the other store, as for --store')
      .option('--images <file>', 'names of images, one a line; - is stdin')
      .option(
        '--traces',
        'say what share of the traced accesses is covered; without --images, copy the images that have traces',
      )
      .action(async (options: Options) => {
        if (options.images === undefined && options.traces !== true) {
          throw fail('CLI_USAGE', { problem: 'name images with --images, or give --traces', program: 'dsec sync' });
        }
        const given = options.images === undefined ? undefined : await readNames(options.images, signal);
        const from = await openChosenStore(options);
        const to = await openStore(options.to);
        const names = given ?? (await tracedNames(from));
        const synced = await syncImages(from, to, names, { progress, signal, coverage: options.traces });
        for (const note of synced.notes) output.note(`dsec: ${note}`);
        if (options.json) return output.json(synced);
        const { images, blobs, bytes, copiedBlobs, copiedBytes, unsharedBytes, coverage } = synced;
        await output.line(
          `${to.url}: ${images.length} image${images.length === 1 ? '' : 's'}, ${blobs} blobs, ${humanSize(bytes)} (${humanSize(unsharedBytes)} if nothing were shared)`,
        );
        await output.line(`copied ${copiedBlobs} blobs, ${humanSize(copiedBytes)}; the rest was there`);
        if (coverage !== undefined) await output.line(coverageText(coverage));
      });
  },
};

function coverageText({ tracedImages, accesses, coveredAccesses, accessedBytes, coveredBytes }: TraceCoverage): string {
  if (accesses === 0) return 'no traced accesses: dsec trace IMAGE -- COMMAND records them';
  const share = ((coveredAccesses / accesses) * 100).toFixed(1);
  const bytes = `${humanSize(coveredBytes)} of ${humanSize(accessedBytes)}`;
  return `covers ${share} % of the traced accesses of ${counted(tracedImages, 'image')}: ${coveredAccesses} of ${counted(accesses, 'chunk')}, ${bytes}`;
}

/** @throws CLI_INPUT_*, CLI_SYNC_LINE */
async function readNames(path: string, signal: AbortSignal): Promise<string[]> {
  let text: string;
  try {
    text = path === '-' ? await textOf(addAbortSignal(signal, process.stdin)) : await readFile(path, 'utf8');
  } catch (error) {
    signal.throwIfAborted();
    throw inputError(path, error);
  }
  const names: string[] = [];
  for (const [index, raw] of text.split('\n').entries()) {
    const line = raw.trim();
    if (line === '' || line.startsWith('#')) continue;
    if (!isImageName(line))
      throw fail('CLI_SYNC_LINE', { file: path, line: index + 1, problem: `"${line}" is no name` });
    names.push(line);
  }
  if (names.length === 0) throw fail('CLI_SYNC_LINE', { file: path, line: 1, problem: 'it names no image' });
  return names;
}
