/**
 * A store in a folder: a local disk, 3FS, or any POSIX mount. The layout is in docs/store.md.
 *
 * Every blob is written and synced in a staging folder and then gets its name by link(2), which never replaces anything,
 * so that a reader, a second writer or a crash sees a whole blob or none; then its folder is synced. Refs and records
 * are replaced by rename(2). When a `put*` or `setRef` returns, what it wrote survives a power failure (records: it is
 * whole, or not there). The umask has no say: files are 0644, folders 0755.
 */
import { createHash } from 'node:crypto';
import { fchmodSync } from 'node:fs';
import {
  chmod,
  constants,
  copyFile,
  type FileHandle,
  link,
  open,
  opendir,
  readdir,
  readFile,
  rename,
  rm,
  rmdir,
  stat,
  utimes,
  writeFile,
} from 'node:fs/promises';
import { dirname, join } from 'node:path';
import { pathToFileURL } from 'node:url';
import { type Digest, digestFromHex, digestOf, hexOf, isDigest, systemCode } from '#base';
import { syncFolder } from '#linux';
import { fail } from '../errors.ts';
import { removeFile, replaceDamaged, settle, sizeOf, undefinedIfMissing } from './blob-file.ts';
import type { BlobStore, DamagedRef, Hold, Ref, Staging } from './blob-store.ts';
import { ensureFolder, FILE_MODE, readFully, writeNewFile } from './durable-file.ts';
import { tryLock } from './file-lock.ts';
import { checkRecordKey, isImageName, isRecordKey, parseImageName } from './image-name.ts';
import { noText, parseDescriptor, refText } from './ref-file.ts';
import { makeStaging, oldestLiveStaging, sweepFolders } from './staging.ts';
import { checkFormat, writeFormat } from './store-format.ts';
import { storeError } from './system-error.ts';

/** Parts a repository's tags from repositories below it. No part of a repository's name can begin with `_`. */
const TAGS = '_tags';
const HEX = /^[0-9a-f]{64}$/;
const STREAM_BYTES = 1024 * 1024;
const RECORD_END = '.json';
const HOLD_TIMEOUT_MS = 30_000;
const RENAME_ATTEMPTS = 100;

export class FolderStore implements BlobStore {
  readonly url: string;
  readonly #root: string;
  readonly #sync: boolean;
  readonly #blobs: string;
  readonly #renewed: string;
  readonly #refs: string;
  readonly #records: string;
  readonly #tmp: string;

  /** `root` is absolute. Use `openStore`, which looks at what is there. */
  /** @param options.sync Wait until data is on the disk before a name leads to it: true by default. */
  constructor(root: string, options: { readonly sync?: boolean } = {}) {
    this.#root = root;
    this.#sync = options.sync ?? true;
    this.url = pathToFileURL(root).href;
    this.#blobs = join(root, 'blobs', 'sha256');
    this.#renewed = join(root, 'renewed', 'sha256');
    this.#refs = join(root, 'refs');
    this.#records = join(root, 'records');
    this.#tmp = join(root, 'tmp');
  }

  /** Refuses what is no store, and removes what dead processes left. Makes nothing. */
  async open(): Promise<void> {
    await this.#guard(this.#root, () => checkFormat(this.#root));
    // A store that we may only read is no worse for what lies in its tmp.
    await this.sweepStaging().catch(() => 0);
  }

  async stat(digest: Digest): Promise<{ sizeBytes: number } | undefined> {
    const path = this.#pathOf(digest);
    return this.#guard(path, async () => {
      const sizeBytes = await sizeOf(path);
      return sizeBytes === undefined ? undefined : { sizeBytes };
    });
  }

  async renew(digest: Digest): Promise<{ sizeBytes: number } | undefined> {
    const path = this.#pathOf(digest);
    return this.#guard(path, async () => {
      if ((await sizeOf(path)) === undefined) return undefined;
      await this.#markRenewed(digest);
      const sizeBytes = await sizeOf(path);
      if (sizeBytes !== undefined) return { sizeBytes };
      // Gone meanwhile: then the caller must know, and the mark is of no use.
      await rm(this.#markOf(digest), { force: true });
      return undefined;
    });
  }

  /** Beside the blob, not on it: a file whose times move cannot be told from one that somebody tampers with. */
  async #markRenewed(digest: Digest): Promise<void> {
    const mark = this.#markOf(digest);
    const now = new Date();
    try {
      await utimes(mark, now, now).catch(async (error) => {
        if (systemCode(error) !== 'ENOENT') throw error;
        await ensureFolder(dirname(mark));
        await writeFile(mark, '', { flag: 'a', mode: FILE_MODE });
        await chmod(mark, FILE_MODE);
        await utimes(mark, now, now);
      });
    } catch (error) {
      // Another user's store: the blob stays as old as it is; it is there all the same.
      if (systemCode(error) !== 'EPERM' && systemCode(error) !== 'EACCES') throw error;
    }
  }

  async read(digest: Digest, offset: number, length: number): Promise<Buffer> {
    return this.#withBlob(digest, async (file, sizeBytes) => {
      // Looked at first: a damaged length must not become an allocation.
      if (offset < 0 || length < 0 || offset + length > sizeBytes) {
        throw fail('STORE_SHORT_READ', { digest, offset, length, got: Math.max(0, sizeBytes - offset) });
      }
      const bytes = Buffer.allocUnsafeSlow(length);
      const got = await readFully(file, bytes, offset);
      if (got < length) throw fail('STORE_SHORT_READ', { digest, offset, length, got });
      return bytes;
    });
  }

  async readVerified(digest: Digest): Promise<Buffer> {
    return this.#withBlob(digest, async (file, sizeBytes) => {
      const bytes = Buffer.allocUnsafeSlow(sizeBytes);
      const hash = createHash('sha256');
      for (let offset = 0; offset < sizeBytes; offset += STREAM_BYTES) {
        const piece = bytes.subarray(offset, Math.min(sizeBytes, offset + STREAM_BYTES));
        const got = await readFully(file, piece, offset);
        if (got < piece.length) throw fail('STORE_SHORT_READ', { digest, offset, length: piece.length, got });
        hash.update(piece);
      }
      const actual = digestFromHex(hash.digest('hex'));
      if (actual !== digest) throw fail('STORE_DIGEST_MISMATCH', { digest, actual, path: this.#pathOf(digest) });
      return bytes;
    });
  }

  async *stream(digest: Digest): AsyncIterable<Buffer> {
    const path = this.#pathOf(digest);
    const file = await this.#openBlob(digest);
    try {
      for (let offset = 0; ; ) {
        const bytes = Buffer.allocUnsafeSlow(STREAM_BYTES);
        const got = await this.#guard(path, () => readFully(file, bytes, offset));
        if (got > 0) yield bytes.subarray(0, got);
        if (got < STREAM_BYTES) return;
        offset += got;
      }
    } finally {
      await file.close();
    }
  }

  localPath(digest: Digest): string {
    return this.#pathOf(digest);
  }

  async stage(): Promise<Staging> {
    return this.#write(this.#tmp, async () => {
      await sweepFolders(this.#tmp);
      return makeStaging(this.#tmp);
    });
  }

  async oldestStagingMs(): Promise<number | undefined> {
    return this.#guard(this.#tmp, () => oldestLiveStaging(this.#tmp));
  }

  /** Removes staging folders of dead processes; returns how many. */
  async sweepStaging(): Promise<number> {
    return this.#guard(this.#tmp, () => sweepFolders(this.#tmp));
  }

  async hold(purpose: 'publish' | 'collect'): Promise<Hold> {
    const path = join(this.#root, 'lock');
    return this.#write(path, async () => {
      const deadline = Date.now() + HOLD_TIMEOUT_MS;
      for (let waitMs = 2; ; waitMs = Math.min(100, waitMs * 2)) {
        const lock = await tryLock(path, purpose === 'publish' ? 'shared' : 'exclusive');
        if (lock !== undefined) {
          fchmodSync(lock.fd, FILE_MODE);
          return { release: async () => lock.release() };
        }
        if (Date.now() > deadline) throw fail('STORE_BUSY', { store: this.#root, path });
        await new Promise((resolve) => setTimeout(resolve, waitMs * (0.5 + Math.random())));
      }
    });
  }

  async put(bytes: Buffer): Promise<Digest> {
    const digest = digestOf(bytes);
    await this.#write(this.#pathOf(digest), async () => {
      if (await this.#adopt(digest, bytes.length)) return;
      const staging = await makeStaging(this.#tmp);
      try {
        const file = join(staging.path, 'blob');
        await writeNewFile(file, bytes, this.#sync);
        await this.#publish(file, digest, bytes.length);
      } finally {
        await staging.remove();
      }
    });
    return digest;
  }

  async putFile(path: string, digest: Digest, sizeBytes: number): Promise<void> {
    await this.#write(path, async () => {
      await settle(path, digest, sizeBytes, this.#sync);
      if (!(await this.#adopt(digest, sizeBytes))) await this.#publish(path, digest, sizeBytes);
      await rm(path, { force: true });
    });
  }

  async deleteBlob(digest: Digest): Promise<void> {
    const path = this.#pathOf(digest);
    await this.#guard(path, async () => {
      if (await removeFile(path)) await this.#syncFolder(this.#blobs);
      await rm(this.#markOf(digest), { force: true });
    });
  }

  async *listBlobs(): AsyncIterable<{ digest: Digest; sizeBytes: number; modifiedMs: number }> {
    const folder = await this.#guard(this.#blobs, () => opendir(this.#blobs).catch(undefinedIfMissing));
    if (folder === undefined) return;
    for await (const { name } of folder) {
      if (!HEX.test(name)) continue;
      const path = join(this.#blobs, name);
      const found = await this.#guard(path, () => stat(path).catch(undefinedIfMissing));
      if (!found?.isFile()) continue;
      const mark = join(this.#renewed, name);
      const renewed = await this.#guard(mark, () => stat(mark).catch(undefinedIfMissing));
      const modifiedMs = Math.max(found.mtimeMs, renewed?.mtimeMs ?? 0);
      yield { digest: digestFromHex(name), sizeBytes: found.size, modifiedMs };
    }
  }

  async getRef(name: string): Promise<Ref | undefined> {
    const { full } = parseImageName(name);
    const path = this.#refPath(full);
    // A folder may be missing on the way, or be a ref's file in a layout that we did not write.
    const text = await this.#guard(path, async () => refText(path));
    if (text === undefined) return undefined;
    const manifest = parseDescriptor(text);
    if (manifest === undefined) throw fail('STORE_REF_DAMAGED', { name: full, path });
    return { name: full, manifest };
  }

  async setRef(ref: Ref): Promise<void> {
    const { mediaType, digest, size } = ref.manifest;
    const path = this.#refPath(parseImageName(ref.name).full);
    await this.#replace(path, `${JSON.stringify({ mediaType, digest, size })}\n`, true);
  }

  async deleteRef(name: string): Promise<boolean> {
    const path = this.#refPath(parseImageName(name).full);
    return this.#guard(path, async () => {
      if (!(await removeFile(path))) return false;
      await this.#syncFolder(dirname(path)).catch(undefinedIfMissing);
      // Folders that are empty now; setRef makes them again when it comes at this moment.
      for (let folder = dirname(path); folder !== this.#refs; folder = dirname(folder)) {
        if (
          !(await rmdir(folder).then(
            () => true,
            () => false,
          ))
        )
          break;
      }
      return true;
    });
  }

  async listRefs(damaged?: DamagedRef): Promise<Ref[]> {
    const refs: Ref[] = [];
    const walk = async (folder: string, repository: string): Promise<void> => {
      const entries = await this.#guard(folder, () =>
        readdir(folder, { withFileTypes: true }).catch(undefinedIfMissing),
      );
      for (const entry of entries ?? []) {
        const path = join(folder, entry.name);
        if (!entry.isDirectory()) continue;
        if (entry.name !== TAGS) {
          await walk(path, repository === '' ? entry.name : `${repository}/${entry.name}`);
          continue;
        }
        for (const tag of (await this.#guard(path, () => readdir(path).catch(undefinedIfMissing))) ?? []) {
          const name = `${repository}:${tag}`;
          if (!isImageName(name)) continue;
          const file = join(path, tag);
          const text = await this.#guard(file, () => readFile(file, 'utf8').catch(noText));
          if (text === undefined) continue;
          const manifest = parseDescriptor(text);
          if (manifest !== undefined) refs.push({ name, manifest });
          else damaged?.(name, fail('STORE_REF_DAMAGED', { name, path: file }));
        }
      }
    };
    await walk(this.#refs, '');
    return refs.sort((a, b) => (a.name < b.name ? -1 : 1));
  }

  async getRecord(kind: string, key: string): Promise<unknown> {
    checkRecordKey(kind, key);
    const path = join(this.#records, kind, `${key}.json`);
    const text = await this.#guard(path, () => readFile(path, 'utf8').catch(undefinedIfMissing));
    try {
      return text === undefined ? undefined : JSON.parse(text);
    } catch {
      return undefined;
    }
  }

  async putRecord(kind: string, key: string, value: unknown): Promise<void> {
    checkRecordKey(kind, key);
    await this.#replace(join(this.#records, kind, `${key}.json`), `${JSON.stringify(value)}\n`, false);
  }

  async listRecords(kind: string, prefix = ''): Promise<string[]> {
    checkRecordKey(kind, 'any');
    const folder = join(this.#records, kind);
    const names = (await this.#guard(folder, () => readdir(folder).catch(undefinedIfMissing))) ?? [];
    return names
      .filter((name) => name.endsWith(RECORD_END) && name.startsWith(prefix))
      .map((name) => name.slice(0, -RECORD_END.length))
      .filter(isRecordKey)
      .sort();
  }

  async deleteRecord(kind: string, key: string): Promise<void> {
    checkRecordKey(kind, key);
    const path = join(this.#records, kind, `${key}${RECORD_END}`);
    await this.#guard(path, () => rm(path, { force: true }));
  }

  #pathOf(digest: Digest): string {
    // The last line of defence against a path made of something unparsed.
    if (!isDigest(digest)) throw fail('STORE_NAME', { name: String(digest), why: 'it is no sha256 digest' });
    return join(this.#blobs, hexOf(digest));
  }

  #markOf(digest: Digest): string {
    return join(this.#renewed, hexOf(digest));
  }

  #refPath(fullName: string): string {
    const { repository, tag } = parseImageName(fullName);
    return join(this.#refs, repository, TAGS, tag);
  }

  async #openBlob(digest: Digest): Promise<FileHandle> {
    const path = this.#pathOf(digest);
    return this.#guard(path, async () => {
      let file: FileHandle;
      try {
        // Non-blocking: a FIFO in the place of a blob is not waited for.
        file = await open(path, constants.O_RDONLY | constants.O_NONBLOCK);
      } catch (error) {
        if (systemCode(error) === 'ENOENT') throw fail('STORE_BLOB_MISSING', { digest, store: this.#root });
        throw error;
      }
      try {
        if (!(await file.stat()).isFile()) throw fail('STORE_BLOB_NOT_FILE', { digest, path });
        return file;
      } catch (error) {
        await file.close();
        throw error;
      }
    });
  }

  async #withBlob<T>(digest: Digest, use: (file: FileHandle, sizeBytes: number) => Promise<T>): Promise<T> {
    const file = await this.#openBlob(digest);
    try {
      return await this.#guard(this.#pathOf(digest), async () => use(file, (await file.stat()).size));
    } finally {
      await file.close();
    }
  }

  async #syncFolder(path: string): Promise<void> {
    if (this.#sync) await syncFolder(path);
  }

  /** Whether the blob is there already, whole; then it is made young, and durable even if its writer is not done with that. */
  async #adopt(digest: Digest, sizeBytes: number): Promise<boolean> {
    const found = await this.renew(digest);
    if (found?.sizeBytes !== sizeBytes) return false;
    await this.#syncFolder(this.#blobs);
    return true;
  }

  /** Gives a settled file its name. The file may be left at `source`, as a second link. */
  async #publish(source: string, digest: Digest, sizeBytes: number): Promise<void> {
    const target = this.#pathOf(digest);
    await ensureFolder(this.#blobs);
    try {
      await link(source, target);
    } catch (error) {
      switch (systemCode(error)) {
        case 'EEXIST':
          // Someone was faster, or a damaged blob is in the way: a blob's size says which.
          if ((await sizeOf(target)) !== sizeBytes) await replaceDamaged(source, target);
          break;
        case 'EXDEV':
          return this.#publishCopy(source, digest, sizeBytes);
        case 'EPERM':
        case 'ENOTSUP':
        case 'ENOSYS':
        case 'EMLINK':
          // No hard links here. Renaming replaces at worst the same bytes.
          await rename(source, target);
          break;
        default:
          throw error;
      }
    }
    await this.#syncFolder(this.#blobs);
  }

  async #publishCopy(source: string, digest: Digest, sizeBytes: number): Promise<void> {
    const staging = await makeStaging(this.#tmp);
    try {
      const copy = join(staging.path, 'blob');
      await copyFile(source, copy);
      await settle(copy, digest, sizeBytes, this.#sync);
      await this.#publish(copy, digest, sizeBytes);
    } finally {
      await staging.remove();
    }
  }

  /** Replaces a small file atomically. */
  async #replace(path: string, text: string, durable: boolean): Promise<void> {
    await this.#write(path, async () => {
      const staging = await makeStaging(this.#tmp);
      try {
        const file = join(staging.path, 'object');
        await writeNewFile(file, Buffer.from(text), durable && this.#sync);
        for (let attempt = 0; ; attempt++) {
          await ensureFolder(dirname(path));
          try {
            await rename(file, path);
            break;
          } catch (error) {
            // deleteRef removes empty folders, perhaps this one, perhaps again.
            if (systemCode(error) !== 'ENOENT' || attempt === RENAME_ATTEMPTS) throw error;
          }
        }
        // Gone again already: deleted by another, which makes that durable.
        if (durable) await this.#syncFolder(dirname(path)).catch(undefinedIfMissing);
      } finally {
        await staging.remove();
      }
    });
  }

  /** Before a write: the store's folder and its marker. Looked at each time: a store can be deleted under a long-lived process. */
  async #prepare(): Promise<void> {
    if ((await checkFormat(this.#root)) === 'store') return;
    await ensureFolder(this.#root);
    await writeFormat(this.#root);
  }

  async #write<T>(path: string, work: () => Promise<T>): Promise<T> {
    return this.#guard(path, async () => {
      await this.#prepare();
      return work();
    });
  }

  /** Runs `work`; what the file system says becomes an error of the store. */
  async #guard<T>(path: string, work: () => Promise<T>): Promise<T> {
    try {
      return await work();
    } catch (error) {
      throw storeError(error, this.#root, path);
    }
  }
}
