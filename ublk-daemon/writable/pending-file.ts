/**
 * What a writable layer has answered and no flush has made safe yet, where it outlives this process: `<index>.pending`, the entries that the
 * index file lacks. A device of the kernel goes on when its server is replaced, and takes what was answered for written: nothing of it may
 * be missing then, flushed or not.
 *
 * Never synced, so it says nothing after a crash of the machine, when entries could be there without their data: it counts in
 * the boot that wrote it alone. Its entries are the last of the layer, none missing between them: to apply some again that the index has
 * already changes nothing.
 *
 *     128 bytes: `dsec pending 1 <boot id> <uuid of the layer>`, filled up with zeros; then entries of 16 bytes
 */
import { closeSync, ftruncateSync, openSync, readFileSync, renameSync, rmSync, writeSync } from 'node:fs';
import { systemCode } from '#base';
import { SEGMENT_BYTES } from '../lsmt/segment.ts';
import { EntryLog } from './entry-log.ts';

const HEADER_BYTES = 128;
const BOOT_ID = '/proc/sys/kernel/random/boot_id';
/** Entries that the index has by now may stay in front of others until there are so many: 1 MiB. */
const MAX_STALE = 64 * 1024;

export function pendingPath(indexPath: string): string {
  return `${indexPath}.pending`;
}

export class PendingFile {
  /** Of a process that died. */
  readonly found: Buffer;
  readonly #path: string;
  /** Undefined: nothing tells one boot from another here, and nothing is kept. */
  readonly #header: Buffer | undefined;
  readonly #scratch = new EntryLog();
  #fd: number | undefined;
  #count: number;

  /** @param uuid of the layer */
  constructor(path: string, uuid: string) {
    this.#path = path;
    this.#header = headerOf(uuid);
    const bytes = readOrEmpty(path);
    const ours = this.#header !== undefined && bytes.subarray(0, HEADER_BYTES).equals(this.#header);
    this.#count = ours ? Math.floor((bytes.length - HEADER_BYTES) / SEGMENT_BYTES) : 0;
    this.found = ours ? bytes.subarray(HEADER_BYTES, HEADER_BYTES + this.#count * SEGMENT_BYTES) : Buffer.alloc(0);
  }

  /** What is behind the first `count` of those found cannot be. */
  cut(count: number): void {
    this.#count = Math.min(this.#count, count);
  }

  /** Before it takes effect. Throws what the disk below does (ENOSPC): nothing has changed then. */
  add(start: number, end: number, moffset: number, zeroed: boolean): void {
    if (this.#header === undefined) return;
    const scratch = this.#scratch;
    scratch.count = 0;
    scratch.add(start, end, moffset, zeroed);
    this.#fd ??= this.#open(this.#header);
    const position = HEADER_BYTES + this.#count * SEGMENT_BYTES;
    try {
      writeAt(this.#fd, scratch.plain(), position);
    } catch (error) {
      // Some of them may be there. Left behind, they would come after what is added next.
      ftruncateSync(this.#fd, position);
      throw error;
    }
    this.#count += scratch.count;
  }

  /** The index has all but these. Fails silently: what stays is merely applied again. */
  keepOnly(entries: EntryLog): void {
    if (this.#fd === undefined || this.#count === entries.count) return;
    try {
      if (entries.count === 0) {
        ftruncateSync(this.#fd, HEADER_BYTES);
        this.#count = 0;
      } else if (this.#count - entries.count > MAX_STALE) this.#rewrite(this.#header!, entries);
    } catch {
      // See above.
    }
  }

  /** When the layer's data cannot be trusted any more, or all of it is safe. */
  remove(): void {
    rmSync(this.#path, { force: true });
    this.close();
    this.#count = 0;
  }

  close(): void {
    if (this.#fd !== undefined) closeSync(this.#fd);
    this.#fd = undefined;
  }

  #open(header: Buffer): number {
    // What is not ours, or of another boot, goes; what was found stays.
    const fd = openSync(this.#path, this.#count === 0 ? 'w+' : 'r+', 0o600);
    try {
      if (this.#count === 0) writeAt(fd, header, 0);
      else ftruncateSync(fd, HEADER_BYTES + this.#count * SEGMENT_BYTES);
      return fd;
    } catch (error) {
      closeSync(fd);
      throw error;
    }
  }

  #rewrite(header: Buffer, entries: EntryLog): void {
    const path = `${this.#path}.new`;
    const fd = openSync(path, 'w+', 0o600);
    try {
      writeAt(fd, header, 0);
      writeAt(fd, entries.plain(), HEADER_BYTES);
      renameSync(path, this.#path);
    } catch (error) {
      closeSync(fd);
      rmSync(path, { force: true });
      throw error;
    }
    closeSync(this.#fd!);
    this.#fd = fd;
    this.#count = entries.count;
  }
}

function headerOf(uuid: string): Buffer | undefined {
  const header = Buffer.alloc(HEADER_BYTES);
  const boot = readOrEmpty(BOOT_ID).toString('latin1').trim();
  if (boot === '') return undefined;
  header.write(`dsec pending 1 ${boot} ${uuid}\n`, 'latin1');
  return header;
}

function readOrEmpty(path: string): Buffer {
  try {
    return readFileSync(path);
  } catch (error) {
    if (systemCode(error) === 'ENOENT') return Buffer.alloc(0);
    throw error;
  }
}

function writeAt(fd: number, bytes: Buffer, position: number): void {
  for (let done = 0; done < bytes.length; ) {
    done += writeSync(fd, bytes, done, bytes.length - done, position + done);
  }
}
