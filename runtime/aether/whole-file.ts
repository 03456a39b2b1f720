/**
 * Files that are there whole or not at all: written under another name in the same folder, and renamed when all is there. Uploads that can be
 * gone on with after a break keep theirs until then; its name says what it shall become, so nothing has to be remembered.
 */
import { createHash } from 'node:crypto';
import { setTimeout as delay } from 'node:timers/promises';
import { isDsecError } from '#base';
import { fail } from '../errors.ts';
import type { FileStatus, SandboxPath, UploadSpec, UploadState, WriteOptions } from '../sandbox-api/files.ts';
import type { AgentFiles } from './agent-files.ts';
import { CREATE, NEW, NO_LINK, PART_BYTES, TRUNCATE } from './file-parts.ts';

const TEMPORARY = '.dsec-part-';
const BUSY_MS = 5_000;
const noMatter = () => {};

/** `fill` writes to the name that it is given. What exists keeps its mode and owner. */
export async function replaceFile(
  files: AgentFiles,
  path: SandboxPath,
  options: WriteOptions,
  fill: (temporary: Buffer) => Promise<void>,
): Promise<FileStatus> {
  const before = await statusOf(files, path);
  const target = Buffer.from(path);
  // What is no file is written to, not replaced: a link leads somewhere.
  if (before !== undefined && before.kind !== 'file') {
    await files.writePart(target, 0, TRUNCATE, Buffer.alloc(0), {});
    await fill(target);
    return files.stat(path);
  }
  const temporary = besides(target, Math.random().toString(36).slice(2));
  try {
    await files.writePart(temporary, 0, CREATE | NEW | NO_LINK, Buffer.alloc(0), { mode: 0o600 });
    await fill(temporary);
    await takePlace(files, temporary, target, before, options);
  } catch (error) {
    await files.remove(temporary).catch(() => {});
    throw error;
  }
  return files.stat(path);
}

export class VerifiedUploads {
  private readonly files: AgentFiles;
  /** Of a path: what is under way. Two at a time would write over each other. */
  private readonly busy = new Map<string, Promise<unknown>>();

  constructor(files: AgentFiles) {
    this.files = files;
  }

  async state(spec: UploadSpec): Promise<UploadState> {
    refuseWrong(spec);
    const part = await this.part(spec);
    if (part !== undefined) return { offset: part.size, complete: false };
    // Whoever has not heard that it is done asks again.
    const there = await statusOf(this.files, spec.path);
    const done =
      there?.kind === 'file' && there.size === spec.size && (await digestOf(this.files, spec.path)) === spec.sha256;
    return done ? { offset: spec.size, complete: true } : { offset: 0, complete: false };
  }

  async write(spec: UploadSpec, offset: number, content: AsyncIterable<Buffer>): Promise<UploadState> {
    refuseWrong(spec);
    const key = Buffer.from(spec.path).toString('latin1');
    const before = this.busy.get(key);
    // Of a connection that broke there may be something under way.
    if (before !== undefined && (await Promise.race([before, delay(BUSY_MS, 'busy', { ref: false })])) === 'busy') {
      throw problem(spec.path, 'EBUSY', 'another request is writing it');
    }
    if (this.busy.get(key) !== before) return this.write(spec, offset, content);
    const work = this.append(spec, offset, content);
    const over = work.then(noMatter, noMatter).then(() => {
      if (this.busy.get(key) === over) this.busy.delete(key);
    });
    this.busy.set(key, over);
    return work;
  }

  private async append(spec: UploadSpec, offset: number, content: AsyncIterable<Buffer>): Promise<UploadState> {
    const { files } = this;
    const temporary = partName(spec);
    const part = await this.part(spec);
    const before = part?.size ?? 0;
    if (offset !== before) throw fail('RUNTIME_UPLOAD_OFFSET', { path: String(spec.path), offset, expected: before });
    if (part === undefined) {
      await files.writePart(temporary, 0, CREATE | NEW | NO_LINK, Buffer.alloc(0), { mode: 0o600 });
    }
    let at = offset;
    for await (const piece of content) {
      if (at + piece.length > spec.size) {
        throw problem(spec.path, 'EFBIG', `more than the ${spec.size} bytes came that it was to have`);
      }
      for (let done = 0; done < piece.length; done += PART_BYTES) {
        const bytes = piece.subarray(done, done + PART_BYTES);
        // Zeros behind its end need no room.
        if (bytes.length >= SPARSE_BYTES && bytes.equals(ZEROS.subarray(0, bytes.length))) {
          await files.change(temporary, { size: at + bytes.length });
        } else {
          await files.writePart(temporary, at, NO_LINK, bytes, {});
        }
        at += bytes.length;
      }
    }
    if (at < spec.size) return { offset: at, complete: false };
    if ((await digestOf(files, temporary)) !== spec.sha256) {
      await files.remove(temporary);
      throw fail('RUNTIME_UPLOAD_DIGEST', { path: String(spec.path), sha256: spec.sha256 });
    }
    await takePlace(files, temporary, Buffer.from(spec.path), await statusOf(files, spec.path), spec);
    return { offset: at, complete: true };
  }

  /** What has come of it. Of somebody else it is not gone on with. */
  private async part(spec: UploadSpec): Promise<FileStatus | undefined> {
    const part = await statusOf(this.files, partName(spec));
    if (part === undefined) return undefined;
    if (part.kind === 'file' && part.uid === 0 && part.links === 1 && part.size <= spec.size) return part;
    await this.files.remove(partName(spec), { recursive: true });
    return undefined;
  }
}

/** Of all bytes, holes as zeros. @throws RUNTIME_FILE when it is replaced meanwhile */
export async function digestOf(files: AgentFiles, path: SandboxPath): Promise<string> {
  const hash = createHash('sha256');
  let at = 0;
  let whole = 0;
  const zeros = (to: number) => {
    for (; at < to; at += Math.min(ZEROS.length, to - at)) hash.update(ZEROS.subarray(0, to - at));
  };
  for await (const { offset, bytes, size } of files.pieces(path)) {
    zeros(offset);
    hash.update(bytes);
    at = offset + bytes.length;
    whole = size;
  }
  zeros(whole);
  return hash.digest('hex');
}

const ZEROS = Buffer.alloc(PART_BYTES);
const SPARSE_BYTES = 4096;

async function takePlace(
  files: AgentFiles,
  temporary: Buffer,
  target: Buffer,
  before: FileStatus | undefined,
  { mode, uid, gid, modifiedMs }: WriteOptions & { readonly modifiedMs?: number },
): Promise<void> {
  const owner = { uid: uid ?? before?.uid ?? 0, gid: gid ?? before?.gid ?? 0 };
  await files.change(temporary, {
    owner,
    mode: mode ?? (before === undefined ? 0o644 : before.mode & 0o7777),
    modifiedMs,
  });
  await files.sync(temporary);
  await files.rename(temporary, target);
}

async function statusOf(files: AgentFiles, path: SandboxPath): Promise<FileStatus | undefined> {
  try {
    return await files.stat(path, { follow: false });
  } catch (error) {
    if (isDsecError(error) && error.params.code === 'ENOENT') return undefined;
    throw error;
  }
}

function partName(spec: UploadSpec): Buffer {
  const { path, size, sha256 } = spec;
  const key = createHash('sha256').update(`${size} ${sha256} `).update(path).digest('hex');
  return besides(Buffer.from(path), key.slice(0, 32));
}

function besides(path: Buffer, key: string): Buffer {
  const text = path.toString('latin1').replace(/\/+$/, '');
  const folder = text.slice(0, text.lastIndexOf('/') + 1);
  return Buffer.from(`${folder}${TEMPORARY}${key}`, 'latin1');
}

function refuseWrong({ path, size, sha256 }: UploadSpec): void {
  if (!Number.isSafeInteger(size) || size < 0) throw problem(path, 'EINVAL', `${size} is no number of bytes`);
  if (!/^[0-9a-f]{64}$/.test(sha256)) throw problem(path, 'EINVAL', `"${sha256}" is no sha256: 64 hexadecimal digits`);
}

function problem(path: SandboxPath, code: string, reason: string) {
  return fail('RUNTIME_FILE', { path: String(path), code, reason });
}
