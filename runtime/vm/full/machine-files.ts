/**
 * Files of a machine by its guest agent: read and written, one at a time. The agent knows no more: no folders, no owners, no times; those fail with
 * RUNTIME_UNSUPPORTED. Paths are the guest's own, whatever its system calls a path.
 */
import { createHash } from 'node:crypto';
import { messageOf } from '#base';
import { fail } from '../../errors.ts';
import type { FileStatus, SandboxFiles, SandboxPath } from '../../sandbox-api/files.ts';
import { isObject } from '../qemu/monitor.ts';
import { errnoOf, type GuestAgent, GuestRefusal } from './guest-agent.ts';

export interface FilesHost {
  /** While `work` goes on the machine runs. @throws RUNTIME_UNSUPPORTED where no agent answers */
  withAgent<T>(work: (agent: GuestAgent) => Promise<T>): Promise<T>;
  unsupported(): Error;
}

const PART_BYTES = 1 << 20;
const LIMIT_BYTES = 64 << 20;
const CODES: Readonly<Record<number, string>> = {
  2: 'ENOENT',
  13: 'EACCES',
  20: 'ENOTDIR',
  21: 'EISDIR',
  28: 'ENOSPC',
  30: 'EROFS',
};

export function machineFiles(host: FilesHost): SandboxFiles {
  const files: Pick<SandboxFiles, 'stat' | 'read' | 'pieces' | 'write' | 'digest'> = {
    stat: (path) => host.withAgent((agent) => withFile(agent, path, 'r', (handle) => statusOf(agent, handle))),
    async read(path, limitBytes = LIMIT_BYTES) {
      const parts: Buffer[] = [];
      let size = 0;
      for await (const { bytes } of files.pieces(path)) {
        size += bytes.length;
        if (size > limitBytes) throw fileError(path, 'EFBIG', `it has more than ${limitBytes} bytes`);
        parts.push(bytes);
      }
      return Buffer.concat(parts);
    },
    async *pieces(path, from = 0) {
      for (let offset = from; ; ) {
        const at = offset;
        const piece = await host.withAgent((agent) =>
          withFile(agent, path, 'r', (handle) => pieceAt(agent, handle, at)),
        );
        yield { offset, bytes: piece.bytes, size: Math.max(piece.size, offset + piece.bytes.length) };
        offset += piece.bytes.length;
        if (piece.bytes.length === 0 || (piece.size > 0 && offset >= piece.size)) return;
        if (offset - from > LIMIT_BYTES && piece.size === 0) throw fileError(path, 'EFBIG', 'it has no end');
      }
    },
    async write(path, content) {
      // All of it is here before it is begun: content that fails leaves what is there. The agent cannot rename, so it is written in place: a write that is
      // broken off leaves a part.
      const bytes = Buffer.isBuffer(content) ? content : await collected(path, content);
      return host.withAgent((agent) =>
        withFile(agent, path, 'w', async (handle) => {
          for (let at = 0; at < bytes.length; ) {
            const part = bytes.subarray(at, at + PART_BYTES);
            const answer = await agent.ask('guest-file-write', { handle, 'buf-b64': part.toString('base64') });
            at += writtenOf(path, part, answer);
          }
          await agent.ask('guest-file-flush', { handle });
          return fileOf(bytes.length);
        }),
      );
    },
    async digest(path) {
      const hash = createHash('sha256');
      for await (const { bytes } of files.pieces(path)) hash.update(bytes);
      return hash.digest('hex');
    },
  };
  const refuse = () => Promise.reject(host.unsupported());
  return new Proxy(files as SandboxFiles, {
    get: (has, name) => (Object.hasOwn(has, name) ? has[name as keyof SandboxFiles] : refuse),
  });
}

async function withFile<T>(
  agent: GuestAgent,
  path: SandboxPath,
  mode: 'r' | 'w',
  work: (handle: number) => Promise<T>,
): Promise<T> {
  try {
    const handle = await agent.ask('guest-file-open', { path: String(path), mode });
    if (typeof handle !== 'number') throw new Error('an answer without a file');
    try {
      return await work(handle);
    } finally {
      await agent.ask('guest-file-close', { handle }).catch(() => {});
    }
  } catch (error) {
    if (!(error instanceof GuestRefusal)) throw error;
    throw fileError(path, CODES[errnoOf(error.message)] ?? 'EIO', messageOf(error), error);
  }
}

async function seek(agent: GuestAgent, handle: number, offset: number, whence: 'set' | 'end'): Promise<number> {
  const answer = await agent.ask('guest-file-seek', { handle, offset, whence });
  return isObject(answer) && typeof answer.position === 'number' ? answer.position : 0;
}

async function statusOf(agent: GuestAgent, handle: number): Promise<FileStatus> {
  return fileOf(await seek(agent, handle, 0, 'end'));
}

/** All that is known of one: that it is a file, and how long. */
function fileOf(size: number): FileStatus {
  return {
    kind: 'file',
    mode: 0o100644,
    uid: 0,
    gid: 0,
    links: 1,
    size,
    blocks: Math.ceil(size / 512),
    inode: 0n,
    modifiedMs: 0,
  };
}

async function pieceAt(agent: GuestAgent, handle: number, offset: number): Promise<{ bytes: Buffer; size: number }> {
  const size = await seek(agent, handle, 0, 'end');
  await seek(agent, handle, offset, 'set');
  const answer = await agent.ask('guest-file-read', { handle, count: PART_BYTES });
  const text = isObject(answer) ? answer['buf-b64'] : undefined;
  return { bytes: Buffer.from(typeof text === 'string' ? text : '', 'base64'), size };
}

/** How much of `part` was written; the rest has to be given again. */
function writtenOf(path: SandboxPath, part: Buffer, answer: unknown): number {
  const count = isObject(answer) ? answer.count : undefined;
  if (typeof count === 'number' && Number.isInteger(count) && count > 0 && count <= part.length) return count;
  throw fileError(path, 'EIO', 'the guest agent does not say that it was written');
}

async function collected(path: SandboxPath, content: AsyncIterable<Buffer>): Promise<Buffer> {
  const parts: Buffer[] = [];
  let size = 0;
  for await (const part of content) {
    size += part.length;
    if (size > LIMIT_BYTES) throw fileError(path, 'EFBIG', `the agent takes files of up to ${LIMIT_BYTES} bytes`);
    parts.push(part);
  }
  return Buffer.concat(parts);
}

function fileError(path: SandboxPath, code: string, reason: string, cause?: unknown): Error {
  return fail('RUNTIME_FILE', { path: String(path), reason: `${reason} (${code})`, code }, cause);
}
