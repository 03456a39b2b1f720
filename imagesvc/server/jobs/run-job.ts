/** Does the work of jobs in the store of the service, and leaves nothing of what was not finished. */
import type { Digest, Progress } from '#base';
import { isDsecError } from '#base';
import { parseImageReference, parsePlatform } from '#converter';
import { openImage, resolveImage, sizesOf } from '../../catalog/catalog.ts';
import { collectGarbage } from '../../catalog/collect-garbage.ts';
import type { Image } from '../../catalog/image.ts';
import { convertToStore } from '../../convert/convert-to-store.ts';
import { packDiff } from '../../pack-diff/pack-diff.ts';
import type { BlobStore } from '../../store/blob-store.ts';
import type { ConvertRequest, Job, JobResult, PackDiffRequest } from './job.ts';
import type { JobRunner } from './job-queue.ts';

interface Running {
  readonly progress: Progress;
  readonly signal: AbortSignal;
}

export function storeRunner(store: BlobStore): JobRunner {
  return {
    async run(job, running) {
      const { store: recorded, put } = recording(store);
      try {
        return job.work.kind === 'convert'
          ? await convert(recorded, job.work.request, job.credentials, running)
          : await pack(recorded, job.work.request, running);
      } catch (error) {
        // Best effort: what stays is found by the next garbage collection.
        if (put.size > 0) await collectGarbage(store, { graceMs: 0, only: put }).catch(() => {});
        throw error;
      }
    },
    async stillHolds(job) {
      if (!isPinned(job) || job.result === undefined) return false;
      try {
        return (await resolveImage(store, job.result.name)).digest === job.result.digest;
      } catch (error) {
        if (isDsecError(error)) return false;
        throw error;
      }
    },
  };
}

/** Only a digest names what cannot change: tags move, and so do files. */
function isPinned({ work }: Job): boolean {
  if (work.kind !== 'convert' || !work.request.source.startsWith('docker://')) return false;
  return parseImageReference(work.request.source.slice('docker://'.length)).digest !== undefined;
}

async function convert(
  store: BlobStore,
  request: ConvertRequest,
  credentials: string | undefined,
  running: Running,
): Promise<JobResult> {
  const { source, name, platform, ...shape } = request;
  const { image, reused, stats, notes } = await convertToStore(store, source, name, {
    ...shape,
    ...running,
    credentials,
    platform: platform === undefined ? undefined : parsePlatform(platform),
  });
  return result(image, { reused, stats: stats && { ...stats }, notes });
}

async function pack(store: BlobStore, request: PackDiffRequest, running: Running): Promise<JobResult> {
  const { upper, image: below, ...options } = request;
  const base = await openImage(store, below);
  const { image, stats, notes } = await packDiff(store, {
    ...options,
    ...running,
    upperDir: upper,
    lowers: base.layers,
    config: base.config,
    base: base.manifestDigest,
  });
  return result(image, { reused: false, stats: { ...stats }, notes });
}

function result(image: Image, more: Pick<JobResult, 'reused' | 'stats' | 'notes'>): JobResult {
  const { name, manifestDigest: digest, kind, layers } = image;
  return { name, digest, kind, layers: layers.length, ...sizesOf(image), ...more };
}

/** The same store, and what was put into it. */
function recording(store: BlobStore): { store: BlobStore; put: ReadonlySet<Digest> } {
  const put = new Set<Digest>();
  const own: Pick<BlobStore, 'put' | 'putFile'> = {
    async put(bytes) {
      const digest = await store.put(bytes);
      put.add(digest);
      return digest;
    },
    async putFile(path, digest, sizeBytes) {
      put.add(digest);
      await store.putFile(path, digest, sizeBytes);
    },
  };
  const recorded = new Proxy(store, {
    get(target, key) {
      if (key === 'put' || key === 'putFile') return own[key];
      const value: unknown = Reflect.get(target, key, target);
      return typeof value === 'function' ? value.bind(target) : value;
    },
  });
  return { store: recorded, put };
}
