/** A repository of a registry as a depot. Blobs that another repository of the registry has are mounted, not sent. */
import type { Digest } from '#base';
import { parseImageReference, RegistryClient } from '#converter';
import type { Descriptor } from '../store/blob-store.ts';
import { traceManifestsIn } from '../trace/registry-traces.ts';
import { TRACES_TYPE, tracesAnnotations } from '../trace/trace-artifact.ts';
import type { Depot, DepotOptions } from './depot.ts';

export class RegistryDepot implements Depot {
  readonly description: string;
  readonly registry: string;
  readonly repository: string;
  readonly #reference: string;
  readonly #client: RegistryClient;
  readonly #options: DepotOptions;

  /** @throws SOURCE_REFERENCE, SOURCE_CREDENTIALS */
  constructor(reference: string, options: DepotOptions) {
    const { registry, repository, tag, digest } = parseImageReference(reference);
    this.registry = registry;
    this.repository = repository;
    this.#reference = digest ?? tag ?? 'latest';
    this.description = `docker://${registry}/${repository}${digest ? `@${digest}` : `:${this.#reference}`}`;
    this.#options = options;
    const { credentials, insecure, signal } = options;
    this.#client = new RegistryClient({ registry, credentials, insecure, signal });
  }

  async manifest(signal?: AbortSignal): Promise<Buffer> {
    return (await this.#client.getManifest(this.repository, this.#reference, signal)).bytes;
  }

  open(blob: Descriptor, signal: AbortSignal): AsyncIterable<Buffer> {
    return this.#client.openBlob(this.repository, blob.digest, blob.size, signal);
  }

  async has({ digest }: Descriptor, signal: AbortSignal): Promise<boolean> {
    if (await this.#client.blobExists(this.repository, digest, signal)) return true;
    const { mountFrom = [], lastPushedTo } = this.#options;
    const remembered = await lastPushedTo?.(this.registry, digest);
    for (const from of new Set([...mountFrom, ...(remembered ? [remembered] : [])])) {
      if (from === this.repository) continue;
      // Not allowed there, gone from there: then it is sent.
      if (await this.#client.mountBlob(this.repository, digest, from, signal).catch(() => false)) return true;
      signal.throwIfAborted();
    }
    return false;
  }

  async put(blob: Descriptor, open: () => AsyncIterable<Buffer>, signal: AbortSignal): Promise<void> {
    await this.#client.uploadBlob(this.repository, blob.digest, blob.size, open, signal);
  }

  async putManifest(bytes: Buffer, _digest: Digest, mediaType: string, signal?: AbortSignal): Promise<void> {
    await this.#client.putManifest(this.repository, this.#reference, bytes, mediaType, signal);
  }

  async traces(image: Digest, signal: AbortSignal): Promise<Buffer[]> {
    return traceManifestsIn(this.#client, this.repository, image, signal);
  }

  async putTraces(bytes: Buffer, revision: number, subject: Digest, signal: AbortSignal): Promise<void> {
    const annotations = tracesAnnotations(revision);
    const referrer = { bytes, artifactType: TRACES_TYPE, annotations, subject };
    await this.#client.putReferrer(this.repository, referrer, signal);
  }

  async close(): Promise<void> {
    await this.#client.close();
  }
}
