/**
 * Files and folders into a sandbox and out of it. Each file is sent with its size and sha256, goes on where it was when the connection breaks (in another run
 * too, for it is known by these), and is at its place only when it is right. Special files are left out, and told.
 */
import { createHash, randomBytes } from 'node:crypto';
import { constants, createReadStream, type Stats } from 'node:fs';
import * as fs from 'node:fs/promises';
import { dirname, join } from 'node:path';
import { setTimeout as delay } from 'node:timers/promises';
import { DSecError, FileChanged, FileError } from './errors.ts';
import type { FileStatus, SandboxFiles } from './files.ts';
import { BackOff, drain, type Transport } from './transport.ts';

export interface TreeOptions {
  readonly signal?: AbortSignal;
  /** Files at once. */
  readonly concurrency?: number;
  /** Told of what is neither file nor folder nor link. */
  readonly onSkipped?: (path: string) => void;
}

interface UploadState {
  readonly offset: number;
  readonly complete: boolean;
}

const AT_ONCE = 8;
/** From here on it is worth a question whether part of it is there. */
const LARGE_BYTES = 4 << 20;
const AGAIN_MS = 200;

type Work = () => Promise<void>;

export async function uploadTree(
  transport: Transport,
  files: SandboxFiles,
  from: string,
  to: string,
  options: TreeOptions,
): Promise<void> {
  const { signal } = options;
  const work: Work[] = [];
  const walk = async (local: string, remote: string): Promise<void> => {
    signal?.throwIfAborted();
    const found = await fs.lstat(local);
    if (found.isFile()) work.push(() => sendFile(transport, files, local, remote, found, signal));
    else if (found.isSymbolicLink()) {
      const target = await fs.readlink(local);
      work.push(() => replaceLink(files, target, remote, signal));
    } else if (found.isDirectory()) {
      await files.mkdir(remote, { parents: true, mode: found.mode & 0o7777, signal });
      for (const name of (await fs.readdir(local)).sort())
        await walk(join(local, name), `${remote.replace(/\/+$/, '')}/${name}`);
    } else options.onSkipped?.(local);
  };
  await walk(from, to);
  await allOf(work, options);
}

async function sendFile(
  transport: Transport,
  files: SandboxFiles,
  local: string,
  remote: string,
  { size, mode, mtimeMs }: Stats,
  signal: AbortSignal | undefined,
): Promise<void> {
  const spec = { path: remote, size, sha256: await sha256Of(local, size), mode: mode & 0o7777, modifiedMs: mtimeMs };
  const parts = `${files.path}/parts`;
  const backOff = new BackOff(transport.patienceMs);
  let ask = size >= LARGE_BYTES;
  let best = -1;
  for (;;) {
    try {
      let offset = 0;
      if (ask) {
        const state = await transport.json<UploadState>('GET', parts, { query: spec, signal });
        if (state.complete) return;
        offset = state.offset;
      }
      if (offset > best) backOff.progress();
      best = Math.max(best, offset);
      ask = true;
      const bytes = offset < size ? createReadStream(local, { start: offset, end: size - 1 }) : Buffer.alloc(0);
      const answer = await transport.once('PUT', parts, { query: { ...spec, offset }, bytes, signal });
      if ((JSON.parse((await drain(answer)).toString()) as UploadState).complete) return;
    } catch (error) {
      // More, or less, of it is there than was known.
      if (error instanceof DSecError && error.code === 'RUNTIME_UPLOAD_OFFSET')
        await delay(AGAIN_MS, undefined, { signal });
      else await backOff.after(error, signal);
    }
  }
}

async function replaceLink(files: SandboxFiles, target: string, path: string, signal?: AbortSignal): Promise<void> {
  try {
    await files.symlink(target, path, { signal });
  } catch (error) {
    if (!(error instanceof FileError)) throw error;
    await files.remove(path, { signal });
    await files.symlink(target, path, { signal });
  }
}

export async function downloadTree(files: SandboxFiles, from: string, to: string, options: TreeOptions): Promise<void> {
  const { signal } = options;
  const work: Work[] = [];
  const walk = async (remote: string, local: string, status: FileStatus): Promise<void> => {
    signal?.throwIfAborted();
    if (status.kind === 'file') work.push(() => fetchFile(files, remote, local, status, signal));
    else if (status.kind === 'symlink') {
      const target = await files.readlink(remote, { signal });
      await fs.rm(local, { force: true });
      await fs.symlink(target, local);
    } else if (status.kind === 'directory') {
      await ownFolder(local);
      for (const entry of await files.list(remote, { signal })) {
        if (entry.nameBase64 !== undefined || /^\.{0,2}$|[/\0]/.test(entry.name)) {
          const message = `${remote}: an entry whose name cannot be had here: ${JSON.stringify(entry.name)}`;
          throw new FileError({ code: 'RUNTIME_FILE', message });
        }
        await walk(`${remote.replace(/\/+$/, '')}/${entry.name}`, join(local, entry.name), entry);
      }
    } else options.onSkipped?.(remote);
  };
  await walk(from, to, await files.stat(from, { signal }));
  await allOf(work, options);
}

/** A folder, and no link to one: that might lead anywhere. */
async function ownFolder(path: string): Promise<void> {
  const found = await fs.lstat(path).catch(() => undefined);
  if (found?.isSymbolicLink()) await fs.rm(path);
  await fs.mkdir(path, { recursive: true });
}

async function fetchFile(
  files: SandboxFiles,
  remote: string,
  local: string,
  { size, mode, modifiedMs }: FileStatus,
  signal: AbortSignal | undefined,
): Promise<void> {
  const sha256 = size >= LARGE_BYTES ? await files.digest(remote, { signal }) : undefined;
  // Named by what it shall be, and so what another run goes on with.
  const mark = sha256?.slice(0, 32) ?? randomBytes(8).toString('hex');
  const part = join(dirname(local), `.dsec-part-${mark}`);
  const flags = constants.O_RDWR | constants.O_CREAT | constants.O_APPEND | constants.O_NOFOLLOW;
  const file = await fs.open(part, flags, 0o600);
  let keep = sha256 !== undefined;
  try {
    let offset = (await file.stat()).size;
    if (offset > size) {
      await file.truncate(0);
      offset = 0;
    }
    if (offset < size)
      for await (const bytes of files.readStream(remote, { offset, signal })) await file.writeFile(bytes);
    const { size: came } = await file.stat();
    if (sha256 !== undefined && (await sha256Of(part, came)) !== sha256) {
      keep = false;
      throw new FileChanged({
        code: 'FILE_CHANGED',
        message: `${remote} was changed while it was copied`,
        retryable: true,
      });
    }
    await file.chmod(mode & 0o777);
    await file.utimes(modifiedMs / 1000, modifiedMs / 1000);
    await fs.rename(part, local);
  } catch (error) {
    if (!keep) await fs.rm(part, { force: true });
    throw error;
  } finally {
    await file.close();
  }
}

async function sha256Of(path: string, size: number): Promise<string> {
  const hash = createHash('sha256');
  if (size > 0) for await (const bytes of createReadStream(path, { end: size - 1 })) hash.update(bytes as Buffer);
  return hash.digest('hex');
}

async function allOf(work: Work[], { concurrency = AT_ONCE }: TreeOptions): Promise<void> {
  let failed = false;
  const worker = async () => {
    for (let next = work.shift(); next !== undefined && !failed; next = work.shift()) {
      try {
        await next();
      } catch (error) {
        failed = true;
        throw error;
      }
    }
  };
  const all = await Promise.allSettled(Array.from({ length: Math.max(1, concurrency) }, worker));
  for (const one of all) if (one.status === 'rejected') throw one.reason;
}
