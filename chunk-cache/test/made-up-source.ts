/** A source that serves made-up blobs, counts what it is asked for, and misbehaves on demand. */
import { randomBytes } from 'node:crypto';
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach } from 'vitest';
import type { Digest, StopSignal } from '#base';
import { CHUNK_BYTES } from '../chunk.ts';
import type { FetchPriority, RangeOptions, RangeSource } from '../range-source.ts';
import type { MadeUpBlob } from './made-up-blob.ts';

export { makeBlob, randomFrom } from './made-up-blob.ts';

export interface Asked {
  readonly blob: Digest;
  readonly offset: number;
  readonly length: number;
  readonly priority: FetchPriority;
  readonly hashed: boolean | undefined;
}

export class MadeUpSource implements RangeSource {
  readonly asked: Asked[] = [];
  readonly #blobs = new Map<Digest, MadeUpBlob>();
  /** Called before the answer; what it returns is the answer, unless undefined. */
  meddle: ((asked: Asked, right: Buffer, signal?: StopSignal) => Promise<Buffer> | Buffer | undefined) | undefined;
  inFlight = 0;
  mostInFlight = 0;

  constructor(...blobs: MadeUpBlob[]) {
    for (const blob of blobs) this.#blobs.set(blob.digest, blob);
  }

  /** How often each chunk was asked for. */
  chunkCounts(digest: Digest): Map<number, number> {
    const counts = new Map<number, number>();
    for (const { blob, offset, length } of this.asked) {
      if (blob !== digest) continue;
      for (let at = offset; at < offset + length; at += CHUNK_BYTES) {
        counts.set(at / CHUNK_BYTES, (counts.get(at / CHUNK_BYTES) ?? 0) + 1);
      }
    }
    return counts;
  }

  async readRange(digest: Digest, offset: number, length: number, options: RangeOptions): Promise<Buffer> {
    const blob = this.#blobs.get(digest);
    if (blob === undefined) throw new Error(`no blob ${digest}`);
    if (offset % CHUNK_BYTES !== 0 || length <= 0 || length > 4 * 2 ** 20 || offset + length > blob.sizeBytes) {
      throw new Error(`range ${offset}+${length} breaks the contract`);
    }
    const asked = { blob: digest, offset, length, priority: options.priority, hashed: options.hashed };
    this.asked.push(asked);
    this.inFlight++;
    this.mostInFlight = Math.max(this.mostInFlight, this.inFlight);
    try {
      const right = Buffer.from(blob.bytes.subarray(offset, offset + length));
      const answer = await this.meddle?.(asked, right, options.signal);
      if (answer === undefined) await Promise.resolve();
      return answer ?? right;
    } finally {
      this.inFlight--;
    }
  }
}

const folders: string[] = [];
afterEach(() => {
  for (const folder of folders.splice(0)) rmSync(folder, { recursive: true, force: true });
});

/** Removed after the test. */
export function temporaryFolder(): string {
  const folder = mkdtempSync(join(tmpdir(), `dsec-chunks-${randomBytes(3).toString('hex')}-`));
  folders.push(folder);
  return folder;
}

/** Tests of the cache itself must not depend on how full the machine's disk is, or how slow the machine. */
export const ROOMY = { minFreeBytes: 0, patienceMs: 3_600_000 } as const;
