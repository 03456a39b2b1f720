/**
 * An archive of an image: a tar whose members are read where they lie. A compressed archive is inflated once into a
 * temporary file, since members must be reached by position; `close` removes it.
 */
import { createReadStream, createWriteStream } from 'node:fs';
import { mkdtemp, rm } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join, resolve } from 'node:path';
import { pipeline } from 'node:stream/promises';
import * as zlib from 'node:zlib';
import { messageOf, systemCode } from '#base';
import { fail } from '../errors.ts';
import { openRegular, readExactly } from './local-file.ts';
import type { LayoutFiles, LocatedFile } from './oci-layout.ts';
import { indexTar, memberName, type TarMember } from './tar-index.ts';

/** Symlinks and hard links among members that may follow each other. */
const MAX_LINKS = 16;

export class ArchiveFile implements LayoutFiles {
  /** The archive as the user named it. */
  readonly root: string;
  /** The tar that is read: the archive itself, or the temporary file. */
  readonly #tarPath: string;
  readonly #members: ReadonlyMap<string, TarMember>;

  private constructor(root: string, tarPath: string, members: ReadonlyMap<string, TarMember>) {
    this.root = root;
    this.#tarPath = tarPath;
    this.#members = members;
  }

  /** @throws SOURCE_PATH, SOURCE_ARCHIVE, SOURCE_ARCHIVE_COMPRESSION */
  static async open(path: string, temporary: TemporaryFolder, signal?: AbortSignal): Promise<ArchiveFile> {
    const root = resolve(path);
    const format = await compressionOf(root);
    let tarPath = root;
    if (format !== 'none') {
      const inflater = decompressor(root, format);
      tarPath = join(await temporary.path(), 'archive.tar');
      try {
        const source = createReadStream(root, { highWaterMark: 256 * 1024 });
        await pipeline(source, inflater, createWriteStream(tarPath, { flags: 'wx', mode: 0o600 }), { signal });
      } catch (error) {
        if (systemCode(error)?.startsWith('Z_') || systemCode(error)?.startsWith('ZSTD_')) {
          throw fail('SOURCE_ARCHIVE', { path: root, reason: `damaged ${format} data: ${messageOf(error)}` }, error);
        }
        throw error;
      }
    }
    return new ArchiveFile(root, tarPath, await indexTar(tarPath));
  }

  async locate(name: string): Promise<LocatedFile | undefined> {
    let at = memberName(name);
    for (let links = 0; links <= MAX_LINKS; links++) {
      const member = this.#members.get(at);
      if (member === undefined) return undefined;
      if (member.type === 'file') return { path: this.#tarPath, offset: member.offset, sizeBytes: member.sizeBytes };
      if (member.type === 'hardlink') at = memberName(member.target);
      else if (member.type === 'symlink') at = linkTarget(at, member.target);
      else throw this.#bad(`${name} is not a file`);
    }
    throw this.#bad(`${name} is a link that leads nowhere`);
  }

  async read(file: LocatedFile, limit: number): Promise<Buffer> {
    if (file.sizeBytes > limit) {
      throw fail('SOURCE_TOO_LARGE', { where: this.root, what: 'a member', actual: file.sizeBytes, limit });
    }
    const { handle } = await openRegular(file.path);
    try {
      return await readExactly(handle, file.path, file.offset, file.sizeBytes);
    } finally {
      await handle.close();
    }
  }

  pathOf(name: string): string {
    return `${this.root}: ${name}`;
  }

  #bad(reason: string) {
    return fail('SOURCE_ARCHIVE', { path: this.root, reason });
  }
}

/** A folder that is made when first asked for and removed once, by `remove`. */
export class TemporaryFolder {
  readonly #parent: string;
  #made: Promise<string> | undefined;

  constructor(parent: string | undefined) {
    this.#parent = parent ?? tmpdir();
  }

  path(): Promise<string> {
    this.#made ??= mkdtemp(join(this.#parent, 'dsec-source-'));
    return this.#made;
  }

  async remove(): Promise<void> {
    const made = this.#made;
    this.#made = undefined;
    if (made !== undefined) await rm(await made, { recursive: true, force: true });
  }
}

type Compression = 'none' | 'gzip' | 'zstd' | 'xz' | 'bzip2';

async function compressionOf(path: string): Promise<Compression> {
  const { handle, sizeBytes } = await openRegular(path);
  try {
    if (sizeBytes === 0) throw fail('SOURCE_ARCHIVE', { path, reason: 'it is empty' });
    const magic = await readExactly(handle, path, 0, Math.min(6, sizeBytes));
    const starts = (hex: string) => magic.toString('hex').startsWith(hex);
    if (starts('1f8b')) return 'gzip';
    if (starts('28b52ffd')) return 'zstd';
    if (starts('fd377a585a00')) return 'xz';
    if (starts('425a68')) return 'bzip2';
    return 'none';
  } finally {
    await handle.close();
  }
}

function decompressor(path: string, format: Exclude<Compression, 'none'>): NodeJS.ReadWriteStream {
  if (format === 'gzip') return zlib.createGunzip({ chunkSize: 256 * 1024 });
  // Node has zstd from 22.15 on.
  const zstd = (zlib as { createZstdDecompress?: () => NodeJS.ReadWriteStream }).createZstdDecompress;
  if (format === 'zstd' && zstd !== undefined) return zstd();
  const command = format === 'zstd' ? 'zstd -d' : format === 'xz' ? 'xz -d' : 'bzip2 -d';
  throw fail('SOURCE_ARCHIVE_COMPRESSION', { path, format, command: `${command} ${path}` });
}

/** A symlink's target as a member's name; `..` stops at the archive's root. */
function linkTarget(from: string, target: string): string {
  const parts = target.startsWith('/') ? [] : from.split('/').slice(0, -1);
  for (const part of target.split('/')) {
    if (part === '..') parts.pop();
    else if (part !== '' && part !== '.') parts.push(part);
  }
  return parts.join('/');
}
