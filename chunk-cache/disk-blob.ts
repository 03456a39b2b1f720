/**
 * One blob on the local disk: a sparse data file of the blob's size, and its map. Reads may come from anywhere at any time;
 * whatever changes the files (write, commit, release, remove) is called by the keeper alone, one step after another.
 *
 * The descriptor of the data file is opened when it is needed and given up when too many are open (see disk-level.ts).
 */
import {
  closeSync,
  fdatasync as fdatasyncCallback,
  fstatSync,
  ftruncateSync,
  openSync,
  read as readCallback,
  readSync,
  rmSync,
  write as writeCallback,
} from 'node:fs';
import { promisify } from 'node:util';
import { failPoint, systemCode } from '#base';
import { punchHole } from '#linux';
import { CHUNK_BYTES, chunkCount, chunkLength } from './chunk.ts';
import {
  createMap,
  type FoundMap,
  fetchedOf,
  isPresent,
  type MapSubject,
  mapIsCurrent,
  TOUCHED,
  updateMap,
} from './chunk-map.ts';
import { ChunkStates, COLD, STORED, VERIFIED } from './chunk-states.ts';

const readAt = promisify(readCallback);
const writeAt = promisify(writeCallback);
const fdatasync = promisify(fdatasyncCallback);

export interface Place {
  readonly key: string;
  readonly dataPath: string;
  readonly mapPath: string;
  readonly slot: number;
  /** Bytes of all blobs together. */
  readonly total: { bytes: number };
  /** The data file has been opened. */
  onOpen(blob: DiskBlob): void;
}

export class DiskBlob {
  readonly subject: MapSubject;
  readonly key: string;
  readonly dataPath: string;
  readonly mapPath: string;
  readonly states: ChunkStates;
  /** Small number, unique among the blobs of the cache now. */
  readonly slot: number;
  /** For eviction: which queue a chunk is in. */
  readonly queue: Uint8Array;
  /** Bytes of the chunks that are STORED or VERIFIED. */
  storedBytes = 0;
  /** Somebody has the blob open: its files stay even when nothing is left in them. */
  inUse = false;
  pinned = false;
  /** No longer one of the cache's: nothing is written for it any more. */
  isGone = false;
  /** States have changed that the map file does not show yet, to less than it claims. */
  overclaims = false;
  /** What is in the map file, a byte a chunk; undefined as long as there is no file. */
  #saved: Buffer | undefined;
  #file: OpenFile | undefined;
  #inodeKnown = false;
  readonly #place: Place;

  constructor(subject: MapSubject, place: Place, found?: FoundMap) {
    this.subject = subject;
    this.key = place.key;
    this.dataPath = place.dataPath;
    this.mapPath = place.mapPath;
    this.slot = place.slot;
    this.#place = place;
    const count = chunkCount(subject.sizeBytes);
    this.states = ChunkStates.make(count);
    this.queue = new Uint8Array(count);
    if (found === undefined) return;
    this.#saved = found.chunks;
    found.chunks.forEach((byte, i) => {
      if (isPresent(byte)) this.#set(i, STORED);
      if ((byte & TOUCHED) !== 0) this.states.touched[i] = 1;
      this.states.fetched[i] = fetchedOf(byte);
    });
  }

  lengthOf(index: number): number {
    return chunkLength(this.subject.sizeBytes, index);
  }

  /** Whether the files are there. */
  get exists(): boolean {
    return this.#saved !== undefined;
  }

  get isBusy(): boolean {
    return this.#file !== undefined && this.#file.users > 0;
  }

  #set(index: number, state: typeof COLD | typeof STORED | typeof VERIFIED): void {
    const before = this.states.state(index);
    this.states.set(index, state);
    const change = Number(state !== COLD) - Number(before !== COLD);
    this.storedBytes += change * this.lengthOf(index);
    this.#place.total.bytes += change * this.lengthOf(index);
  }

  /**
   * Reads bytes of one chunk into `target`. False when they are not all there, or the chunk left (or came anew) meanwhile: then what
   * is in `target` means nothing.
   */
  async read(index: number, start: number, length: number, target: Buffer, at: number): Promise<boolean> {
    const word = this.states.word(index);
    if ((word & 3) === COLD) return false;
    let file: OpenFile | undefined;
    try {
      file = this.#open();
      file.users++;
      for (let done = 0; done < length; ) {
        const { bytesRead } = await readAt(
          file.fd,
          target,
          at + done,
          length - done,
          index * CHUNK_BYTES + start + done,
        );
        if (bytesRead === 0) return false;
        done += bytesRead;
      }
    } catch {
      return false;
    } finally {
      file?.leave();
    }
    return this.states.word(index) === word;
  }

  /** `read`, at once. */
  readNow(index: number, start: number, length: number, target: Buffer, at: number): boolean {
    const word = this.states.word(index);
    if ((word & 3) === COLD) return false;
    try {
      const { fd } = this.#open();
      for (let done = 0; done < length; ) {
        const bytesRead = readSync(fd, target, at + done, length - done, index * CHUNK_BYTES + start + done);
        if (bytesRead === 0) return false;
        done += bytesRead;
      }
    } catch {
      return false;
    }
    return this.states.word(index) === word;
  }

  /** The chunk's digest has been checked. `word`: its state word from before its bytes were read. */
  believe(index: number, word: number): void {
    if (this.states.word(index) === word) this.#set(index, VERIFIED);
  }

  /** What is on disk is not the chunk. Its place is not punched out: if it is mapped somewhere, zeros are no better. */
  disbelieve(index: number): void {
    if (this.states.state(index) === COLD) return;
    this.#set(index, COLD);
    this.overclaims = true;
  }

  /** Writes whole chunks. They are not there before `commit`. Returns which data file they are in. */
  async write(firstChunk: number, bytes: Buffer): Promise<number> {
    const file = this.#open(true);
    const generation = this.states.fileGeneration;
    file.users++;
    try {
      failPoint('cache-fill-before-data');
      for (let done = 0; done < bytes.length; ) {
        const { bytesWritten } = await writeAt(
          file.fd,
          bytes,
          done,
          bytes.length - done,
          firstChunk * CHUNK_BYTES + done,
        );
        done += bytesWritten;
      }
      failPoint('cache-fill-data-written');
      return generation;
    } finally {
      file.leave();
    }
  }

  /** Makes what was written safe, then claims it. Throws when it is not safe; then nothing is claimed. */
  async commit(chunks: readonly number[]): Promise<void> {
    const file = this.#open();
    file.users++;
    try {
      await fdatasync(file.fd);
    } finally {
      file.leave();
    }
    failPoint('cache-fill-data-synced');
    for (const index of chunks) this.#set(index, VERIFIED);
    try {
      this.#saveMap();
    } catch (error) {
      for (const index of chunks) this.disbelieve(index);
      throw error;
    }
    failPoint('cache-fill-claimed');
  }

  /** Brings the map up to date where it says too much. Called before a chunk's place is written again. */
  async withdraw(): Promise<void> {
    if (!this.overclaims || !this.exists) return;
    await this.#saveMapSafely();
    this.overclaims = false;
  }

  /** Gives the chunks' space back. Takes their claims back first, and safely, so that no crash leaves a claim on a hole. */
  async release(chunks: readonly number[]): Promise<void> {
    for (const index of chunks) this.#set(index, COLD);
    failPoint('cache-evict-before-map');
    await this.#saveMapSafely();
    this.overclaims = false;
    failPoint('cache-evict-map-synced');
    this.punch(chunks);
    failPoint('cache-evict-punched');
  }

  /** Gives back the place of chunks that are not claimed. */
  punch(chunks: readonly number[]): void {
    const sorted = [...chunks].sort((a, b) => a - b);
    const { fd } = this.#open();
    for (let i = 0; i < sorted.length; ) {
      let end = i + 1;
      while (end < sorted.length && sorted[end] === sorted[end - 1]! + 1) end++;
      punchHole(fd, sorted[i]! * CHUNK_BYTES, (end - i) * CHUNK_BYTES);
      i = end;
      if (i < sorted.length) failPoint('cache-evict-between-punches');
    }
  }

  /** Writes down what statistics know; nothing depends on it. */
  saveMap(): void {
    if (this.#saved !== undefined && !mapIsCurrent(this.states, this.#saved)) this.#saveMap();
  }

  /** Removes both files, the map first. Readers of other threads notice by the states. */
  remove(): void {
    this.forgetAll();
    rmSync(this.mapPath, { force: true });
    failPoint('cache-remove-map-gone');
    rmSync(this.dataPath, { force: true });
    this.#saved = undefined;
    this.closeFile();
  }

  forgetAll(): void {
    for (let i = 0; i < this.states.count; i++) this.#set(i, COLD);
    this.overclaims = this.exists;
    this.states.newFile();
  }

  /** Those who read or write through it at the moment finish. */
  closeFile(): void {
    this.#file?.retire();
    this.#file = undefined;
  }

  #open(create = false): OpenFile {
    if (this.#file !== undefined) return this.#file;
    const fd = this.#openOurs() ?? (create ? this.#create() : undefined);
    if (fd === undefined) {
      throw Object.assign(new Error(`${this.dataPath}: not the file that it was`), { code: 'ESTALE' });
    }
    this.#file = new OpenFile(fd);
    this.#place.onOpen(this);
    return this.#file;
  }

  /** The data file that the states are about; undefined when it is gone, or another lies in its place. */
  #openOurs(): number | undefined {
    if (!this.exists) return undefined;
    let fd: number;
    try {
      fd = openSync(this.dataPath, 'r+');
    } catch (error) {
      if (systemCode(error) === 'ENOENT') return undefined;
      throw error;
    }
    const { size, ino } = fstatSync(fd, { bigint: true });
    if (size !== BigInt(this.subject.sizeBytes) || (this.#inodeKnown && !this.states.isInode(ino))) {
      closeSync(fd);
      return undefined;
    }
    this.#know(ino);
    return fd;
  }

  #know(inode: bigint): void {
    this.states.setInode(inode);
    this.#inodeKnown = true;
  }

  /** New files. The map that claims nothing comes first: one that is left over must not speak for the new data file. */
  #create(): number {
    this.forgetAll();
    const chunks = Buffer.alloc(this.states.count);
    createMap(this.mapPath, this.subject, chunks);
    rmSync(this.dataPath, { force: true });
    failPoint('cache-create-map-made');
    const fd = openSync(this.dataPath, 'wx+', 0o600);
    try {
      ftruncateSync(fd, this.subject.sizeBytes);
      this.#know(fstatSync(fd, { bigint: true }).ino);
    } catch (error) {
      closeSync(fd);
      throw error;
    }
    this.#saved = chunks;
    this.overclaims = false;
    return fd;
  }

  #saveMap(): void {
    let fd: number;
    try {
      fd = openSync(this.mapPath, 'r+');
    } catch (error) {
      if (systemCode(error) !== 'ENOENT') throw error;
      // Somebody removed it. A new one says what we know.
      createMap(this.mapPath, this.subject, Buffer.alloc(this.states.count));
      this.#saved = Buffer.alloc(this.states.count);
      fd = openSync(this.mapPath, 'r+');
    }
    try {
      updateMap(fd, this.states, this.#saved!);
    } finally {
      closeSync(fd);
    }
  }

  async #saveMapSafely(): Promise<void> {
    this.#saveMap();
    const fd = openSync(this.mapPath, 'r+');
    try {
      await fdatasync(fd);
    } finally {
      closeSync(fd);
    }
  }
}

/** A descriptor that is closed when it is retired and nobody uses it: its number is soon another file's. */
class OpenFile {
  readonly fd: number;
  users = 0;
  #retired = false;

  constructor(fd: number) {
    this.fd = fd;
  }

  leave(): void {
    this.users--;
    if (this.#retired && this.users === 0) closeSync(this.fd);
  }

  retire(): void {
    this.#retired = true;
    if (this.users === 0) closeSync(this.fd);
  }
}
