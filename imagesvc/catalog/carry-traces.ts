/**
 * Traces of an image on their way to and from a depot. They save time and nothing else: what is wrong with them is told, and the image
 * is carried all the same. Those that the depot has under other names stay there.
 */
import { type Digest, isDsecError, messageOf } from '#base';
import { fail } from '../errors.ts';
import type { BlobStore, Descriptor } from '../store/blob-store.ts';
import { parseTrace } from '../trace/trace.ts';
import {
  buildTracesManifest,
  type CarriedTrace,
  type CarriedTraces,
  carriedTrace,
  EMPTY_CONFIG,
  emptyConfig,
  joinTraces,
  parseTracesManifest,
} from '../trace/trace-artifact.ts';
import { keepTrace, keptTraces, latestKept } from '../trace/trace-store.ts';
import type { Depot } from './depot.ts';
import type { Image } from './image.ts';
import { verified } from './verified-stream.ts';

export interface TraceTransfer {
  readonly signal?: AbortSignal;
  readonly onTraceProblem?: (text: string) => void;
}

/** Returns how many traces of the store the depot has now. */
export async function sendTraces(
  store: BlobStore,
  depot: Depot,
  image: Image,
  { signal = new AbortController().signal, onTraceProblem = () => {} }: TraceTransfer,
): Promise<number> {
  const kept = await latestKept(store, await keptTraces(store, image.manifestDigest));
  if (kept.length === 0) return 0;
  try {
    const ours: CarriedTrace[] = [];
    for (const { name, digest } of kept) {
      const found = await store.stat(digest);
      if (found === undefined) onTraceProblem(`trace ${name} of ${image.name}: its blob ${digest} is gone`);
      else ours.push(carriedTrace(name, digest, found.sizeBytes));
    }
    const there = await tracesIn(depot, image.manifestDigest, signal);
    const before = there.map((one) => one.traces);
    if (there[0] !== undefined && sameTraces(there[0].traces, joinTraces([ours, ...before]))) return ours.length;
    const sent: CarriedTrace[] = [];
    for (const trace of ours) {
      try {
        // Whole: of what is read while it is sent, a depot that is a single file could not let go.
        const bytes = await store.readVerified(trace.blob.digest);
        if (!(await depot.has(trace.blob, signal))) await depot.put(trace.blob, () => once(bytes), signal);
        sent.push(trace);
      } catch (error) {
        if (!isDsecError(error, 'STORE_DIGEST_MISMATCH')) throw error;
        onTraceProblem(`trace ${trace.name} of ${image.name} was not sent: ${messageOf(error)}`);
      }
    }
    const traces = joinTraces([sent, ...before]);
    const config = emptyConfig();
    if (!(await depot.has(config, signal))) await depot.put(config, () => once(EMPTY_CONFIG), signal);
    const revision = Math.max(0, ...there.map((one) => one.revision)) + 1;
    const of = { digest: image.manifestDigest, size: image.manifestSize };
    await depot.putTraces(buildTracesManifest(of, { revision, traces }), revision, image.manifestDigest, signal);
    return sent.length;
  } catch (error) {
    if (signal.aborted || !isDsecError(error)) throw error;
    onTraceProblem(`traces of ${image.name} were not sent: ${messageOf(error)}`);
    return 0;
  }
}

/** The image is in the store. Returns how many came. */
export async function fetchTraces(
  store: BlobStore,
  depot: Depot,
  image: Image,
  { signal = new AbortController().signal, onTraceProblem = () => {} }: TraceTransfer,
): Promise<number> {
  let count = 0;
  const problem = (error: unknown) => {
    if (signal.aborted || !isDsecError(error)) throw error;
    onTraceProblem(`${image.name} came without its traces: ${messageOf(error)}`);
  };
  try {
    const there = await tracesIn(depot, image.manifestDigest, signal);
    const kept = new Set(
      (await keptTraces(store, image.manifestDigest)).map(({ name, digest }) => `${name} ${digest}`),
    );
    for (const { name, blob } of joinTraces(there.map((one) => one.traces))) {
      if (kept.has(`${name} ${blob.digest}`)) continue;
      try {
        await keepTrace(store, image, name, parseTrace(await bytesOf(depot, blob, signal), `trace ${name}`));
        count++;
      } catch (error) {
        problem(error);
      }
    }
  } catch (error) {
    problem(error);
  }
  return count;
}

/** The latest first. */
async function tracesIn(depot: Depot, image: Digest, signal: AbortSignal): Promise<CarriedTraces[]> {
  const found = (await depot.traces(image, signal)).flatMap((bytes) => parseTracesManifest(bytes, image) ?? []);
  return found.sort((a, b) => b.revision - a.revision);
}

function sameTraces(a: CarriedTraces['traces'], b: CarriedTraces['traces']): boolean {
  const lines = (traces: CarriedTraces['traces']) => traces.map(({ name, blob }) => `${name} ${blob.digest}`).sort();
  return lines(a).join('\n') === lines(b).join('\n');
}

/** Bounded by what a trace may have: its descriptor was checked. */
async function bytesOf(depot: Depot, blob: Descriptor, signal: AbortSignal): Promise<Buffer> {
  const mismatch = (why: string) =>
    fail('CATALOG_PULL_MISMATCH', { source: depot.description, digest: blob.digest, why });
  const parts: Buffer[] = [];
  for await (const part of verified(depot.open(blob, signal), blob, mismatch)) parts.push(part);
  return Buffer.concat(parts);
}

async function* once(bytes: Buffer): AsyncIterable<Buffer> {
  yield bytes;
}
