/**
 * What a start of an image reads: which chunks of its data blobs, in the order of the first touch, and which files those
 * were. A trace is JSON (docs/traces.md), made by `dsec trace`, kept beside the image (trace-store.ts), used to fetch ahead
 * (trace-prefetch.ts) and to lay files out (`dsec convert --profile`).
 *
 * Nothing in it is trusted: it is parsed within bounds, and held against the image that it says it is of. What a wrong one
 * can do is to have the wrong chunks fetched, each verified as ever.
 */
import { type ByteString, byteString, type Digest, fromText, isDigest, messageOf } from '#base';
import { CHUNK_BYTES, type Image } from '../catalog/image.ts';
import { fail } from '../errors.ts';
import { jsonText } from '../reader/format-entry.ts';

export interface TracedBlob {
  readonly digest: Digest;
  readonly sizeBytes: number;
}

export interface TracedChunk {
  /** Index into `blobs`. */
  readonly blob: number;
  readonly chunk: number;
  /** Since the first read of the start. */
  readonly ms: number;
}

export interface TracedFile {
  readonly path: ByteString;
  readonly sizeBytes: number;
  readonly ms: number;
  /** Of the file: [offset, length], by offset. The kernel's read-ahead is in them. */
  readonly ranges: readonly (readonly [number, number])[];
}

export interface Trace {
  /** Manifest digest. */
  readonly image: Digest;
  readonly command: readonly string[];
  readonly blobs: readonly TracedBlob[];
  /** In the order of the first touch, each once. */
  readonly chunks: readonly TracedChunk[];
  /** In the order of the first touch. Files whose bytes all lie in the metadata are not among them. */
  readonly files: readonly TracedFile[];
  /** There were more reads than could be recorded: the end is missing. */
  readonly truncated?: boolean;
}

const FORMAT = 'dsec-trace';
const VERSION = 1;
export const MAX_TRACE_BYTES = 16 * 1024 * 1024;
const MAX_BLOBS = 1024;
const MAX_CHUNKS = 1 << 20;
const MAX_FILES = 1 << 19;
const MAX_PATH_BYTES = 32768;

/** One object; the same trace, the same text. */
export function traceJson(trace: Trace): Record<string, unknown> {
  const { image, command, blobs, chunks, files, truncated } = trace;
  return {
    format: FORMAT,
    version: VERSION,
    image,
    command,
    ...(truncated ? { truncated } : {}),
    blobs: blobs.map(({ digest, sizeBytes }) => ({ digest, sizeBytes })),
    chunks: chunks.map(({ blob, chunk, ms }) => [blob, chunk, ms]),
    files: files.map(({ path, sizeBytes, ms, ranges }) => ({ ...jsonText('path', path), sizeBytes, ms, ranges })),
  };
}

/** @throws TRACE_TOO_LARGE */
export function formatTrace(trace: Trace, name: string): Buffer {
  const bytes = Buffer.from(`${JSON.stringify(traceJson(trace))}\n`);
  checkSize(name, bytes.length);
  return bytes;
}

/** @throws TRACE_TOO_LARGE */
export function checkSize(name: string, sizeBytes: number): void {
  if (sizeBytes > MAX_TRACE_BYTES) throw fail('TRACE_TOO_LARGE', { name, sizeBytes, limit: MAX_TRACE_BYTES });
}

/** @param name For messages. @throws TRACE_DAMAGED, TRACE_TOO_LARGE */
export function parseTrace(bytes: Buffer, name: string): Trace {
  checkSize(name, bytes.length);
  let value: unknown;
  try {
    value = JSON.parse(bytes.toString('utf8'));
  } catch (error) {
    throw fail('TRACE_DAMAGED', { name, problem: `it is not JSON: ${messageOf(error)}` }, error);
  }
  return traceFrom(value, name);
}

/** @throws TRACE_DAMAGED */
export function traceFrom(value: unknown, name: string): Trace {
  const damaged = (problem: string) => fail('TRACE_DAMAGED', { name, problem });
  if (!isObject(value) || value.format !== FORMAT) throw damaged(`it does not say "format":"${FORMAT}"`);
  if (value.version !== VERSION) throw damaged(`version ${String(value.version)}; this program reads ${VERSION}`);
  const { image, command, truncated } = value;
  if (!isDigest(image)) throw damaged('image is no digest');
  if (!isListOf(command, (word) => typeof word === 'string')) throw damaged('command is no list of texts');
  const list = (field: string, most: number): unknown[] => {
    const found = value[field];
    if (!Array.isArray(found)) throw damaged(`${field} is no list`);
    if (found.length > most) throw damaged(`${field} has ${found.length} entries, more than ${most}`);
    return found;
  };
  const blobs = list('blobs', MAX_BLOBS).map((blob, i): TracedBlob => {
    if (!isObject(blob) || !isDigest(blob.digest) || !isCount(blob.sizeBytes)) throw damaged(`blobs[${i}]`);
    return { digest: blob.digest, sizeBytes: blob.sizeBytes };
  });
  const seen = new Set<string>();
  const chunks = list('chunks', MAX_CHUNKS).map((entry, i): TracedChunk => {
    if (!Array.isArray(entry) || entry.length !== 3) throw damaged(`chunks[${i}] is not [blob, chunk, ms]`);
    const [blob, chunk, ms] = entry as unknown[];
    const of = isCount(blob) ? blobs[blob] : undefined;
    if (of === undefined || !isCount(chunk) || chunk * CHUNK_BYTES >= of.sizeBytes || !isTime(ms)) {
      throw damaged(`chunks[${i}] lies in none of its blobs`);
    }
    const key = `${blob as number}/${chunk}`;
    if (seen.has(key)) throw damaged(`chunks[${i}] is there twice`);
    seen.add(key);
    return { blob: blob as number, chunk, ms };
  });
  const files = list('files', MAX_FILES).map((file, i): TracedFile => {
    if (!isObject(file) || typeof file.path !== 'string' || !isCount(file.sizeBytes) || !isTime(file.ms)) {
      throw damaged(`files[${i}]`);
    }
    const { path: text, pathBase64, sizeBytes, ms, ranges } = file;
    const path = typeof pathBase64 === 'string' ? byteString(Buffer.from(pathBase64, 'base64')) : fromText(text);
    if (!path.startsWith('/') || path.length > MAX_PATH_BYTES) throw damaged(`files[${i}] has no path`);
    const inFile = (range: unknown) =>
      isListOf(range, isCount) && range.length === 2 && range[0]! + range[1]! <= (sizeBytes as number);
    if (!isListOf(ranges, inFile)) throw damaged(`files[${i}] has ranges that it does not hold`);
    return { path, sizeBytes, ms, ranges: ranges as [number, number][] };
  });
  return { image, command: command as string[], blobs, chunks, files, ...(truncated === true ? { truncated } : {}) };
}

/**
 * The trace must be of this image and of its blobs.
 * @throws TRACE_OTHER_IMAGE
 */
export function checkTraceOf(trace: Trace, image: Image, name: string): void {
  const wrong = (problem: string) => fail('TRACE_OTHER_IMAGE', { name, image: image.name, problem });
  if (trace.image !== image.manifestDigest)
    throw wrong(`it is of ${trace.image}, the image is ${image.manifestDigest}`);
  const sizes = new Map(image.layers.flatMap(({ devices }) => devices.map(({ blob }) => [blob.digest, blob.size])));
  for (const { digest, sizeBytes } of trace.blobs) {
    if (sizes.get(digest) === sizeBytes) continue;
    throw wrong(`it names blob ${digest} of ${sizeBytes} bytes, which the image does not have`);
  }
}

/** Bytes of the chunks of a trace. */
export function tracedBytes({ blobs, chunks }: Trace): number {
  return chunks.reduce((sum, { blob, chunk }) => sum + chunkBytes(blobs[blob]!, chunk), 0);
}

export function chunkBytes({ sizeBytes }: TracedBlob, chunk: number): number {
  return Math.min(CHUNK_BYTES, sizeBytes - chunk * CHUNK_BYTES);
}

function isObject(value: unknown): value is Record<string, unknown> {
  return typeof value === 'object' && value !== null && !Array.isArray(value);
}

function isListOf<T>(value: unknown, holds: ((one: unknown) => one is T) | ((one: unknown) => boolean)): value is T[] {
  return Array.isArray(value) && value.every((one) => holds(one));
}

function isCount(value: unknown): value is number {
  return typeof value === 'number' && Number.isSafeInteger(value) && value >= 0;
}

function isTime(value: unknown): value is number {
  return typeof value === 'number' && Number.isFinite(value) && value >= 0;
}
