/**
 * Writes a small OCI image layout, as other tools would: gzip layers, config, manifest, index. The main job makes its input
 * with it, so that it converts ordinary images and needs no network.
 */
import { createHash, type Hash } from 'node:crypto';
import { once } from 'node:events';
import { createReadStream, createWriteStream } from 'node:fs';
import { lstat, mkdir, readdir, readlink, rename, writeFile } from 'node:fs/promises';
import { arch } from 'node:os';
import { join } from 'node:path';
import { Transform, type TransformCallback } from 'node:stream';
import { pipeline } from 'node:stream/promises';
import { createGzip } from 'node:zlib';
import { type Pack, pack as tarPack } from 'tar-stream';
import { type Digest, digestFromHex, digestOf, hexOf } from '#base';

/** One member of a layer. Paths are relative to the image's root. */
export type Member =
  | { readonly kind: 'dir'; readonly path: string; readonly mode?: number }
  | { readonly kind: 'symlink'; readonly path: string; readonly target: string }
  | { readonly kind: 'file'; readonly path: string; readonly mode?: number; readonly content: Buffer | string }
  /** The content of a file of this machine, links followed. */
  | {
      readonly kind: 'copy';
      readonly path: string;
      readonly mode: number;
      readonly from: string;
      readonly sizeBytes: number;
    };

export interface WrittenLayer {
  readonly digest: Digest;
  readonly diffId: Digest;
  readonly sizeBytes: number;
  readonly tarBytes: number;
  readonly members: number;
}

export interface ImageSettings {
  readonly env?: readonly string[];
  readonly cmd?: readonly string[];
  readonly workingDir?: string;
}

/** One time for all: what matters here is content. */
const MTIME = new Date('2024-01-01T00:00:00Z');

const GOARCH: Readonly<Record<string, string>> = { x64: 'amd64', ia32: '386' };

/** Everything below `from` as members below `to`, sorted. Owners become root, names must be UTF-8. */
export async function folderMembers(from: string, to: string): Promise<Member[]> {
  const members: Member[] = [];
  const names = (await readdir(from)).sort();
  for (const name of names) {
    const source = join(from, name);
    const path = `${to}/${name}`;
    const stat = await lstat(source);
    if (stat.isDirectory()) {
      members.push({ kind: 'dir', path, mode: stat.mode & 0o7777 }, ...(await folderMembers(source, path)));
    } else if (stat.isSymbolicLink()) members.push({ kind: 'symlink', path, target: await readlink(source) });
    else if (stat.isFile())
      members.push({ kind: 'copy', path, mode: stat.mode & 0o7777, from: source, sizeBytes: stat.size });
  }
  return members;
}

export class LayoutWriter {
  readonly #folder: string;
  readonly #manifests: object[] = [];
  #layers = 0;

  constructor(folder: string) {
    this.#folder = folder;
  }

  async open(): Promise<void> {
    await mkdir(join(this.#folder, 'blobs/sha256'), { recursive: true });
    await writeFile(join(this.#folder, 'oci-layout'), '{"imageLayoutVersion":"1.0.0"}');
  }

  async addLayer(members: readonly Member[], signal: AbortSignal): Promise<WrittenLayer> {
    const pack = tarPack();
    const tarHash = new Tap();
    const blobHash = new Tap();
    const temporary = join(this.#folder, `blobs/layer-${this.#layers++}`);
    const written = pipeline(pack, tarHash, createGzip({ level: 1 }), blobHash, createWriteStream(temporary), {
      signal,
    });
    await Promise.all([fill(pack, members), written]);
    const digest = blobHash.digest();
    await rename(temporary, this.#blobPath(digest));
    return {
      digest,
      diffId: tarHash.digest(),
      sizeBytes: blobHash.sizeBytes,
      tarBytes: tarHash.sizeBytes,
      members: members.length,
    };
  }

  /** Adds an image of these layers, bottom first, under `tag`. */
  async addImage(tag: string, layers: readonly WrittenLayer[], settings: ImageSettings): Promise<void> {
    const config = await this.#addJson({
      architecture: GOARCH[arch()] ?? arch(),
      os: 'linux',
      config: { Env: settings.env, Cmd: settings.cmd, WorkingDir: settings.workingDir },
      rootfs: { type: 'layers', diff_ids: layers.map((layer) => layer.diffId) },
    });
    const manifest = await this.#addJson({
      schemaVersion: 2,
      mediaType: 'application/vnd.oci.image.manifest.v1+json',
      config: { mediaType: 'application/vnd.oci.image.config.v1+json', ...config },
      layers: layers.map(({ digest, sizeBytes }) => ({
        mediaType: 'application/vnd.oci.image.layer.v1.tar+gzip',
        digest,
        size: sizeBytes,
      })),
    });
    this.#manifests.push({
      mediaType: 'application/vnd.oci.image.manifest.v1+json',
      ...manifest,
      annotations: { 'org.opencontainers.image.ref.name': tag },
    });
    await writeFile(
      join(this.#folder, 'index.json'),
      JSON.stringify({
        schemaVersion: 2,
        mediaType: 'application/vnd.oci.image.index.v1+json',
        manifests: this.#manifests,
      }),
    );
  }

  async #addJson(value: object): Promise<{ digest: Digest; size: number }> {
    const bytes = Buffer.from(JSON.stringify(value));
    const digest = digestOf(bytes);
    await writeFile(this.#blobPath(digest), bytes);
    return { digest, size: bytes.length };
  }

  #blobPath(digest: Digest): string {
    return join(this.#folder, 'blobs/sha256', hexOf(digest));
  }
}

async function fill(pack: Pack, members: readonly Member[]): Promise<void> {
  for (const member of members) {
    const common = { name: member.path, mtime: MTIME };
    if (member.kind === 'dir') await entry(pack, { ...common, type: 'directory', mode: member.mode ?? 0o755 });
    else if (member.kind === 'symlink') await entry(pack, { ...common, type: 'symlink', linkname: member.target });
    else if (member.kind === 'file') await entry(pack, { ...common, mode: member.mode ?? 0o644 }, member.content);
    else {
      const sink = pack.entry({ ...common, mode: member.mode, size: member.sizeBytes });
      for await (const chunk of createReadStream(member.from, { highWaterMark: 1 << 20 })) {
        if (!sink.write(chunk)) await once(sink, 'drain');
      }
      const finished = once(sink, 'finish');
      sink.end(null);
      await finished;
    }
  }
  pack.finalize();
}

function entry(pack: Pack, headers: Parameters<Pack['entry']>[0], content: Buffer | string = ''): Promise<void> {
  return new Promise((resolve, reject) => {
    pack.entry(headers, content, (error) => (error ? reject(error) : resolve()));
  });
}

/** Passes bytes on; knows their digest and number. */
class Tap extends Transform {
  readonly #hash: Hash = createHash('sha256');
  sizeBytes = 0;

  override _transform(chunk: Buffer, _encoding: BufferEncoding, done: TransformCallback): void {
    this.#hash.update(chunk);
    this.sizeBytes += chunk.length;
    done(null, chunk);
  }

  digest(): Digest {
    return digestFromHex(this.#hash.digest('hex'));
  }
}
