/**
 * A store in an S3 bucket (or under a prefix of one): the keys are those of a store in a folder (docs/store.md), and the promises the same
 * as far as S3 goes. A PUT replaces an object whole, so blobs are published and refs replaced atomically; of two who set a ref
 * at once the last wins. What S3 has no way to say is said by small objects:
 *
 * - `renewed/sha256/<hex>`, empty: its time is when the blob was last renewed (S3 has no touch, and copying 10 GB onto itself is none).
 * - `work/`: who is at work (s3-leases.ts).
 *
 * Ages count in whole seconds on most servers. They are rounded up, so that nothing seems older than it is: garbage collection leaves
 * what is younger than a second. Every read is tried again where that can help (decorators/retry-call.ts).
 */
import { lstat, rm } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { basename, join } from 'node:path';
import { type Digest, digestFromHex, digestOf, hexOf, isDigest, isDsecError, type StopSignal } from '#base';
import type { RangeSource } from '#chunk-cache';
import { fail } from '../errors.ts';
import type { BlobStore, DamagedRef, Descriptor, Hold, Ref, Staging } from './blob-store.ts';
import { RetryAllowance, type RetryOptions, retryCall, retryFor } from './decorators/retry-call.ts';
import { ensureFolder } from './durable-file.ts';
import { checkRecordKey, isImageName, isRecordKey, parseImageName } from './image-name.ts';
import { parseDescriptor } from './ref-file.ts';
import { S3Access } from './s3-access.ts';
import { type LeaseTimes, S3Leases } from './s3-leases.ts';
import { type RangeOptions, type S3Page, S3Ranges } from './s3-ranges.ts';
import { parseS3Url } from './s3-url.ts';
import { S3Writer, type S3WriterSizes } from './s3-writer.ts';
import { makeStaging, sweepFolders } from './staging.ts';
import { FORMAT_FILE, FORMAT_TEXT, formatVersion } from './store-format.ts';
import { storeError } from './system-error.ts';

const BLOBS = 'blobs/sha256/';
const RENEWED = 'renewed/sha256/';
const REFS = 'refs/';
const TAGS = '/_tags/';
const HEX = /^[0-9a-f]{64}$/;
/** Whole blobs are read in pieces of this size, this many at once. */
const PIECE_BYTES = 8 * 1024 * 1024;
const PIECES_AT_ONCE = 4;
const REFS_AT_ONCE = 16;
/** Refs and records. */
const MAX_SMALL_BYTES = 4 * 1024 * 1024;
/** Unfinished uploads of dead processes are kept this long. */
const UPLOAD_KEPT_MS = 24 * 3_600_000;

export interface S3StoreOptions {
  readonly env?: NodeJS.ProcessEnv;
  readonly retry?: RetryOptions;
  readonly leases?: LeaseTimes;
  readonly sizes?: S3WriterSizes;
}

export class S3Store implements BlobStore {
  readonly url: string;
  /** Single tries, to be decorated. */
  readonly ranges: RangeSource;
  readonly #env: NodeJS.ProcessEnv;
  readonly #prefix: string;
  readonly #ranges: S3Ranges;
  readonly #writer: S3Writer;
  readonly #leases: S3Leases;
  readonly #retry: RetryOptions;
  #marked = false;

  /** Use `openStore`, which looks at what is there. @throws STORE_URL */
  constructor(url: string, options: S3StoreOptions = {}) {
    const { env = process.env, retry, leases, sizes } = options;
    const location = parseS3Url(url, env);
    const access = new S3Access(location, env);
    this.url = location.url;
    this.#env = env;
    this.#prefix = location.prefix;
    this.#ranges = new S3Ranges(access);
    this.#writer = new S3Writer(access, sizes);
    this.#retry = { allowance: new RetryAllowance(), ...retry };
    const objects = {
      put: (key: string, bytes: Buffer) => this.#writer.put(this.#prefix + key, bytes),
      delete: (key: string) => this.#writer.delete(this.#prefix + key),
      list: (prefix: string) => this.#list(prefix),
    };
    this.#leases = new S3Leases(objects, this.url, leases);
    this.ranges = {
      readRange: (blob, offset, length, options) => this.#range(blob, offset, length, options),
    };
  }

  /** Refuses what is no store. Makes nothing. @throws STORE_FOREIGN, STORE_VERSION, STORE_REMOTE_ACCESS, ... */
  async open(): Promise<void> {
    await this.#checkFormat();
  }

  async stat(digest: Digest): Promise<{ sizeBytes: number } | undefined> {
    const key = this.#blobKey(digest);
    return this.#again(`look at ${key}`, () => this.#ranges.head(key));
  }

  async renew(digest: Digest): Promise<{ sizeBytes: number } | undefined> {
    const found = await this.stat(digest);
    if (found === undefined) return undefined;
    await this.#writer.put(`${this.#prefix}${RENEWED}${hexOf(digest)}`, Buffer.alloc(0));
    // Gone meanwhile: then the caller must know, and the mark is of no use.
    const still = await this.stat(digest);
    if (still === undefined) await this.#writer.delete(`${this.#prefix}${RENEWED}${hexOf(digest)}`);
    return still;
  }

  async read(digest: Digest, offset: number, length: number): Promise<Buffer> {
    return this.#again(
      `read of ${digest}`,
      (signal) => this.#range(digest, offset, length, { signal }),
      Math.max(0, length),
    );
  }

  async readVerified(digest: Digest): Promise<Buffer> {
    const bytes = await this.#whole(digest);
    if (digestOf(bytes) === digest) return bytes;
    // Perhaps only damaged on its way.
    const second = await this.#whole(digest);
    const actual = digestOf(second);
    if (actual !== digest)
      throw fail('STORE_DIGEST_MISMATCH', { digest, actual, path: `${this.url}: ${this.#blobKey(digest)}` });
    return second;
  }

  async *stream(digest: Digest): AsyncIterable<Buffer> {
    const first = await this.#beginning(digest);
    const ahead: Promise<Buffer>[] = [];
    let next = first.bytes.length;
    const refill = () => {
      while (ahead.length < 2 && next < first.sizeBytes) {
        const length = Math.min(PIECE_BYTES, first.sizeBytes - next);
        const piece = this.read(digest, next, length);
        // Told when its turn comes.
        piece.catch(() => {});
        ahead.push(piece);
        next += length;
      }
    };
    refill();
    if (first.bytes.length > 0) yield first.bytes;
    for (let piece = ahead.shift(); piece !== undefined; piece = ahead.shift()) {
      const bytes = await piece;
      refill();
      yield bytes;
    }
  }

  localPath(): undefined {
    return undefined;
  }

  async stage(): Promise<Staging> {
    await this.#prepare();
    const folder = await this.#localStaging();
    const id = basename(folder.path);
    const lease = await this.#leases.stage(id).catch(async (error) => {
      await folder.remove();
      throw error;
    });
    return {
      path: folder.path,
      async remove() {
        await folder.remove();
        // A lease that cannot be removed ends by itself.
        await lease.end().catch(() => {});
      },
    };
  }

  async oldestStagingMs(): Promise<number | undefined> {
    return this.#leases.oldestStagingMs();
  }

  async hold(purpose: 'publish' | 'collect'): Promise<Hold> {
    await this.#prepare();
    const hold = await this.#leases.hold(purpose);
    if (purpose === 'collect') {
      // Housekeeping that may be forbidden, or unknown to the server; a lifecycle rule of the bucket does the same.
      await this.#writer.abortUploads(this.#prefix + BLOBS, Date.now() - UPLOAD_KEPT_MS).catch(() => 0);
    }
    return hold;
  }

  async put(bytes: Buffer): Promise<Digest> {
    const digest = digestOf(bytes);
    await this.#prepare();
    if (!(await this.#adopt(digest, bytes.length))) {
      await this.#writer.put(this.#blobKey(digest), bytes, Buffer.from(hexOf(digest), 'hex'));
    }
    return digest;
  }

  async putFile(path: string, digest: Digest, sizeBytes: number): Promise<void> {
    await this.#prepare();
    try {
      const found = await lstat(path);
      if (!found.isFile()) throw fail('STORE_IO', { store: this.url, path, reason: 'it is no regular file' });
      if (found.size !== sizeBytes) {
        throw fail('STORE_SIZE_MISMATCH', { digest, path, actual: found.size, expected: sizeBytes });
      }
      if (!(await this.#adopt(digest, sizeBytes))) {
        await this.#writer.putFile(this.#blobKey(digest), path, sizeBytes, Buffer.from(hexOf(digest), 'hex'));
      }
      await rm(path, { force: true });
    } catch (error) {
      throw storeError(error, this.url, path);
    }
  }

  async deleteBlob(digest: Digest): Promise<void> {
    this.#leases.checkCollecting();
    await this.#writer.delete(this.#blobKey(digest));
    await this.#writer.delete(`${this.#prefix}${RENEWED}${hexOf(digest)}`);
  }

  async *listBlobs(): AsyncIterable<{ digest: Digest; sizeBytes: number; modifiedMs: number }> {
    const renewed = new Map<string, number>();
    for await (const { objects } of this.#list(RENEWED)) {
      for (const { key, modifiedMs } of objects) renewed.set(key.slice(RENEWED.length), notOlder(modifiedMs));
    }
    for await (const { objects } of this.#list(BLOBS)) {
      for (const { key, sizeBytes, modifiedMs } of objects) {
        const hex = key.slice(BLOBS.length);
        if (!HEX.test(hex)) continue;
        const youngest = Math.max(notOlder(modifiedMs), renewed.get(hex) ?? 0);
        yield { digest: digestFromHex(hex), sizeBytes, modifiedMs: youngest };
      }
    }
  }

  async getRef(name: string): Promise<Ref | undefined> {
    const { full } = parseImageName(name);
    const key = refKey(full);
    const text = await this.#small(key);
    if (text === undefined) return undefined;
    const manifest = parseDescriptor(text);
    if (manifest === undefined) throw fail('STORE_REF_DAMAGED', { name: full, path: `${this.url}: ${key}` });
    return { name: full, manifest };
  }

  /** The last of several writers wins. */
  async setRef(ref: Ref): Promise<void> {
    const { mediaType, digest, size }: Descriptor = ref.manifest;
    const key = refKey(parseImageName(ref.name).full);
    await this.#prepare();
    await this.#writer.put(this.#prefix + key, Buffer.from(`${JSON.stringify({ mediaType, digest, size })}\n`));
  }

  async deleteRef(name: string): Promise<boolean> {
    const key = this.#prefix + refKey(parseImageName(name).full);
    if ((await this.#again(`look at ${key}`, () => this.#ranges.head(key))) === undefined) return false;
    await this.#writer.delete(key);
    return true;
  }

  async listRefs(damaged?: DamagedRef): Promise<Ref[]> {
    const names: string[] = [];
    for await (const { objects } of this.#list(REFS)) {
      for (const { key } of objects) {
        const [repository, tag, more] = key.slice(REFS.length).split(TAGS);
        const name = `${repository}:${tag}`;
        if (tag !== undefined && more === undefined && isImageName(name)) names.push(name);
      }
    }
    const refs: Ref[] = [];
    let next = 0;
    const readSome = async () => {
      while (next < names.length) {
        const name = names[next++]!;
        const ref = await this.getRef(name).catch((error) => {
          if (!isDsecError(error, 'STORE_REF_DAMAGED')) throw error;
          damaged?.(name, error);
          return undefined;
        });
        if (ref !== undefined) refs.push(ref);
      }
    };
    await Promise.all(Array.from({ length: REFS_AT_ONCE }, readSome));
    return refs.sort((a, b) => (a.name < b.name ? -1 : 1));
  }

  async getRecord(kind: string, key: string): Promise<unknown> {
    checkRecordKey(kind, key);
    const text = await this.#small(`records/${kind}/${key}.json`);
    try {
      return text === undefined ? undefined : JSON.parse(text);
    } catch {
      return undefined;
    }
  }

  async putRecord(kind: string, key: string, value: unknown): Promise<void> {
    checkRecordKey(kind, key);
    await this.#prepare();
    await this.#writer.put(`${this.#prefix}records/${kind}/${key}.json`, Buffer.from(`${JSON.stringify(value)}\n`));
  }

  async listRecords(kind: string, prefix = ''): Promise<string[]> {
    checkRecordKey(kind, 'any');
    const folder = `records/${kind}/`;
    const keys: string[] = [];
    for await (const { objects } of this.#list(folder + prefix)) {
      for (const { key } of objects) {
        const name = key.slice(folder.length, -'.json'.length);
        if (key.endsWith('.json') && isRecordKey(name)) keys.push(name);
      }
    }
    return keys.sort();
  }

  async deleteRecord(kind: string, key: string): Promise<void> {
    checkRecordKey(kind, key);
    await this.#writer.delete(`${this.#prefix}records/${kind}/${key}.json`);
  }

  #blobKey(digest: Digest): string {
    // The last line of defence against a key made of something unparsed.
    if (!isDigest(digest)) throw fail('STORE_NAME', { name: String(digest), why: 'it is no sha256 digest' });
    return `${this.#prefix}${BLOBS}${hexOf(digest)}`;
  }

  /** One try. */
  async #range(digest: Digest, offset: number, length: number, options: RangeOptions): Promise<Buffer> {
    const key = this.#blobKey(digest);
    const short = (sizeBytes: number) =>
      fail('STORE_SHORT_READ', { digest, offset, length, got: Math.max(0, sizeBytes - offset) });
    const missing = () => fail('STORE_BLOB_MISSING', { digest, store: this.url });
    if (length <= 0 || offset < 0) {
      // There is no such range in HTTP.
      const found = await this.#ranges.head(key);
      if (found === undefined) throw missing();
      if (length < 0 || offset < 0 || offset > found.sizeBytes) throw short(found.sizeBytes);
      return Buffer.alloc(0);
    }
    const found = await this.#ranges.range(key, offset, length, options);
    if (found === undefined) throw missing();
    if (!Buffer.isBuffer(found)) throw short(found.sizeBytes);
    return found;
  }

  async #beginning(digest: Digest): Promise<{ bytes: Buffer; sizeBytes: number }> {
    const key = this.#blobKey(digest);
    const first = await this.#again(`read of ${key}`, () => this.#ranges.beginning(key, PIECE_BYTES), PIECE_BYTES);
    if (first === undefined) throw fail('STORE_BLOB_MISSING', { digest, store: this.url });
    return first;
  }

  async #whole(digest: Digest): Promise<Buffer> {
    const { bytes, sizeBytes } = await this.#beginning(digest);
    if (bytes.length === sizeBytes) return bytes;
    const all = Buffer.allocUnsafeSlow(sizeBytes);
    let next = bytes.copy(all);
    const readSome = async () => {
      while (next < sizeBytes) {
        const offset = next;
        const length = Math.min(PIECE_BYTES, sizeBytes - offset);
        next += length;
        (await this.read(digest, offset, length)).copy(all, offset);
      }
    };
    await Promise.all(Array.from({ length: PIECES_AT_ONCE }, readSome));
    return all;
  }

  async #small(key: string): Promise<string | undefined> {
    const found = await this.#again(`read of ${key}`, () =>
      this.#ranges.beginning(this.#prefix + key, MAX_SMALL_BYTES),
    );
    return found?.bytes.toString('utf8');
  }

  /** Keys come without the store's prefix. A page that fails is asked for again. */
  async *#list(prefix: string): AsyncIterable<S3Page> {
    const pages = this.#ranges.list(this.#prefix + prefix, (work) => this.#again(`list of ${prefix}`, work));
    for await (const { objects, serverNowMs } of pages) {
      const inside = objects.map((object) => ({ ...object, key: object.key.slice(this.#prefix.length) }));
      yield { objects: inside, serverNowMs };
    }
  }

  /** Whether the blob is there already, whole; then it is made young. */
  async #adopt(digest: Digest, sizeBytes: number): Promise<boolean> {
    const found = await this.stat(digest);
    return found?.sizeBytes === sizeBytes && (await this.renew(digest))?.sizeBytes === sizeBytes;
  }

  async #checkFormat(): Promise<'store' | 'nothing'> {
    if (this.#marked) return 'store';
    let text = await this.#small(FORMAT_FILE);
    if (text === undefined) {
      const other = await this.#again('list', () => this.#ranges.anyKey(this.#prefix));
      if (other === undefined) return 'nothing';
      // What is there may have been written after its marker, and we have looked for that before.
      text = await this.#small(FORMAT_FILE);
      if (text === undefined) {
        const why = `it has no ${FORMAT_FILE} but holds other objects ("${other}"); name a prefix that is empty`;
        throw fail('STORE_FOREIGN', { store: this.url, why });
      }
    }
    formatVersion(text, this.url);
    this.#marked = true;
    return 'store';
  }

  /** Before a write: the store's marker. */
  async #prepare(): Promise<void> {
    if ((await this.#checkFormat()) === 'store') return;
    await this.#writer.put(this.#prefix + FORMAT_FILE, Buffer.from(FORMAT_TEXT));
    this.#marked = true;
  }

  /** A folder on a local disk: what is made in it is read once, and sent. */
  async #localStaging(): Promise<Staging> {
    const cache = this.#env.DSEC_CACHE || (process.getuid?.() === 0 ? '/var/lib/dsec/cache' : undefined);
    const tmp =
      cache === undefined ? join(tmpdir(), `dsec-staging-${process.getuid?.() ?? 0}`) : join(cache, 'staging');
    try {
      await ensureFolder(tmp);
      await sweepFolders(tmp);
      return await makeStaging(tmp);
    } catch (error) {
      throw storeError(error, tmp, tmp);
    }
  }

  #again<T>(what: string, work: (signal: StopSignal | undefined) => Promise<T>, bytes = 0): Promise<T> {
    return retryCall(work, () => `${this.url}: ${what}`, retryFor(bytes, this.#retry));
  }
}

/** Whole seconds may hide up to 999 ms: as young as it can be. */
function notOlder(modifiedMs: number): number {
  return modifiedMs % 1000 === 0 ? modifiedMs + 999 : modifiedMs;
}

function refKey(fullName: string): string {
  const { repository, tag } = parseImageName(fullName);
  return `${REFS}${repository}${TAGS}${tag}`;
}
