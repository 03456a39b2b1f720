/** `dsec sync`: a set of images, into another store. */
import { readFile } from 'node:fs/promises';
import { addAbortSignal } from 'node:stream';
import { text as textOf } from 'node:stream/consumers';
import { humanSize, messageOf } from '#base';
import { isImageName, openStore, syncImages } from '#imagesvc';
import { fail } from '../../errors.ts';
import type { CommandDefinition } from '../command.ts';
import { type JsonOption, openChosenStore, type StoreOption, withJson, withStore } from '../store-option.ts';

interface Options extends StoreOption, JsonOption {
  readonly to: string;
  readonly images: string;
}

export const definition: CommandDefinition = {
  description:
    'Copies images with all their blobs to another store, under the same names. A blob that several images share is copied once, one that is there ' +
    'already not at all; every byte is verified. An image gets its name when all its blobs are there. After an interruption the same command goes on.',
  examples: [
    { line: 'dsec sync --to /mnt/other/store --images images.txt', what: 'the images that the file names, one a line' },
    {
      line: "dsec images --json | jq -r '.[].name' | dsec sync --to /mnt/other/store --images -",
      what: 'all images',
    },
  ],
  json: 'an object: `from`, `to`, `images`, `blobs`, `bytes`, `copiedBlobs`, `copiedBytes`, `unsharedBytes`',
  configure(command, { output, progress, signal }) {
    withJson(withStore(command))
      .requiredOption('--to <url>', 'the other store, as for --store')
      .requiredOption('--images <file>', 'names of images, one a line; - is stdin')
      .action(async (options: Options) => {
        const names = await readNames(options.images, signal);
        const from = await openChosenStore(options);
        const to = await openStore(options.to);
        const synced = await syncImages(from, to, names, { progress, signal });
        if (options.json) return output.json(synced);
        const { images, blobs, bytes, copiedBlobs, copiedBytes, unsharedBytes } = synced;
        await output.line(
          `${to.url}: ${images.length} image${images.length === 1 ? '' : 's'}, ${blobs} blobs, ${humanSize(bytes)} (${humanSize(unsharedBytes)} if nothing were shared)`,
        );
        await output.line(`copied ${copiedBlobs} blobs, ${humanSize(copiedBytes)}; the rest was there`);
      });
  },
};

/** @throws CLI_INPUT_UNREADABLE, CLI_SYNC_LINE */
async function readNames(path: string, signal: AbortSignal): Promise<string[]> {
  let text: string;
  try {
    text = path === '-' ? await textOf(addAbortSignal(signal, process.stdin)) : await readFile(path, 'utf8');
  } catch (error) {
    signal.throwIfAborted();
    throw fail('CLI_INPUT_UNREADABLE', { path, reason: messageOf(error) }, error);
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
