/**
 * A disk: sealed layers below, and a writable one on top, or none. This is what the ways out serve.
 *
 * A read asks the upper first, the merged index of the lowers for what it does not have; nothing there reads as zeros.
 */
import type { ByteSource } from './byte-source.ts';
import { fail } from './errors.ts';
import type { CommitOptions, CommittedLayer } from './layer/commit.ts';
import { commitLayer } from './layer/commit.ts';
import type { LayerStack } from './layer/stack.ts';
import { SECTOR } from './lsmt/header.ts';
import { clipIndex, MAX_LAYERS, mergeIndexes } from './lsmt/merge-index.ts';
import { HOLE, Pieces } from './lsmt/pieces.ts';
import type { SegmentIndex } from './lsmt/segment-index.ts';
import type { BlockTarget } from './target/block-target.ts';
import type { Extent, Extents, Immediate } from './target/capabilities.ts';
import { checkRange } from './target/range.ts';
import { TargetError } from './target/target-error.ts';
import { type Below, type Compacted, UPPER, type Upper } from './writable/upper.ts';

const ZEROS = Buffer.alloc(64 * 1024);
const MAX_EXTENTS = 1024;
/** Sectors that are looked at together: 1 GiB. */
const EXTENT_WINDOW = 2 ** 21;

/** `cover`: a layer of zeros, sealed at once, between the one that is sealed and the new one; the first of the two to be made. */
type MakeUpper = (facts: { virtualSize: number; parentUuid: string; cover: boolean }) => Promise<Upper>;

export interface SealedUpper {
  readonly path: string;
  readonly uuid: string;
}

export class StackedDisk implements BlockTarget, Immediate, Extents {
  readonly blockSize = 512;
  private size: number;
  private lowerIndex: SegmentIndex;
  private lowerSources: readonly ByteSource[];
  private readonly lowers: LayerStack;
  private upper: Upper | undefined;
  /** Uppers that `snapshot` has sealed: lower layers since then. */
  private readonly sealed: Upper[] = [];
  /** Of each lower layer, bottom first. */
  private readonly layers: { readonly index: SegmentIndex; readonly uuid: string }[];
  private readonly upperPieces = new Pieces();
  private readonly lowerPieces = new Pieces();
  /** What `close` waits for. */
  private readonly working = new Set<Promise<unknown>>();
  /** Of these, what `snapshot` waits for. */
  private readonly writing = new Set<Promise<unknown>>();
  /** While it is there, writes wait for it. */
  private gate: Promise<void> | undefined;
  private snapshotting = false;
  private closed = false;

  constructor(lowers: LayerStack, upper?: Upper) {
    if (upper !== undefined && lowers.layers.length > 0 && upper.virtualSize < lowers.virtualSize) {
      // Clipping the index once is all that a smaller device needs; it is done by who opens the lowers with that size.
      throw fail('LSMT_OPTION', {
        what: `size ${upper.virtualSize}`,
        problem: 'smaller than the layers below were opened with',
      });
    }
    this.lowers = lowers;
    this.lowerIndex = lowers.index;
    this.lowerSources = lowers.sources;
    this.layers = lowers.layers.map(({ index, trailer }) => ({ index, uuid: trailer.uuid }));
    this.upper = upper;
    this.size = upper?.virtualSize ?? lowers.virtualSize;
  }

  get sizeBytes(): number {
    return this.size;
  }

  get readOnly(): boolean {
    return this.upper === undefined;
  }

  get layerCount(): number {
    return this.lowerSources.length + (this.upper === undefined ? 0 : 1);
  }

  get usage(): Upper['usage'] | undefined {
    return this.upper?.usage;
  }

  async read(offset: number, length: number): Promise<Buffer> {
    checkRange(this, offset, length);
    this.checkOpen();
    const into = Buffer.allocUnsafe(length);
    const start = offset / SECTOR;
    // Mostly all of it is in memory, and a promise less is a tenth of a small read.
    if (this.begin(into, start) !== undefined) {
      const waits: Promise<void>[] = [];
      this.begin(into, start, waits);
      const done = Promise.all(waits);
      this.work(done);
      await done;
    }
    return into;
  }

  async write(offset: number, data: Buffer, { fua = false } = {}): Promise<void> {
    checkRange(this, offset, data.length);
    if (data.length === 0) return;
    await this.change((upper) => {
      const start = offset / SECTOR;
      if (isZero(data)) return upper.zero(start, start + data.length / SECTOR, this.below);
      return upper.write(start, data, this.below);
    });
    if (fua) await this.flush();
  }

  readNow(into: Buffer, at: number, offset: number, length: number): boolean {
    checkRange(this, offset, length);
    this.checkOpen();
    const target = at === 0 && length === into.length ? into : into.subarray(at, at + length);
    return this.begin(target, offset / SECTOR) === undefined;
  }

  writeNow(offset: number, data: Buffer): boolean {
    checkRange(this, offset, data.length);
    if (this.gate !== undefined) return false;
    this.checkOpen();
    const { upper } = this;
    if (upper === undefined) throw new TargetError('TARGET_READ_ONLY');
    if (!upper.writesNow(data.length)) return false;
    if (data.length === 0) return true;
    const start = offset / SECTOR;
    if (isZero(data)) upper.zero(start, start + data.length / SECTOR, this.below);
    else upper.write(start, data, this.below);
    return true;
  }

  async extents(offset: number, length: number): Promise<Extent[]> {
    checkRange(this, offset, length);
    this.checkOpen();
    const end = (offset + length) / SECTOR;
    const found: Extent[] = [];
    let position = offset / SECTOR;
    const add = (until: number, hasData: boolean) => {
      if (until === position) return;
      found.push({ length: (until - position) * SECTOR, hole: !hasData, zero: !hasData });
      position = until;
    };
    // Not the whole disk at once: the client asks again.
    for (let from = position; from < end && found.length < MAX_EXTENTS; from += EXTENT_WINDOW) {
      const until = Math.min(end, from + EXTENT_WINDOW);
      const runs = this.dataRuns(from, until);
      if (runs.length === 0 && until < end) continue;
      for (const [start, stop] of runs) {
        add(start, false);
        add(stop, true);
      }
      add(until, false);
    }
    return found;
  }

  async flush(): Promise<void> {
    // A layer that is being sealed is safe when the new order of layers is, not before.
    while (this.gate !== undefined) await this.gate;
    this.checkOpen();
    const { upper } = this;
    if (upper !== undefined) await this.work(upper.flush());
  }

  /** What is no data already, here or below, needs no entry: discarding an empty disk costs nothing. */
  async discard(offset: number, length: number): Promise<void> {
    checkRange(this, offset, length);
    if (length === 0) return;
    await this.change(async (upper) => {
      for (const [start, end] of this.dataRuns(offset / SECTOR, (offset + length) / SECTOR)) {
        await upper.zero(start, end, this.below);
      }
    });
  }

  async writeZeroes(offset: number, length: number, { fua = false } = {}): Promise<void> {
    await this.discard(offset, length);
    if (fua) await this.flush();
  }

  /** Gives back what overwritten data takes. Reads and writes go on meanwhile. */
  async compact(): Promise<Compacted> {
    this.checkOpen();
    if (this.upper === undefined) throw new TargetError('TARGET_READ_ONLY');
    return this.work(this.upper.compact());
  }

  /**
   * Seals the upper and puts `makeUpper()` on top. Writes wait from the last flush until `publish` is done; reads go on.
   * @param publish makes the new order of layers durable: called when the sealed ones are on the disk. If it fails, all is as before.
   * @param sizeBytes of the disk from then on; what lay beyond a smaller size is zeros in a layer of its own, so that it stays gone
   *   when the disk grows again, and is there when this fails
   */
  async snapshot(
    makeUpper: MakeUpper,
    publish: (sealed: readonly SealedUpper[]) => Promise<void>,
    sizeBytes = this.sizeBytes,
  ): Promise<SealedUpper> {
    this.checkOpen();
    const old = this.upper;
    if (old === undefined) throw new TargetError('TARGET_READ_ONLY');
    if (this.snapshotting) throw fail('DISK_SNAPSHOT_RUNNING', { file: old.dataPath });
    const count = this.lowerSources.length + (sizeBytes < this.size ? 2 : 1);
    if (count > MAX_LAYERS) throw fail('DISK_TOO_MANY_LAYERS', { count, most: MAX_LAYERS });
    this.snapshotting = true;
    return this.work(this.sealAndRestack(old, makeUpper, publish, sizeBytes));
  }

  private async sealAndRestack(
    old: Upper,
    makeUpper: MakeUpper,
    publish: (sealed: readonly SealedUpper[]) => Promise<void>,
    sizeBytes: number,
  ): Promise<SealedUpper> {
    let open = () => {};
    const gate = new Promise<void>((resolve) => {
      open = resolve;
    });
    const made: Upper[] = [];
    const make = async (virtualSize: number, below: Upper, cover: boolean) => {
      const upper = await makeUpper({ virtualSize, parentUuid: below.uuid, cover });
      made.push(upper);
      return upper;
    };
    try {
      // What can be done before writes have to wait: most of what is not on the disk yet goes there, and the next layers are made.
      const making = async () => {
        const cover = sizeBytes < this.size ? await make(this.size, old, true) : undefined;
        return { cover, fresh: await make(sizeBytes, cover ?? old, false) };
      };
      const [flushed, layers] = await Promise.allSettled([old.flush(), making()]);
      if (layers.status === 'rejected') throw layers.reason;
      if (flushed.status === 'rejected') throw flushed.reason;
      const { cover, fresh } = layers.value;
      this.gate = gate;
      await Promise.allSettled([...this.writing]);
      if (cover !== undefined) {
        for (const [start, end] of this.dataRuns(sizeBytes / SECTOR, this.size / SECTOR)) {
          await cover.zero(start, end, this.below);
        }
        await cover.seal();
      }
      await old.seal();
      const sealed = cover === undefined ? [old] : [old, cover];
      try {
        await publish(sealed.map(({ dataPath, uuid }) => ({ path: dataPath, uuid })));
      } catch (error) {
        await old.unseal();
        throw error;
      }
      const number = this.lowerSources.length;
      const indexes = sealed.map((upper, at) => upper.freeze(number + at));
      this.lowerIndex = clipIndex(mergeIndexes([this.lowerIndex, ...indexes]), sizeBytes / SECTOR);
      this.size = sizeBytes;
      this.layers.push(...sealed.map(({ uuid }, at) => ({ index: indexes[at]!, uuid })));
      this.lowerSources = [...this.lowerSources, ...sealed.map(({ source }) => source)];
      this.sealed.push(...sealed);
      this.upper = fresh;
      made.length = 0;
      return { path: old.dataPath, uuid: old.uuid };
    } finally {
      for (const upper of made) await upper.close();
      this.snapshotting = false;
      this.gate = undefined;
      open();
    }
  }

  /**
   * What was written above the first `layers` lowers, as one layer: an increment of them. 0: the whole disk. As of the moment when
   * what was answered before has been flushed: writes go on meanwhile, and are not in it.
   * @param options.onFrozen Called at that moment.
   * @throws DISK_SPARSE_UNSUPPORTED where writes happen in place, unless nobody writes (`quiet`)
   */
  async commitAbove(
    layers: number,
    path: string,
    options: Omit<CommitOptions, 'virtualSize'> & { readonly quiet?: boolean; readonly onFrozen?: () => void },
  ): Promise<CommittedLayer> {
    const { quiet = true, onFrozen, ...identity } = options;
    this.checkFrozen(quiet);
    await this.flush();
    const { index, sources } = this.freezeAbove(layers);
    onFrozen?.();
    const parentUuid = this.layers[layers - 1]?.uuid;
    const done = commitLayer(path, index, sources, { parentUuid, ...identity, virtualSize: this.sizeBytes });
    this.upper?.track(done);
    return this.work(done);
  }

  /**
   * What the disk holds now, read-only, whatever is written from now on. Compaction and `close` wait until it is closed.
   * @throws DISK_SPARSE_UNSUPPORTED where writes happen in place, unless nobody writes (`quiet`)
   */
  frozen({ quiet = false } = {}): StackedDisk {
    this.checkFrozen(quiet);
    const { index, sources } = this.freezeAbove(0);
    let release = () => {};
    const released = new Promise<void>((done) => {
      release = done;
    });
    this.upper?.track(released);
    this.work(released);
    const uuid = this.upper?.uuid ?? this.lowers.uuid;
    return new StackedDisk({
      layers: [],
      sources,
      index,
      virtualSize: this.sizeBytes,
      uuid,
      close: async () => release(),
    });
  }

  private checkFrozen(quiet: boolean): void {
    this.checkOpen();
    if (quiet || this.upper === undefined || this.upper.writesAside) return;
    const problem = 'its disk is in use, and what is written goes over what is being read';
    throw fail('DISK_SPARSE_UNSUPPORTED', { file: this.upper.dataPath, problem });
  }

  /** One index of the layers above the first `layers`, and the sources of all: made at once, so of one moment. */
  private freezeAbove(layers: number): { index: SegmentIndex; sources: ByteSource[] } {
    const above = this.layers.slice(layers).map(({ index }) => index);
    const { upper } = this;
    if (upper !== undefined) above.push(upper.freeze(this.lowerSources.length));
    return {
      index: clipIndex(mergeIndexes(above), this.sizeBytes / SECTOR),
      sources: [...this.lowerSources, ...(upper === undefined ? [] : [upper.source])],
    };
  }

  async close(): Promise<void> {
    if (this.closed) return;
    while (this.gate !== undefined) await this.gate;
    this.closed = true;
    await Promise.allSettled([...this.working]);
    try {
      await this.upper?.flush();
    } finally {
      await this.upper?.close();
      for (const upper of this.sealed) await upper.close();
      await this.lowers.close();
    }
  }

  /** Ends without a flush, as a process that dies would. For tests. */
  async abandon(): Promise<void> {
    this.closed = true;
    await Promise.allSettled([...this.working]);
    await this.upper?.close();
    for (const upper of this.sealed) await upper.close();
    await this.lowers.close();
  }

  private checkOpen(): void {
    if (this.closed) throw new TargetError('TARGET_CLOSED');
  }

  private async change(work: (upper: Upper) => Promise<void> | undefined): Promise<void> {
    while (this.gate !== undefined) await this.gate;
    this.checkOpen();
    if (this.upper === undefined) throw new TargetError('TARGET_READ_ONLY');
    const waits = work(this.upper);
    if (waits === undefined) return;
    this.writing.add(waits);
    const done = () => this.writing.delete(waits);
    waits.then(done, done);
    await this.work(waits);
  }

  private work<T>(work: Promise<T>): Promise<T> {
    this.working.add(work);
    const done = () => this.working.delete(work);
    work.then(done, done);
    return work;
  }

  /**
   * Fills `into` from what lies at hand, and has the rest read: `waits` then has the promises. Without `waits` nothing is begun that
   * would have to be waited for.
   * @returns false where something was missing and there is no `waits`; undefined otherwise
   */
  private begin(into: Buffer, start: number, waits?: Promise<void>[]): false | undefined {
    const { upper, upperPieces } = this;
    const end = start + into.length / SECTOR;
    if (upper === undefined) return this.beginBelow(into, start, end, start, waits);
    upperPieces.clear();
    upper.lookup(start, end, upperPieces);
    for (let at = 0; at < upperPieces.count; at++) {
      const from = upperPieces.starts[at]!;
      const to = upperPieces.ends[at]!;
      const layer = upperPieces.layers[at]!;
      if (layer === HOLE) {
        if (this.beginBelow(into, from, to, start, waits) === false) return false;
      } else {
        const first = (from - start) * SECTOR;
        const last = (to - start) * SECTOR;
        if (layer !== UPPER) into.fill(0, first, last);
        else {
          const known = waits?.length;
          if (fillFrom(upper.source, into, first, last, upperPieces.moffsets[at]!, waits) === false) return false;
          // What compaction must wait for: it knows a place in the data file. What lies below may be far away, and is not waited for.
          if (waits !== undefined && waits.length !== known) upper.track(waits.at(-1)!);
        }
      }
    }
    return undefined;
  }

  private beginBelow(
    into: Buffer,
    from: number,
    to: number,
    start: number,
    waits?: Promise<void>[],
  ): false | undefined {
    const { lowerPieces, lowerSources } = this;
    lowerPieces.clear();
    this.lowerIndex.lookup(from, to, lowerPieces);
    for (let at = 0; at < lowerPieces.count; at++) {
      const first = (lowerPieces.starts[at]! - start) * SECTOR;
      const last = (lowerPieces.ends[at]! - start) * SECTOR;
      const layer = lowerPieces.layers[at]!;
      if (layer < 0) into.fill(0, first, last);
      else if (fillFrom(lowerSources[layer]!, into, first, last, lowerPieces.moffsets[at]!, waits) === false)
        return false;
    }
    return undefined;
  }

  private readonly below: Below = {
    read: async (into, start) => {
      const waits: Promise<void>[] = [];
      this.beginBelow(into, start, start + into.length / SECTOR, start, waits);
      await Promise.all(waits);
    },
    hasData: (start, end) => this.lowerIndex.touches(start, end, false),
  };

  /** Runs of the range that hold bytes, in the upper or below it, in sectors. */
  dataRuns(start: number, end: number): [number, number][] {
    const { upperPieces, lowerPieces } = this;
    const runs: [number, number][] = [];
    const add = (from: number, to: number) => {
      const last = runs.at(-1);
      if (last !== undefined && last[1] === from) last[1] = to;
      else runs.push([from, to]);
    };
    upperPieces.clear();
    if (this.upper === undefined) upperPieces.add(start, end, 0, HOLE);
    else this.upper.lookup(start, end, upperPieces);
    for (let at = 0; at < upperPieces.count; at++) {
      const layer = upperPieces.layers[at]!;
      if (layer === UPPER) add(upperPieces.starts[at]!, upperPieces.ends[at]!);
      if (layer !== HOLE) continue;
      lowerPieces.clear();
      this.lowerIndex.lookup(upperPieces.starts[at]!, upperPieces.ends[at]!, lowerPieces);
      for (let below = 0; below < lowerPieces.count; below++) {
        if (lowerPieces.layers[below]! >= 0) add(lowerPieces.starts[below]!, lowerPieces.ends[below]!);
      }
    }
    return runs;
  }
}

function fillFrom(
  source: ByteSource,
  into: Buffer,
  from: number,
  to: number,
  moffset: number,
  waits?: Promise<void>[],
): false | undefined {
  const part = from === 0 && to === into.length ? into : into.subarray(from, to);
  if (waits === undefined) return source.readNow(part, moffset * SECTOR) ? undefined : false;
  const wait = source.read(part, moffset * SECTOR);
  if (wait !== undefined) waits.push(wait);
  return undefined;
}

function isZero(data: Buffer): boolean {
  // Most data is told by its first bytes.
  if (data[0] !== 0 || data.readInt32LE(data.length >>> 1) !== 0) return false;
  for (let at = 0; at < data.length; at += ZEROS.length) {
    const end = Math.min(data.length, at + ZEROS.length);
    if (data.compare(ZEROS, 0, end - at, at, end) !== 0) return false;
  }
  return true;
}
