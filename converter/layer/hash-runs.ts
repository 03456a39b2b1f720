/**
 * A blob is parts of spool files, one after the other ("runs"). Its sha256 and its chunk digests are two jobs, so that
 * they run on two cores; the one that hashes chunks also writes the blob where it is not a spool file already.
 */
import { createHash } from 'node:crypto';
import { type FileHandle, open } from 'node:fs/promises';
import type { ChunkResult, Run } from './layer-job.ts';

export const CHUNK_BYTES = 256 * 1024;
const READ_BYTES = 1 << 20;

/** Hex sha256 over the runs. */
export async function digestOverRuns(runs: readonly Run[]): Promise<string> {
  const hash = createHash('sha256');
  for await (const bytes of readRuns(runs)) hash.update(bytes);
  return hash.digest('hex');
}

/** Digests of every 256 KiB over the runs (the last may be shorter), and the runs written to `out` if given. */
export async function hashChunks(runs: readonly Run[], out: string | undefined): Promise<ChunkResult> {
  const total = runs.reduce((sum, run) => sum + run.length, 0);
  const digests = new Uint8Array(Math.ceil(total / CHUNK_BYTES) * 32);
  const file = out === undefined ? undefined : await open(out, 'w', 0o644);
  try {
    let chunk = 0;
    let inChunk = 0;
    let hash = createHash('sha256');
    let writing: Promise<unknown> | undefined;
    for await (const bytes of readRuns(runs)) {
      await writing;
      writing = file === undefined ? undefined : writeAll(file, bytes);
      for (let at = 0; at < bytes.length; ) {
        const n = Math.min(CHUNK_BYTES - inChunk, bytes.length - at);
        hash.update(bytes.subarray(at, at + n));
        at += n;
        inChunk += n;
        if (inChunk === CHUNK_BYTES) {
          hash.digest().copy(digests, chunk++ * 32);
          hash = createHash('sha256');
          inChunk = 0;
        }
      }
    }
    await writing;
    if (inChunk > 0) hash.digest().copy(digests, chunk * 32);
    return { digests };
  } finally {
    await file?.close();
  }
}

async function writeAll(file: FileHandle, bytes: Buffer): Promise<void> {
  for (let done = 0; done < bytes.length; ) {
    const { bytesWritten } = await file.write(bytes, done, bytes.length - done);
    done += bytesWritten;
  }
}

/** The runs' bytes in blocks of up to 1 MiB, the next one always being read. */
async function* readRuns(runs: readonly Run[]): AsyncGenerator<Buffer> {
  const files = new Map<string, FileHandle>();
  const fileOf = async (path: string) => {
    const known = files.get(path);
    if (known !== undefined) return known;
    const file = await open(path, 'r');
    files.set(path, file);
    return file;
  };
  const pieces = (function* () {
    for (const run of runs) {
      for (let at = 0; at < run.length; at += READ_BYTES) {
        yield { path: run.path, offset: run.offset + at, length: Math.min(READ_BYTES, run.length - at) };
      }
    }
  })();
  const readNext = async (): Promise<Buffer | undefined> => {
    const step = pieces.next();
    if (step.done) return undefined;
    const { path, offset, length } = step.value;
    const file = await fileOf(path);
    const bytes = Buffer.allocUnsafe(length);
    for (let done = 0; done < length; ) {
      const { bytesRead } = await file.read(bytes, done, length - done, offset + done);
      if (bytesRead === 0) throw new Error(`${path} ends early`);
      done += bytesRead;
    }
    return bytes;
  };
  try {
    let pending = readNext();
    for (;;) {
      const bytes = await pending;
      if (bytes === undefined) return;
      pending = readNext();
      pending.catch(() => {});
      yield bytes;
    }
  } finally {
    for (const file of files.values()) await file.close();
  }
}
