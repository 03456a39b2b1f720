/**
 * A container registry, as the OCI distribution specification has it. Reads and writes manifests and blobs of any of its
 * repositories; close it when done. Safe to use concurrently: requests beyond the bound wait for a connection.
 *
 * What a registry says about a digest is not believed: bytes fetched by digest are hashed and compared.
 */
import { type Digest, digestOf, isDigest, parseDigest } from '#base';
import { fail } from '../errors.ts';
import { downloadBlob, downloadRange } from './blob-download.ts';
import { mountBlob, type OpenStream, uploadBlob } from './blob-upload.ts';
import { discard } from './http-client.ts';
import { JsonFields } from './json-fields.ts';
import { documentType, MAX_DOCUMENT_BYTES } from './manifest.ts';
import { uploadManifest } from './manifest-upload.ts';
import { ACCEPTED_MANIFESTS } from './media-types.ts';
import { listReferrers, type NewReferrer, putReferrer, type Referrer } from './referrers.ts';
import { type RegistryClientOptions, type RegistryRequest, RegistrySession } from './registry-session.ts';

export interface FetchedManifest {
  readonly mediaType: string;
  /** Of `bytes`, computed here. */
  readonly digest: Digest;
  readonly bytes: Buffer;
}

const MAX_TAGS = 1_000_000;
const MAX_TAG_PAGES = 10_000;

export class RegistryClient {
  readonly registry: string;
  readonly #session: RegistrySession;

  /** @throws SOURCE_CREDENTIALS when `credentials` is not `user:password` */
  constructor(options: RegistryClientOptions) {
    this.registry = options.registry;
    this.#session = new RegistrySession(options);
  }

  /** Ends connections at once, also those of streams that are still open. Safe to call twice. */
  close(): Promise<void> {
    return this.#session.close();
  }

  /** The manifest or index that a tag or digest names. @throws SOURCE_REGISTRY_*, SOURCE_DIGEST_MISMATCH, SOURCE_TOO_LARGE */
  async getManifest(repository: string, reference: string, signal?: AbortSignal): Promise<FetchedManifest> {
    const session = this.#session;
    return session.run(signal, async () => {
      const request = await this.#manifestRequest('GET', repository, reference, signal);
      const response = await session.exchange(request);
      if (response.status !== 200) throw await session.refusal(response, request);
      const contentType = response.header('content-type')?.split(';')[0]?.trim().toLowerCase();
      const bytes = await session.read(response, request, MAX_DOCUMENT_BYTES);
      const digest = digestOf(bytes);
      const where = `${this.registry}/${repository}`;
      if (isDigest(reference) && digest !== reference) {
        throw fail('SOURCE_DIGEST_MISMATCH', { where, what: 'manifest', actual: digest, expected: reference });
      }
      const root = JsonFields.parse(bytes, `${where}, manifest ${reference}`);
      return { mediaType: documentType(root, contentType), digest, bytes };
    });
  }

  /**
   * What the registry says a tag or digest names, or undefined when it has none. Its digest is a claim: good for
   * deciding whether to push, not for trust.
   */
  async headManifest(
    repository: string,
    reference: string,
    signal?: AbortSignal,
  ): Promise<{ digest: Digest | undefined; mediaType: string | undefined; sizeBytes: number | undefined } | undefined> {
    const session = this.#session;
    return session.run(signal, async () => {
      const request = await this.#manifestRequest('HEAD', repository, reference, signal);
      const response = await session.exchange(request);
      if (response.status === 404) {
        discard(response);
        return undefined;
      }
      if (response.status !== 200) throw await session.refusal(response, request);
      discard(response);
      const length = response.header('content-length');
      return {
        digest: parseDigest(response.header('docker-content-digest')),
        mediaType: response.header('content-type')?.split(';')[0]?.trim(),
        sizeBytes: length === undefined ? undefined : Number(length),
      };
    });
  }

  /** A whole small blob, verified. @throws SOURCE_TOO_LARGE beyond `limit`, SOURCE_DIGEST_MISMATCH */
  async getBlob(repository: string, digest: Digest, limit = MAX_DOCUMENT_BYTES, signal?: AbortSignal): Promise<Buffer> {
    const session = this.#session;
    return session.run(signal, async () => {
      const request = await this.#blobRequest('GET', repository, digest, signal);
      const response = await session.exchange(request);
      if (response.status !== 200) throw await session.refusal(response, request);
      const bytes = await session.read(response, request, limit);
      const actual = digestOf(bytes);
      if (actual !== digest) {
        const where = `${this.registry}/${repository}`;
        throw fail('SOURCE_DIGEST_MISMATCH', { where, what: 'blob', actual, expected: digest });
      }
      return bytes;
    });
  }

  /** Exactly `length` bytes from `offset`; not verified, since a part has no digest. */
  readBlobRange(
    repository: string,
    digest: Digest,
    offset: number,
    length: number,
    signal?: AbortSignal,
  ): Promise<Buffer> {
    return downloadRange(this.#session, repository, digest, offset, length, signal);
  }

  /** The blob in order, across broken connections; its length is checked, its digest is not. */
  openBlob(repository: string, digest: Digest, sizeBytes: number, signal?: AbortSignal): AsyncIterable<Buffer> {
    return downloadBlob(this.#session, repository, digest, sizeBytes, signal);
  }

  async blobExists(repository: string, digest: Digest, signal?: AbortSignal): Promise<boolean> {
    return (await this.statBlob(repository, digest, signal)) !== undefined;
  }

  /** Undefined when the repository has no such blob; `sizeBytes` is undefined when the registry does not say it. */
  async statBlob(
    repository: string,
    digest: Digest,
    signal?: AbortSignal,
  ): Promise<{ sizeBytes: number | undefined } | undefined> {
    const session = this.#session;
    return session.run(signal, async () => {
      const request = await this.#blobRequest('HEAD', repository, digest, signal);
      const response = await session.exchange(request);
      if (response.status !== 200 && response.status !== 404) throw await session.refusal(response, request);
      discard(response);
      if (response.status === 404) return undefined;
      const length = response.header('content-length');
      return { sizeBytes: length !== undefined && /^\d{1,15}$/.test(length) ? Number(length) : undefined };
    });
  }

  /** Whether the registry took the blob over from `from`, another repository of it. False: upload it. */
  mountBlob(repository: string, digest: Digest, from: string, signal?: AbortSignal): Promise<boolean> {
    return mountBlob(this.#session, repository, digest, from, signal);
  }

  /** `open` may be called more than once: an upload that breaks starts again. */
  uploadBlob(
    repository: string,
    digest: Digest,
    sizeBytes: number,
    open: OpenStream,
    signal?: AbortSignal,
  ): Promise<void> {
    return uploadBlob(this.#session, repository, digest, sizeBytes, open, signal);
  }

  /** Publishes a manifest under a tag or its digest; the blobs it names must be there. Answers its digest. */
  async putManifest(
    repository: string,
    reference: string,
    bytes: Buffer,
    mediaType: string,
    signal?: AbortSignal,
  ): Promise<Digest> {
    await uploadManifest(this.#session, repository, reference, bytes, mediaType, signal);
    return digestOf(bytes);
  }

  /** Manifests of this artifact type that name `subject` as theirs. What they are is for the caller to check. */
  referrers(repository: string, subject: Digest, artifactType: string, signal?: AbortSignal): Promise<Referrer[]> {
    return listReferrers(this.#session, repository, subject, artifactType, signal);
  }

  putReferrer(repository: string, referrer: NewReferrer, signal?: AbortSignal): Promise<void> {
    return putReferrer(this.#session, repository, referrer, signal);
  }

  /** All tags, in the registry's order. */
  async listTags(repository: string, signal?: AbortSignal): Promise<string[]> {
    const session = this.#session;
    const tags: string[] = [];
    let url: URL | undefined = await session.run(signal, () => session.url(`${repository}/tags/list`));
    for (let page = 0; url !== undefined; page++) {
      const request: RegistryRequest = {
        method: 'GET',
        url,
        repository,
        scope: `repository:${repository}:pull`,
        action: `tags of ${repository}`,
        signal,
      };
      if (page >= MAX_TAG_PAGES) throw session.unexpected(request.action, `more than ${MAX_TAG_PAGES} pages`);
      const [bytes, link] = await session.run(signal, async () => {
        const response = await session.exchange(request);
        if (response.status !== 200) throw await session.refusal(response, request);
        return [await session.read(response, request, 4 * MAX_DOCUMENT_BYTES), response.header('link')] as const;
      });
      const field = JsonFields.parse(bytes, `${this.registry}/${repository}, list of tags`).get('tags');
      if (field.present) for (const tag of field.array(MAX_TAGS)) tags.push(tag.string());
      if (tags.length > MAX_TAGS) throw session.unexpected(request.action, `more than ${MAX_TAGS} tags`);
      const next = /<([^>]*)>\s*;[^,]*rel="?next"?/.exec(link ?? '')?.[1];
      url = next === undefined ? undefined : await session.follow(next, url, request.action);
    }
    return tags;
  }

  async #manifestRequest(
    method: 'GET' | 'HEAD',
    repository: string,
    reference: string,
    signal: AbortSignal | undefined,
  ): Promise<RegistryRequest> {
    return {
      method,
      url: await this.#session.url(`${repository}/manifests/${reference}`),
      repository,
      scope: `repository:${repository}:pull`,
      action: `manifest ${reference} of ${repository}`,
      headers: { accept: ACCEPTED_MANIFESTS.join(', ') },
      signal,
    };
  }

  async #blobRequest(
    method: 'GET' | 'HEAD',
    repository: string,
    digest: Digest,
    signal: AbortSignal | undefined,
  ): Promise<RegistryRequest> {
    return {
      method,
      url: await this.#session.url(`${repository}/blobs/${digest}`),
      repository,
      scope: `repository:${repository}:pull`,
      action: `blob ${digest} of ${repository}`,
      signal,
    };
  }
}
