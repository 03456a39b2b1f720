/** `dsec stats`: what of an image's data was ever read on this node. */
import { humanSize } from '#base';
import {
  blobMapSvg,
  type HeatBytes,
  heatText,
  type ImageStats,
  imageStats,
  jsonText,
  openImage,
  percent,
} from '#imagesvc';
import { fail } from '../../errors.ts';
import type { CommandDefinition } from '../command.ts';
import { shown } from '../output.ts';
import { writeOutput } from '../output-file.ts';
import { type JsonOption, openChosenStore, type StoreOption, withJson, withStore } from '../store-option.ts';

interface Options extends StoreOption, JsonOption {
  readonly depth: string;
  readonly svg?: string;
}

const FROM: Readonly<Record<ImageStats['from'], string>> = {
  server: 'as the running data server has it',
  disk: 'as the cache on disk has it: no data server runs for this store, or it does not show the image',
  nothing: 'nothing of it was ever in the cache of this node',
};

export const definition: CommandDefinition = {
  description:
    'Shows how much of an image’s data was ever read on this machine through lazy mounts, in chunks of 256 KiB: read by a reader, prefetched and not ' +
    'read, or cold, which never came; by directory, and as a map with --svg. It comes from the running data server, or from the cache on disk; the output ' +
    'says which. What is read from a folder store without --lazy, and from blobs that are whole in the cache, is read by the kernel and not counted. Needs root.',
  examples: [
    { line: 'dsec stats web:1', what: 'by top-level directory' },
    { line: 'dsec stats web:1 --depth 3 --svg web.svg', what: 'further down, and a map of the blobs' },
  ],
  json:
    'an object: `name`, `digest`, `from` (server, disk or nothing), `sizeBytes`, `readBytes`, `prefetchedBytes`, `coldBytes`, `blobs` (`digest`, `layer`, `from`, `chunks`: a digit a chunk, ' +
    '0 cold, 1 prefetched, 2 read, and the bytes), `directories` (`path` and the bytes), `svg`',
  exactPaths: { options: ['svg'] },
  configure(command, context) {
    const { output } = context;
    withJson(withStore(command))
      .argument('<image>', 'name or digest')
      .option('--depth <levels>', 'how far down directories are told apart', '1')
      .option('--svg <file>', 'draw a map of the data blobs')
      .action(async (name: string, options: Options) => {
        const depth = Number(options.depth);
        if (!Number.isSafeInteger(depth) || depth < 0 || options.depth.trim() === '') {
          throw fail('CLI_USAGE', {
            problem: `--depth ${options.depth}: it is a number from 0`,
            program: 'dsec stats',
          });
        }
        const store = await openChosenStore(options);
        const stats = await imageStats(store, await openImage(store, name), { depth });
        const { svg } = options;
        if (svg !== undefined) await writeOutput(piecesOf(blobMapSvg(stats)), svg, context);
        // Then the map is what was asked for.
        if (svg === '-') return;
        if (options.json) return output.json({ ...jsonOf(stats), svg });
        await showStats(stats);
        if (svg !== undefined) await output.line(`map: ${svg}`);
      });

    async function showStats(stats: ImageStats): Promise<void> {
      await output.line(`${stats.name}: ${humanSize(stats.sizeBytes)} of data: ${heatText(stats)}`);
      await output.line(`(${FROM[stats.from]})`);
      if (stats.directories.length === 0) return;
      await output.line();
      await output.table(
        [
          { title: 'DATA', right: true },
          { title: 'READ', right: true },
          { title: 'PREFETCHED', right: true },
          { title: 'COLD', right: true },
          { title: 'DIRECTORY' },
        ],
        stats.directories.map(({ path, ...heat }) => [...rowOf(heat), shown(path)]),
      );
    }
  },
};

function rowOf({ sizeBytes, readBytes, prefetchedBytes, coldBytes }: HeatBytes): string[] {
  const share = (bytes: number) => percent(bytes, sizeBytes);
  return [humanSize(sizeBytes), share(readBytes), share(prefetchedBytes), share(coldBytes)];
}

function jsonOf({ blobs, directories, ...rest }: ImageStats): Record<string, unknown> {
  return {
    ...rest,
    blobs: blobs.map(({ chunks, ...blob }) => ({ ...blob, chunks: chunks.join('') })),
    directories: directories.map(({ path, ...heat }) => ({ ...jsonText('path', path), ...heat })),
  };
}

async function* piecesOf(text: string): AsyncGenerator<Buffer> {
  yield Buffer.from(text);
}
