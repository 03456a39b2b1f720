/**
 * A store in memory: for tests, and to keep the interface honest (a second implementation that has no folder beneath).
 * Only staging folders are real, for whoever writes files on their way into the store.
 */
import { mkdtemp, readFile, rm } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { type Digest, digestOf } from '#base';
import { fail } from '../errors.ts';
import type { BlobStore, Hold, Ref, Staging } from './blob-store.ts';
import { checkRecordKey, parseImageName } from './image-name.ts';

const STREAM_BYTES = 1024 * 1024;

export class MemoryStore implements BlobStore {
  readonly url = 'memory:';
  readonly #blobs = new Map<Digest, { bytes: Buffer; modifiedMs: number }>();
  readonly #refs = new Map<string, Ref>();
  readonly #records = new Map<string, string>();
  readonly #stagings = new Map<string, number>();
  #publishing = 0;
  #collecting = false;
  #waiting: (() => void)[] = [];

  async stat(digest: Digest): Promise<{ sizeBytes: number } | undefined> {
    const blob = this.#blobs.get(digest);
    return blob && { sizeBytes: blob.bytes.length };
  }

  async renew(digest: Digest): Promise<{ sizeBytes: number } | undefined> {
    const blob = this.#blobs.get(digest);
    if (blob) blob.modifiedMs = Date.now();
    return this.stat(digest);
  }

  async read(digest: Digest, offset: number, length: number): Promise<Buffer> {
    const bytes = this.#bytes(digest);
    if (offset < 0 || length < 0 || offset + length > bytes.length) {
      throw fail('STORE_SHORT_READ', { digest, offset, length, got: Math.max(0, bytes.length - offset) });
    }
    return Buffer.from(bytes.subarray(offset, offset + length));
  }

  async readVerified(digest: Digest): Promise<Buffer> {
    const bytes = this.#bytes(digest);
    const actual = digestOf(bytes);
    if (actual !== digest) throw fail('STORE_DIGEST_MISMATCH', { digest, actual, path: `${this.url}${digest}` });
    return Buffer.from(bytes);
  }

  async *stream(digest: Digest): AsyncIterable<Buffer> {
    const bytes = this.#bytes(digest);
    for (let offset = 0; offset < bytes.length; offset += STREAM_BYTES) {
      yield Buffer.from(bytes.subarray(offset, offset + STREAM_BYTES));
    }
  }

  localPath(): undefined {
    return undefined;
  }

  async stage(): Promise<Staging> {
    const path = await mkdtemp(join(tmpdir(), 'dsec-staging-'));
    this.#stagings.set(path, Date.now());
    return {
      path,
      remove: async () => {
        this.#stagings.delete(path);
        await rm(path, { recursive: true, force: true });
      },
    };
  }

  async oldestStagingMs(): Promise<number | undefined> {
    return this.#stagings.size === 0 ? undefined : Math.min(...this.#stagings.values());
  }

  async hold(purpose: 'publish' | 'collect'): Promise<Hold> {
    while (this.#collecting || (purpose === 'collect' && this.#publishing > 0)) {
      await new Promise<void>((resolve) => this.#waiting.push(resolve));
    }
    if (purpose === 'collect') this.#collecting = true;
    else this.#publishing++;
    let released = false;
    return {
      release: async () => {
        if (released) return;
        released = true;
        if (purpose === 'collect') this.#collecting = false;
        else this.#publishing--;
        for (const wake of this.#waiting.splice(0)) wake();
      },
    };
  }

  async put(bytes: Buffer): Promise<Digest> {
    const digest = digestOf(bytes);
    this.#blobs.set(digest, { bytes: Buffer.from(bytes), modifiedMs: Date.now() });
    return digest;
  }

  async putFile(path: string, digest: Digest, sizeBytes: number): Promise<void> {
    const bytes = await readFile(path);
    if (bytes.length !== sizeBytes) {
      throw fail('STORE_SIZE_MISMATCH', { digest, path, actual: bytes.length, expected: sizeBytes });
    }
    this.#blobs.set(digest, { bytes, modifiedMs: Date.now() });
    await rm(path, { force: true });
  }

  async deleteBlob(digest: Digest): Promise<void> {
    this.#blobs.delete(digest);
  }

  async *listBlobs(): AsyncIterable<{ digest: Digest; sizeBytes: number; modifiedMs: number }> {
    for (const [digest, { bytes, modifiedMs }] of [...this.#blobs]) {
      yield { digest, sizeBytes: bytes.length, modifiedMs };
    }
  }

  /** For tests: other bytes under a blob's name. */
  damage(digest: Digest, bytes: Buffer): void {
    this.#blobs.set(digest, { bytes: Buffer.from(bytes), modifiedMs: Date.now() });
  }

  async getRef(name: string): Promise<Ref | undefined> {
    return this.#refs.get(parseImageName(name).full);
  }

  async setRef({ name, manifest: { mediaType, digest, size } }: Ref): Promise<void> {
    const { full } = parseImageName(name);
    this.#refs.set(full, { name: full, manifest: { mediaType, digest, size } });
  }

  async deleteRef(name: string): Promise<boolean> {
    return this.#refs.delete(parseImageName(name).full);
  }

  async listRefs(): Promise<Ref[]> {
    return [...this.#refs.values()].sort((a, b) => (a.name < b.name ? -1 : 1));
  }

  async getRecord(kind: string, key: string): Promise<unknown> {
    checkRecordKey(kind, key);
    const text = this.#records.get(`${kind}/${key}`);
    return text === undefined ? undefined : JSON.parse(text);
  }

  async putRecord(kind: string, key: string, value: unknown): Promise<void> {
    checkRecordKey(kind, key);
    this.#records.set(`${kind}/${key}`, JSON.stringify(value));
  }

  async listRecords(kind: string, prefix = ''): Promise<string[]> {
    checkRecordKey(kind, 'any');
    const start = `${kind}/`;
    const keys = [...this.#records.keys()].filter((key) => key.startsWith(start + prefix));
    return keys.map((key) => key.slice(start.length)).sort();
  }

  async deleteRecord(kind: string, key: string): Promise<void> {
    checkRecordKey(kind, key);
    this.#records.delete(`${kind}/${key}`);
  }

  #bytes(digest: Digest): Buffer {
    const blob = this.#blobs.get(digest);
    if (!blob) throw fail('STORE_BLOB_MISSING', { digest, store: this.url });
    return blob.bytes;
  }
}
