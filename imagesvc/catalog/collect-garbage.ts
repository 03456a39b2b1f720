/**
 * Mark and sweep. A blob is deleted when no name leads to it, and nobody at work can be about to need it:
 *
 * - Marked is all that a ref's manifest names, and likewise its base image's manifest. A trace lives as long as its manifest. If a ref or its manifest cannot be
 *   read, nothing is deleted: what it needs is unknown.
 * - Publishing waits while a collection runs (BlobStore.hold), and looks at all blobs of its image first: an image is
 *   published with all its blobs, or not at all.
 * - What was put or renewed since the oldest staging of a live process began is left alone: it may be that process's.
 * - So is what is younger than `graceMs`: on a store that several machines share without shared locks, and for a process
 *   that has no staging, that is the protection. An hour by default; `rm` takes none.
 *
 * Each blob's age is looked at just before it is deleted. What is interrupted is finished by the next collection.
 */
import { setTimeout as delay } from 'node:timers/promises';
import { type Digest, isDigest, isDsecError, messageOf } from '#base';
import { fail } from '../errors.ts';
import type { BlobStore } from '../store/blob-store.ts';
import { forgetSynced } from '../sync/synced-images.ts';
import { type KeptTrace, keptTraces, TRACE_RECORDS } from '../trace/trace-store.ts';
import { BASE, MAX_MANIFEST_BYTES } from './manifest.ts';

export const DEFAULT_GRACE_MS = 3600_000;

export interface CollectOptions {
  /** Says what would be deleted, and deletes nothing. */
  readonly dryRun?: boolean;
  readonly graceMs?: number;
  /** Only blobs that this manifest leads to. */
  readonly onlyOf?: Digest;
  /** Only these blobs. */
  readonly only?: ReadonlySet<Digest>;
  /** As if this name were not there. */
  readonly without?: string;
  /** Needed whatever names say: blobs of what is mounted. */
  readonly inUse?: ReadonlySet<Digest>;
}

export interface Collected {
  /** What was deleted, or would be. */
  readonly deleted: readonly Digest[];
  readonly freedBytes: number;
  /** Blobs that no name leads to, left because they are young, or mounted, or because a process at work may need them. */
  readonly kept: number;
  /** Traces that went with their images. */
  readonly traces: number;
}

/** @throws CATALOG_GC_UNSAFE, STORE_BUSY */
export async function collectGarbage(store: BlobStore, options: CollectOptions = {}): Promise<Collected> {
  const { dryRun = false, graceMs = DEFAULT_GRACE_MS, onlyOf, only, without, inUse } = options;
  const hold = await store.hold('collect');
  try {
    // Ages are in milliseconds: let one pass, so that what was written before now is older than now.
    await delay(2);
    const startedMs = Date.now();
    const stagingMs = (await store.oldestStagingMs()) ?? Number.POSITIVE_INFINITY;
    const cutoffMs = Math.min(startedMs - graceMs, stagingMs);
    const traces = await keptTraces(store);
    const live = await markLive(store, without);
    const candidates = onlyOf === undefined ? undefined : await reachable(store, onlyOf).catch(() => new Set([onlyOf]));
    /** A trace lives as long as the manifest that it is of, whatever its own age. */
    const traceBlobs = new Map<Digest, BlobFound | undefined>(traces.map(({ digest }) => [digest, undefined]));
    const deleted: Digest[] = [];
    let freedBytes = 0;
    let kept = 0;
    for await (const { digest, sizeBytes, modifiedMs } of store.listBlobs()) {
      if (traceBlobs.has(digest)) traceBlobs.set(digest, { sizeBytes, modifiedMs });
      if (live.has(digest) || traceBlobs.has(digest)) continue;
      if (candidates?.has(digest) === false || only?.has(digest) === false) continue;
      if (inUse?.has(digest)) {
        kept++;
        continue;
      }
      if (Math.round(modifiedMs) >= cutoffMs) {
        kept++;
        continue;
      }
      if (!dryRun) await store.deleteBlob(digest);
      deleted.push(digest);
      freedBytes += sizeBytes;
    }
    const gone = await dropTraces(store, traces, new Set(deleted), dryRun);
    const needed = new Set(traces.filter((trace) => !gone.includes(trace)).map(({ digest }) => digest));
    for (const digest of new Set(gone.map((trace) => trace.digest))) {
      const found = traceBlobs.get(digest);
      if (found === undefined || needed.has(digest) || live.has(digest) || inUse?.has(digest)) continue;
      if (Math.round(found.modifiedMs) >= cutoffMs) {
        kept++;
        continue;
      }
      if (!dryRun) await store.deleteBlob(digest);
      deleted.push(digest);
      freedBytes += found.sizeBytes;
    }
    if (!dryRun) await forgetSynced(store, new Set(deleted));
    return { deleted: deleted.sort(), freedBytes, kept, traces: gone.length };
  } finally {
    await hold.release();
  }
}

interface BlobFound {
  readonly sizeBytes: number;
  readonly modifiedMs: number;
}

/** Takes away the records of traces of manifests that are gone. Returns those traces. */
async function dropTraces(
  store: BlobStore,
  traces: readonly KeptTrace[],
  deleted: ReadonlySet<Digest>,
  dryRun: boolean,
): Promise<KeptTrace[]> {
  const gone = new Map<Digest, boolean>();
  const dropped: KeptTrace[] = [];
  for (const trace of traces) {
    const { manifest, key } = trace;
    if (!gone.has(manifest)) {
      gone.set(manifest, deleted.has(manifest) || (await store.stat(manifest)) === undefined);
    }
    if (gone.get(manifest) !== true) continue;
    if (!dryRun) await store.deleteRecord(TRACE_RECORDS, key);
    dropped.push(trace);
  }
  return dropped;
}

async function markLive(store: BlobStore, without: string | undefined): Promise<Set<Digest>> {
  const marks = new Marks(store);
  const damaged: { name: string; problem: Error }[] = [];
  const refs = await store.listRefs((name, problem) => damaged.push({ name, problem }));
  for (const { name, problem } of damaged) {
    if (name === without) continue;
    throw fail('CATALOG_GC_UNSAFE', { name, manifest: 'an image', why: messageOf(problem) }, problem);
  }
  for (const { name, manifest } of refs) {
    if (name === without) continue;
    try {
      await marks.manifest(manifest.digest);
    } catch (error) {
      throw fail('CATALOG_GC_UNSAFE', { name, manifest: `manifest ${manifest.digest}`, why: messageOf(error) }, error);
    }
  }
  return marks.found;
}

/** All blobs that a manifest leads to, and itself. @throws what reading it throws */
export async function reachable(store: BlobStore, digest: Digest): Promise<Set<Digest>> {
  const marks = new Marks(store);
  await marks.manifest(digest);
  return marks.found;
}

/** All that manifests lead to. Any OCI manifest or index, also one that a newer version wrote: every descriptor counts. */
class Marks {
  readonly found = new Set<Digest>();
  readonly #store: BlobStore;
  /** Apart from `found`: what one manifest names as a mere blob may be another's manifest. */
  readonly #read = new Set<Digest>();

  constructor(store: BlobStore) {
    this.#store = store;
  }

  async manifest(digest: Digest): Promise<void> {
    if (this.#read.has(digest)) return;
    const manifest = await readJson(this.#store, digest);
    this.#read.add(digest);
    this.found.add(digest);
    const { config, layers, blobs, manifests, subject, annotations } = manifest;
    for (const blob of [...digestIn(config), ...digestsIn(layers), ...digestsIn(blobs)]) this.found.add(blob);
    const base = (annotations as Record<string, unknown> | null | undefined)?.[BASE];
    // An image holds all its layers itself: a base that is gone, or was never here, takes nothing from it.
    for (const other of [...digestsIn(manifests), ...digestIn(subject), ...(isDigest(base) ? [base] : [])]) {
      await this.manifest(other).catch((error) => {
        if (!isDsecError(error, 'STORE_BLOB_MISSING')) throw error;
      });
    }
  }
}

function digestIn(value: unknown): Digest[] {
  const found = (value as { digest?: unknown } | null | undefined)?.digest;
  return isDigest(found) ? [found] : [];
}

function digestsIn(value: unknown): Digest[] {
  return Array.isArray(value) ? value.flatMap(digestIn) : [];
}

async function readJson(store: BlobStore, digest: Digest): Promise<Record<string, unknown>> {
  const sizeBytes = (await store.stat(digest))?.sizeBytes ?? 0;
  if (sizeBytes > MAX_MANIFEST_BYTES) throw new Error(`${sizeBytes} bytes are too many for a manifest`);
  const value: unknown = JSON.parse((await store.readVerified(digest)).toString('utf8'));
  if (typeof value !== 'object' || value === null || Array.isArray(value)) throw new Error('it is not a JSON object');
  return value as Record<string, unknown>;
}
