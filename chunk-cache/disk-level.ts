/**
 * Chunks on the local disk: the blobs of a cache folder, found again after a restart.
 *
 *     <folder>/v1/lock                   held by the owner (owner-lock.ts)
 *     <folder>/v1/blobs/<name>.data      sparse, of the blob's size
 *     <folder>/v1/blobs/<name>.map       which chunks are in it (chunk-map.ts)
 *     <folder>/v1/pins/<64 hex>          blobs that must not be evicted, also after a restart
 *
 * <name> is the blob's digest and the beginning of the hash of its chunk digests: two images that name one blob with different chunk
 * digests share nothing, so neither can make the other read what its own manifest does not vouch for.
 *
 * Opening drops what is damaged (a map without its data, or the other way round, a file of the wrong size) and gives back space that no
 * map claims. It reads no data.
 */
import {
  closeSync,
  existsSync,
  mkdirSync,
  openSync,
  readdirSync,
  rmSync,
  statfsSync,
  statSync,
  unlinkSync,
  writeFileSync,
} from 'node:fs';
import { join } from 'node:path';
import { type Digest, digestFromHex, hexOf, messageOf, systemCode } from '#base';
import { dataRuns, punchHole } from '#linux';
import { CHUNK_BYTES } from './chunk.ts';
import { type FoundMap, type MapSubject, readMap } from './chunk-map.ts';
import { COLD } from './chunk-states.ts';
import { DiskBlob } from './disk-blob.ts';
import { fail } from './errors.ts';

export const VERSION = 'v1';
const TABLE_HEX_DIGITS = 32;
/** Data files kept open. Node raises the soft limit of descriptors to the hard one; this stays well below both. */
const OPEN_FILES = 256;
/** Space of a data file that no map claims and that is not worth looking for: the file system's own blocks. */
const SLACK_BYTES = 64 * 1024;

/** What a blob's files are called, without their ends. */
export function keyOf(digest: Digest, tableHash: Buffer): string {
  return `${hexOf(digest)}-${tableHash.toString('hex').slice(0, TABLE_HEX_DIGITS)}`;
}

export class DiskLevel {
  readonly folder: string;
  readonly lockPath: string;
  /** Bytes of chunks on disk. */
  readonly total = { bytes: 0 };
  readonly #blobFolder: string;
  readonly #pinFolder: string;
  readonly #blobs = new Map<string, DiskBlob>();
  readonly #slots: (DiskBlob | undefined)[] = [];
  readonly #freeSlots: number[] = [];
  /** The longest open first. */
  readonly #open = new Set<DiskBlob>();
  readonly #pins = new Set<string>();

  /** Makes the folders. @throws CACHE_FOLDER */
  constructor(folder: string) {
    this.folder = folder;
    const versioned = join(folder, VERSION);
    this.lockPath = join(versioned, 'lock');
    this.#blobFolder = join(versioned, 'blobs');
    this.#pinFolder = join(versioned, 'pins');
    try {
      for (const path of [versioned, this.#blobFolder, this.#pinFolder]) {
        mkdirSync(path, { recursive: true, mode: 0o700 });
      }
    } catch (error) {
      throw fail('CACHE_FOLDER', { folder, problem: messageOf(error) }, error);
    }
  }

  /** Finds what earlier owners left. The lock is held. The blobs used longest ago come first. @throws CACHE_FOLDER */
  load(): DiskBlob[] {
    this.#checkHoles();
    for (const name of readdirSync(this.#pinFolder)) this.#pins.add(name);
    const names = new Set(readdirSync(this.#blobFolder));
    const found: { blob: DiskBlob; usedMs: number }[] = [];
    for (const name of names) {
      if (!name.endsWith('.map')) {
        if (!name.endsWith('.data') || !names.has(`${name.slice(0, -5)}.map`)) this.#discard(name);
        continue;
      }
      const key = name.slice(0, -4);
      const map = this.#mapOf(key);
      if (map === undefined) {
        this.#discard(name);
        this.#discard(`${key}.data`);
        continue;
      }
      const blob = this.#add(key, map, map);
      found.push({ blob, usedMs: statSync(blob.mapPath).mtimeMs });
      try {
        giveBackUnclaimed(blob);
      } catch {
        // A damaged file system may refuse; each chunk is checked when it is read.
      }
    }
    return found.sort((a, b) => a.usedMs - b.usedMs).map(({ blob }) => blob);
  }

  blobs(): IterableIterator<DiskBlob> {
    return this.#blobs.values();
  }

  blobAt(slot: number): DiskBlob | undefined {
    return this.#slots[slot];
  }

  /** The blob's place, with what is in it, or a new one. No file is made before there is something to write. */
  blobFor(subject: MapSubject): DiskBlob {
    const key = keyOf(subject.digest, subject.tableHash);
    const known = this.#blobs.get(key);
    if (known !== undefined && known.subject.sizeBytes === subject.sizeBytes) return known;
    // The same digests for another size: one of the two is made up. The later one has been checked against its digests' number.
    if (known !== undefined) this.remove(known);
    return this.#add(key, subject);
  }

  /** Removes the files and forgets the blob. */
  remove(blob: DiskBlob): void {
    blob.remove();
    this.forget(blob);
  }

  forget(blob: DiskBlob): void {
    this.#open.delete(blob);
    blob.closeFile();
    if (this.#blobs.get(blob.key) !== blob) return;
    blob.isGone = true;
    this.#blobs.delete(blob.key);
    this.#slots[blob.slot] = undefined;
    this.#freeSlots.push(blob.slot);
  }

  isPinned(digest: Digest): boolean {
    return this.#pins.has(hexOf(digest));
  }

  pinned(): Digest[] {
    return [...this.#pins].map((hex) => digestFromHex(hex));
  }

  /** Lasts beyond this process. Written before it is relied on. */
  setPinned(digest: Digest, pinned: boolean): void {
    const hex = hexOf(digest);
    const path = join(this.#pinFolder, hex);
    if (pinned) {
      if (!this.#pins.has(hex)) writeFileSync(path, '');
      this.#pins.add(hex);
    } else {
      rmSync(path, { force: true });
      this.#pins.delete(hex);
    }
    for (const blob of this.#blobs.values()) if (blob.subject.digest === digest) blob.pinned = pinned;
  }

  freeBytes(): number {
    const { bavail, bsize } = statfsSync(this.#blobFolder);
    return bavail * bsize;
  }

  sizeBytes(): number {
    const { blocks, bsize } = statfsSync(this.#blobFolder);
    return blocks * bsize;
  }

  close(): void {
    for (const blob of this.#open) blob.closeFile();
    this.#open.clear();
  }

  #add(key: string, subject: MapSubject, found?: FoundMap): DiskBlob {
    const slot = this.#freeSlots.pop() ?? this.#slots.length;
    const blob = new DiskBlob(
      subject,
      {
        key,
        dataPath: join(this.#blobFolder, `${key}.data`),
        mapPath: join(this.#blobFolder, `${key}.map`),
        slot,
        total: this.total,
        onOpen: (opened) => this.#noteOpen(opened),
      },
      found,
    );
    blob.pinned = this.isPinned(subject.digest);
    this.#slots[slot] = blob;
    this.#blobs.set(key, blob);
    return blob;
  }

  #noteOpen(opened: DiskBlob): void {
    this.#open.delete(opened);
    this.#open.add(opened);
    for (const blob of this.#open) {
      if (this.#open.size <= OPEN_FILES) return;
      if (blob.isBusy || blob === opened) continue;
      blob.closeFile();
      this.#open.delete(blob);
    }
  }

  /** The map of `key` when it and its data file look whole. */
  #mapOf(key: string): FoundMap | undefined {
    const map = readMap(join(this.#blobFolder, `${key}.map`));
    if (map === undefined || !key.startsWith(`${hexOf(map.digest)}-`)) return undefined;
    if (key.slice(65) !== map.tableHash.toString('hex').slice(0, TABLE_HEX_DIGITS)) return undefined;
    try {
      const { size } = statSync(join(this.#blobFolder, `${key}.data`));
      return size === map.sizeBytes ? map : undefined;
    } catch (error) {
      if (systemCode(error) === 'ENOENT') return undefined;
      throw error;
    }
  }

  #discard(name: string): void {
    rmSync(join(this.#blobFolder, name), { recursive: true, force: true });
  }

  /** Eviction gives space back by punching holes: a file system that has none is of no use. */
  #checkHoles(): void {
    const path = join(this.#blobFolder, 'holes.new');
    let fd: number | undefined;
    try {
      fd = openSync(path, 'w');
      punchHole(fd, 0, 4096);
    } catch (error) {
      if (systemCode(error) === 'ENOSPC') return;
      throw fail('CACHE_FOLDER', { folder: this.folder, problem: messageOf(error) }, error);
    } finally {
      if (fd !== undefined) closeSync(fd);
      if (existsSync(path)) unlinkSync(path);
    }
  }
}

/** What a killed owner wrote and did not claim, or took the claim back from and did not punch. */
function giveBackUnclaimed(blob: DiskBlob): void {
  const { blocks } = statSync(blob.dataPath);
  if (blocks * 512 <= blob.storedBytes + SLACK_BYTES || blob.pinned) return;
  const fd = openSync(blob.dataPath, 'r+');
  try {
    for (const { offset, length } of [...dataRuns(fd, blob.subject.sizeBytes)]) {
      const last = Math.floor((offset + length - 1) / CHUNK_BYTES);
      for (let i = Math.floor(offset / CHUNK_BYTES); i <= last; i++) {
        if (blob.states.state(i) === COLD) punchHole(fd, i * CHUNK_BYTES, CHUNK_BYTES);
      }
    }
  } finally {
    closeSync(fd);
  }
}
