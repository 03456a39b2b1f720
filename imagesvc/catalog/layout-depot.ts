/**
 * An OCI image layout in a folder as a depot: `oci-layout`, `index.json`, `blobs/sha256/<hex>`. Other images in it are
 * kept. Everything in it is written beside its place and renamed; the index, which makes the image exist, comes last.
 */
import { createWriteStream } from 'node:fs';
import { access, constants, open, readdir, readFile, rename, rm, stat } from 'node:fs/promises';
import { dirname, join } from 'node:path';
import { pipeline } from 'node:stream/promises';
import { type Digest, digestOf, hexOf, isDigest, messageOf, systemCode } from '#base';
import { fail } from '../errors.ts';
import type { Descriptor } from '../store/blob-store.ts';
import { ensureFolder, writeNewFile } from '../store/durable-file.ts';
import type { Depot } from './depot.ts';
import { MAX_MANIFEST_BYTES } from './manifest.ts';

export const REF_NAME = 'org.opencontainers.image.ref.name';
export const LAYOUT_FILE = '{"imageLayoutVersion":"1.0.0"}';
/** On an image in the index: where its traces are. An entry of their own would be another image to other tools. */
const TRACES = 'io.dsec.traces';
const INDEX_TYPE = 'application/vnd.oci.image.index.v1+json';
const MAX_INDEX_BYTES = 64 * 1024 * 1024;
const STREAM_BYTES = 1024 * 1024;

interface IndexEntry extends Descriptor {
  readonly annotations?: Readonly<Record<string, string>>;
}

/** One image alone, as `index.json`. */
export function indexOf(entries: readonly object[]): Buffer {
  return Buffer.from(JSON.stringify({ schemaVersion: 2, mediaType: INDEX_TYPE, manifests: entries }));
}

export function indexEntry(
  mediaType: string,
  digest: Digest,
  size: number,
  { tag, traces }: { readonly tag: string | undefined; readonly traces: Digest | undefined },
): object {
  const annotations = {
    ...(tag === undefined ? {} : { [REF_NAME]: tag }),
    ...(traces === undefined ? {} : { [TRACES]: traces }),
  };
  return { mediaType, digest, size, ...(Object.keys(annotations).length === 0 ? {} : { annotations }) };
}

export class LayoutDepot implements Depot {
  readonly description: string;
  readonly #path: string;
  readonly #tag: string | undefined;
  #traces: Digest | undefined;

  /** `description` names what the user gave, where that is not `path` itself. */
  constructor(path: string, tag: string | undefined, description = `oci:${path}${tag === undefined ? '' : `:${tag}`}`) {
    this.#path = path;
    this.#tag = tag;
    this.description = description;
  }

  async manifest(): Promise<Buffer> {
    const entries = await this.#index();
    if (entries === undefined) throw await this.#missing();
    const fitting =
      this.#tag === undefined ? entries : entries.filter((entry) => entry.annotations?.[REF_NAME] === this.#tag);
    const names = entries.map((entry) => entry.annotations?.[REF_NAME] ?? entry.digest).slice(0, 10);
    const path = this.description;
    if (fitting.length === 0) {
      const why = this.#tag === undefined ? 'it holds no image' : `it has no image named ${this.#tag}`;
      const remedy = `it has: ${names.join(', ') || 'none'}; use one of these names, or none if there is only one image`;
      throw fail('CATALOG_LAYOUT_NOT_FOUND', { path, why, remedy });
    }
    if (new Set(fitting.map((entry) => entry.digest)).size > 1) {
      throw fail('CATALOG_LAYOUT_AMBIGUOUS', { path, names: names.join(', '), example: `${path}:${names[0]}` });
    }
    const { digest } = fitting[0] as IndexEntry;
    const bytes = await this.#small(this.#blobPath(digest), MAX_MANIFEST_BYTES);
    if (digestOf(bytes) !== digest) throw this.#wrong(`manifest ${digest} has other bytes: ${digestOf(bytes)}`);
    return bytes;
  }

  async *open({ digest }: Descriptor): AsyncIterable<Buffer> {
    // Without O_NONBLOCK a pipe of that name would wait for a writer for ever.
    const file = await open(this.#blobPath(digest), constants.O_RDONLY | constants.O_NONBLOCK).catch((error) => {
      if (systemCode(error) === 'EACCES') throw this.#denied(error);
      throw this.#wrong(`blob ${digest} cannot be read: ${messageOf(error)}`);
    });
    try {
      if (!(await file.stat()).isFile()) throw this.#wrong(`blob ${digest} is not a file`);
      for (;;) {
        const { bytesRead, buffer } = await file.read(Buffer.allocUnsafeSlow(STREAM_BYTES), 0, STREAM_BYTES);
        if (bytesRead === 0) return;
        yield buffer.subarray(0, bytesRead);
      }
    } finally {
      await file.close();
    }
  }

  async has({ digest, size }: Descriptor): Promise<boolean> {
    const found = await stat(this.#blobPath(digest)).catch(() => undefined);
    return found?.isFile() === true && found.size === size;
  }

  async put({ digest }: Descriptor, source: () => AsyncIterable<Buffer>, signal: AbortSignal): Promise<void> {
    await this.#prepare();
    await this.#place(this.#blobPath(digest), async (beside) => {
      await pipeline(source(), createWriteStream(beside, { flags: 'wx', flush: true }), { signal });
    });
  }

  async putManifest(bytes: Buffer, digest: Digest, mediaType: string): Promise<void> {
    await this.#prepare();
    await this.#place(this.#blobPath(digest), (beside) => writeNewFile(beside, bytes, true));
    // Only what has this very name gives way, or, to an image without one, what is that image without one.
    const before = (await this.#index()) ?? [];
    const others = before.filter((entry) => {
      const tag = entry.annotations?.[REF_NAME];
      return tag !== this.#tag || (tag === undefined && entry.digest !== digest);
    });
    // The same image again keeps the traces that it had.
    const traces = this.#traces ?? before.flatMap((entry) => (entry.digest === digest ? tracesOf(entry) : []))[0];
    const entry = indexEntry(mediaType, digest, bytes.length, { tag: this.#tag, traces });
    const index = indexOf([...others, entry]);
    await this.#place(join(this.#path, 'index.json'), (beside) => writeNewFile(beside, index, true));
  }

  async traces(image: Digest): Promise<Buffer[]> {
    const entries = ((await this.#index()) ?? []).filter(({ digest }) => digest === image);
    const found: Buffer[] = [];
    for (const digest of new Set(entries.flatMap(tracesOf))) {
      // Gone where another tool has tidied up: then there are none.
      const bytes = await this.#small(this.#blobPath(digest), MAX_MANIFEST_BYTES).catch(() => undefined);
      if (bytes !== undefined && digestOf(bytes) === digest) found.push(bytes);
    }
    return found;
  }

  async putTraces(bytes: Buffer): Promise<void> {
    await this.#prepare();
    const digest = digestOf(bytes);
    await this.#place(this.#blobPath(digest), (beside) => writeNewFile(beside, bytes, true));
    this.#traces = digest;
  }

  async close(): Promise<void> {}

  /** Makes the layout; refuses a folder that holds something else. */
  async #prepare(): Promise<void> {
    try {
      const names = await readdir(this.#path);
      if (names.length > 0 && !names.includes('oci-layout') && !names.includes('blobs')) {
        throw this.#wrong(`it is no image layout, but holds other files ("${names[0]}")`);
      }
    } catch (error) {
      if (systemCode(error) === 'ENOTDIR') throw this.#wrong('it is a file, not a folder');
      if (systemCode(error) !== 'ENOENT') throw error;
    }
    await ensureFolder(join(this.#path, 'blobs/sha256'));
    const layout = join(this.#path, 'oci-layout');
    if (!(await stat(layout).catch(() => undefined))) {
      await this.#place(layout, (beside) => writeNewFile(beside, Buffer.from(LAYOUT_FILE), false));
    }
  }

  async #place(path: string, write: (beside: string) => Promise<void>): Promise<void> {
    const beside = join(dirname(path), `.dsec-${process.pid}-${Math.random().toString(36).slice(2)}`);
    try {
      await write(beside);
      await rename(beside, path);
    } finally {
      await rm(beside, { force: true });
    }
  }

  #blobPath(digest: Digest): string {
    return join(this.#path, 'blobs/sha256', hexOf(digest));
  }

  async #index(): Promise<IndexEntry[] | undefined> {
    const path = join(this.#path, 'index.json');
    try {
      await access(path, constants.R_OK);
    } catch (error) {
      if (systemCode(error) === 'EACCES') throw this.#denied(error);
      return undefined;
    }
    let listed: unknown;
    try {
      listed = (
        JSON.parse((await this.#small(path, MAX_INDEX_BYTES)).toString('utf8')) as { manifests?: unknown } | null
      )?.manifests;
    } catch (error) {
      throw this.#wrong(`index.json: ${messageOf(error)}`);
    }
    if (!Array.isArray(listed) || !listed.every((entry) => isDigest((entry as { digest?: unknown } | null)?.digest))) {
      throw this.#wrong('index.json: "manifests" must be a list of descriptors');
    }
    return listed as IndexEntry[];
  }

  async #small(path: string, limit: number): Promise<Buffer> {
    const found = await stat(path).catch((error) => {
      throw this.#wrong(messageOf(error));
    });
    if (!found.isFile() || found.size > limit) throw this.#wrong(`${path} is not a file of at most ${limit} bytes`);
    return readFile(path).catch((error) => {
      throw systemCode(error) === 'EACCES' ? this.#denied(error) : this.#wrong(messageOf(error));
    });
  }

  /** Why there is no index. */
  async #missing(): Promise<Error> {
    const path = this.description;
    const found = await stat(this.#path).catch(() => undefined);
    if (found === undefined) {
      return fail('CATALOG_LAYOUT_NOT_FOUND', { path, why: 'no such folder', remedy: 'check the path' });
    }
    const why = found.isDirectory()
      ? 'it has no index.json, so it is no OCI image layout'
      : 'it is a file, not a folder';
    const remedy = 'check the path; "dsec convert" takes plain folders (dir:), tars (tar:) and archives';
    return fail('CATALOG_LAYOUT_NOT_FOUND', { path, why, remedy });
  }

  #denied(cause: unknown): Error {
    return fail('CATALOG_LAYOUT_DENIED', { path: this.description, why: messageOf(cause) }, cause);
  }

  #wrong(why: string): Error {
    return fail('CATALOG_LAYOUT', { path: this.description, why });
  }
}

function tracesOf({ annotations }: IndexEntry): Digest[] {
  const named = annotations?.[TRACES];
  return isDigest(named) ? [named] : [];
}
