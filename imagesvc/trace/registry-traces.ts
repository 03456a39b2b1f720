/** Manifests of an image's traces (trace-artifact.ts) in a registry. */
import type { Digest } from '#base';
import type { RegistryClient } from '#converter';
import { MAX_MANIFEST_BYTES } from '../catalog/manifest.ts';
import { TRACES_TYPE } from './trace-artifact.ts';

/** Of a list that grows with each change, the end. */
const MOST_MANIFESTS = 8;

/** Not checked but for their size. */
export async function traceManifestsIn(
  client: RegistryClient,
  repository: string,
  image: Digest,
  signal?: AbortSignal,
): Promise<Buffer[]> {
  const found = await client.referrers(repository, image, TRACES_TYPE, signal);
  const latest = found.filter(({ size }) => size <= MAX_MANIFEST_BYTES).slice(-MOST_MANIFESTS);
  return Promise.all(latest.map(async ({ digest }) => (await client.getManifest(repository, digest, signal)).bytes));
}
