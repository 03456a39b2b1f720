/**
 * Where benchmarks work: `dsec-bench-<uid>/` in the temporary folder, on a file system that EROFS images can be mounted
 * from. `cache/` in it keeps layers between runs (`--clean` removes it); every run has a folder of its own beside it and
 * removes that.
 */
import { mkdirSync, mkdtempSync, rmSync, statfsSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { humanSize } from '#base';
import { readMountInfo, umount } from '#linux';
import { fail } from './errors.ts';
import { hasFlag } from './options.ts';

/** ext4, xfs, btrfs. */
const MOUNTABLE = new Set([0xef53, 0x58465342, 0x9123683e]);

export function benchFolder(): string {
  const place = [tmpdir(), '/var/tmp'].find((candidate) => MOUNTABLE.has(statfsSync(candidate).type)) ?? tmpdir();
  const folder = join(place, `dsec-bench-${process.getuid?.() ?? 0}`);
  mkdirSync(folder, { recursive: true, mode: 0o700 });
  return folder;
}

export function cacheFolder(): string {
  const folder = join(benchFolder(), 'cache');
  mkdirSync(folder, { recursive: true });
  return folder;
}

/** With what is kept between runs, and what killed ones have left. */
export function removeBenchFolder(): void {
  const folder = benchFolder();
  unmountIn(folder);
  rmSync(folder, { recursive: true, force: true });
}

function unmountIn(folder: string): void {
  const points = readMountInfo().map((row) => row.mountPoint);
  for (const point of points.filter((path) => path.startsWith(`${folder}/`)).reverse()) umount(point, { lazy: true });
}

/** A fresh folder for one benchmark; whatever is mounted in it goes with it. */
export async function withScratch<T>(name: string, work: (folder: string) => Promise<T>): Promise<T> {
  const folder = mkdtempSync(join(benchFolder(), `${name}-`));
  const remove = () => {
    unmountIn(folder);
    if (!hasFlag('keep')) rmSync(folder, { recursive: true, force: true });
  };
  const interrupted = () => {
    remove();
    process.exit(130);
  };
  process.once('SIGINT', interrupted);
  process.once('SIGTERM', interrupted);
  try {
    return await work(folder);
  } finally {
    process.off('SIGINT', interrupted);
    process.off('SIGTERM', interrupted);
    remove();
  }
}

/** @throws BENCH_SPACE */
export function needSpace(folder: string, wantBytes: number): void {
  const { bavail, bsize } = statfsSync(folder);
  const have = bavail * bsize;
  if (have < wantBytes) throw fail('BENCH_SPACE', { folder, have: humanSize(have), want: humanSize(wantBytes) });
}
