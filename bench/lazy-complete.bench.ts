/**
 * What a lazy mount costs once its data is here: reads of an image whose blobs are complete in the local cache, mounted through the
 * lazy path, against the same image mounted from a local store. Front to back, and 4 KiB at random; EROFS's own pages are dropped
 * before every run, those of the file below it once too (cold: from the disk) and once not (warm).
 */
import { execFileSync } from 'node:child_process';
import { readdirSync, statSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { hexOf } from '#base';
import { convertToStore, openImage, openStore } from '#imagesvc';
import { dropCached } from '#linux';
import { atLeast, type Benchmark, type Result, round } from './benchmark.ts';
import { FUSE_READER_C } from './fuse-programs.ts';
import { writeLargeFiles } from './generated-tar.ts';
import { LazyNode } from './lazy-image.ts';
import { numberOption } from './options.ts';
import { printTable } from './results.ts';
import { inTurn, summary } from './sample.ts';
import { missingTool, needsRoot } from './tool.ts';
import { needSpace, withScratch } from './work-folder.ts';

/** No slower, up to what two runs of the same differ by. */
const TARGET = 0.95;
const MIB = 2 ** 20;

const READS = [
  { name: 'sequential 1 MiB, cold', mode: 'seq', block: MIB, count: 1, cold: true },
  { name: 'random 4 KiB, cold', mode: 'random', block: 4096, count: 2000, cold: true },
  { name: 'sequential 1 MiB, warm', mode: 'seq', block: MIB, count: 1, cold: false },
  { name: 'random 4 KiB, warm', mode: 'random', block: 4096, count: 20_000, cold: false },
] as const;

export const benchmark: Benchmark = {
  name: 'lazy-complete',
  about: 'reads of a complete blob through a lazy mount, against a plain local EROFS mount',
  needs: () => needsRoot() ?? missingTool({ gcc: 'gcc libc6-dev' }),
  run: () => withScratch('complete', measure),
};

async function measure(folder: string): Promise<Result> {
  const sizeBytes = numberOption('mb', 192) * MIB;
  needSpace(folder, sizeBytes * 4);
  const reader = join(folder, 'reader');
  writeFileSync(`${reader}.c`, CACHED_READER_C);
  execFileSync('gcc', ['-O2', '-D_GNU_SOURCE', '-o', reader, `${reader}.c`, '-lpthread']);
  const tar = writeLargeFiles(join(folder, 'layer.tar'), sizeBytes);
  const store = await openStore(`file://${join(folder, 'store')}`);
  await convertToStore(store, `tar:${tar.path}`, 'large:1');
  const image = await openImage(store, 'large:1');
  const lazy = new LazyNode(join(folder, 'lazy'), store);
  const plain = new LazyNode(join(folder, 'plain'), store);
  const targets = { lazy: join(folder, 'lazy-mount'), plain: join(folder, 'plain-mount') };
  try {
    await lazy.mount(image, targets.lazy);
    execFileSync('cat', [join(targets.lazy, 'large/file-0')], { stdio: ['ignore', 'ignore', 'inherit'] });
    // What has come is written down behind the reader; then the mount uses the cache's own file.
    for (const until = Date.now() + 60_000; Date.now() < until; await sleep(100)) {
      if ((await lazy.cacheNumbers()).storedBytes >= sizeBytes) break;
    }
    await lazy.unmount(targets.lazy);
    await lazy.mount(image, targets.lazy);
    const { served } = await lazy.mounted(targets.lazy);
    await plain.mount(image, targets.plain, false);
    const rows: string[][] = [['reads', 'lazy', 'plain', 'ratio']];
    const details: Record<
      string,
      { ratio: number; ours: ReturnType<typeof summary>; plain: ReturnType<typeof summary> }
    > = {};
    const n = numberOption('n', 9);
    const { blob } = image.layers[0]!.devices[0]!;
    const below = { lazy: fileOf(lazy.folders.cacheDir, hexOf(blob.digest)), plain: store.localPath(blob.digest)! };
    for (const { name, mode, block, count, cold } of READS) {
      const reads = String(mode === 'seq' ? Math.floor(sizeBytes / MIB) : count);
      const run = (side: 'lazy' | 'plain') => async () => {
        if (cold) dropCached(below[side]);
        const file = join(targets[side], 'large/file-0');
        return Number(execFileSync(reader, [file, mode, String(block), reads, '1'], { encoding: 'latin1' }));
      };
      await run('lazy')();
      await run('plain')();
      const pairs = await inTurn(n, run('lazy'), run('plain'));
      details[name] = { ratio: pairs.ratio, ours: summary(pairs.ours), plain: summary(pairs.theirs) };
      rows.push([name, `${summary(pairs.ours).p50} ms`, `${summary(pairs.theirs).p50} ms`, String(pairs.ratio)]);
    }
    printTable(rows);
    const worst = Math.min(...Object.values(details).map(({ ratio }) => ratio));
    const first = details[READS[0].name]!;
    return {
      ratio: round(worst),
      ...atLeast(TARGET, worst),
      against: 'the same image mounted from a local store',
      n,
      p50: first.ours.p50,
      p99: first.ours.p99,
      unit: 'ms',
      sizeBytes,
      /** False: the kernel reads the cache's file, and no data server is asked. */
      throughDataServer: served,
      reads: details,
    };
  } finally {
    await lazy.stop();
    await plain.stop();
  }
}

/** The data file of a blob in a chunk cache: the largest file of that name below it. */
function fileOf(cacheDir: string, hex: string): string {
  const found = readdirSync(cacheDir, { recursive: true, encoding: 'utf8' })
    .filter((path) => path.includes(hex) && !path.includes('meta'))
    .map((path) => ({ path: join(cacheDir, path), sizeBytes: statSync(join(cacheDir, path)).size }))
    .sort((a, b) => b.sizeBytes - a.sizeBytes);
  return found[0]!.path;
}

/** The reader of fuse-read, through the page cache, which is emptied of the file first. */
const CACHED_READER_C = FUSE_READER_C.replace('O_RDONLY | O_DIRECT', 'O_RDONLY').replace(
  '  clock_gettime(CLOCK_MONOTONIC, &a);',
  '  posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED);\n  clock_gettime(CLOCK_MONOTONIC, &a);',
);
