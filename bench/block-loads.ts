/** What block devices are measured with: random 4 KiB, alone and 16 at once, and sequential 1 MiB, reads and writes, through fio. */
import { spawn } from 'node:child_process';
import { randomBytes } from 'node:crypto';
import { once } from 'node:events';
import { closeSync, openSync, writeSync } from 'node:fs';

const MIB = 1024 * 1024;

export const BLOCK_LOADS = [
  { name: 'random 4 KiB read', rw: 'randread', bs: '4k', depth: 1 },
  { name: 'random 4 KiB read, 16 at once', rw: 'randread', bs: '4k', depth: 16 },
  { name: 'sequential 1 MiB read, 4 at once', rw: 'read', bs: '1m', depth: 4 },
  { name: 'random 4 KiB write', rw: 'randwrite', bs: '4k', depth: 1 },
  { name: 'random 4 KiB write, 16 at once', rw: 'randwrite', bs: '4k', depth: 16 },
  { name: 'sequential 1 MiB write, 4 at once', rw: 'write', bs: '1m', depth: 4 },
] as const;
export type BlockLoad = Omit<(typeof BLOCK_LOADS)[number], 'depth'> & { readonly depth: number };

/**
 * Milliseconds that fio's job took.
 * @param where fio's options that say what is read or written
 */
export async function runLoad(
  where: readonly string[],
  { rw, bs, depth }: BlockLoad,
  sizeBytes: number,
  bytes: number,
): Promise<number> {
  const child = spawn(
    'fio',
    [
      ...['--name=load', ...where, `--size=${sizeBytes}`, `--io_size=${bytes}`],
      ...[`--rw=${rw}`, `--bs=${bs}`, `--iodepth=${depth}`],
      ...['--randrepeat=0', '--norandommap', '--output-format=json'],
    ],
    { stdio: ['ignore', 'pipe', 'inherit'] },
  );
  let text = '';
  child.stdout.setEncoding('utf8').on('data', (more: string) => {
    text += more;
  });
  const [status] = await once(child, 'close');
  if (status !== 0) throw new Error(`fio ended with ${status}`);
  const [job] = JSON.parse(text.slice(text.indexOf('{'))).jobs;
  if (job.error !== 0) throw new Error(`fio: error ${job.error}`);
  const side = rw.endsWith('read') ? job.read : job.write;
  // In steps of a millisecond `runtime` is too coarse for the short ones.
  return (side.total_ios / side.iops) * 1000;
}

/** A file that no file system can make smaller. */
export function writeNoise(path: string, sizeBytes: number): void {
  const fd = openSync(path, 'w');
  for (let at = 0; at < sizeBytes; at += MIB) writeSync(fd, randomBytes(MIB));
  closeSync(fd);
}
