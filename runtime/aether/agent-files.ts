/**
 * Files of a sandbox through its agent (runtime/agent/src/files.rs): small operations, each resolved by the kernel inside the sandbox's
 * root in one step. Trees are walked from here; what changes in the middle is met as it is then, but never outside the root.
 */
import type { Stats } from 'node:fs';
import * as fs from 'node:fs/promises';
import { basename, dirname, join, resolve } from 'node:path';
import { inParallel, isDsecError, messageOf, Slots, systemCode } from '#base';
import { PayloadReader, PayloadWriter } from '../backend/agent-wire.ts';
import { fail } from '../errors.ts';
import type {
  FileEntry,
  FileKind,
  FileStatus,
  SandboxFiles,
  SandboxPath,
  UploadSpec,
  UploadState,
  WriteOptions,
} from '../sandbox-api/files.ts';
import { CREATE, PART_BYTES, TRUNCATE } from './file-parts.ts';
import { digestOf, replaceFile, VerifiedUploads } from './whole-file.ts';

const OPERATION = {
  stat: 1,
  read: 2,
  write: 3,
  list: 4,
  remove: 5,
  rename: 6,
  mkdir: 7,
  symlink: 8,
  link: 9,
  change: 10,
  readlink: 11,
  sync: 12,
} as const;

/** Flags of `change`. */
const MODE = 1;
const OWNER = 2;
const TIME = 4;
const SIZE = 8;

/** Files and names of a tree: a round trip each would make a large one slow; all at once would take as much memory as it has names. */
const AT_ONCE = 16;
const READ_LIMIT_BYTES = 64 << 20;
const NO_ID = 0xffffffff;
/** Of one folder. One that is filled while it is listed has no end. */
const MAX_ENTRIES = 1 << 20;

/** Of a file with several names: the first, and when it is there. */
interface Copied<P> {
  readonly path: P;
  readonly done: Promise<void>;
}

export class AgentFiles implements SandboxFiles {
  private readonly ask: (payload: Buffer) => Promise<Buffer>;
  /** Files of trees that are open here. */
  private readonly gate = new Slots(AT_ONCE);
  private readonly uploads = new VerifiedUploads(this);

  /** @param ask Sends a request, gives its answer, or rejects with the `code` of an errno. */
  constructor(ask: (payload: Buffer) => Promise<Buffer>) {
    this.ask = ask;
  }

  async stat(path: SandboxPath, { follow = true }: { readonly follow?: boolean } = {}): Promise<FileStatus> {
    return statusOf(new PayloadReader(await this.request(OPERATION.stat, path, (out) => out.u8(follow ? 1 : 0))));
  }

  async list(path: SandboxPath): Promise<FileEntry[]> {
    const entries: FileEntry[] = [];
    for (let cookie = 0n; ; ) {
      const at = cookie;
      const reader = new PayloadReader(await this.request(OPERATION.list, path, (out) => out.u64(at)));
      cookie = reader.u64();
      for (const entry of reader.list(() => ({ name: Buffer.from(reader.bytes()), ...statusOf(reader) })))
        entries.push(entry);
      if (cookie === 0n) return entries;
      if (entries.length > MAX_ENTRIES)
        throw fileError(path, 'EFBIG', `the folder has more than ${MAX_ENTRIES} entries`);
    }
  }

  async read(path: SandboxPath, limitBytes = READ_LIMIT_BYTES): Promise<Buffer> {
    const parts: Buffer[] = [];
    let at = 0;
    for await (const { offset, bytes } of this.pieces(path)) {
      if (offset + bytes.length > limitBytes) throw fileError(path, 'EFBIG', `it has more than ${limitBytes} bytes`);
      if (offset > at) parts.push(Buffer.alloc(offset - at));
      parts.push(bytes);
      at = offset + bytes.length;
    }
    return Buffer.concat(parts);
  }

  async *pieces(path: SandboxPath, from = 0): AsyncGenerator<{ offset: number; bytes: Buffer; size: number }> {
    let first: FileStatus | undefined;
    for (let at = from; ; ) {
      const offset = at;
      const payload = await this.request(OPERATION.read, path, (out) => out.u64(BigInt(offset)).u32(PART_BYTES));
      const reader = new PayloadReader(payload);
      const status = statusOf(reader);
      first ??= status;
      if (status.inode !== first.inode) throw fileError(path, 'ESTALE', 'it was replaced while it was read');
      const begin = Math.min(Number(reader.u64()), end(first));
      const bytes = reader.rest().subarray(0, Math.max(0, end(first) - begin));
      yield { offset: begin, bytes, size: Math.min(status.size, end(first)) };
      if (bytes.length === 0) return;
      at = begin + bytes.length;
      if (at >= status.size && status.size > 0) return;
      // One that grows while it is read would have no end, and fill whatever it is copied to.
      if (at >= end(first)) {
        if (first.size > 0) return;
        throw fileError(path, 'EFBIG', `it said that it is empty, and has more than ${READ_LIMIT_BYTES} bytes`);
      }
    }
  }

  async write(
    path: SandboxPath,
    content: Buffer | AsyncIterable<Buffer>,
    options: WriteOptions = {},
  ): Promise<FileStatus> {
    // At once, so it is whole too.
    if (Buffer.isBuffer(content) && content.length <= PART_BYTES) {
      return this.writePart(path, 0, CREATE | TRUNCATE, content, options);
    }
    return replaceFile(this, path, options, async (temporary) => {
      let at = 0;
      for await (const piece of Buffer.isBuffer(content) ? [content] : content) {
        for (let done = 0; done < piece.length; done += PART_BYTES) {
          const part = piece.subarray(done, done + PART_BYTES);
          await this.writePart(temporary, at, 0, part, {});
          at += part.length;
        }
      }
    });
  }

  uploadState(spec: UploadSpec): Promise<UploadState> {
    return this.uploads.state(spec);
  }

  uploadPart(spec: UploadSpec, offset: number, content: AsyncIterable<Buffer>): Promise<UploadState> {
    return this.uploads.write(spec, offset, content);
  }

  digest(path: SandboxPath): Promise<string> {
    return digestOf(this, path);
  }

  async mkdir(
    path: SandboxPath,
    { mode = 0o755, parents = false }: { readonly mode?: number; readonly parents?: boolean } = {},
  ) {
    const names = pathOf(path)
      .toString('latin1')
      .split('/')
      .filter((name) => name !== '' && name !== '.');
    for (let depth = parents ? 1 : names.length; depth <= names.length; depth++) {
      const one = Buffer.from(`/${names.slice(0, depth).join('/')}`, 'latin1');
      try {
        await this.request(OPERATION.mkdir, one, (out) => out.u32(mode));
      } catch (error) {
        if (!parents || codeOf(error) !== 'EEXIST') throw error;
        if ((await this.stat(one)).kind !== 'directory') throw error;
      }
    }
  }

  async remove(path: SandboxPath, { recursive = false }: { readonly recursive?: boolean } = {}): Promise<void> {
    // Before anything below it goes: what it leads to would be another folder, and cannot be removed by this name.
    const last = pathOf(path)
      .toString('latin1')
      .split('/')
      .filter((name) => name !== '')
      .at(-1);
    if (last === undefined) throw fileError(path, 'EBUSY', 'the root cannot be removed');
    if (last === '.' || last === '..') throw fileError(path, 'EINVAL', 'a name is needed to remove something by');
    const { kind } = await this.stat(path, { follow: false });
    if (kind !== 'directory') return void (await this.request(OPERATION.remove, path, (out) => out.u8(0)));
    if (recursive) {
      for (const { name } of await this.list(path)) await this.remove(below(path, name), { recursive });
    }
    await this.request(OPERATION.remove, path, (out) => out.u8(1));
  }

  async rename(from: SandboxPath, to: SandboxPath): Promise<void> {
    refuseNul(to);
    await this.request(OPERATION.rename, from, (out) => out.bytes(pathOf(to)).u32(0));
  }

  /** What was written outlives the machine. */
  async sync(path: SandboxPath): Promise<void> {
    await this.request(OPERATION.sync, path, () => {});
  }

  async readlink(path: SandboxPath): Promise<Buffer> {
    return Buffer.from(await this.request(OPERATION.readlink, path, () => {}));
  }

  async symlink(target: SandboxPath, path: SandboxPath): Promise<void> {
    refuseNul(target);
    await this.request(OPERATION.symlink, path, (out) => out.bytes(pathOf(target)));
  }

  async upload(from: string, to: SandboxPath): Promise<void> {
    await this.uploadOne(from, await fs.lstat(from), to, new Map());
  }

  async download(from: SandboxPath, to: string): Promise<void> {
    const status = await this.stat(from, { follow: false });
    // Without a slash at its end, which would lead through a link.
    const target = resolve(to);
    await this.downloadOne(from, status.kind === 'symlink' ? await this.stat(from) : status, target, new Map());
  }

  /** `known`: each file that has several names, at the first of them. */
  private async uploadOne(
    from: string,
    stat: Stats,
    to: SandboxPath,
    known: Map<string, Copied<SandboxPath>>,
  ): Promise<void> {
    if (stat.isSymbolicLink()) {
      const target = await fs.readlink(from, { encoding: 'buffer' });
      await this.remove(to).catch(unlessMissing);
      return this.symlink(target, to);
    }
    const modifiedMs = stat.mtimeMs;
    if (stat.isDirectory()) {
      await this.mkdir(to, { mode: 0o700 }).catch(async (error: unknown) => {
        if (codeOf(error) !== 'EEXIST' || (await this.stat(to)).kind !== 'directory') throw error;
      });
      await inParallel(await fs.readdir(from), AT_ONCE, async (name) => {
        const path = join(from, name);
        await this.uploadOne(path, await fs.lstat(path), below(to, Buffer.from(name)), known);
      });
    } else if (stat.isFile()) {
      const key = `${stat.dev}:${stat.ino}`;
      const before = stat.nlink > 1 ? known.get(key) : undefined;
      if (before !== undefined) {
        await before.done;
        await this.remove(to).catch(unlessMissing);
        return void (await this.request(OPERATION.link, before.path, (out) => out.bytes(pathOf(to))));
      }
      const done = this.gate.run(() => this.uploadFile(from, to));
      if (stat.nlink > 1) known.set(key, { path: to, done });
      await done;
    } else {
      throw fileError(from, 'EINVAL', 'it is neither a file nor a folder nor a link');
    }
    await this.change(to, { mode: stat.mode & 0o7777, modifiedMs });
  }

  /** Zeros are left out: a sparse file stays one. */
  private async uploadFile(from: string, to: SandboxPath): Promise<void> {
    const file = await fs.open(from, 'r');
    try {
      const part = Buffer.alloc(PART_BYTES);
      const first = await file.read(part, 0, PART_BYTES, 0);
      if (first.bytesRead < PART_BYTES) {
        const bytes = Buffer.from(part.subarray(0, first.bytesRead));
        return void (await this.writePart(to, 0, CREATE | TRUNCATE, bytes, { mode: 0o600 }));
      }
      await replaceFile(this, to, { mode: 0o600 }, async (temporary) => {
        const zeros = Buffer.alloc(PART_BYTES);
        let at = 0;
        for (let { bytesRead } = first; bytesRead > 0; ) {
          const bytes = part.subarray(0, bytesRead);
          if (!bytes.equals(zeros.subarray(0, bytesRead)))
            await this.writePart(temporary, at, 0, Buffer.from(bytes), {});
          at += bytesRead;
          bytesRead = (await file.read(part, 0, PART_BYTES, at)).bytesRead;
        }
        await this.change(temporary, { size: at });
      });
    } catch (error) {
      if (isDsecError(error)) throw error;
      throw fileError(from, systemCode(error) ?? 'EIO', messageOf(error));
    } finally {
      await file.close();
    }
  }

  private async downloadOne(
    from: SandboxPath,
    status: FileStatus,
    to: string,
    known: Map<string, Copied<string>>,
  ): Promise<void> {
    if (status.kind === 'symlink') {
      await fs.rm(to, { force: true });
      return fs.symlink(await this.readlink(from), to);
    }
    if (status.kind === 'directory') {
      await ownFolder(to);
      // A name that was taken anew while it was listed comes twice: what was a link may be a folder then.
      const entries = new Map((await this.list(from)).map((entry) => [hostName(from, entry.name), entry]));
      await inParallel([...entries], AT_ONCE, async ([name, { name: exact, ...entry }]) => {
        await this.downloadOne(below(from, exact), entry, join(to, name), known);
      });
    } else if (status.kind === 'file') {
      // Inode numbers are those of one file system each, and a tree may span several.
      const key = `${status.inode} ${status.size} ${status.modifiedMs} ${status.links}`;
      const before = status.links > 1 ? known.get(key) : undefined;
      if (before !== undefined) {
        await before.done;
        await fs.rm(to, { force: true });
        return fs.link(before.path, to);
      }
      const done = this.gate.run(() => this.downloadFile(from, to));
      if (status.links > 1) known.set(key, { path: to, done });
      await done;
    } else {
      throw fileError(from, 'EINVAL', 'it is neither a file nor a folder nor a link');
    }
    // What it may do as another user in the sandbox it must not do as the user here.
    await fs.chmod(to, status.mode & 0o777);
    await fs.utimes(to, status.modifiedMs / 1000, status.modifiedMs / 1000);
  }

  private async downloadFile(from: SandboxPath, to: string): Promise<void> {
    // A new one: a link that lies there is not written through.
    const fresh = join(dirname(to), `.dsec-${process.pid}-${Math.random().toString(36).slice(2)}`);
    const file = await fs.open(fresh, 'wx', 0o600);
    try {
      let size = 0;
      for await (const piece of this.pieces(from)) {
        size = Math.max(piece.size, piece.offset + piece.bytes.length);
        await file.write(piece.bytes, 0, piece.bytes.length, piece.offset);
      }
      await file.truncate(size);
      await fs.rename(fresh, to);
    } catch (error) {
      await fs.rm(fresh, { force: true });
      throw error;
    } finally {
      await file.close();
    }
  }

  /** Of one name, at once. */
  async change(
    path: SandboxPath,
    what: {
      readonly mode?: number;
      readonly modifiedMs?: number;
      readonly size?: number;
      readonly owner?: { readonly uid: number; readonly gid: number };
    },
  ): Promise<void> {
    const flags =
      (what.mode === undefined ? 0 : MODE) |
      (what.owner === undefined ? 0 : OWNER) |
      (what.modifiedMs === undefined ? 0 : TIME) |
      (what.size === undefined ? 0 : SIZE);
    const ms = what.modifiedMs ?? 0;
    const seconds = Math.floor(ms / 1000);
    await this.request(OPERATION.change, path, (out) =>
      out
        .u8(flags)
        .u32(what.mode ?? 0)
        .u32(what.owner?.uid ?? NO_ID)
        .u32(what.owner?.gid ?? NO_ID)
        .u64(BigInt.asUintN(64, BigInt(seconds)))
        .u32(Math.round((ms - seconds * 1000) * 1e6) % 1_000_000_000)
        .u64(BigInt(what.size ?? 0)),
    );
  }

  /** A piece of a file. */
  async writePart(
    path: SandboxPath,
    at: number,
    flags: number,
    bytes: Buffer,
    options: WriteOptions,
  ): Promise<FileStatus> {
    const { mode = 0o644, uid = NO_ID, gid = NO_ID } = options;
    const answer = await this.request(OPERATION.write, path, (out) =>
      out.u64(BigInt(at)).u8(flags).u32(mode).u32(uid).u32(gid).bytes(bytes),
    );
    return statusOf(new PayloadReader(answer));
  }

  private async request(operation: number, path: SandboxPath, more: (out: PayloadWriter) => unknown): Promise<Buffer> {
    const bytes = pathOf(path);
    refuseNul(path);
    const out = new PayloadWriter().u8(operation).bytes(bytes);
    more(out);
    try {
      return await this.ask(out.done());
    } catch (error) {
      if (isDsecError(error)) throw error;
      throw fileError(path, systemCode(error) ?? 'EIO', messageOf(error), error);
    }
  }
}

/** The agent takes one that the kernel could not have for a broken frame, and ends. */
function refuseNul(path: SandboxPath): void {
  const bytes = pathOf(path);
  if (bytes.length === 0 || bytes.includes(0))
    throw fileError(path, 'EINVAL', 'a path has at least one byte, and none that is NUL');
}

function pathOf(path: SandboxPath): Buffer {
  return typeof path === 'string' ? Buffer.from(path) : path;
}

function below(path: SandboxPath, name: Buffer): Buffer {
  return Buffer.concat([pathOf(path), Buffer.from('/'), name]);
}

/**
 * A folder of this machine that the sandbox's is copied into: never one that a link leads to. The sandbox may have had a link by this
 * name when it was copied before.
 */
async function ownFolder(path: string): Promise<void> {
  const found = await fs.lstat(path).catch((error: unknown) => {
    if (systemCode(error) !== 'ENOENT') throw error;
  });
  if (found?.isDirectory()) return;
  if (found !== undefined) await fs.rm(path);
  else await fs.mkdir(dirname(path), { recursive: true });
  await fs.mkdir(path);
}

/** A name of the sandbox's on this machine: it is one name, and text. */
function hostName(folder: SandboxPath, name: Buffer): string {
  const text = name.toString('utf8');
  if (
    !Buffer.from(text).equals(name) ||
    text.includes('/') ||
    basename(text) !== text ||
    text === '..' ||
    text === '.'
  ) {
    throw fileError(below(folder, name), 'EILSEQ', 'its name is not UTF-8');
  }
  return text;
}

function fileError(path: SandboxPath, code: string, reason: string, cause?: unknown) {
  return fail('RUNTIME_FILE', { path: String(path), reason: `${reason} (${code})`, code }, cause);
}

/** How far it is read. Files of /proc say that they are empty. */
function end(first: FileStatus): number {
  return first.size > 0 ? first.size : READ_LIMIT_BYTES;
}

function codeOf(error: unknown): string | undefined {
  return isDsecError(error, 'RUNTIME_FILE') ? String(error.params.code) : undefined;
}

function unlessMissing(error: unknown): void {
  if (codeOf(error) !== 'ENOENT') throw error;
}

function kindOf(mode: number): FileKind {
  switch (mode & 0o170000) {
    case 0o100000:
      return 'file';
    case 0o040000:
      return 'directory';
    case 0o120000:
      return 'symlink';
    default:
      return 'other';
  }
}

function statusOf(reader: PayloadReader): FileStatus {
  const [mode, uid, gid, links] = [reader.u32(), reader.u32(), reader.u32(), reader.u32()];
  const [size, blocks, inode, seconds] = [reader.u64(), reader.u64(), reader.u64(), reader.i64()];
  const nanoseconds = reader.u32();
  reader.u64();
  return {
    kind: kindOf(mode),
    mode,
    uid,
    gid,
    links,
    size: Number(size),
    blocks: Number(blocks),
    inode,
    modifiedMs: Number(seconds) * 1000 + nanoseconds / 1e6,
  };
}
