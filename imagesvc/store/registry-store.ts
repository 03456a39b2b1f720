/**
 * A repository of a container registry as a store that can only be read: `docker://HOST/REPOSITORY`, holding images that `dsec push`
 * put there. Blobs are read by range; names are the repository's tags, `REPOSITORY:TAG`, where the repository's last part
 * alone does as well. Ordinary images among them are seen, and say themselves that they are not converted.
 */
import {
  abortSignalOf,
  type Digest,
  digestFromHex,
  digestOf,
  hexOf,
  isDigest,
  isDsecError,
  type StopSignal,
} from '#base';
import type { RangeSource } from '#chunk-cache';
import type { RegistryClient } from '#converter';
import { fail } from '../errors.ts';
import { traceManifestsIn } from '../trace/registry-traces.ts';
import { joinTraces, parseTracesManifest } from '../trace/trace-artifact.ts';
import { TRACE_RECORDS } from '../trace/trace-name.ts';
import type { BlobStore, Hold, Ref, Staging } from './blob-store.ts';
import { checkRecordKey, parseImageName } from './image-name.ts';

/** No image: where a registry that keeps no list of referrers has it (converter/source/referrers.ts). */
const REFERRERS_TAG = /^sha256-[0-9a-f]{64}$/;
const PIECE_BYTES = 8 * 1024 * 1024;
/** A blob that is read whole into memory: metadata. */
const MAX_WHOLE_BYTES = 1024 * 1024 * 1024;
const MAX_MANIFEST_BYTES = 4 * 1024 * 1024;
const TAGS_AT_ONCE = 8;
const OPTIONS = ['insecure', 'creds'];

export class RegistryStore implements BlobStore {
  readonly url: string;
  readonly ranges: RangeSource;
  readonly #client: RegistryClient;
  readonly #repository: string;
  /** Blobs never change: what is known of one stays true. */
  readonly #sizes = new Map<Digest, number>();
  /** Digests that are manifests, which registries keep apart from blobs. */
  readonly #manifests = new Map<Digest, Buffer>();

  private constructor(registry: string, repository: string, client: RegistryClient, insecure: boolean) {
    // What remembers it (a disk, a data server) opens it again by this.
    this.url = `docker://${registry}/${repository}${insecure ? '?insecure=1' : ''}`;
    this.#repository = repository;
    this.#client = client;
    this.ranges = {
      readRange: (blob, offset, length, { signal }) => this.#read(blob, offset, length, signal),
    };
  }

  /** @throws STORE_URL, SOURCE_REFERENCE */
  static async open(url: string): Promise<RegistryStore> {
    const shown = url.replace(/(creds=)[^&#]*/i, '$1…').replace(/^(docker:\/\/)[^/?#]*@/i, '$1…@');
    const refuse = (why: string) => fail('STORE_URL', { url: shown, why });
    const match = /^docker:\/\/([^?#]+)(?:\?([^#]*))?$/i.exec(url);
    if (match === null) throw refuse('write docker://HOST/REPOSITORY');
    const parameters = new URLSearchParams(match[2] ?? '');
    for (const name of parameters.keys()) {
      if (!OPTIONS.includes(name)) throw refuse(`no option "${name}"; there is insecure=1`);
    }
    if (parameters.has('creds')) throw refuse('credentials do not belong in a URL: log in with docker or skopeo');
    const { parseImageReference, RegistryClient } = await import('#converter');
    const { registry, repository, tag, digest } = parseImageReference(match[1]!.replace(/\/+$/, ''));
    if (tag !== undefined || digest !== undefined) {
      throw refuse('a store is a repository: leave the tag out, it is the name of the image');
    }
    const insecure = ['', '1', 'true'].includes(parameters.get('insecure') ?? '0');
    return new RegistryStore(registry, repository, new RegistryClient({ registry, insecure }), insecure);
  }

  async stat(digest: Digest): Promise<{ sizeBytes: number } | undefined> {
    const known = this.#sizes.get(digest) ?? this.#manifests.get(digest)?.length;
    if (known !== undefined) return { sizeBytes: known };
    const found = await this.#client.statBlob(this.#repository, digest);
    if (found?.sizeBytes !== undefined) {
      this.#sizes.set(digest, found.sizeBytes);
      return { sizeBytes: found.sizeBytes };
    }
    if (found !== undefined) return { sizeBytes: (await this.readVerified(digest)).length };
    const manifest = await this.#manifest(digest);
    return manifest && { sizeBytes: manifest.length };
  }

  async read(digest: Digest, offset: number, length: number): Promise<Buffer> {
    return this.#read(digest, offset, length, undefined);
  }

  async readVerified(digest: Digest): Promise<Buffer> {
    const manifest = this.#manifests.get(digest);
    if (manifest !== undefined) return Buffer.from(manifest);
    if (!this.#sizes.has(digest) && (await this.#client.statBlob(this.#repository, digest)) === undefined) {
      const found = await this.#manifest(digest);
      if (found === undefined) throw fail('STORE_BLOB_MISSING', { digest, store: this.url });
      return Buffer.from(found);
    }
    try {
      const bytes = await this.#client.getBlob(this.#repository, digest, MAX_WHOLE_BYTES);
      this.#sizes.set(digest, bytes.length);
      return bytes;
    } catch (error) {
      if (!isDsecError(error, 'SOURCE_DIGEST_MISMATCH')) throw error;
      const actual = String(error.params.actual ?? 'another');
      throw fail('STORE_DIGEST_MISMATCH', { digest, actual, path: `${this.url}: ${digest}` }, error);
    }
  }

  async *stream(digest: Digest): AsyncIterable<Buffer> {
    const found = await this.stat(digest);
    if (found === undefined) throw fail('STORE_BLOB_MISSING', { digest, store: this.url });
    for (let offset = 0; offset < found.sizeBytes; offset += PIECE_BYTES) {
      yield await this.read(digest, offset, Math.min(PIECE_BYTES, found.sizeBytes - offset));
    }
  }

  localPath(): undefined {
    return undefined;
  }

  async getRef(name: string): Promise<Ref | undefined> {
    const { repository, tag } = parseImageName(name);
    if (repository !== this.#repository && repository !== this.#repository.split('/').at(-1)) return undefined;
    const found = await this.#client.getManifest(this.#repository, tag).catch((error) => {
      if (isDsecError(error) && error.http === 404) return undefined;
      throw error;
    });
    if (found === undefined) return undefined;
    const { digest, mediaType, bytes } = found;
    this.#remember(digest, bytes);
    return { name: `${this.#repository}:${tag}`, manifest: { mediaType, digest, size: bytes.length } };
  }

  async listRefs(): Promise<Ref[]> {
    const tags = await this.#client.listTags(this.#repository).catch((error) => {
      // A repository that nothing was pushed to is an empty store.
      if (isDsecError(error) && error.http === 404) return [];
      throw error;
    });
    const images = tags.filter((tag) => !REFERRERS_TAG.test(tag));
    const refs: Ref[] = [];
    let next = 0;
    const readSome = async () => {
      while (next < images.length) {
        const ref = await this.getRef(`${this.#repository}:${images[next++]}`);
        if (ref !== undefined) refs.push(ref);
      }
    };
    await Promise.all(Array.from({ length: TAGS_AT_ONCE }, readSome));
    return refs.sort((a, b) => (a.name < b.name ? -1 : 1));
  }

  /** What the repository's tags lead to: a registry lists no blobs. Their age is not known: they count as new. */
  async *listBlobs(): AsyncIterable<{ digest: Digest; sizeBytes: number; modifiedMs: number }> {
    const seen = new Set<Digest>();
    for (const { manifest } of await this.listRefs()) {
      for (const { digest, size } of [manifest, ...namedIn(await this.readVerified(manifest.digest))]) {
        if (seen.has(digest)) continue;
        seen.add(digest);
        yield { digest, sizeBytes: size, modifiedMs: Date.now() };
      }
    }
  }

  async getRecord(kind: string, key: string): Promise<undefined> {
    checkRecordKey(kind, key);
    return undefined;
  }

  /** Of an image, the traces that were pushed with it. Other records no registry has. */
  async listRecords(kind: string, prefix = ''): Promise<string[]> {
    checkRecordKey(kind, 'any');
    const hex = /^([0-9a-f]{64})\.$/.exec(prefix)?.[1];
    if (kind !== TRACE_RECORDS || hex === undefined) return [];
    const image = digestFromHex(hex);
    // Who is not let in there still reads images.
    const manifests = await traceManifestsIn(this.#client, this.#repository, image).catch((error: unknown) => {
      if (isDsecError(error) && !error.retryable) return [];
      throw error;
    });
    const found = manifests.flatMap((bytes) => parseTracesManifest(bytes, image) ?? []);
    found.sort((a, b) => b.revision - a.revision);
    return joinTraces(found.map(({ traces }) => traces)).map(({ name, blob }) => {
      this.#sizes.set(blob.digest, blob.size);
      return `${hex}.${hexOf(blob.digest)}.${name}`;
    });
  }

  async oldestStagingMs(): Promise<undefined> {
    return undefined;
  }

  async renew(): Promise<never> {
    throw this.#refusal();
  }

  async stage(): Promise<Staging> {
    throw this.#refusal();
  }

  async hold(): Promise<Hold> {
    throw this.#refusal();
  }

  async put(): Promise<never> {
    throw this.#refusal();
  }

  async putFile(): Promise<never> {
    throw this.#refusal();
  }

  async deleteBlob(): Promise<never> {
    throw this.#refusal();
  }

  async setRef(): Promise<never> {
    throw this.#refusal();
  }

  async deleteRef(): Promise<never> {
    throw this.#refusal();
  }

  async putRecord(): Promise<never> {
    throw this.#refusal();
  }

  async deleteRecord(): Promise<never> {
    throw this.#refusal();
  }

  #refusal(): Error {
    return fail('STORE_NO_WRITES', { store: this.url, why: 'it is a registry' });
  }

  async #read(digest: Digest, offset: number, length: number, signal: StopSignal | undefined): Promise<Buffer> {
    // Known after the first read; a range beyond the end would be an odd answer instead of a clear one.
    const found = await this.stat(digest);
    if (found === undefined) throw fail('STORE_BLOB_MISSING', { digest, store: this.url });
    if (offset < 0 || length < 0 || offset + length > found.sizeBytes) {
      throw fail('STORE_SHORT_READ', { digest, offset, length, got: Math.max(0, found.sizeBytes - offset) });
    }
    const manifest = this.#manifests.get(digest);
    if (manifest !== undefined) return Buffer.from(manifest.subarray(offset, offset + length));
    return this.#client.readBlobRange(this.#repository, digest, offset, length, signal && abortSignalOf(signal));
  }

  async #manifest(digest: Digest): Promise<Buffer | undefined> {
    const known = this.#manifests.get(digest);
    if (known !== undefined) return known;
    try {
      const { bytes } = await this.#client.getManifest(this.#repository, digest);
      this.#remember(digest, bytes);
      return bytes;
    } catch (error) {
      if (isDsecError(error) && error.http === 404) return undefined;
      throw error;
    }
  }

  #remember(digest: Digest, bytes: Buffer): void {
    if (bytes.length <= MAX_MANIFEST_BYTES && digestOf(bytes) === digest) this.#manifests.set(digest, bytes);
  }
}

/** Config and layers of a manifest; none of what is no manifest. */
function namedIn(manifest: Buffer): { digest: Digest; size: number }[] {
  try {
    const { config, layers } = JSON.parse(manifest.toString('utf8')) as { config?: unknown; layers?: unknown };
    return [config, ...(Array.isArray(layers) ? layers : [])].flatMap((entry) => {
      const { digest, size } = (entry ?? {}) as { digest?: unknown; size?: unknown };
      return isDigest(digest) && Number.isSafeInteger(size) ? [{ digest, size: size as number }] : [];
    });
  } catch {
    return [];
  }
}
