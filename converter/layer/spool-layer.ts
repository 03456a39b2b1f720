/**
 * One layer, from its bytes to a spool: read, hash, inflate, hash, parse, write. Everything that is promised about a
 * layer's input is checked here: its size, its digest, its diff_id. Runs in a worker.
 */
import { createHash, type Hash } from 'node:crypto';
import { open } from 'node:fs/promises';
import { fail } from '../errors.ts';
import { codecFor } from './cluster-codec.ts';
import { decompress } from './decompress.ts';
import type { Entry, EntryHandler } from './entry.ts';
import { underPrefix } from './entry-prefix.ts';
import { FileSpool } from './file-spool.ts';
import { readFolder } from './folder-reader.ts';
import type { SpoolJob, SpoolResult } from './layer-job.ts';
import { SpoolIndexWriter } from './spool-format.ts';
import { TarReader } from './tar-reader.ts';

const READ_BYTES = 2 << 20;

export interface SpoolContext {
  /** The bytes of a `stream` source. */
  openStream(): AsyncIterable<Buffer>;
  /** Bytes of the blob consumed so far. */
  progress(doneBytes: number): void;
  /** How much of the data spool will not change any more: for whoever hashes it alongside. */
  settled?(dataBytes: number): void;
}

export async function spoolLayer(job: SpoolJob, context: SpoolContext): Promise<SpoolResult> {
  const { source } = job;
  if (source.kind === 'folder') return spoolEntries(job, (handler) => spoolFolder(job, source.path, handler, context));
  return spoolEntries(
    job,
    (handler) => spoolTar(job, source, handler, context),
    (bytes) => context.settled?.(bytes),
  );
}

/** What a layer's reader knows about its input when it is done. */
export interface InputFacts {
  readonly diffId: string | undefined;
  readonly blobBytes: number;
  /** Of a tar: its length. Of a folder: the sum of its files. What the collapse plan counts. */
  readonly tarBytes: number;
  readonly notes: readonly string[];
}

export type SpoolTarget = Pick<SpoolJob, 'layer' | 'dataPath' | 'tailPath' | 'tailLimitBytes' | 'codec'>;

/** Spools whatever `read` tells its handler. */
export async function spoolEntries(
  target: SpoolTarget,
  read: (handler: EntryHandler & { readonly fileBytes: number }) => Promise<InputFacts>,
  onSettled?: (bytes: number) => void,
): Promise<SpoolResult> {
  const codec = target.codec === undefined ? undefined : codecFor(target.codec);
  const files = new FileSpool(target.dataPath, target.tailPath, {
    tailLimitBytes: target.tailLimitBytes,
    codec,
    onSettled,
  });
  try {
    const index = new SpoolIndexWriter();
    const handler = new SpoolHandler(target.layer, index, files);
    const facts = await read(handler);
    const { dataBytes } = files.finish();
    return { index: index.finish(), ...facts, dataBytes, fileBytes: handler.fileBytes };
  } finally {
    files.close();
  }
}

class SpoolHandler implements EntryHandler {
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
}

async function spoolTar(
  job: SpoolJob,
  source: Exclude<SpoolJob['source'], { kind: 'folder' }>,
  handler: EntryHandler,
  context: SpoolContext,
): Promise<InputFacts> {
  const blobHash = job.digest === undefined ? undefined : createHash('sha256');
  const blob = new CountedSource(
    source.kind === 'file' ? readFileRange(source.path, source.offset, source.sizeBytes) : context.openStream(),
    blobHash,
    context,
    job,
  );
  // A tar that nobody vouches for has nothing to be compared with.
  const tarHash = job.diffId === undefined ? undefined : createHash('sha256');
  const reader = new TarReader(underPrefix(job.prefix, handler), { label: job.label });
  let tarBytes = 0;
  for await (const chunk of decompress(blob, job.compression, { label: job.label })) {
    tarHash?.update(chunk);
    tarBytes += chunk.length;
    reader.push(chunk);
  }
  reader.end();
  await blob.drain();
  checkSize(job, blob.bytes);
  if (blobHash !== undefined) checkDigest('LAYER_DIGEST', job, blobHash, job.digest!);
  const diffId = tarHash && `sha256:${tarHash.digest('hex')}`;
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

function checkDigest(code: 'LAYER_DIGEST', job: SpoolJob, hash: Hash, expected: string): void {
  const actual = `sha256:${hash.digest('hex')}`;
  if (actual !== expected) throw fail(code, { layer: job.label, expected, actual });
}

async function spoolFolder(
  job: SpoolJob,
  path: string,
  handler: EntryHandler & { readonly fileBytes: number },
  context: SpoolContext,
): Promise<InputFacts> {
  const { notes } = await readFolder(path, underPrefix(job.prefix, handler));
  context.progress(handler.fileBytes);
  return { diffId: undefined, blobBytes: handler.fileBytes, tarBytes: handler.fileBytes, notes };
}

/** Hashes and counts a blob as the decompressor takes it, and lets the rest of it be read when that stopped early. */
class CountedSource implements AsyncIterable<Buffer> {
  readonly #iterator: AsyncIterator<Buffer>;
  readonly #hash: Hash | undefined;
  readonly #context: SpoolContext;
  readonly #job: SpoolJob;
  bytes = 0;
  #done = false;

  constructor(source: AsyncIterable<Buffer>, hash: Hash | undefined, context: SpoolContext, job: SpoolJob) {
    this.#iterator = source[Symbol.asyncIterator]();
    this.#hash = hash;
    this.#context = context;
    this.#job = job;
  }

  async #next(): Promise<IteratorResult<Buffer>> {
    const step = await this.#iterator.next();
    if (step.done) {
      this.#done = true;
      return step;
    }
    this.#hash?.update(step.value);
    this.bytes += step.value.length;
    if (this.#job.sizeBytes !== undefined && this.bytes > this.#job.sizeBytes) checkSize(this.#job, this.bytes);
    this.#context.progress(this.bytes);
    return step;
  }

  [Symbol.asyncIterator](): AsyncIterator<Buffer> {
    // No `return`: a consumer that stops must not end the source, `drain` still reads it.
    return { next: () => this.#next() };
  }

  async drain(): Promise<void> {
    while (!this.#done) await this.#next();
  }
}

/** A part of a file, the next block always on its way. @throws LAYER_SIZE when the file is shorter. */
export async function* readFileRange(path: string, offset: number, sizeBytes: number): AsyncGenerator<Buffer> {
  const file = await open(path, 'r');
  try {
    let position = 0;
    const readNext = () => {
      const length = Math.min(READ_BYTES, sizeBytes - position);
      const at = offset + position;
      position += length;
      return length === 0 ? undefined : file.read(Buffer.allocUnsafe(length), 0, length, at);
    };
    let pending = readNext();
    while (pending !== undefined) {
      const { bytesRead, buffer } = await pending;
      if (bytesRead < buffer.length) {
        const end = position - buffer.length + bytesRead;
        if (bytesRead === 0) throw fail('LAYER_SIZE', { layer: path, expected: sizeBytes, actual: end });
        position = end;
      }
      pending = readNext();
      yield bytesRead < buffer.length ? buffer.subarray(0, bytesRead) : buffer;
    }
  } finally {
    await file.close();
  }
}
