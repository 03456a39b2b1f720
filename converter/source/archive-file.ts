/**
 * An archive of an image: a tar whose members are read where they lie. A compressed archive is inflated once into a
 * temporary file, since members must be reached by position; `close` removes it.
 */
import { createReadStream } from 'node:fs';
import { mkdtemp, open, rm } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join, resolve } from 'node:path';
import { isDsecError } from '#base';
import { fail } from '../errors.ts';
import { decompress } from '../layer/decompress.ts';
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
      tarPath = join(await temporary.path(), 'archive.tar');
      await inflate(root, format, tarPath, signal);
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

async function inflate(
  path: string,
  format: Exclude<Compression, 'none'>,
  into: string,
  signal: AbortSignal | undefined,
): Promise<void> {
  if (format === 'xz' || format === 'bzip2') {
    throw fail('SOURCE_ARCHIVE_COMPRESSION', { path, format, command: `${format} -d ${path}` });
  }
  signal?.throwIfAborted();
  const out = await open(into, 'wx', 0o600);
  try {
    const source = createReadStream(path, { highWaterMark: 256 * 1024 });
    // A chunk is valid until the next one is asked for: it must be written by then.
    for await (const chunk of decompress(source, format, { signal, label: path })) await out.writeFile(chunk);
  } catch (error) {
    if (!isDsecError(error) || !error.code.startsWith('LAYER_')) throw error;
    throw fail('SOURCE_ARCHIVE', { path, reason: `damaged ${format} data: ${error.message}` }, error);
  } finally {
    await out.close();
  }
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
