/**
 * From an image to EROFS layers: the main flow of the converter.
 *
 *   layers -> spools (in parallel: read, verify, inflate, parse)        layer/spool-layer.ts
 *          -> one tree, layer by layer, cut into groups                 tree/overlay-merge.ts, tree/collapse-plan.ts
 *          -> per group: live data -> blob and digests                  erofs/data-blob.ts, layer/hash-runs.ts
 *                        metadata image                                 erofs/writer.ts
 *          -> the sink
 *
 * A `Converter` remembers spools and groups, so that images converted by the same one do shared work once.
 */

import { closeSync, openSync, readSync } from 'node:fs';
import { link, rm } from 'node:fs/promises';
import { join } from 'node:path';
import { digestFromHex, digestOf, type Progress, silent, systemCode } from '#base';
import { type DataPlacement, placeInLayerBlobs, placeInOneBlob } from './erofs/data-blob.ts';
import { ErofsWriter, type TailReader } from './erofs/writer.ts';
import { fail } from './errors.ts';
import type { CodecName } from './layer/cluster-codec.ts';
import type { FollowResult, Run, SpoolResult } from './layer/layer-job.ts';
import { LayerPool } from './layer/layer-pool.ts';
import { decodeData, type FileData } from './layer/spool-format.ts';
import { type SpoolTarget, spoolEntries } from './layer/spool-layer.ts';
import type { BuiltLayer, LayerSink } from './layer-sink.ts';
import type { SourceImage, SourceLayer } from './source/image-source.ts';
import { startsGroup } from './tree/collapse-plan.ts';
import { GroupView } from './tree/group-view.ts';
import { OverlayTree } from './tree/overlay-merge.ts';

/** Changes whenever the same input gives other bytes than before: results of older converters are not reused. */
export const CONVERTER_VERSION = 1;

export const DEFAULT_COLLAPSE_LIMIT_BYTES = 3 * 2 ** 30;
/**
 * Ends of files up to this size go into the metadata image. Larger: the image that must be local grows; smaller: more
 * blocks of the data blob are mostly padding. This is the least at which the whole is no larger than what mkfs.erofs makes
 * of the same tree; bench/inline-limit.bench.ts has the sweep.
 */
export const DEFAULT_INLINE_LIMIT_BYTES = 3072;
/** A tail must fit into a block behind an inode with a few attributes. */
export const MAX_INLINE_LIMIT_BYTES = 4000;

export interface ConvertOptions {
  /** `data`: groups of layers become EROFS layers with one blob each. `metadata`: one EROFS layer over one blob per layer. */
  readonly collapse?: 'data' | 'metadata';
  readonly collapseLimitBytes?: number;
  readonly inlineLimitBytes?: number;
  readonly compress?: CodecName;
  readonly progress?: Progress;
  readonly signal?: AbortSignal;
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
  /** Of the data spool as a whole, where it was hashed while it was written. */
  readonly digests: FollowResult | undefined;
  readonly dataPath: string;
  readonly tailPath: string;
  readonly records: readonly FileData[];
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
  readonly #pool = new LayerPool();
  readonly #spools = new Map<string, SpoolUse>();
  readonly #groups = new Map<string, Promise<BuiltLayer>>();
  readonly #onAbort = () => void this.#pool.close(abortReason(this.#options.signal));
  #files = 0;

  constructor(sink: LayerSink, options: ConvertOptions = {}) {
    this.#sink = sink;
    this.#options = options;
    this.#progress = options.progress ?? silent;
    options.signal?.throwIfAborted();
    options.signal?.addEventListener('abort', this.#onAbort);
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
    const uses = image.layers.map((layer, number) => this.#use(layer, number));
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
    const id = this.#files++;
    const dataPath = join(this.#sink.workDir, `layer-${id}.data`);
    const tailPath = join(this.#sink.workDir, `layer-${id}.tails`);
    const target = {
      layer: number,
      dataPath,
      tailPath,
      tailLimitBytes: Math.min(this.#options.inlineLimitBytes ?? DEFAULT_INLINE_LIMIT_BYTES, MAX_INLINE_LIMIT_BYTES),
      codec: this.#options.compress,
    };
    const report = (phase: string, doneBytes?: number, totalBytes?: number) =>
      this.#progress({ task: layer.label, phase, doneBytes, totalBytes: totalBytes ?? layer.sizeBytes });
    const onProgress = (doneBytes: number) => report('convert', doneBytes);
    report('wait');
    const result = await this.#runSpool(layer, target, onProgress);
    report('done', result.blobBytes, result.blobBytes);
    const isTar = layer.input.kind === 'file' || layer.input.kind === 'stream';
    return { ...result, isTar, dataPath, tailPath, records: decodeData(result.index.data, number) };
  }

  #runSpool(layer: SourceLayer, target: SpoolTarget, onProgress: (doneBytes: number) => void) {
    const { input } = layer;
    if (input.kind === 'entries') {
      return spoolEntries(target, async (handler) => {
        const { notes } = await input.read(handler);
        return { diffId: undefined, blobBytes: handler.fileBytes, tarBytes: handler.fileBytes, notes };
      }).then((result) => ({ ...result, digests: undefined }));
    }
    const { label, prefix, compression, digest, sizeBytes, diffId } = layer;
    return this.#pool.spool({
      job: { ...target, op: 'spool', label, prefix, compression, digest, sizeBytes, diffId },
      source: input,
      follow: this.#spoolsBecomeBlobs,
      onProgress,
    });
  }

  /** Whether data spools will probably be data blobs as they are: then they are hashed while they are written. */
  get #spoolsBecomeBlobs(): boolean {
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
    const files = spools.map((s) => ({ path: s.dataPath, dataBytes: s.dataBytes }));
    const tails = new SpoolTails(spools);
    const metaPath = this.#newFile('meta');
    try {
      const writer = new ErofsWriter({
        root: tree.root,
        view: new GroupView(tree.group),
        tails,
        codec: this.#options.compress,
      });
      const placement =
        this.#options.collapse === 'metadata' ? placeInLayerBlobs(files) : placeInOneBlob(writer.liveData, files);
      this.#progress({ task: 'erofs', phase: 'write', note: `${writer.inodeCount} inodes` });
      const devices = await Promise.all(placement.devices.map((device) => this.#buildDevice(device, spools)));
      const { sizeBytes, hex } = writer.write(
        metaPath,
        placement,
        devices.map((d) => d.blob.digest.slice('sha256:'.length)),
      );
      const meta = { digest: digestFromHex(hex), sizeBytes };
      await this.#sink.putFile(metaPath, meta.digest, sizeBytes);
      return { meta, devices, inodes: writer.inodeCount };
    } finally {
      tails.close();
    }
  }

  async #buildDevice({ runs }: DataPlacement['devices'][number], spools: readonly Spool[]) {
    const sizeBytes = sum(runs.map((run) => run.length));
    const [run] = runs;
    const whole =
      runs.length === 1 && run!.offset === 0
        ? spools.find((spool) => spool.dataPath === run!.path && spool.dataBytes === sizeBytes)
        : undefined;
    const path = this.#newFile('blob');
    // The spool stays readable for groups above that link to its files; a second name goes to the sink.
    if (whole !== undefined) await link(whole.dataPath, path);
    const { hex, digests } = whole?.digests ?? (await this.#hash(runs, whole === undefined ? path : undefined));
    const digest = digestFromHex(hex);
    await this.#sink.putFile(path, digest, sizeBytes);
    const chunkDigests = Buffer.from(digests);
    await this.#sink.put(chunkDigests);
    return {
      blob: { digest, sizeBytes },
      chunkDigests: { digest: digestOf(chunkDigests), sizeBytes: chunkDigests.length },
    };
  }

  async #hash(runs: readonly Run[], out: string | undefined): Promise<FollowResult> {
    const [hex, { digests }] = await Promise.all([
      this.#pool.run({ op: 'digest', runs }),
      this.#pool.run({ op: 'chunks', runs, out }),
    ]);
    return { hex, digests };
  }

  #newFile(kind: string): string {
    return join(this.#sink.workDir, `${kind}-${this.#files++}`);
  }
}

/** What makes two layers the same one, if that can be told beforehand. */
function keyOf(layer: SourceLayer): string | undefined {
  return layer.diffId ?? layer.digest;
}

/** Inline tails, read from the spools in blocks: they lie there in the order of the layer, which is nearly that of the tree. */
class SpoolTails implements TailReader {
  static readonly #BLOCK_BYTES = 1 << 16;
  static readonly #MAX_BLOCKS = 256;
  readonly #spools: readonly Spool[];
  readonly #fds = new Map<string, number>();
  readonly #blocks = new Map<string, Buffer>();

  constructor(spools: readonly Spool[]) {
    this.#spools = spools;
  }

  read(data: FileData, into: Buffer): void {
    const path = this.#spools[data.layer]!.tailPath;
    for (let done = 0; done < into.length; ) {
      const position = data.tailOffset + done;
      const block = this.#block(path, Math.floor(position / SpoolTails.#BLOCK_BYTES));
      const from = position % SpoolTails.#BLOCK_BYTES;
      const n = block.copy(into, done, from, Math.min(block.length, from + into.length - done));
      if (n === 0) throw new Error(`${path} ends early`);
      done += n;
    }
  }

  #block(path: string, number: number): Buffer {
    const key = `${path}:${number}`;
    const known = this.#blocks.get(key);
    if (known !== undefined) return known;
    let fd = this.#fds.get(path);
    if (fd === undefined) {
      fd = openSync(path, 'r');
      this.#fds.set(path, fd);
    }
    const bytes = Buffer.allocUnsafe(SpoolTails.#BLOCK_BYTES);
    const n = readSync(fd, bytes, 0, bytes.length, number * bytes.length);
    if (this.#blocks.size >= SpoolTails.#MAX_BLOCKS) this.#blocks.delete(this.#blocks.keys().next().value!);
    const block = bytes.subarray(0, n);
    this.#blocks.set(key, block);
    return block;
  }

  close(): void {
    for (const fd of this.#fds.values()) closeSync(fd);
  }
}

function sum(numbers: readonly number[]): number {
  return numbers.reduce((a, b) => a + b, 0);
}

function abortReason(signal: AbortSignal | undefined): Error {
  return signal?.reason instanceof Error ? signal.reason : new Error('interrupted');
}
