/**
 * Which parts of the layers' spools make up the data of an EROFS layer, and where each file's bytes come to lie.
 *
 * In one blob: the live files of all layers of the group in the order of the layers and of their members; a file that an
 * earlier layer of the group has, too, is stored once. When a single spool, or a stack of them, is live
 * as a whole, it is the blob as it is.
 * In blobs per layer (`--collapse metadata`): every layer's spool is a device of its own, untouched.
 *
 * With an order (`--profile`), the files that it names come first, in its order, and the others after them as ever: what a start
 * reads then lies together at the beginning of a blob.
 */
import { closeSync, openSync, readSync } from 'node:fs';
import type { Run } from '../layer/layer-job.ts';
import type { FileData } from '../layer/spool-format.ts';
import { BLOCK_BYTES } from './layout.ts';

const MAX_CANDIDATES = 4;

export interface SpoolFile {
  readonly path: string;
  /** Where the spool's data begins in the file. */
  readonly dataOffset: number;
  readonly dataBytes: number;
}

export interface DataPlacement {
  /** 1-based device slot and first block in it. */
  placeOf(data: FileData): { slot: number; block: number };
  /** Per device slot: the parts of spools that it is made of. */
  readonly devices: readonly { readonly runs: readonly Run[]; readonly blocks: number }[];
}

/** Files that come first, with their places in that order. */
export type FileOrder = ReadonlyMap<FileData, number>;

/** `live`: the data of every file in the layer, each object once. `spools[i]`: of layer i. */
export function placeInOneBlob(
  live: Iterable<FileData>,
  spools: readonly SpoolFile[],
  order: FileOrder = new Map(),
): DataPlacement {
  const withBlocks = [...live].filter((d) => d.blocks > 0);
  withBlocks.sort((a, b) => rank(order, a) - rank(order, b) || a.layer - b.layer || a.id - b.id);
  const places = new Map<FileData, number>();
  const known = new Map<string, FileData[]>();
  const runs: GrowingRun[] = [];
  let block = 0;
  const comparer = new SpoolComparer(spools);
  try {
    for (const data of withBlocks) {
      const same = comparer.findSame(data, known);
      if (same !== undefined) {
        places.set(data, places.get(same)!);
        continue;
      }
      places.set(data, block);
      addRun(runs, spools[data.layer]!, data);
      block += data.blocks;
    }
  } finally {
    comparer.close();
  }
  return {
    placeOf: (data) => ({ slot: 1, block: places.get(data)! }),
    devices: block === 0 ? [] : [{ runs, blocks: block }],
  };
}

/** One after the other in the same file are one run. */
type GrowingRun = { path: string; offset: number; length: number };

function addRun(runs: GrowingRun[], { path, dataOffset }: SpoolFile, data: FileData): void {
  const offset = dataOffset + data.startBlock * BLOCK_BYTES;
  const length = data.blocks * BLOCK_BYTES;
  const last = runs[runs.length - 1];
  if (last !== undefined && last.path === path && last.offset + last.length === offset) last.length += length;
  else runs.push({ path, offset, length });
}

function rank(order: FileOrder, data: FileData): number {
  return order.get(data) ?? Number.MAX_SAFE_INTEGER;
}

/** `records[i]`: the data of every file of layer i, live or not: layers that images share stay shared where their order is the same. */
export function placeInOrderedLayerBlobs(
  spools: readonly SpoolFile[],
  records: readonly (readonly FileData[])[],
  order: FileOrder,
): DataPlacement {
  const places = new Map<FileData, { slot: number; block: number }>();
  const devices: { runs: GrowingRun[]; blocks: number }[] = [];
  spools.forEach((spool, layer) => {
    const withBlocks = records[layer]!.filter((d) => d.blocks > 0);
    if (withBlocks.length === 0) return;
    withBlocks.sort((a, b) => rank(order, a) - rank(order, b) || a.startBlock - b.startBlock);
    const device = { runs: [] as GrowingRun[], blocks: 0 };
    devices.push(device);
    for (const data of withBlocks) {
      places.set(data, { slot: devices.length, block: device.blocks });
      addRun(device.runs, spool, data);
      device.blocks += data.blocks;
    }
  });
  return { placeOf: (data) => places.get(data)!, devices };
}

export function placeInLayerBlobs(spools: readonly SpoolFile[]): DataPlacement {
  const slots = new Map<number, number>();
  const devices: { runs: Run[]; blocks: number }[] = [];
  spools.forEach((spool, layer) => {
    if (spool.dataBytes === 0) return;
    devices.push({
      runs: [{ path: spool.path, offset: spool.dataOffset, length: spool.dataBytes }],
      blocks: spool.dataBytes / BLOCK_BYTES,
    });
    slots.set(layer, devices.length);
  });
  return { placeOf: (data) => ({ slot: slots.get(data.layer)!, block: data.startBlock }), devices };
}

/** Finds files of other layers with the same stored bytes. Within a layer the spool has seen to it already. */
class SpoolComparer {
  readonly #spools: readonly SpoolFile[];
  readonly #fds = new Map<string, number>();

  constructor(spools: readonly SpoolFile[]) {
    this.#spools = spools;
  }

  findSame(data: FileData, known: Map<string, FileData[]>): FileData | undefined {
    const key = `${data.sizeBytes}:${data.crc32}`;
    const candidates = known.get(key);
    if (candidates === undefined) {
      known.set(key, [data]);
      return undefined;
    }
    for (const other of candidates) if (other.layer !== data.layer && this.#sameBytes(other, data)) return other;
    if (candidates.length < MAX_CANDIDATES) candidates.push(data);
    return undefined;
  }

  #sameBytes(a: FileData, b: FileData): boolean {
    if (a.form !== b.form || a.blocks !== b.blocks || a.tailBytes !== b.tailBytes || a.unitBits !== b.unitBits)
      return false;
    if (a.map !== undefined && !(a.map.length === b.map!.length && a.map.every((v, i) => v === b.map![i])))
      return false;
    if (this.#isAt(a, b)) return true;
    const left = Buffer.allocUnsafe(1 << 18);
    const right = Buffer.allocUnsafe(1 << 18);
    const total = a.blocks * BLOCK_BYTES;
    for (let done = 0; done < total; done += left.length) {
      const n = Math.min(left.length, total - done);
      this.#read(a, done, left, n);
      this.#read(b, done, right, n);
      if (left.compare(right, 0, n, 0, n) !== 0) return false;
    }
    return true;
  }

  /** In a stack, a file that a lower layer has was not stored again. */
  #isAt(a: FileData, b: FileData): boolean {
    const [left, right] = [this.#spools[a.layer]!, this.#spools[b.layer]!];
    const apart = left.dataOffset - right.dataOffset + (a.startBlock - b.startBlock) * BLOCK_BYTES;
    return left.path === right.path && apart === 0;
  }

  #read(data: FileData, at: number, into: Buffer, length: number): void {
    const { path, dataOffset } = this.#spools[data.layer]!;
    let fd = this.#fds.get(path);
    if (fd === undefined) {
      fd = openSync(path, 'r');
      this.#fds.set(path, fd);
    }
    for (let done = 0; done < length; ) {
      const n = readSync(fd, into, done, length - done, dataOffset + data.startBlock * BLOCK_BYTES + at + done);
      if (n === 0) throw new Error(`${path} ends early`);
      done += n;
    }
  }

  close(): void {
    for (const fd of this.#fds.values()) closeSync(fd);
  }
}
