/** Small images for tests: layers through tar-stream, layouts and archives written by hand so that each part can be wrong. */
import { mkdirSync, mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { dirname, join } from 'node:path';
import { gzipSync } from 'node:zlib';
import { pack } from 'tar-stream';
import { expect } from 'vitest';
import { type Digest, digestOf, hexOf } from '#base';

export interface TarInput {
  readonly name: string;
  readonly content?: Buffer | string;
  readonly type?: 'file' | 'symlink' | 'link' | 'directory';
  readonly linkname?: string;
  readonly pax?: Record<string, string>;
}

export async function tarOf(members: readonly TarInput[]): Promise<Buffer> {
  const out = pack();
  for (const { name, content = '', type = 'file', linkname, pax } of members) {
    const body = Buffer.from(content as string);
    const header = { name, type, linkname, pax, mtime: new Date(0), size: type === 'file' ? body.length : 0 };
    if (type === 'file') out.entry(header, body);
    else out.entry(header);
  }
  out.finalize();
  const parts: Buffer[] = [];
  for await (const part of out) parts.push(part as Buffer);
  return Buffer.concat(parts);
}

export interface Described {
  mediaType: string;
  digest: Digest;
  size: number;
  annotations?: Record<string, string>;
  platform?: Record<string, unknown>;
  urls?: string[];
}

export const OCI = 'application/vnd.oci.image';
export const DOCKER = 'application/vnd.docker';

/** An image kept in memory, a blob store and an index; edit it before it is written. */
export class ImageFixture {
  readonly blobs = new Map<Digest, Buffer>();
  readonly files = new Map<string, Buffer>([['oci-layout', Buffer.from('{"imageLayoutVersion":"1.0.0"}')]]);
  index: { schemaVersion: number; mediaType?: string; manifests: Described[] } = { schemaVersion: 2, manifests: [] };

  add(bytes: Buffer | string, mediaType: string): Described {
    const buffer = Buffer.from(bytes as string);
    const digest = digestOf(buffer);
    this.blobs.set(digest, buffer);
    return { mediaType, digest, size: buffer.length };
  }

  json(value: unknown, mediaType: string): Described {
    return this.add(JSON.stringify(value), mediaType);
  }

  /** A whole image of gzip layers; answers its manifest's descriptor. `edit` may spoil the manifest. */
  image(
    tars: readonly Buffer[],
    architecture = 'amd64',
    edit: (manifest: Record<string, unknown> & { layers: Described[]; config: Described }) => void = () => {},
  ): Described {
    const config = { architecture, os: 'linux', config: {}, rootfs: { type: 'layers', diff_ids: tars.map(digestOf) } };
    const manifest = {
      schemaVersion: 2,
      mediaType: `${OCI}.manifest.v1+json`,
      config: this.json(config, `${OCI}.config.v1+json`),
      layers: tars.map((tar) => this.add(gzipSync(tar), `${OCI}.layer.v1.tar+gzip`)),
    };
    edit(manifest);
    return this.json(manifest, manifest.mediaType);
  }

  name(descriptor: Described, name: string | undefined, platform?: Record<string, unknown>): void {
    const annotations = name === undefined ? {} : { annotations: { 'org.opencontainers.image.ref.name': name } };
    this.index.manifests.push({ ...descriptor, ...annotations, ...(platform ? { platform } : {}) });
  }

  all(): Map<string, Buffer> {
    const out = new Map(this.files);
    if (!out.has('index.json')) out.set('index.json', Buffer.from(JSON.stringify(this.index)));
    for (const [digest, bytes] of this.blobs) out.set(`blobs/sha256/${hexOf(digest)}`, bytes);
    return out;
  }

  write(folder: string): string {
    for (const [name, bytes] of this.all()) {
      mkdirSync(dirname(join(folder, name)), { recursive: true });
      writeFileSync(join(folder, name), bytes);
    }
    return folder;
  }

  async archive(path: string): Promise<string> {
    writeFileSync(path, await tarOf([...this.all()].map(([name, content]) => ({ name, content }))));
    return path;
  }
}

/** A folder for one test file; `remove` it at the end. */
export class Workshop {
  readonly path = mkdtempSync(join(tmpdir(), 'dsec-source-test-'));
  #next = 0;

  fresh(name = 'item'): string {
    return join(this.path, `${name}-${this.#next++}`);
  }

  remove(): void {
    rmSync(this.path, { recursive: true, force: true });
  }
}

/** The error that `work` ends with; fails when there is none. */
export async function failureOf(
  work: Promise<unknown> | (() => unknown),
): Promise<Error & { code?: string; hint?: string }> {
  try {
    await (typeof work === 'function' ? work() : work);
  } catch (error) {
    return error as Error;
  }
  throw new Error('nothing failed');
}

/** Equal bytes. Comparing large buffers element by element, as `toEqual` does, takes seconds. */
export function expectBytes(actual: Buffer, expected: Buffer): void {
  expect([actual.length, digestOf(actual)]).toEqual([expected.length, digestOf(expected)]);
}
