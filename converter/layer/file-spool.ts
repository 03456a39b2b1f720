/**
 * Writes the file data of one layer to two local files while the layer streams by: `data`, whole 4096-byte blocks, laid
 * out as a data blob will have them, and `tails`, the short ends that go into the metadata image.
 *
 * A unit (64 KiB) of zeros becomes a hole; a file whose bytes are in the spool already is taken back out. With a codec,
 * files are cut into clusters of 64 KiB, each compressed alone and stored in whole blocks if that saves one.
 *
 * Everything is decided from the bytes in their order, so the same layer always gives the same spool.
 */
import { crc32 } from 'node:zlib';
import type { BlobDigests, Due } from '#linux';
import { BLOCK_BYTES } from '../erofs/layout.ts';
import type { Codec } from './cluster-codec.ts';
import { DataFile, directFrom } from './data-file.ts';
import { SpoolFile } from './spool-file.ts';
import type { FileData } from './spool-format.ts';

/** Cluster size, and the smallest unit that can become a hole. */
const UNIT_BITS = 16;
const UNIT_BYTES = 1 << UNIT_BITS;
/** A file this large or larger gets larger units, so that a chunk map stays under about 65,536 entries. */
const MAX_UNIT_BITS = 20;
/** Holds at least one unit of the largest size beyond what is written out. */
const BUFFER_BYTES = 4 << 20;
const TAIL_BUFFER_BYTES = 1 << 18;
/** Files of the same size and checksum that are compared; more would let a crafted layer cost quadratic time. */
const MAX_CANDIDATES = 4;
/** An announced hole this long makes a compressed file fall back to chunks, whose holes cost nothing. */
const SPARSE_BYTES = 1 << 20;

export interface FileSpoolOptions {
  /** A file's last partial block goes to `tails` when it has at most this many bytes. */
  readonly tailLimitBytes: number;
  readonly codec: Codec | undefined;
  /** The data spool will probably be a data blob as it is: hash it on the way, and write it as one that stays. */
  readonly becomesBlob: boolean;
  /** Of one that becomes a blob: see DataFileOptions. */
  readonly directFromBytes?: number | undefined;
  /** Where the data goes instead of a file of its own: behind that of other layers. */
  readonly into?: DataStack | undefined;
}

/** Layers' data in one file, which is the caller's to finish and to close. */
export interface DataStack {
  readonly data: DataFile;
  /** Files of the layers below, by size and checksum, and where their layer's data begins. */
  readonly known: Map<string, { readonly file: FileData; readonly base: number }[]>;
}

export class FileSpool {
  readonly #data: DataFile;
  /** Where this spool's data begins in it. */
  readonly #base: number;
  readonly #tails: SpoolFile;
  readonly #options: FileSpoolOptions;
  readonly #known = new Map<string, FileData[]>();
  /** What is not handed over yet; it holds the whole unit that is being filled. */
  readonly #buffer = Buffer.allocUnsafeSlow(BUFFER_BYTES);
  #fill = 0;
  readonly #tailBuffer = Buffer.allocUnsafeSlow(TAIL_BUFFER_BYTES);
  #tailFill = 0;
  #compared: readonly [Buffer, Buffer] | undefined;

  // The file being written.
  #sizeBytes = 0;
  #position = 0;
  #startByte = 0;
  #unitBits = UNIT_BITS;
  /** Where the current unit's bytes begin in the buffer. */
  #unitFill = 0;
  #map: number[] = [];
  #holes = 0;
  #crc = 0;
  #sampled = false;
  #compressing = false;
  #plainClusters = 0;

  constructor(dataPath: string, tailPath: string, options: FileSpoolOptions) {
    this.#options = options;
    this.#data =
      options.into?.data ??
      new DataFile(dataPath, {
        hash: options.becomesBlob,
        directFromBytes: options.becomesBlob ? (options.directFromBytes ?? directFrom(0)) : undefined,
      });
    this.#base = this.#data.length;
    this.#tails = new SpoolFile(tailPath);
  }

  begin(sizeBytes: number): void {
    this.#sizeBytes = sizeBytes;
    this.#position = 0;
    this.#startByte = this.#data.length + this.#fill;
    // What the file has so far may still be taken back.
    this.#data.rewindPoint = this.#startByte;
    this.#unitBits = UNIT_BITS;
    this.#compressing = this.#options.codec !== undefined;
    if (!this.#compressing) this.#chooseUnit();
    this.#unitFill = this.#fill;
    this.#map = [];
    this.#holes = 0;
    this.#plainClusters = 0;
    this.#crc = 0;
    this.#sampled = false;
  }

  #chooseUnit(): void {
    while (this.#unitBits < MAX_UNIT_BITS && this.#sizeBytes / 2 ** this.#unitBits > 65536) this.#unitBits++;
  }

  write(bytes: Buffer): void {
    let from = 0;
    while (from < bytes.length) {
      const unit = 1 << this.#unitBits;
      const inUnit = this.#fill - this.#unitFill;
      if (inUnit === 0 && !this.#compressing && bytes.length - from >= unit) {
        from += this.#writeUnits(bytes.subarray(from));
        continue;
      }
      const n = Math.min(unit - inUnit, bytes.length - from);
      if (this.#fill + n > this.#buffer.length) this.#flush();
      bytes.copy(this.#buffer, this.#fill, from, from + n);
      this.#advance(n);
      from += n;
    }
  }

  /** Writes the whole units that `bytes` begins with, straight from where they are. Returns their length. */
  #writeUnits(bytes: Buffer): number {
    const unit = 1 << this.#unitBits;
    const end = bytes.length - (bytes.length % unit);
    const pieces: Buffer[] = [this.#buffer.subarray(0, this.#fill)];
    let next = this.#data.length + this.#fill - this.#startByte;
    let runStart = -1;
    const endRun = (at: number) => {
      if (runStart >= 0) pieces.push(bytes.subarray(runStart, at));
      runStart = -1;
    };
    for (let at = 0; at < end; at += unit) {
      const piece = bytes.subarray(at, at + unit);
      if (isZero(piece)) {
        endRun(at);
        this.#map.push(-1);
        this.#holes++;
        continue;
      }
      if (runStart < 0) runStart = at;
      this.#sample(piece);
      this.#map.push(next / BLOCK_BYTES);
      next += unit;
    }
    endRun(end);
    this.#position += end;
    if (pieces.length > 1) {
      this.#data.append(pieces);
      this.#fill = 0;
      this.#unitFill = 0;
    }
    return end;
  }

  hole(sizeBytes: number): void {
    let left = sizeBytes;
    if (this.#compressing && left >= SPARSE_BYTES) this.#stopCompressing();
    while (left > 0) {
      const unit = 1 << this.#unitBits;
      const inUnit = this.#fill - this.#unitFill;
      if (inUnit === 0 && !this.#compressing && (left >= unit || this.#position + left === this.#sizeBytes)) {
        const n = Math.min(left, unit);
        this.#map.push(-1);
        this.#holes++;
        this.#position += n;
        left -= n;
        continue;
      }
      const n = Math.min(left, unit - inUnit);
      if (this.#fill + n > this.#buffer.length) this.#flush();
      this.#buffer.fill(0, this.#fill, this.#fill + n);
      this.#advance(n);
      left -= n;
    }
  }

  #advance(n: number): void {
    this.#fill += n;
    this.#position += n;
    if (this.#fill - this.#unitFill === 1 << this.#unitBits) this.#endUnit();
  }

  #endUnit(): void {
    const start = this.#unitFill;
    const length = this.#fill - start;
    if (length === 0) return;
    const unit = this.#buffer.subarray(start, this.#fill);
    if (this.#compressing) {
      this.#endCluster(unit);
    } else if (isZero(unit)) {
      this.#map.push(-1);
      this.#holes++;
      this.#fill = start;
    } else {
      this.#sample(unit);
      this.#map.push((this.#data.length + start - this.#startByte) / BLOCK_BYTES);
    }
    this.#unitFill = this.#fill;
  }

  /** The first stored unit stands for the file when identical ones are looked for; bytes are compared before it counts. */
  #sample(unit: Buffer): void {
    if (this.#sampled) return;
    this.#crc = crc32(unit, this.#crc);
    this.#sampled = true;
  }

  /** Replaces the cluster's bytes at the end of the buffer by their compressed form, if that saves a block. */
  #endCluster(unit: Buffer): void {
    const plainBlocks = Math.ceil(unit.length / BLOCK_BYTES);
    const packed = plainBlocks > 1 || this.#map.length > 0 ? this.#options.codec!.compress(unit) : undefined;
    const blocks = packed === undefined ? plainBlocks : Math.ceil(packed.length / BLOCK_BYTES);
    // The kernel strips leading zero bytes as padding: output that begins with one cannot be stored.
    if (packed === undefined || packed.length === 0 || packed[0] === 0 || blocks >= plainBlocks) {
      this.#padBlock();
      this.#map.push(plainBlocks | 0x100);
      this.#plainClusters++;
    } else {
      const at = this.#unitFill;
      this.#buffer.fill(0, at, at + blocks * BLOCK_BYTES - packed.length);
      packed.copy(this.#buffer, at + blocks * BLOCK_BYTES - packed.length);
      this.#fill = at + blocks * BLOCK_BYTES;
      this.#map.push(blocks);
    }
    this.#sample(this.#buffer.subarray(this.#unitFill, this.#fill));
  }

  /**
   * Writes what the file has so far once more, as plain units; the rest of it is not compressed either. The compressed
   * copy stays behind as dead bytes, which no data record names.
   */
  #stopCompressing(): void {
    const pending = Buffer.from(this.#buffer.subarray(this.#unitFill, this.#fill));
    this.#fill = this.#unitFill;
    const clusters = this.#map;
    let at = this.#startByte;
    this.#flush();
    this.begin(this.#sizeBytes);
    this.#compressing = false;
    this.#chooseUnit();
    for (const cluster of clusters) {
      const bytes = Buffer.allocUnsafe((cluster & 0xff) * BLOCK_BYTES);
      this.#data.readAt(at, bytes);
      at += bytes.length;
      this.write((cluster & 0x100) !== 0 ? bytes : this.#options.codec!.decompress(bytes, UNIT_BYTES));
    }
    this.write(pending);
  }

  /** Ends the file. Its data record, fresh or that of an identical file before it. `nextId` is the id for a fresh one. */
  end(layer: number, nextId: number): FileData | undefined {
    if (this.#sizeBytes === 0) return undefined;
    const tailBytes = this.#takeTail();
    this.#endUnit();
    this.#padBlock();
    this.#unitFill = this.#fill;
    const endByte = this.#data.length + this.#fill;
    const blocks = (endByte - this.#startByte) / BLOCK_BYTES;
    const clusters = this.#compressing && this.#plainClusters < this.#map.length;
    const form = clusters ? 'clusters' : this.#holes > 0 ? 'chunks' : 'flat';
    let unitBits = this.#unitBits;
    let map: Int32Array | undefined = form === 'flat' ? undefined : Int32Array.from(this.#map);
    if (form === 'chunks') [map, unitBits] = widen(map!, unitBits);
    const fresh: FileData = {
      layer,
      id: nextId,
      form,
      sizeBytes: this.#sizeBytes,
      crc32: this.#crc,
      startBlock: (this.#startByte - this.#base) / BLOCK_BYTES,
      blocks,
      tailOffset: this.#tails.length + this.#tailFill - tailBytes,
      tailBytes,
      unitBits,
      map,
    };
    if (blocks === 0) return fresh;
    const key = keyOf(fresh);
    const candidates = this.#known.get(key) ?? [];
    const old = candidates.find((candidate) => this.#same(candidate, fresh));
    if (old !== undefined) {
      this.#rewind(this.#startByte);
      this.#dropTail(tailBytes);
      return old;
    }
    const placed = this.#placedBelow(key, fresh) ?? fresh;
    if (candidates.length === 0) this.#known.set(key, [placed]);
    else if (candidates.length < MAX_CANDIDATES) candidates.push(placed);
    return placed;
  }

  /** In a stack: the file with its blocks at those of an identical one of a lower layer. Its tail is its own. */
  #placedBelow(key: string, fresh: FileData): FileData | undefined {
    for (const { file, base } of this.#options.into?.known.get(key) ?? []) {
      const there = { ...file, startBlock: file.startBlock + (base - this.#base) / BLOCK_BYTES };
      if (!sameShape(there, fresh) || !this.#sameBlocks(there, fresh)) continue;
      this.#rewind(this.#startByte);
      return { ...fresh, startBlock: there.startBlock };
    }
    return undefined;
  }

  /** Moves the last partial block of a flat file to the tails. */
  #takeTail(): number {
    const tail = this.#sizeBytes % BLOCK_BYTES;
    if (tail === 0 || tail > this.#options.tailLimitBytes || this.#holes > 0) return 0;
    if (this.#compressing && this.#sizeBytes > BLOCK_BYTES) return 0;
    const bytes = this.#buffer.subarray(this.#fill - tail, this.#fill);
    // Zeros at the end may be a hole of the last unit; a file that would be all holes stays in chunks.
    if (this.#sizeBytes > BLOCK_BYTES && isZero(this.#buffer.subarray(this.#unitFill, this.#fill))) {
      return 0;
    }
    if (this.#tailFill + tail > this.#tailBuffer.length) this.#flushTails();
    bytes.copy(this.#tailBuffer, this.#tailFill);
    this.#tailFill += tail;
    this.#crc = crc32(bytes, this.#crc);
    this.#fill -= tail;
    if (this.#compressing) this.#compressing = false;
    return tail;
  }

  #dropTail(sizeBytes: number): void {
    if (this.#tailFill >= sizeBytes) this.#tailFill -= sizeBytes;
    else this.#tails.rewind(this.#tails.length - sizeBytes);
  }

  #padBlock(): void {
    const rest = (this.#data.length + this.#fill) % BLOCK_BYTES;
    if (rest === 0) return;
    const pad = BLOCK_BYTES - rest;
    if (this.#fill + pad > this.#buffer.length) this.#flush();
    this.#buffer.fill(0, this.#fill, this.#fill + pad);
    this.#fill += pad;
  }

  #same(a: FileData, b: FileData): boolean {
    if (!sameShape(a, b)) return false;
    if (a.tailBytes > 0) {
      this.#flushTails();
      const [left, right] = [a, b].map((d) => {
        const tail = Buffer.allocUnsafe(d.tailBytes);
        this.#tails.readAt(d.tailOffset, tail);
        return tail;
      });
      if (!left!.equals(right!)) return false;
    }
    return this.#sameBlocks(a, b);
  }

  #sameBlocks(a: FileData, b: FileData): boolean {
    this.#flush();
    const total = a.blocks * BLOCK_BYTES;
    this.#compared ??= [Buffer.allocUnsafeSlow(COMPARE_BYTES), Buffer.allocUnsafeSlow(COMPARE_BYTES)];
    const [left, right] = this.#compared;
    for (let done = 0; done < total; done += left.length) {
      const n = Math.min(left.length, total - done);
      this.#data.readAt(this.#base + a.startBlock * BLOCK_BYTES + done, left.subarray(0, n));
      this.#data.readAt(this.#base + b.startBlock * BLOCK_BYTES + done, right.subarray(0, n));
      if (left.compare(right, 0, n, 0, n) !== 0) return false;
    }
    return true;
  }

  /** Forgets the data after `toByte`. */
  #rewind(toByte: number): void {
    if (toByte >= this.#data.length) {
      this.#fill = toByte - this.#data.length;
    } else {
      this.#data.rewind(toByte);
      this.#fill = 0;
    }
    this.#unitFill = this.#fill;
  }

  /** Writes out all but the unit that is being filled. */
  #flush(): void {
    if (this.#unitFill === 0) return;
    this.#data.append([this.#buffer.subarray(0, this.#unitFill)]);
    this.#buffer.copyWithin(0, this.#unitFill, this.#fill);
    this.#fill -= this.#unitFill;
    this.#unitFill = 0;
  }

  #flushTails(): void {
    this.#tails.append([this.#tailBuffer.subarray(0, this.#tailFill)]);
    this.#tailFill = 0;
  }

  /**
   * Between blocks of the tar: hashes what has come of it, and besides what else is due; waits if the disk has fallen behind.
   * @throws what a write has failed with
   */
  catchUp(besides?: readonly Due[]): Promise<void> {
    this.#data.hash(besides);
    return this.#data.drain();
  }

  /** Writes out the rest. What the spools hold, and the digests of the data spool if it becomes a blob. */
  async finish(): Promise<SpoolSizes> {
    this.#unitFill = this.#fill;
    this.#flush();
    this.#flushTails();
    this.#tails.finish();
    this.#data.rewindPoint = this.#data.length;
    if (this.#options.into !== undefined) this.#tellAbove(this.#options.into);
    const digests = this.#options.into === undefined ? await this.#data.finish() : undefined;
    const dataBytes = this.#data.length - this.#base;
    return { dataOffset: this.#base, dataBytes, tailBytes: this.#tails.length, digests };
  }

  #tellAbove({ known }: DataStack): void {
    for (const [key, files] of this.#known) {
      const all = known.get(key) ?? [];
      // What a lower layer has is there already.
      for (const file of files) if (file.startBlock >= 0) all.push({ file, base: this.#base });
      if (all.length > 0) known.set(key, all.slice(0, MAX_CANDIDATES));
    }
  }

  async close(): Promise<void> {
    this.#tails.close();
    if (this.#options.into === undefined) await this.#data.close();
  }
}

export interface SpoolSizes {
  /** Where the data begins in its file. */
  readonly dataOffset: number;
  readonly dataBytes: number;
  readonly tailBytes: number;
  readonly digests: BlobDigests | undefined;
}

/** Bytes compared at a time. */
const COMPARE_BYTES = 1 << 18;
const ZEROS = Buffer.alloc(1 << MAX_UNIT_BITS);

function isZero(bytes: Buffer): boolean {
  return bytes[0] === 0 && bytes[bytes.length - 1] === 0 && bytes.compare(ZEROS, 0, bytes.length) === 0;
}

/** Doubles the unit as long as no unit would be half hole, half data: fewer entries, the same bytes. */
function widen(map: Int32Array, unitBits: number): [Int32Array, number] {
  let current = map;
  let bits = unitBits;
  while (current.length > 1 && bits < 40) {
    for (let i = 0; i + 1 < current.length; i += 2) {
      if (current[i]! < 0 !== current[i + 1]! < 0) return [current, bits];
    }
    current = current.filter((_, i) => i % 2 === 0);
    bits++;
  }
  return [current, bits];
}

function keyOf(file: FileData): string {
  return `${file.sizeBytes}:${file.crc32}`;
}

function sameShape(a: FileData, b: FileData): boolean {
  if (a.form !== b.form || a.blocks !== b.blocks || a.tailBytes !== b.tailBytes || a.unitBits !== b.unitBits)
    return false;
  return a.map === undefined || sameMap(a.map, b.map!);
}

function sameMap(a: Int32Array, b: Int32Array): boolean {
  return a.length === b.length && a.every((value, i) => value === b[i]);
}
