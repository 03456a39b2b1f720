/**
 * How much of what traced starts read a set of images holds: what a node that mounts the set alone would not have to fetch from
 * elsewhere. An access is a chunk that a trace names; a blob that an image of the set has covers it, whichever image was
 * traced, since images share layers.
 */
import type { Digest } from '#base';
import { allBlobsOf, openImage } from '../catalog/catalog.ts';
import type { Image } from '../catalog/image.ts';
import type { BlobStore } from '../store/blob-store.ts';
import { chunkBytes } from '../trace/trace.ts';
import { keptTraces, readTrace } from '../trace/trace-store.ts';

export interface TraceCoverage {
  /** Images of the store that have traces, and those of them all of whose traces are covered. */
  readonly tracedImages: number;
  readonly coveredImages: number;
  /** Chunks that the traces name, one for each trace that names it. */
  readonly accesses: number;
  readonly coveredAccesses: number;
  readonly accessedBytes: number;
  readonly coveredBytes: number;
}

/** Names of the store's images that have traces, sorted. */
export async function tracedNames(store: BlobStore): Promise<string[]> {
  const traced = new Set((await keptTraces(store)).map(({ manifest }) => manifest));
  return (await store.listRefs()).filter(({ manifest }) => traced.has(manifest.digest)).map(({ name }) => name);
}

/** @param onProblem Told of what cannot be read; it is left out. */
export async function traceCoverage(
  store: BlobStore,
  set: readonly Image[],
  onProblem: (name: string, error: unknown) => void = () => {},
): Promise<TraceCoverage> {
  const held = new Set<Digest>(set.flatMap((image) => allBlobsOf(image).map(({ digest }) => digest)));
  const named = new Map(set.map((image) => [image.manifestDigest, image]));
  const traced = new Set<Digest>();
  const uncovered = new Set<Digest>();
  const sum = { accesses: 0, coveredAccesses: 0, accessedBytes: 0, coveredBytes: 0 };
  for (const { manifest, name } of await keptTraces(store)) {
    try {
      const { blobs, chunks } = await readTrace(store, named.get(manifest) ?? (await openImage(store, manifest)), name);
      traced.add(manifest);
      for (const { blob, chunk } of chunks) {
        const of = blobs[blob]!;
        const bytes = chunkBytes(of, chunk);
        sum.accesses++;
        sum.accessedBytes += bytes;
        if (held.has(of.digest)) {
          sum.coveredAccesses++;
          sum.coveredBytes += bytes;
        } else uncovered.add(manifest);
      }
    } catch (error) {
      onProblem(name, error);
    }
  }
  return { tracedImages: traced.size, coveredImages: traced.size - uncovered.size, ...sum };
}
