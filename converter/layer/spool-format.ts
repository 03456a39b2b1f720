/**
 * How a parsed layer travels from its worker to the converter: records in a few large buffers, transferred, not copied.
 * A record is an `Entry` and, for a file, where its bytes lie in the layer's spool. One million entries take about
 * 120 MB this way instead of several times that as cloned objects.
 */
import { type ByteString, byteString, writeByteString } from '#base';
import type { Entry, EntryKind } from './entry.ts';

const KINDS: readonly EntryKind[] = [
  'file',
  'dir',
  'symlink',
  'hardlink',
  'char',
  'block',
  'fifo',
  'socket',
  'whiteout',
  'opaque',
];
const SEGMENT_BYTES = 1 << 20;
const FIXED_BYTES = 76;
const NO_DATA = 0xffffffff;

/**
 * Where a file's bytes lie in a layer's spool. Identical files of a layer share one object (and one `id`).
 *
 * - `flat`: `blocks` whole blocks from `startBlock` on; `tailBytes` more at `tailOffset` of the tail spool.
 * - `chunks`: like flat, but only the units (`1 << unitBits` bytes each) that are not holes are stored, one after the
 *   other; `map[i]` is unit i's first block relative to `startBlock`, or -1 for a hole.
 * - `clusters`: compressed; cluster i (64 KiB of the file) takes `map[i] & 0xff` blocks; bit 8 set: stored plain.
 */
export interface FileData {
  readonly layer: number;
  readonly id: number;
  readonly form: 'flat' | 'chunks' | 'clusters';
  readonly sizeBytes: number;
  /** CRC-32 of the first stored unit and the tail: with the size, the key under which identical files are looked for. */
  readonly crc32: number;
  /** In blocks of 4096 bytes from the start of the layer's data spool. */
  readonly startBlock: number;
  readonly blocks: number;
  readonly tailOffset: number;
  readonly tailBytes: number;
  readonly unitBits: number;
  readonly map: Int32Array | undefined;
}

const FORMS = ['flat', 'chunks', 'clusters'] as const;

export class SpoolIndexWriter {
  readonly #segments: Uint8Array<ArrayBuffer>[] = [];
  #buffer = Buffer.from(new ArrayBuffer(SEGMENT_BYTES));
  #used = 0;
  #data: FileData[] = [];
  count = 0;
  #hasMarks = false;

  add(entry: Entry, data: FileData | undefined): void {
    let size = FIXED_BYTES + entry.path.length + entry.target.length;
    if (entry.xattrs) for (const [name, value] of entry.xattrs) size += 8 + name.length + value.length;
    const at = this.#reserve(size);
    const b = this.#buffer;
    b.writeUInt32LE(size, at);
    b[at + 4] = KINDS.indexOf(entry.kind);
    b.writeUInt16LE(entry.mode, at + 6);
    b.writeUInt32LE(entry.uid, at + 8);
    b.writeUInt32LE(entry.gid, at + 12);
    b.writeDoubleLE(entry.mtimeSec, at + 16);
    b.writeUInt32LE(entry.mtimeNsec, at + 24);
    b.writeDoubleLE(entry.sizeBytes, at + 28);
    b.writeUInt32LE(entry.major, at + 36);
    b.writeUInt32LE(entry.minor, at + 40);
    b.writeUInt32LE(entry.path.length, at + 44);
    b.writeUInt32LE(entry.target.length, at + 48);
    b.writeUInt32LE(entry.xattrs?.size ?? 0, at + 52);
    b.writeUInt32LE(data === undefined ? NO_DATA : data.id, at + 56);
    let p = at + FIXED_BYTES;
    p += writeByteString(b, entry.path, p);
    p += writeByteString(b, entry.target, p);
    if (entry.xattrs) {
      for (const [name, value] of entry.xattrs) {
        b.writeUInt32LE(name.length, p);
        b.writeUInt32LE(value.length, p + 4);
        p += 8;
        p += writeByteString(b, name, p);
        p += value.copy(b, p);
      }
    }
    this.#used = p;
    this.count++;
    this.#hasMarks ||= entry.kind === 'whiteout' || entry.kind === 'opaque' || entry.path.includes('.wh.');
  }

  /** Remembers a file's place; `id` must be its position in this order. */
  addData(data: FileData): void {
    this.#data.push(data);
  }

  get dataCount(): number {
    return this.#data.length;
  }

  #reserve(size: number): number {
    if (this.#used + size > this.#buffer.length) {
      this.#seal();
      if (size > SEGMENT_BYTES) this.#buffer = Buffer.from(new ArrayBuffer(size));
    }
    return this.#used;
  }

  #seal(): void {
    const bytes = this.#buffer.buffer as ArrayBuffer;
    if (this.#used > 0) this.#segments.push(new Uint8Array(bytes, 0, this.#used));
    this.#buffer = Buffer.from(new ArrayBuffer(SEGMENT_BYTES));
    this.#used = 0;
  }

  finish(): SpoolIndex {
    // The last segment is cut to what it holds: many small layers must not cost a megabyte each.
    if (this.#used > 0)
      this.#segments.push(new Uint8Array(this.#buffer.subarray(0, this.#used)) as Uint8Array<ArrayBuffer>);
    this.#used = 0;
    return {
      segments: this.#segments,
      data: encodeData(this.#data),
      count: this.count,
      hasMarks: this.#hasMarks,
    };
  }
}

/** Transferable: hand `transferList(index)` to postMessage. */
export interface SpoolIndex {
  readonly segments: readonly Uint8Array<ArrayBuffer>[];
  readonly data: EncodedData;
  readonly count: number;
  /** Whether any entry may hide something of lower layers without being in its place: whiteouts, and `.wh.` in a path. */
  readonly hasMarks: boolean;
}

interface EncodedData {
  /** Nine numbers a file. */
  readonly fields: Float64Array<ArrayBuffer>;
  readonly maps: readonly (Int32Array | undefined)[];
}

export function transferList(index: SpoolIndex): ArrayBuffer[] {
  return [...index.segments.map((s) => s.buffer), index.data.fields.buffer];
}

const FIELDS = 9;

function encodeData(all: readonly FileData[]): EncodedData {
  const fields = new Float64Array(all.length * FIELDS);
  const maps: (Int32Array | undefined)[] = [];
  all.forEach((d, i) => {
    fields.set(
      [
        FORMS.indexOf(d.form),
        d.sizeBytes,
        d.crc32,
        d.startBlock,
        d.blocks,
        d.tailOffset,
        d.tailBytes,
        d.unitBits,
        maps.length,
      ],
      i * FIELDS,
    );
    if (d.map) maps.push(d.map);
  });
  return { fields, maps };
}

/** The data records of a layer, by id. */
export function decodeData(encoded: EncodedData, layer: number): FileData[] {
  const out: FileData[] = [];
  const f = encoded.fields;
  for (let i = 0; i * FIELDS < f.length; i++) {
    const at = i * FIELDS;
    const form = FORMS[f[at]!]!;
    out.push({
      layer,
      id: i,
      form,
      sizeBytes: f[at + 1]!,
      crc32: f[at + 2]!,
      startBlock: f[at + 3]!,
      blocks: f[at + 4]!,
      tailOffset: f[at + 5]!,
      tailBytes: f[at + 6]!,
      unitBits: f[at + 7]!,
      map: form === 'flat' ? undefined : encoded.maps[f[at + 8]!],
    });
  }
  return out;
}

/** Calls `visit` for every entry in order; the entry object is fresh each time, its data id -1 when there is none. */
export function forEachEntry(index: SpoolIndex, visit: (entry: Entry, dataId: number) => void): void {
  for (const segment of index.segments) {
    const b = Buffer.from(segment.buffer, segment.byteOffset, segment.byteLength);
    for (let at = 0; at < b.length; at += b.readUInt32LE(at)) {
      const pathLength = b.readUInt32LE(at + 44);
      const targetLength = b.readUInt32LE(at + 48);
      const xattrCount = b.readUInt32LE(at + 52);
      const dataId = b.readUInt32LE(at + 56);
      let p = at + FIXED_BYTES;
      const path = byteString(b, p, p + pathLength);
      p += pathLength;
      const target = targetLength === 0 ? '' : byteString(b, p, p + targetLength);
      p += targetLength;
      let xattrs: Map<ByteString, Buffer> | undefined;
      if (xattrCount > 0) {
        xattrs = new Map();
        for (let i = 0; i < xattrCount; i++) {
          const nameLength = b.readUInt32LE(p);
          const valueLength = b.readUInt32LE(p + 4);
          p += 8;
          const name = byteString(b, p, p + nameLength);
          p += nameLength;
          xattrs.set(name, Buffer.from(b.subarray(p, p + valueLength)));
          p += valueLength;
        }
      }
      visit(
        {
          path,
          kind: KINDS[b[at + 4]!]!,
          mode: b.readUInt16LE(at + 6),
          uid: b.readUInt32LE(at + 8),
          gid: b.readUInt32LE(at + 12),
          mtimeSec: b.readDoubleLE(at + 16),
          mtimeNsec: b.readUInt32LE(at + 24),
          sizeBytes: b.readDoubleLE(at + 28),
          major: b.readUInt32LE(at + 36),
          minor: b.readUInt32LE(at + 40),
          target,
          xattrs,
        },
        dataId === NO_DATA ? -1 : dataId,
      );
    }
  }
}
