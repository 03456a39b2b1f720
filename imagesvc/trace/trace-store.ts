/**
 * Where traces are kept: each is a blob, and a record `trace/<manifest hex>.<blob hex>.<name>` says of which image it is. The
 * key alone says it all, so that one listing tells what an image has, and what garbage collection must keep; the record's
 * value is a summary for people.
 *
 * A trace goes with its image: `sync` copies it, `rm` and `gc` delete it when the image's manifest is deleted.
 */
import { type Digest, digestFromHex, hexOf, inParallel, isDsecError } from '#base';
import type { Image } from '../catalog/image.ts';
import { fail } from '../errors.ts';
import type { BlobStore } from '../store/blob-store.ts';
import { mergeTraces } from './merge-traces.ts';
import { checkSize, checkTraceOf, formatTrace, parseTrace, type Trace, tracedBytes } from './trace.ts';
import { isTraceName, TRACE_RECORDS } from './trace-name.ts';

export { TRACE_RECORDS };

/** Traces of an image that are used together: so many, of so many bytes. A parsed trace takes several times its size. */
export const MOST_USED = 16;
const MOST_USED_BYTES = 64 * 1024 * 1024;
const RECORDS_AT_ONCE = 8;

/** What is said of a kept trace without reading it. */
export interface TraceSummary {
  readonly chunks: number;
  readonly bytes: number;
  readonly files: number;
  readonly command: readonly string[];
}

export interface KeptTrace {
  readonly name: string;
  /** Of the trace itself. */
  readonly digest: Digest;
  readonly key: string;
  readonly manifest: Digest;
}

export interface TraceRow extends Partial<TraceSummary> {
  readonly name: string;
  readonly digest: Digest;
}

const KEY = /^([0-9a-f]{64})\.([0-9a-f]{64})\.([a-z0-9.-]+)$/;

/** @throws TRACE_NAME */
export function checkTraceName(name: string): string {
  if (!isTraceName(name)) throw fail('TRACE_NAME', { name });
  return name;
}

/** Undefined when it is not one of ours. */
export function parseTraceKey(key: string): KeptTrace | undefined {
  const parts = KEY.exec(key);
  if (parts === null || !isTraceName(parts[3])) return undefined;
  return { key, manifest: digestFromHex(parts[1]!), digest: digestFromHex(parts[2]!), name: parts[3]! };
}

/** What a record says, as far as it says it rightly. */
function summaryFrom(record: unknown): Partial<TraceSummary> {
  const said = (typeof record === 'object' && record !== null ? record : {}) as Record<string, unknown>;
  const count = (value: unknown) =>
    Number.isSafeInteger(value) && (value as number) >= 0 ? (value as number) : undefined;
  const isWords = (value: unknown): value is string[] =>
    Array.isArray(value) && value.every((word) => typeof word === 'string');
  const { chunks, bytes, files, command } = said;
  return {
    chunks: count(chunks),
    bytes: count(bytes),
    files: count(files),
    command: isWords(command) ? command : undefined,
  };
}

/** All traces of all images, or of one. Two of one image have the same name when they were kept at the same moment: see `oneOfEach`. */
export async function keptTraces(store: BlobStore, manifest?: Digest): Promise<KeptTrace[]> {
  const keys = await store.listRecords(TRACE_RECORDS, manifest === undefined ? '' : `${hexOf(manifest)}.`);
  return keys
    .flatMap((key) => parseTraceKey(key) ?? [])
    .sort((a, b) => (a.name === b.name ? (a.key < b.key ? -1 : 1) : a.name < b.name ? -1 : 1));
}

/** Of traces of one image, one of each name. */
function oneOfEach(kept: readonly KeptTrace[]): KeptTrace[] {
  return kept.filter(({ name }, i) => kept.findIndex((one) => one.name === name) === i);
}

/** As many as are used at once: the latest, by name. What nobody knows the time of is older than the rest. */
export async function latestKept(store: BlobStore, kept: readonly KeptTrace[]): Promise<KeptTrace[]> {
  const each = oneOfEach(kept);
  if (each.length <= MOST_USED) return each;
  const times = new Map<KeptTrace, number>();
  await inParallel(each, RECORDS_AT_ONCE, async (one) => {
    times.set(one, keptMsOf(await store.getRecord(TRACE_RECORDS, one.key)));
  });
  const latest = new Set([...each].sort((a, b) => times.get(b)! - times.get(a)!).slice(0, MOST_USED));
  return each.filter((one) => latest.has(one));
}

function keptMsOf(record: unknown): number {
  const { keptMs } = (typeof record === 'object' && record !== null ? record : {}) as { keptMs?: unknown };
  return typeof keptMs === 'number' && Number.isFinite(keptMs) ? keptMs : 0;
}

/** With what can be said of each, by name. */
export async function listTraces(store: BlobStore, manifest: Digest): Promise<TraceRow[]> {
  const rows: TraceRow[] = [];
  for (const { name, digest, key } of oneOfEach(await keptTraces(store, manifest))) {
    rows.push({ name, digest, ...summaryFrom(await store.getRecord(TRACE_RECORDS, key)) });
  }
  return rows;
}

/**
 * Keeps a trace under a name, which it takes from whatever had it.
 * @throws TRACE_NAME, TRACE_TOO_LARGE, TRACE_OTHER_IMAGE, STORE_NO_WRITES
 */
export async function keepTrace(store: BlobStore, image: Image, name: string, trace: Trace): Promise<TraceRow> {
  checkTraceName(name);
  checkTraceOf(trace, image, name);
  const bytes = formatTrace(trace, name);
  const { chunks, files, command } = trace;
  const summary: TraceSummary = { chunks: chunks.length, bytes: tracedBytes(trace), files: files.length, command };
  // What is put from here on is left alone by garbage collection until the record says whose it is.
  const staging = await store.stage();
  try {
    // Those from before alone: of two that are kept at the same moment, each would remove the other.
    const before = (await keptTraces(store, image.manifestDigest)).filter((old) => old.name === name);
    const digest = await store.put(bytes);
    const key = `${hexOf(image.manifestDigest)}.${hexOf(digest)}.${name}`;
    await store.putRecord(TRACE_RECORDS, key, { ...summary, keptMs: Date.now() });
    for (const old of before) if (old.key !== key) await dropTrace(store, old);
    return { name, digest, ...summary };
  } finally {
    await staging.remove();
  }
}

/** @throws TRACE_NOT_FOUND, TRACE_DAMAGED, TRACE_OTHER_IMAGE, TRACE_TOO_LARGE */
export async function readTrace(store: BlobStore, image: Image, name: string): Promise<Trace> {
  const kept = (await keptTraces(store, image.manifestDigest)).find((one) => one.name === name);
  if (kept === undefined) throw fail('TRACE_NOT_FOUND', { image: image.name, name });
  return readKept(store, image, kept);
}

async function readKept(store: BlobStore, image: Image, { name, digest }: KeptTrace): Promise<Trace> {
  const label = `trace ${name} of ${image.name}`;
  const found = await store.stat(digest);
  if (found === undefined) throw fail('TRACE_DAMAGED', { name: label, problem: `blob ${digest} is gone` });
  checkSize(label, found.sizeBytes);
  let bytes: Buffer;
  try {
    bytes = await store.readVerified(digest);
  } catch (error) {
    if (!isDsecError(error, 'STORE_DIGEST_MISMATCH')) throw error;
    throw fail('TRACE_DAMAGED', { name: label, problem: `its bytes are not those of ${digest}` }, error);
  }
  const trace = parseTrace(bytes, label);
  checkTraceOf(trace, image, label);
  return trace;
}

/**
 * The traces of the image as one, of many the latest; undefined when there is none.
 * @param onProblem Told of each that cannot be read, which is left out; without it the error is thrown.
 */
export async function mergedTrace(
  store: BlobStore,
  image: Image,
  onProblem?: (error: unknown) => void,
): Promise<Trace | undefined> {
  const kept = await withinBytes(store, await latestKept(store, await keptTraces(store, image.manifestDigest)));
  const traces = await Promise.all(
    kept.map((one) =>
      readKept(store, image, one).catch((error: unknown) => {
        if (onProblem === undefined) throw error;
        onProblem(error);
        return undefined;
      }),
    ),
  );
  const whole = traces.filter((trace) => trace !== undefined);
  return whole.length === 0 ? undefined : mergeTraces(whole);
}

/** As many from the first on as the bound allows; the first in any case, which has one of its own. */
async function withinBytes(store: BlobStore, kept: readonly KeptTrace[]): Promise<KeptTrace[]> {
  const sizes = await Promise.all(kept.map(async ({ digest }) => (await store.stat(digest))?.sizeBytes ?? 0));
  let bytes = 0;
  return kept.filter((_, i) => {
    bytes += sizes[i]!;
    return i === 0 || bytes <= MOST_USED_BYTES;
  });
}

/** All traces of the image as one. @throws TRACE_NONE, and what readTrace throws */
export async function traceOf(store: BlobStore, image: Image): Promise<Trace> {
  const trace = await mergedTrace(store, image);
  if (trace === undefined) throw fail('TRACE_NONE', { image: image.name });
  return trace;
}

/** @throws TRACE_NOT_FOUND */
export async function removeTrace(store: BlobStore, image: Image, name: string): Promise<void> {
  const found = (await keptTraces(store, image.manifestDigest)).filter((one) => one.name === name);
  if (found.length === 0) throw fail('TRACE_NOT_FOUND', { image: image.name, name });
  for (const one of found) await dropTrace(store, one);
}

/** The record; garbage collection takes the blob, which two images may have in common. */
async function dropTrace(store: BlobStore, { key }: KeptTrace): Promise<void> {
  await store.deleteRecord(TRACE_RECORDS, key);
}

/** Into another store, which has the image. `kept`: traces of it. Returns how many were not there. */
export async function copyTraces(
  from: BlobStore,
  to: BlobStore,
  image: Image,
  kept: readonly KeptTrace[],
  onProblem: (name: string, error: unknown) => void,
): Promise<number> {
  if (kept.length === 0) return 0;
  let copied = 0;
  const there = new Set((await keptTraces(to, image.manifestDigest)).map(({ key }) => key));
  for (const one of oneOfEach(kept)) {
    try {
      if (there.has(one.key) && (await to.stat(one.digest)) !== undefined) continue;
      await keepTrace(to, image, one.name, await readKept(from, image, one));
      copied++;
    } catch (error) {
      // A trace saves time; a damaged one must not keep the image from being copied.
      if (!isDsecError(error) || !error.code.startsWith('TRACE_')) throw error;
      onProblem(one.name, error);
    }
  }
  return copied;
}
