/**
 * An OCI image layout in a tar file as a depot. Written in one stream beside its place and renamed; it replaces what was
 * there. To be read, it is unpacked into a work folder: only a layout's own files, and never past their place.
 */
import { createReadStream, createWriteStream } from 'node:fs';
import { mkdir, rename, rm } from 'node:fs/promises';
import { dirname, join } from 'node:path';
import { Readable } from 'node:stream';
import { pipeline } from 'node:stream/promises';
import { extract, pack } from 'tar-stream';
import { type Digest, digestOf, hexOf, isDsecError, messageOf } from '#base';
import { fail } from '../errors.ts';
import type { Descriptor } from '../store/blob-store.ts';
import type { Depot } from './depot.ts';
import { indexEntry, indexOf, LAYOUT_FILE, LayoutDepot } from './layout-depot.ts';

export class ArchiveDepot implements Depot {
  readonly description: string;
  readonly #path: string;
  readonly #tag: string | undefined;
  readonly #workDir: string;
  readonly #blobs = new Map<Digest, { blob: Descriptor; open: () => AsyncIterable<Buffer> }>();
  #traces: { digest: Digest; bytes: Buffer } | undefined;
  #unpacked: Promise<LayoutDepot> | undefined;

  constructor(path: string, tag: string | undefined, workDir: string) {
    this.#path = path;
    this.#tag = tag;
    this.#workDir = workDir;
    this.description = `oci-archive:${path}${tag === undefined ? '' : `:${tag}`}`;
  }

  async manifest(): Promise<Buffer> {
    return (await this.#layout()).manifest();
  }

  async *open(blob: Descriptor): AsyncIterable<Buffer> {
    yield* (await this.#layout()).open(blob);
  }

  async has(): Promise<boolean> {
    return false;
  }

  /** Only noted: a tar is written in order, once everything is known. */
  async put(blob: Descriptor, open: () => AsyncIterable<Buffer>): Promise<void> {
    this.#blobs.set(blob.digest, { blob, open });
  }

  async putManifest(bytes: Buffer, digest: Digest, mediaType: string, signal?: AbortSignal): Promise<void> {
    const beside = join(dirname(this.#path), `.dsec-${process.pid}-${Math.random().toString(36).slice(2)}`);
    try {
      await pipeline(
        Readable.from(this.#tar(bytes, digest, mediaType)),
        createWriteStream(beside, { flags: 'wx', flush: true }),
        { signal },
      );
      await rename(beside, this.#path);
    } catch (error) {
      if (isDsecError(error) || signal?.aborted) throw error;
      throw fail('CATALOG_LAYOUT', { path: this.description, why: messageOf(error) }, error);
    } finally {
      await rm(beside, { force: true });
    }
  }

  /** One that is written replaces what was there. */
  async traces(image: Digest): Promise<Buffer[]> {
    return this.#workDir === '' ? [] : (await this.#layout()).traces(image);
  }

  async putTraces(bytes: Buffer): Promise<void> {
    this.#traces = { digest: digestOf(bytes), bytes };
  }

  async close(): Promise<void> {}

  async *#tar(manifest: Buffer, digest: Digest, mediaType: string): AsyncGenerator<Buffer, void, undefined> {
    const tar = pack();
    // Same image, same archive: no time, no owner.
    const header = (name: string, size: number) => ({ name, size, mode: 0o644, mtime: new Date(0), uid: 0, gid: 0 });
    const small = (name: string, bytes: Buffer) => tar.entry(header(name, bytes.length), bytes);
    const fill = async () => {
      small('oci-layout', Buffer.from(LAYOUT_FILE));
      small(
        'index.json',
        indexOf([indexEntry(mediaType, digest, manifest.length, { tag: this.#tag, traces: this.#traces?.digest })]),
      );
      small(`blobs/sha256/${hexOf(digest)}`, manifest);
      if (this.#traces !== undefined) small(`blobs/sha256/${hexOf(this.#traces.digest)}`, this.#traces.bytes);
      for (const { blob, open } of this.#blobs.values()) {
        await pipeline(Readable.from(open()), tar.entry(header(`blobs/sha256/${hexOf(blob.digest)}`, blob.size)));
      }
      tar.finalize();
    };
    let failure: unknown;
    fill().catch((error) => {
      failure = error;
      tar.destroy(error as Error);
    });
    try {
      yield* tar as AsyncIterable<Buffer>;
    } catch (error) {
      throw failure ?? error;
    }
  }

  #layout(): Promise<LayoutDepot> {
    this.#unpacked ??= this.#unpack();
    return this.#unpacked;
  }

  async #unpack(): Promise<LayoutDepot> {
    const folder = join(this.#workDir, 'layout');
    await mkdir(join(folder, 'blobs/sha256'), { recursive: true });
    const tar = extract();
    tar.on('entry', (header, stream, next) => {
      const name = header.name.replace(/^(\.\/)+/, '');
      if (header.type !== 'file' || !/^(oci-layout|index\.json|blobs\/sha256\/[0-9a-f]{64})$/.test(name)) {
        stream.on('end', next).resume();
        return;
      }
      pipeline(stream, createWriteStream(join(folder, name))).then(
        () => next(),
        (error) => next(error),
      );
    });
    try {
      await pipeline(createReadStream(this.#path), tar);
    } catch (error) {
      throw fail('CATALOG_LAYOUT', { path: this.description, why: messageOf(error) }, error);
    }
    return new LayoutDepot(folder, this.#tag, this.description);
  }
}
