/** A blob out of parts of spool files, one after the other ("runs"): its digests, and its bytes where it is no spool as it is. */
import { type FileHandle, open } from 'node:fs/promises';
import type { BlobDigests } from '#linux';
import { DataFile, directFrom } from './data-file.ts';
import type { Run } from './layer-job.ts';

export async function makeBlob(
  runs: readonly Run[],
  out: string | undefined,
  signal?: AbortSignal,
): Promise<BlobDigests> {
  const sizeBytes = runs.reduce((sum, run) => sum + run.length, 0);
  const blob = new DataFile(out, { hash: true, directFromBytes: directFrom(sizeBytes) });
  const reader = new RunReader(runs);
  try {
    let pending = reader.fill(blob.space());
    for (;;) {
      const bytes = await pending;
      signal?.throwIfAborted();
      if (bytes === 0) break;
      blob.commit(bytes);
      // The next block is read while this one is hashed.
      pending = reader.fill(blob.space());
      pending.catch(() => {});
      blob.hash();
      await blob.drain();
    }
    return (await blob.finish())!;
  } finally {
    await reader.close();
    await blob.close();
  }
}

class RunReader {
  readonly #runs: readonly Run[];
  readonly #files = new Map<string, FileHandle>();
  #run = 0;
  #inRun = 0;
  #filling: Promise<number> | undefined;

  constructor(runs: readonly Run[]) {
    this.#runs = runs;
  }

  /** Fills `into` with what comes next. Fewer bytes only at the end. */
  fill(into: Buffer): Promise<number> {
    this.#filling = this.#fill(into);
    return this.#filling;
  }

  async #fill(into: Buffer): Promise<number> {
    let done = 0;
    while (done < into.length && this.#run < this.#runs.length) {
      const { path, offset, length } = this.#runs[this.#run]!;
      const file = await this.#file(path);
      const want = Math.min(into.length - done, length - this.#inRun);
      const { bytesRead } = await file.read(into, done, want, offset + this.#inRun);
      if (bytesRead === 0 && want > 0) throw new Error(`${path} ends early`);
      done += bytesRead;
      this.#inRun += bytesRead;
      if (this.#inRun < length) continue;
      this.#run++;
      this.#inRun = 0;
    }
    return done;
  }

  async #file(path: string): Promise<FileHandle> {
    const known = this.#files.get(path);
    if (known !== undefined) return known;
    const file = await open(path, 'r');
    this.#files.set(path, file);
    return file;
  }

  /** Once no read is under way. */
  async close(): Promise<void> {
    await this.#filling?.catch(() => {});
    for (const file of this.#files.values()) await file.close();
  }
}
