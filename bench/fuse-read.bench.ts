/**
 * Warm reads through the data server's raw transport, against a C server on libfuse3 that shows the same file: sequential 1 MiB
 * and random 4 KiB, around the page cache (O_DIRECT, as EROFS reads it), one reader and four. Both serve with several threads;
 * a program in C reads from both. Ours answers from the chunk cache, every chunk of it verified before.
 */
import { execFileSync, spawn, spawnSync } from 'node:child_process';
import { createHash } from 'node:crypto';
import { closeSync, mkdirSync, openSync, readSync, writeFileSync, writeSync } from 'node:fs';
import { join } from 'node:path';
import { digestFromHex, hexOf } from '#base';
import { CHUNK_BYTES, openChunkCache } from '#chunk-cache';
import { connectFuse, serveRaw } from '#imagesvc';
import { umount } from '#linux';
import { atLeast, type Benchmark, type Result, round } from './benchmark.ts';
import { FUSE_READER_C, FUSE_SERVER_C } from './fuse-programs.ts';
import { numberOption } from './options.ts';
import { printTable } from './results.ts';
import { inTurn, summary } from './sample.ts';
import { missingTool, needsRoot } from './tool.ts';
import { needSpace, withScratch } from './work-folder.ts';

const MIB = 1024 * 1024;

const READS = [
  { name: 'sequential 1 MiB', mode: 'seq', block: MIB, readers: 1, share: 1 },
  { name: 'random 4 KiB', mode: 'random', block: 4096, readers: 1, share: 1 },
  { name: 'random 4 KiB, 4 readers', mode: 'random', block: 4096, readers: 4, share: 2 },
] as const;

export const benchmark: Benchmark = {
  name: 'fuse-read',
  about: 'warm reads through the data server, against a C server on libfuse3',
  needs: () =>
    needsRoot() ??
    missingTool({ gcc: 'gcc libc6-dev', 'pkg-config': 'pkg-config' }) ??
    (spawnSync('pkg-config', ['--exists', 'fuse3']).status === 0
      ? undefined
      : 'libfuse3 is missing (apt-get install libfuse3-dev)'),
  run: () => withScratch('fuse-read', measure),
};

async function measure(folder: string): Promise<Result> {
  const sizeBytes = numberOption('mb', 256) * MIB;
  needSpace(folder, sizeBytes * 2.2);
  const reader = compile(folder, 'reader', FUSE_READER_C);
  const file = join(folder, 'file');
  const { digest, chunkDigests } = writeNoise(file, sizeBytes);

  const ours = join(folder, 'ours');
  const theirs = join(folder, 'theirs');
  for (const path of [ours, theirs]) mkdirSync(path);
  const peer = await startPeer(compile(folder, 'server', FUSE_SERVER_C), file, theirs);
  const cache = await openChunkCache({
    folder: join(folder, 'cache'),
    source: {
      async readRange(_blob, offset, lengthBytes) {
        const bytes = Buffer.allocUnsafe(lengthBytes);
        const fd = openSync(file, 'r');
        readSync(fd, bytes, 0, lengthBytes, offset);
        closeSync(fd);
        return bytes;
      },
    },
  });
  const blob = cache.open({ digest, sizeBytes, chunkDigests });
  const { fd } = connectFuse(ours, 'dsec-bench');
  const view = { kind: 'chunks', chunks: blob.view() } as const;
  const transport = serveRaw({
    fd,
    blobs: [{ digest, sizeBytes, node: 2, view }],
    reader: { read: (_, at, n) => blob.read(at, n) },
  });
  const ourFile = join(ours, hexOf(digest));
  const theirFile = join(theirs, 'f');
  try {
    // Fetches, verifies, and waits until all of it is on the disk.
    await read(reader, ourFile, 'seq', MIB, sizeBytes / MIB, 1);
    while (!blob.isComplete) await new Promise((done) => setTimeout(done, 50));
    await read(reader, theirFile, 'seq', MIB, sizeBytes / MIB, 1);
    const n = numberOption('n', 7);
    const rows: string[][] = [['reads', 'ours', 'libfuse3', 'ratio']];
    const ratios: Record<string, number> = {};
    const details: Record<string, unknown> = {};
    for (const { name, mode, block, readers, share } of READS) {
      const count = mode === 'seq' ? sizeBytes / MIB : 20_000 / share;
      const run = (path: string) => () => read(reader, path, mode, block, count, readers);
      const pairs = await inTurn(n, run(ourFile), run(theirFile));
      const rate = (ms: number) =>
        mode === 'seq'
          ? `${((sizeBytes / MIB / ms) * 1000).toFixed(0)} MiB/s`
          : `${((count * readers) / ms).toFixed(1)} k/s`;
      ratios[name] = pairs.ratio;
      details[name] = { ratio: pairs.ratio, ours: summary(pairs.ours), libfuse3: summary(pairs.theirs) };
      rows.push([name, rate(summary(pairs.ours).p50), rate(summary(pairs.theirs).p50), String(pairs.ratio)]);
    }
    printTable(rows);
    const worst = Math.min(...Object.values(ratios));
    const first = details['sequential 1 MiB'] as { ours: { p50: number; p99: number } };
    return {
      ratio: round(worst),
      ...atLeast(1, worst),
      against: `libfuse3 ${execFileSync('pkg-config', ['--modversion', 'fuse3'], { encoding: 'utf8' }).trim()}, multi-threaded, pread`,
      n,
      p50: first.ours.p50,
      p99: first.ours.p99,
      unit: 'ms',
      sizeBytes,
      reads: details,
    };
  } finally {
    umount(ours, { lazy: true });
    await transport.ended;
    await cache.close();
    peer.kill('SIGTERM');
    await new Promise((done) => peer.once('exit', done));
  }
}

function compile(folder: string, name: string, source: string): string {
  const path = join(folder, name);
  writeFileSync(`${path}.c`, source);
  const flags = execFileSync('pkg-config', ['--cflags', '--libs', 'fuse3'], { encoding: 'utf8' }).trim().split(/\s+/);
  execFileSync('gcc', ['-O2', '-D_GNU_SOURCE', '-o', path, `${path}.c`, ...flags, '-lpthread']);
  return path;
}

function writeNoise(path: string, sizeBytes: number) {
  const fd = openSync(path, 'w');
  const whole = createHash('sha256');
  const digests: Buffer[] = [];
  for (let at = 0; at < sizeBytes; at += CHUNK_BYTES) {
    const chunk = createHash('shake256', { outputLength: CHUNK_BYTES }).update(String(at)).digest();
    writeSync(fd, chunk);
    whole.update(chunk);
    digests.push(createHash('sha256').update(chunk).digest());
  }
  closeSync(fd);
  return { digest: digestFromHex(whole.digest('hex')), chunkDigests: Buffer.concat(digests) };
}

async function startPeer(program: string, file: string, mountPoint: string) {
  const peer = spawn(program, [file, mountPoint], { stdio: ['ignore', 'pipe', 'inherit'] });
  await new Promise<void>((ready, failed) => {
    peer.stdout.once('data', () => ready());
    peer.once('exit', (code) => failed(new Error(`the libfuse3 server ended with ${code}`)));
  });
  return peer;
}

/** Milliseconds, as the reader itself measured them. */
function read(
  reader: string,
  path: string,
  mode: string,
  block: number,
  count: number,
  readers: number,
): Promise<number> {
  return new Promise((done, failed) => {
    const child = spawn(reader, [path, mode, String(block), String(count), String(readers)], {
      stdio: ['ignore', 'pipe', 'inherit'],
    });
    let text = '';
    child.stdout.setEncoding('latin1').on('data', (more: string) => {
      text += more;
    });
    child.once('error', failed);
    child.once('close', (code) =>
      code === 0 ? done(Number(text)) : failed(new Error(`the reader ended with ${code}`)),
    );
  });
}
