/**
 * One layer, from its bytes to a spool: read, hash, inflate, hash, parse, write. Everything that is promised about a
 * layer's input is checked here: its size, its digest, its diff_id. Runs in a worker.
 */
import { type BlobDigests, createSha256, type Due, type Sha256 } from '#linux';
import { fail } from '../errors.ts';
import { codecFor } from './cluster-codec.ts';
import { DataFile, directFrom } from './data-file.ts';
import { decompress } from './decompress.ts';
import type { Entry, EntryHandler } from './entry.ts';
import { underPrefix } from './entry-prefix.ts';
import { FileRange } from './file-range.ts';
import { type DataStack, FileSpool, type FileSpoolOptions } from './file-spool.ts';
import { readFolder } from './folder-reader.ts';
import { GzipFile } from './gzip-file.ts';
import type { SpoolJob, SpoolResult, StackJob } from './layer-job.ts';
import type { RecyclingSource } from './prefetch.ts';
import { SpoolIndexWriter } from './spool-format.ts';
import { TarReader } from './tar-reader.ts';

export interface SpoolContext {
  /** The bytes of a `stream` source. */
  openStream(): AsyncIterable<Buffer>;
  /** Bytes of the blob consumed so far. */
  progress(doneBytes: number): void;
  /** Ends it between two pieces of a tar. */
  readonly signal?: AbortSignal | undefined;
}

/** Where a layer's data goes; see FileSpoolOptions. */
export type DataPlace = Pick<FileSpoolOptions, 'into' | 'directFromBytes'>;

export async function spoolLayer(
  job: SpoolJob,
  context: SpoolContext,
  place: DataPlace = { directFromBytes: directFrom(job.sizeBytes ?? 0) },
  input?: TarInput,
): Promise<SpoolResult> {
  const { source } = job;
  if (source.kind === 'folder') {
    return spoolEntries(job, (handler) => spoolFolder(job, source.path, handler, context), place);
  }
  return spoolEntries(
    job,
    (handler) => spoolTar(job, input ?? openTar(job, source, context), handler, context.signal),
    place,
  );
}

/** Layers one after the other. Those with their data in one file: it is a blob as it is if nothing of it dies. */
export async function spoolStack(
  job: StackJob,
  contextOf: (part: number) => SpoolContext,
  onPart: (part: number, result: SpoolResult) => void,
): Promise<BlobDigests | undefined> {
  // Data is seldom less than what it was compressed to.
  const leastBytes = job.layers.reduce((sum, { sizeBytes }) => sum + (sizeBytes ?? 0), 0);
  const inputs = new InputsAhead(job.layers, contextOf);
  try {
    if (job.dataPath === undefined) {
      let bytes = 0;
      for (const [part, layer] of job.layers.entries()) {
        // What goes through the page cache is the beginning of all of them, not of each.
        const place = { directFromBytes: directFrom(leastBytes, bytes) };
        const result = await spoolLayer(layer, contextOf(part), place, inputs.take(part));
        bytes += result.dataBytes;
        onPart(part, result);
      }
      return undefined;
    }
    const isDoomed = () => Atomics.load(job.doomed, 0) !== 0;
    const data = new DataFile(job.dataPath, { hash: true, directFromBytes: directFrom(leastBytes), isDoomed });
    const stack: DataStack = { data, known: new Map() };
    try {
      for (const [part, layer] of job.layers.entries())
        onPart(part, await spoolLayer(layer, contextOf(part), { into: stack }, inputs.take(part)));
      return await data.finish();
    } finally {
      await data.close();
    }
  } finally {
    await inputs.close();
  }
}

/** While one layer is spooled, the next one is inflated as far as memory is set aside for it: it is what a free core can do. */
class InputsAhead {
  readonly #layers: readonly SpoolJob[];
  readonly #contextOf: (part: number) => SpoolContext;
  readonly #opened: TarInput[] = [];
  #next: TarInput | undefined;

  constructor(layers: readonly SpoolJob[], contextOf: (part: number) => SpoolContext) {
    this.#layers = layers;
    this.#contextOf = contextOf;
    this.#next = this.#open(0);
  }

  take(part: number): TarInput | undefined {
    const input = this.#next;
    this.#next = this.#open(part + 1);
    return input;
  }

  #open(part: number): TarInput | undefined {
    const job = this.#layers[part];
    if (job === undefined || job.source.kind === 'folder') return undefined;
    const input = openTar(job, job.source, this.#contextOf(part));
    this.#opened.push(input);
    input.begin();
    return input;
  }

  /** Those that were not spooled to their end. */
  async close(): Promise<void> {
    await Promise.all(this.#opened.map((input) => input.close()));
  }
}

/** What a layer's reader knows about its input when it is done. */
export interface InputFacts {
  readonly diffId: string | undefined;
  readonly blobBytes: number;
  /** Of a tar: its length. Of a folder: the sum of its files. What the collapse plan counts. */
  readonly tarBytes: number;
  readonly notes: readonly string[];
}

export type SpoolTarget = Pick<
  SpoolJob,
  'layer' | 'dataPath' | 'tailPath' | 'tailLimitBytes' | 'codec' | 'becomesBlob'
>;

/** Spools whatever `read` tells its handler. */
export async function spoolEntries(
  target: SpoolTarget,
  read: (handler: SpoolHandler) => Promise<InputFacts>,
  place?: DataPlace,
): Promise<SpoolResult> {
  const codec = target.codec === undefined ? undefined : codecFor(target.codec);
  const files = new FileSpool(target.dataPath, target.tailPath, {
    tailLimitBytes: target.tailLimitBytes,
    codec,
    becomesBlob: target.becomesBlob,
    ...place,
  });
  try {
    const index = new SpoolIndexWriter();
    const handler = new SpoolHandler(target.layer, index, files);
    const facts = await read(handler);
    const { dataOffset, dataBytes, digests } = await files.finish();
    return { index: index.finish(), ...facts, dataOffset, dataBytes, fileBytes: handler.fileBytes, digests };
  } finally {
    await files.close();
  }
}

export class SpoolHandler implements EntryHandler {
  readonly #layer: number;
  readonly #index: SpoolIndexWriter;
  readonly #files: FileSpool;
  #file: Entry | undefined;
  fileBytes = 0;

  constructor(layer: number, index: SpoolIndexWriter, files: FileSpool) {
    this.#layer = layer;
    this.#index = index;
    this.#files = files;
  }

  entry(entry: Entry): void {
    if (entry.kind !== 'file') {
      this.#index.add(entry, undefined);
      return;
    }
    this.#file = entry;
    this.fileBytes += entry.sizeBytes;
    this.#files.begin(entry.sizeBytes);
  }

  data(bytes: Buffer): void {
    this.#files.write(bytes);
  }

  hole(sizeBytes: number): void {
    this.#files.hole(sizeBytes);
  }

  fileEnd(): void {
    const data = this.#files.end(this.#layer, this.#index.dataCount);
    if (data !== undefined && data.id === this.#index.dataCount) this.#index.addData(data);
    this.#index.add(this.#file!, data);
    this.#file = undefined;
  }

  /** See FileSpool.catchUp. */
  catchUp(besides?: readonly Due[]): Promise<void> {
    return this.#files.catchUp(besides);
  }
}

/** A layer's blob and the tar in it. */
class TarInput {
  readonly blob: CountedSource;
  readonly blobHash: Sha256 | undefined;
  readonly #chunks: AsyncGenerator<Buffer>;
  #first: Promise<IteratorResult<Buffer>> | undefined;

  constructor(blob: CountedSource, blobHash: Sha256 | undefined, chunks: AsyncGenerator<Buffer>) {
    this.blob = blob;
    this.blobHash = blobHash;
    this.#chunks = chunks;
  }

  /** Begins to inflate it. What goes wrong is told to who takes the chunks. */
  begin(): void {
    this.#first = this.#chunks.next();
    this.#first.catch(() => {});
  }

  async *chunks(): AsyncGenerator<Buffer> {
    const first = await this.#first;
    if (first?.done === true) return;
    if (first !== undefined) yield first.value;
    yield* this.#chunks;
  }

  async close(): Promise<void> {
    await this.#chunks.return(undefined);
  }
}

function openTar(
  job: SpoolJob,
  source: Exclude<SpoolJob['source'], { kind: 'folder' }>,
  context: SpoolContext,
): TarInput {
  const blobHash = job.digest === undefined ? undefined : createSha256();
  const blob = new CountedSource(
    source.kind === 'file' ? new FileRange(source.path, source.offset, source.sizeBytes) : context.openStream(),
    blobHash,
    context,
    job,
  );
  return new TarInput(blob, blobHash, tarOf(job, source, blob, blobHash));
}

async function* tarOf(
  job: SpoolJob,
  source: Exclude<SpoolJob['source'], { kind: 'folder' }>,
  blob: CountedSource,
  blobHash: Sha256 | undefined,
): AsyncGenerator<Buffer> {
  const file = source.kind === 'file' ? await GzipFile.open(source, job.compression, blobHash) : undefined;
  if (file === undefined) {
    yield* decompress(blob, job.compression, { label: job.label });
  } else {
    blob.readBy(file);
    yield* file.chunks(job.label, () => blob.progress());
  }
}

async function spoolTar(
  job: SpoolJob,
  input: TarInput,
  handler: SpoolHandler,
  signal: AbortSignal | undefined,
): Promise<InputFacts> {
  const { blob, blobHash } = input;
  // A tar that nobody vouches for has nothing to be compared with.
  const tarHash = job.diffId === undefined ? undefined : createSha256();
  const reader = new TarReader(underPrefix(job.prefix, handler), { label: job.label });
  let tarBytes = 0;
  try {
    for await (const chunk of input.chunks()) {
      signal?.throwIfAborted();
      tarBytes += chunk.length;
      reader.push(chunk);
      const dues: Due[] = tarHash === undefined ? [] : [{ stream: tarHash, bytes: chunk }];
      const blobBytes = blobHash === undefined ? undefined : blob.unhashed(chunk.length);
      if (blobBytes !== undefined) dues.push({ stream: blobHash!, bytes: blobBytes });
      const caughtUp = handler.catchUp(dues);
      if (blobBytes !== undefined) blob.hashed(blobBytes.length);
      await caughtUp;
    }
  } finally {
    await input.close();
  }
  reader.end();
  await blob.drain();
  checkSize(job, blob.bytes);
  if (blobHash !== undefined) checkDigest('LAYER_DIGEST', job, blobHash, job.digest!);
  const diffId = tarHash && `sha256:${tarHash.digest().toString('hex')}`;
  if (job.diffId !== diffId) {
    throw fail('LAYER_DIFF_ID', { layer: job.label, expected: job.diffId, actual: diffId });
  }
  return { diffId, blobBytes: blob.bytes, tarBytes, notes: [] };
}

function checkSize(job: SpoolJob, actual: number): void {
  if (job.sizeBytes !== undefined && job.sizeBytes !== actual) {
    throw fail('LAYER_SIZE', { layer: job.label, expected: job.sizeBytes, actual });
  }
}

function checkDigest(code: 'LAYER_DIGEST', job: SpoolJob, hash: Sha256, expected: string): void {
  const actual = `sha256:${hash.digest().toString('hex')}`;
  if (actual !== expected) throw fail(code, { layer: job.label, expected, actual });
}

async function spoolFolder(
  job: SpoolJob,
  path: string,
  handler: SpoolHandler,
  context: SpoolContext,
): Promise<InputFacts> {
  const { notes } = await readFolder(path, underPrefix(job.prefix, handler));
  context.progress(handler.fileBytes);
  return { diffId: undefined, blobBytes: handler.fileBytes, tarBytes: handler.fileBytes, notes };
}

/** Hashes and counts a blob as the decompressor takes it, and lets the rest of it be read when that stopped early. */
class CountedSource implements RecyclingSource {
  readonly #source: RecyclingSource;
  readonly #iterator: AsyncIterator<Buffer>;
  readonly #hash: Sha256 | undefined;
  readonly #context: SpoolContext;
  readonly #job: SpoolJob;
  bytes = 0;
  #done = false;
  #last: Promise<unknown> = Promise.resolve();

  constructor(source: RecyclingSource, hash: Sha256 | undefined, context: SpoolContext, job: SpoolJob) {
    this.#source = source;
    this.#iterator = source[Symbol.asyncIterator]();
    this.#hash = hash;
    this.#context = context;
    this.#job = job;
  }

  /** One at a time: a digest takes its bytes in their order. */
  #next(): Promise<IteratorResult<Buffer>> {
    const step = this.#last.then(() => this.#step());
    this.#last = step.catch(() => {});
    return step;
  }

  async #step(): Promise<IteratorResult<Buffer>> {
    const step = await this.#iterator.next();
    if (step.done) {
      this.#done = true;
      return step;
    }
    await this.#hash?.updateAside(step.value);
    this.bytes += step.value.length;
    if (this.#job.sizeBytes !== undefined && this.bytes > this.#job.sizeBytes) checkSize(this.#job, this.bytes);
    this.#context.progress(this.bytes);
    return step;
  }

  [Symbol.asyncIterator](): AsyncIterator<Buffer> {
    // No `return`: a consumer that stops must not end the source, `drain` still reads it.
    return { next: () => this.#next() };
  }

  recycle(chunk: Buffer): void {
    this.#source.recycle?.(chunk);
  }

  // ---- a file that reads itself

  #file: GzipFile | undefined;

  readBy(file: GzipFile): void {
    this.#file = file;
    this.#done = true;
  }

  progress(): void {
    this.bytes = this.#file!.readBytes;
    this.#context.progress(this.bytes);
  }

  /** Bytes of the blob that its digest has to get by `hashed`; undefined where it gets them by itself. */
  unhashed(mostBytes: number): Buffer | undefined {
    return this.#file?.unhashed(mostBytes);
  }

  hashed(bytes: number): void {
    this.#file!.hashed(bytes);
  }

  async drain(): Promise<void> {
    while (!this.#done) await this.#next();
  }
}
