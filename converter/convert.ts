/**
 * From an image to EROFS layers: the main flow of the converter.
 *
 *   layers -> spools (in parallel: read, verify, inflate, parse)        layer/spool-layer.ts
 *          -> one tree, layer by layer, cut into groups                 tree/overlay-merge.ts, tree/collapse-plan.ts
 *          -> per group: live data -> blob and digests                  erofs/data-blob.ts, layer/make-blob.ts
 *                        metadata image                                 erofs/writer.ts
 *          -> the sink
 *
 * A `Converter` remembers spools and groups, so that images converted by the same one do shared work once.
 */

import { link, rm, stat } from 'node:fs/promises';
import { join } from 'node:path';
import { setImmediate as turn } from 'node:timers/promises';
import { type ByteString, digestFromHex, digestOf, type Progress, silent, systemCode } from '#base';
import { type BlobDigests, sha256Fallback } from '#linux';
import {
  type DataPlacement,
  placeInLayerBlobs,
  placeInOneBlob,
  placeInOrderedLayerBlobs,
  type SpoolFile,
} from './erofs/data-blob.ts';
import { ErofsWriter } from './erofs/writer.ts';
import { fail } from './errors.ts';
import type { CodecName } from './layer/cluster-codec.ts';
import type { Run, SpoolJob, SpoolResult } from './layer/layer-job.ts';
import { LayerPool } from './layer/layer-pool.ts';
import { decodeData, type FileData } from './layer/spool-format.ts';
import { type SpoolTarget, spoolEntries } from './layer/spool-layer.ts';
import { SpoolTails } from './layer/spool-tails.ts';
import type { BuiltLayer, LayerSink } from './layer-sink.ts';
import type { SourceImage, SourceLayer } from './source/image-source.ts';
import { startsGroup } from './tree/collapse-plan.ts';
import { GroupView } from './tree/group-view.ts';
import { OverlayTree } from './tree/overlay-merge.ts';
import { orderOf } from './tree/profile-order.ts';

/** Changes whenever the same input gives other bytes than before: results of older converters are not reused. */
export const CONVERTER_VERSION = 1;

export const DEFAULT_COLLAPSE_LIMIT_BYTES = 3 * 2 ** 30;
/**
 * Ends of files up to this size go into the metadata image. Larger: the image that must be local grows; smaller: more
 * blocks of the data blob are mostly padding. This is the least at which the whole is no larger than what mkfs.erofs makes
 * of the same tree; bench/inline-limit.bench.ts has the sweep.
 */
export const DEFAULT_INLINE_LIMIT_BYTES = 3072;
/** With so many cores or fewer, layers are converted one after the other. */
const QUEUEING_CORES = 2;
/** Bytes of tar for a byte of layer: above this, a stack that becomes two groups after all is written twice. */
const LIKELY_GAIN = 4;
/** A tail must fit into a block behind an inode with a few attributes. */
export const MAX_INLINE_LIMIT_BYTES = 4000;

export interface ConvertOptions {
  /** `data`: groups of layers become EROFS layers with one blob each. `metadata`: one EROFS layer over one blob per layer. */
  readonly collapse?: 'data' | 'metadata';
  readonly collapseLimitBytes?: number;
  readonly inlineLimitBytes?: number;
  readonly compress?: CodecName;
  /** Paths of files that a start reads, in that order: they come first in the data blobs. */
  readonly profile?: readonly ByteString[];
  readonly progress?: Progress;
  readonly signal?: AbortSignal;
  /** The caller's thread has nothing else to do: it may be kept busy for milliseconds at a time (see LayerPoolOptions). */
  readonly here?: boolean;
}

export interface ConvertImageOptions {
  /** Layers before which a group must end: see cutsWhereChainsPart. */
  readonly cuts?: ReadonlySet<number>;
  /** The layers lie over something this conversion does not know: their whiteouts are kept, whatever they hide. */
  readonly unknownBase?: boolean;
}

export interface ConvertedImage {
  /** Bottom first. */
  readonly layers: readonly BuiltLayer[];
  /** Digest of each layer's tar, bottom first; undefined for folders. */
  readonly diffIds: readonly (string | undefined)[];
  readonly stats: ConvertStats;
  /** What was left out or changed, for people. */
  readonly notes: readonly string[];
}

export interface ConvertStats {
  /** Compressed bytes read. */
  readonly bytesIn: number;
  readonly tarBytes: number;
  /** Of all regular files of all layers, holes included. */
  readonly fileBytes: number;
  readonly inodes: number;
  readonly metadataBytes: number;
  readonly dataBytes: number;
}

interface Spool extends SpoolResult {
  /** Whether `.wh.` names in it are whiteouts. */
  readonly isTar: boolean;
  readonly dataPath: string;
  readonly tailPath: string;
  readonly records: readonly FileData[];
  /** Where its data lies with that of other layers. */
  readonly stack: Stack | undefined;
}

interface Stack {
  /** Of all of its data, once all of it is in the file; undefined if it was doomed by then. */
  readonly digests: Promise<BlobDigests | undefined>;
  /** Its file will not be a blob as it is. */
  doom(): void;
}

interface SpoolUse {
  readonly spool: Promise<Spool>;
  /** Images that still need it. */
  uses: number;
}

export class Converter {
  readonly #sink: LayerSink;
  readonly #options: ConvertOptions;
  readonly #progress: Progress;
  readonly #pool: LayerPool;
  readonly #spools = new Map<string, SpoolUse>();
  readonly #groups = new Map<string, Promise<BuiltLayer>>();
  readonly #onAbort = () => void this.#pool.close(abortReason(this.#options.signal));
  #files = 0;

  constructor(sink: LayerSink, options: ConvertOptions = {}) {
    this.#sink = sink;
    this.#options = options;
    this.#pool = new LayerPool({ here: options.here });
    this.#progress = options.progress ?? silent;
    options.signal?.throwIfAborted();
    options.signal?.addEventListener('abort', this.#onAbort);
  }

  /** Starts a worker while the caller still finds out what it has to convert. */
  warm(): void {
    this.#pool.warm();
  }

  /** Tells that `image` will be converted, so that what it shares with others is kept until then. */
  expect(image: SourceImage): void {
    for (const layer of image.layers) {
      const key = keyOf(layer);
      if (key !== undefined) this.#expected.set(key, (this.#expected.get(key) ?? 0) + 1);
    }
  }

  readonly #expected = new Map<string, number>();

  async convert(image: SourceImage, options: ConvertImageOptions = {}): Promise<ConvertedImage> {
    this.#singleLayer = image.layers.length === 1;
    const uses = this.#canQueue(image, options)
      ? this.#useQueue(image.layers)
      : image.layers.map((layer, number) => this.#use(layer, number));
    try {
      return await this.#convert(uses, options);
    } catch (error) {
      if (this.#options.signal?.aborted) throw abortReason(this.#options.signal);
      throw systemCode(error) === 'ENOSPC' ? fail('LAYER_NO_SPACE', { path: this.#sink.workDir }, error) : error;
    } finally {
      await Promise.all(image.layers.map((layer, i) => this.#release(layer, uses[i]!)));
    }
  }

  /** Ends the workers. The files in the sink's work folder are the caller's to remove. */
  async close(): Promise<void> {
    this.#options.signal?.removeEventListener('abort', this.#onAbort);
    await this.#pool.close();
  }

  async #convert(uses: readonly SpoolUse[], options: ConvertImageOptions): Promise<ConvertedImage> {
    const plan = {
      limitBytes:
        this.#options.collapse === 'metadata'
          ? Number.POSITIVE_INFINITY
          : (this.#options.collapseLimitBytes ?? DEFAULT_COLLAPSE_LIMIT_BYTES),
      cuts: options.cuts,
    };
    const tree = new OverlayTree({ unknownBase: options.unknownBase });
    const spools: Spool[] = [];
    const layers: BuiltLayer[] = [];
    let groupBytes = 0;
    let groupStart = 0;
    // A layer that fails must not leave the others' failures unheard.
    for (const use of uses) use.spool.catch(() => {});
    for (let i = 0; i < uses.length; i++) {
      const spool = await uses[i]!.spool;
      if (startsGroup(i, groupBytes, spool.tarBytes, plan)) {
        layers.push(await this.#finishGroup(tree, spools, groupStart, options));
        tree.nextGroup();
        groupBytes = 0;
        groupStart = i;
      }
      groupBytes += spool.tarBytes;
      // Records are numbered by this image's layers, whichever image the spool was made for.
      const records = spool.records.map((record) => (record.layer === i ? record : { ...record, layer: i }));
      spools.push({ ...spool, records });
      tree.apply({
        label: this.#labels.get(uses[i]!) ?? `layer ${i + 1}`,
        index: spool.index,
        data: records,
        whiteoutNames: spool.isTar,
      });
      if (tree.losesData) spool.stack?.doom();
    }
    layers.push(await this.#finishGroup(tree, spools, groupStart, options));
    return {
      layers,
      diffIds: spools.map((s) => s.diffId),
      stats: {
        bytesIn: sum(spools.map((s) => s.blobBytes)),
        tarBytes: sum(spools.map((s) => s.tarBytes)),
        fileBytes: sum(spools.map((s) => s.fileBytes)),
        inodes: sum(layers.map((l) => l.inodes)),
        metadataBytes: sum(layers.map((l) => l.meta.sizeBytes)),
        dataBytes: sum(layers.flatMap((l) => l.devices.map((d) => d.blob.sizeBytes))),
      },
      notes: [...spools.flatMap((s) => s.notes), ...tree.notes],
    };
  }

  // ---- spools

  readonly #labels = new Map<SpoolUse, string>();

  #use(layer: SourceLayer, number: number): SpoolUse {
    const key = keyOf(layer);
    const known = key === undefined ? undefined : this.#spools.get(key);
    if (known !== undefined) {
      known.uses++;
      return known;
    }
    const use: SpoolUse = { spool: this.#spool(layer, number), uses: 1 };
    this.#labels.set(use, layer.label);
    if (key !== undefined) this.#spools.set(key, use);
    return use;
  }

  async #release(layer: SourceLayer, use: SpoolUse): Promise<void> {
    const key = keyOf(layer);
    const left = key === undefined ? 0 : (this.#expected.get(key) ?? 1) - 1;
    if (key !== undefined) this.#expected.set(key, left);
    if (--use.uses > 0 || left > 0) return;
    if (key !== undefined) this.#spools.delete(key);
    this.#labels.delete(use);
    const spool = await use.spool.catch(() => undefined);
    if (spool !== undefined)
      await Promise.all([rm(spool.dataPath, { force: true }), rm(spool.tailPath, { force: true })]);
  }

  async #spool(layer: SourceLayer, number: number): Promise<Spool> {
    const target = this.#target(number, this.#newFile('data'));
    const report = this.#reporter(layer);
    const onProgress = (doneBytes: number) => report('convert', doneBytes);
    report('wait');
    const result = await this.#runSpool(layer, target, onProgress);
    report('done', result.blobBytes, result.blobBytes);
    const isTar = layer.input.kind === 'file' || layer.input.kind === 'stream';
    return this.#spooled(result, target, isTar, undefined);
  }

  #target(layer: number, dataPath: string): SpoolTarget {
    return {
      layer,
      dataPath,
      tailPath: this.#newFile('tails'),
      tailLimitBytes: Math.min(this.#options.inlineLimitBytes ?? DEFAULT_INLINE_LIMIT_BYTES, MAX_INLINE_LIMIT_BYTES),
      codec: this.#options.compress,
      becomesBlob: this.#spoolsBecomeBlobs,
    };
  }

  #reporter(layer: SourceLayer) {
    return (phase: string, doneBytes?: number, totalBytes?: number) =>
      this.#progress({ task: layer.label, phase, doneBytes, totalBytes: totalBytes ?? layer.sizeBytes });
  }

  #spooled(result: SpoolResult, target: SpoolTarget, isTar: boolean, stack: Spool['stack']): Spool {
    const { dataPath, tailPath, layer } = target;
    return { ...result, isTar, dataPath, tailPath, stack, records: decodeData(result.index.data, layer) };
  }

  /**
   * Layers one after the other. Inflating one layer keeps one core busy and what follows another: where there are more, or a layer
   * comes over a network, layers are better converted side by side.
   */
  #canQueue({ layers }: SourceImage, { cuts }: ConvertImageOptions): boolean {
    const { collapseLimitBytes = DEFAULT_COLLAPSE_LIMIT_BYTES, compress } = this.#options;
    if (this.#pool.size > QUEUEING_CORES || sha256Fallback() !== undefined || this.#profile !== undefined) return false;
    if (layers.length < 2 || compress !== undefined || (cuts?.size ?? 0) > 0) return false;
    const keys = layers.map(keyOf);
    const alone = keys.every(
      (key) => key !== undefined && !this.#spools.has(key) && (this.#expected.get(key) ?? 0) <= 1,
    );
    if (!alone || new Set(keys).size < keys.length || layers.some(({ input }) => input.kind !== 'file')) return false;
    return (
      this.#spoolsBecomeBlobs || LIKELY_GAIN * sum(layers.map(({ sizeBytes }) => sizeBytes ?? 0)) <= collapseLimitBytes
    );
  }

  /**
   * Layers that will probably be one group are stacked: their data is in one file that becomes the blob, so that nothing is written
   * twice. What dies in a lower layer makes the blob another one, written anew.
   */
  #useQueue(layers: readonly SourceLayer[]): SpoolUse[] {
    const dataPath = this.#spoolsBecomeBlobs ? undefined : this.#newFile('data');
    const reports = layers.map((layer) => this.#reporter(layer));
    for (const report of reports) report('wait');
    const targets = layers.map((_, number) => this.#target(number, dataPath ?? this.#newFile('data')));
    const jobs = layers.map((layer, number): SpoolJob => {
      const { label, prefix, compression, digest, sizeBytes, diffId, input } = layer;
      if (input.kind !== 'file') throw new Error('only files are queued');
      return { ...targets[number]!, op: 'spool', label, prefix, compression, digest, sizeBytes, diffId, source: input };
    });
    const doomed = new Int32Array(new SharedArrayBuffer(4));
    const running = this.#pool.stack({ op: 'stack', layers: jobs, dataPath, doomed }, (doneBytes, part) =>
      reports[part]!('convert', doneBytes),
    );
    running.digests.catch(() => {});
    const stack: Stack | undefined =
      dataPath === undefined ? undefined : { digests: running.digests, doom: () => Atomics.store(doomed, 0, 1) };
    return layers.map((layer, number) => {
      const spool = running.layers[number]!.then((result) => {
        reports[number]!('done', result.blobBytes, result.blobBytes);
        return this.#spooled(result, targets[number]!, true, stack);
      });
      const use: SpoolUse = { spool, uses: 1 };
      this.#labels.set(use, layer.label);
      this.#spools.set(keyOf(layer)!, use);
      return use;
    });
  }

  #runSpool(layer: SourceLayer, target: SpoolTarget, onProgress: (doneBytes: number) => void) {
    const { input } = layer;
    if (input.kind === 'entries') {
      return spoolEntries(target, async (handler) => {
        const { notes } = await input.read(handler);
        return { diffId: undefined, blobBytes: handler.fileBytes, tarBytes: handler.fileBytes, notes };
      });
    }
    const { label, prefix, compression, digest, sizeBytes, diffId } = layer;
    return this.#pool.spool({
      job: { ...target, op: 'spool', label, prefix, compression, digest, sizeBytes, diffId },
      source: input,
      onProgress,
      isAlone: this.#singleLayer,
    });
  }

  /** Whether data spools will probably be data blobs as they are: then they are hashed while they are written. */
  get #spoolsBecomeBlobs(): boolean {
    if (this.#profile !== undefined) return false;
    return this.#options.collapse === 'metadata' || this.#options.collapseLimitBytes === 0 || this.#singleLayer;
  }

  #singleLayer = false;

  // ---- groups

  #finishGroup(
    tree: OverlayTree,
    spools: readonly Spool[],
    start: number,
    options: ConvertImageOptions,
  ): Promise<BuiltLayer> {
    const ids = spools.map((s) => s.diffId);
    // What a group holds follows from all layers up to its last one, and from where it begins.
    const key = ids.every((id) => id !== undefined) && !options.unknownBase ? `${start}:${ids.join()}` : undefined;
    const known = key === undefined ? undefined : this.#groups.get(key);
    if (known !== undefined) return known;
    const built = this.#buildGroup(tree, spools);
    if (key !== undefined) this.#groups.set(key, built);
    return built;
  }

  async #buildGroup(tree: OverlayTree, spools: readonly Spool[]): Promise<BuiltLayer> {
    // Spools are read from here on: what is stacked has to be in its file.
    await Promise.all(spools.map((spool) => spool.stack?.digests));
    const files = spools.map((s) => ({ path: s.dataPath, dataOffset: s.dataOffset, dataBytes: s.dataBytes }));
    const tails = new SpoolTails(spools.map((spool) => spool.tailPath));
    const metaPath = this.#newFile('meta');
    let publishing: Promise<unknown> | undefined;
    try {
      const writer = new ErofsWriter({
        root: tree.root,
        view: new GroupView(tree.group),
        tails,
        codec: this.#options.compress,
      });
      const placement = this.#place(tree, writer, spools, files);
      this.#progress({ task: 'erofs', phase: 'write', note: `${writer.inodeCount} inodes` });
      const making = await Promise.all(placement.devices.map((device) => this.#buildDevice(device, spools)));
      // The metadata image is made while the disk takes the blobs.
      const published = Promise.all(making.map((device) => device.published));
      published.catch(() => {});
      publishing = published;
      await turn();
      const devices = making.map(({ blob, chunkDigests }) => ({ blob, chunkDigests }));
      const { sizeBytes, hex } = writer.write(
        metaPath,
        placement,
        devices.map((d) => d.blob.digest.slice('sha256:'.length)),
      );
      const meta = { digest: digestFromHex(hex), sizeBytes };
      await this.#sink.putFile(metaPath, meta.digest, sizeBytes);
      await published;
      return { meta, devices, inodes: writer.inodeCount };
    } finally {
      tails.close();
      // Whatever has failed: nobody works with the files any more when this is over.
      await publishing?.catch(() => {});
    }
  }

  get #profile(): readonly ByteString[] | undefined {
    const { profile } = this.#options;
    return profile === undefined || profile.length === 0 ? undefined : profile;
  }

  #place(
    tree: OverlayTree,
    { liveData }: ErofsWriter,
    spools: readonly Spool[],
    files: readonly SpoolFile[],
  ): DataPlacement {
    const order = this.#profile === undefined ? undefined : orderOf(tree, this.#profile);
    if (this.#options.collapse !== 'metadata') return placeInOneBlob(liveData, files, order);
    if (order === undefined) return placeInLayerBlobs(files);
    return placeInOrderedLayerBlobs(
      files,
      spools.map(({ records }) => records),
      order,
    );
  }

  async #buildDevice({ runs }: DataPlacement['devices'][number], spools: readonly Spool[]) {
    const sizeBytes = sum(runs.map((run) => run.length));
    const whole = await this.#wholeFile(runs, spools);
    const path = this.#newFile('blob');
    // The spool stays readable for groups above that link to its files; a second name goes to the sink.
    if (whole !== undefined) await link(whole.path, path);
    const { hex, digests } =
      whole?.digests ?? (await this.#pool.run({ op: 'blob', runs, out: whole === undefined ? path : undefined }));
    const digest = digestFromHex(hex);
    const chunkDigests = Buffer.from(digests);
    return {
      blob: { digest, sizeBytes },
      chunkDigests: { digest: digestOf(chunkDigests), sizeBytes: chunkDigests.length },
      published: Promise.all([this.#sink.putFile(path, digest, sizeBytes), this.#sink.put(chunkDigests)]),
    };
  }

  /** The file that the runs are, from its first to its last byte, if they are one. */
  async #wholeFile(
    runs: readonly Run[],
    spools: readonly Spool[],
  ): Promise<{ readonly path: string; readonly digests: BlobDigests | undefined } | undefined> {
    const [run] = runs;
    if (runs.length !== 1 || run!.offset !== 0) return undefined;
    const parts = spools.filter((spool) => spool.dataPath === run!.path);
    // A later group may have put more behind it.
    const { stack } = parts[0]!;
    const fileBytes = stack === undefined ? parts[0]!.dataBytes : (await stat(run!.path)).size;
    if (fileBytes !== run!.length) return undefined;
    return { path: run!.path, digests: stack === undefined ? parts[0]!.digests : await stack.digests };
  }

  #newFile(kind: string): string {
    return join(this.#sink.workDir, `${kind}-${this.#files++}`);
  }
}

/** What makes two layers the same one, if that can be told beforehand. */
function keyOf(layer: SourceLayer): string | undefined {
  return layer.diffId ?? layer.digest;
}

function sum(numbers: readonly number[]): number {
  return numbers.reduce((a, b) => a + b, 0);
}

function abortReason(signal: AbortSignal | undefined): Error {
  return signal?.reason instanceof Error ? signal.reason : new Error('interrupted');
}
