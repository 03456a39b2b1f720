/**
 * One file into a sandbox or out of it, through a connection that may break: it goes on where it was as soon as the runtime service answers again,
 * also in another run of the same command, and takes its place when its sha256 is right, and not before.
 */
import { createHash, randomUUID } from 'node:crypto';
import { constants, createReadStream } from 'node:fs';
import * as fs from 'node:fs/promises';
import { dirname, join } from 'node:path';
import { setTimeout as delay } from 'node:timers/promises';
import { isDsecError } from '#base';
import type { UploadSpec } from '#runtime';
import { fail } from '../errors.ts';
import type { SandboxClient } from './sandbox-client.ts';

const PATIENCE_MS = 60_000;
const AGAIN_MS = 300;
/** The service has died under it, or is away. */
const BROKEN = ['SANDBOX_PROTOCOL', 'SANDBOX_NO_SERVICE', 'RUNTIME_UPLOAD_OFFSET'] as const;

/** @throws RUNTIME_FILE, RUNTIME_UPLOAD_DIGEST when the file changes meanwhile */
export async function sendFile(client: SandboxClient, name: string, from: string, to: string): Promise<void> {
  const found = await fs.stat(from);
  if (!found.isFile())
    throw fail('SANDBOX_NO_FILE', { path: from, kind: found.isDirectory() ? 'directory' : 'special file' });
  const { size, mode, mtimeMs } = found;
  const spec: UploadSpec = { path: to, size, sha256: await hashOf(from), mode: mode & 0o7777, modifiedMs: mtimeMs };
  await again(async (progress) => {
    const { offset, complete } = await client.uploadState(name, spec);
    progress(offset);
    if (complete) return true;
    return (await client.uploadPart(name, spec, offset, createReadStream(from, { start: offset }))).complete;
  });
}

/** At one go and unverified, for sandboxes that take no parts: whole machines. @throws RUNTIME_FILE */
export async function sendWhole(client: SandboxClient, name: string, from: string, to: string): Promise<void> {
  await client.write(name, to, createReadStream(from));
}

/** The other way; it takes its place when all of it has come. @throws RUNTIME_FILE */
export async function fetchWhole(client: SandboxClient, name: string, from: string, to: string): Promise<void> {
  const part = join(dirname(to), `.dsec-part-${randomUUID()}`);
  const file = await fs.open(part, 'wx', 0o600);
  try {
    for await (const bytes of client.content(name, from, 0)) await file.appendFile(bytes);
    await file.chmod(0o666 & ~process.umask());
    await fs.rename(part, to);
  } catch (error) {
    await fs.rm(part, { force: true });
    throw error;
  } finally {
    await file.close();
  }
}

/** @throws SANDBOX_FILE_CHANGED */
export async function fetchFile(client: SandboxClient, name: string, from: string, to: string): Promise<void> {
  const { kind, size, mode, modifiedMs } = await client.stat(name, from);
  if (kind !== 'file') throw fail('SANDBOX_NO_FILE', { path: from, kind });
  const { sha256 } = await client.digest(name, from);
  // What it shall be, and so what another run of the same command goes on with.
  const part = join(dirname(to), `.dsec-part-${sha256.slice(0, 32)}`);
  const flags = constants.O_RDWR | constants.O_CREAT | constants.O_APPEND | constants.O_NOFOLLOW;
  const file = await fs.open(part, flags, 0o600);
  try {
    if ((await file.stat()).size > size) await file.truncate(0);
    await again(async (progress) => {
      const { size: offset } = await file.stat();
      progress(offset);
      if (offset < size) for await (const bytes of client.content(name, from, offset)) await file.appendFile(bytes);
      return (await file.stat()).size >= size;
    });
    if ((await hashOf(part)) !== sha256) {
      await fs.rm(part);
      throw fail('SANDBOX_FILE_CHANGED', { path: from, name });
    }
    await file.chmod(mode & 0o777);
    await file.utimes(modifiedMs / 1000, modifiedMs / 1000);
    await file.sync();
    await fs.rename(part, to);
  } finally {
    await file.close();
  }
}

/** Until it is true; a minute without progress ends it. */
async function again(work: (progress: (offset: number) => void) => Promise<boolean>): Promise<void> {
  let best = -1;
  let deadline = Date.now() + PATIENCE_MS;
  const progress = (offset: number) => {
    if (offset > best) deadline = Date.now() + PATIENCE_MS;
    best = Math.max(best, offset);
  };
  for (;;) {
    try {
      if (await work(progress)) return;
      if (Date.now() > deadline) throw fail('SANDBOX_PROTOCOL', { problem: 'nothing has come for a minute' });
    } catch (error) {
      if (!BROKEN.some((code) => isDsecError(error, code)) || Date.now() > deadline) throw error;
    }
    await delay(AGAIN_MS);
  }
}

async function hashOf(path: string): Promise<string> {
  const hash = createHash('sha256');
  for await (const bytes of createReadStream(path)) hash.update(bytes as Buffer);
  return hash.digest('hex');
}
