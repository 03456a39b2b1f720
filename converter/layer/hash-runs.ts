/**
 * A blob is parts of spool files, one after the other ("runs"). Its sha256 and its chunk digests are two jobs, so that
 * they run on two cores; the one that hashes chunks also writes the blob where it is not a spool file already.
 */
import { createHash } from 'node:crypto';
import { closeSync, openSync, readSync } from 'node:fs';
import { type FileHandle, open } from 'node:fs/promises';
import { startWriteback } from '#linux';
import type { ChunkResult, FollowResult, Run } from './layer-job.ts';

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
  const chunks = new ChunkHasher();
  const file = out === undefined ? undefined : await open(out, 'w', 0o644);
  try {
    let writing: Promise<unknown> | undefined;
    let written = 0;
    for await (const bytes of readRuns(runs)) {
      await writing;
      writing = file === undefined ? undefined : writeAll(file, bytes, written);
      written += bytes.length;
      writing?.catch(() => {});
      chunks.update(bytes);
    }
    await writing;
    return { digests: chunks.finish() };
  } finally {
    await file?.close();
  }
}

/**
 * Both digests of a file that grows: `settled` yields how many bytes are final, up to all of them. What has been hashed is
 * sent on its way to the disk, so that the fsync at the end finds little left to do.
 */
export async function followSpool(path: string, settled: AsyncIterable<number>): Promise<FollowResult> {
  const whole = createHash('sha256');
  const chunks = new ChunkHasher();
  let file: FileHandle | undefined;
  try {
    let done = 0;
    for await (const bytes of settled) {
      if (bytes <= done) continue;
      // The spool is made by another thread; once something is settled it is there.
      file ??= await open(path, 'r');
      for await (const piece of readRuns([{ path, offset: done, length: bytes - done }])) {
        whole.update(piece);
        chunks.update(piece);
      }
      startWriteback(file.fd, done, bytes - done);
      done = bytes;
    }
    return { hex: whole.digest('hex'), digests: chunks.finish() };
  } finally {
    await file?.close();
  }
}

/**
 * The same for a spool that this very thread writes, called between its writes. On two cores this beats a thread of its own,
 * which would take turns with the one that inflates.
 */
export class SpoolHasher {
  readonly #path: string;
  readonly #whole = createHash('sha256');
  readonly #chunks = new ChunkHasher();
  readonly #piece = Buffer.allocUnsafeSlow(READ_BYTES);
  #fd: number | undefined;
  #done = 0;

  constructor(path: string) {
    this.#path = path;
  }

  /** Hashes up to `bytes`, which are in the file and final. */
  advance(bytes: number): void {
    if (bytes <= this.#done) return;
    this.#fd ??= openSync(this.#path, 'r');
    const from = this.#done;
    while (this.#done < bytes) {
      const n = readSync(this.#fd, this.#piece, 0, Math.min(READ_BYTES, bytes - this.#done), this.#done);
      if (n === 0) throw new Error(`${this.#path} ends early`);
      const piece = this.#piece.subarray(0, n);
      this.#whole.update(piece);
      this.#chunks.update(piece);
      this.#done += n;
    }
    startWriteback(this.#fd, from, bytes - from);
  }

  finish(): FollowResult {
    return { hex: this.#whole.digest('hex'), digests: this.#chunks.finish() };
  }

  close(): void {
    if (this.#fd !== undefined) closeSync(this.#fd);
  }
}

/** sha256 of each 256 KiB of what it is given. */
class ChunkHasher {
  readonly #digests: Buffer[] = [];
  #hash = createHash('sha256');
  #inChunk = 0;

  update(bytes: Buffer): void {
    for (let at = 0; at < bytes.length; ) {
      const n = Math.min(CHUNK_BYTES - this.#inChunk, bytes.length - at);
      this.#hash.update(bytes.subarray(at, at + n));
      at += n;
      this.#inChunk += n;
      if (this.#inChunk === CHUNK_BYTES) this.#next();
    }
  }

  #next(): void {
    this.#digests.push(this.#hash.digest());
    this.#hash = createHash('sha256');
    this.#inChunk = 0;
  }

  finish(): Uint8Array {
    if (this.#inChunk > 0) this.#next();
    return new Uint8Array(Buffer.concat(this.#digests));
  }
}

async function writeAll(file: FileHandle, bytes: Buffer, position: number): Promise<void> {
  for (let done = 0; done < bytes.length; ) {
    const { bytesWritten } = await file.write(bytes, done, bytes.length - done, position + done);
    done += bytesWritten;
  }
  startWriteback(file.fd, position, bytes.length);
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
