/**
 * Files and folders into a sandbox of another machine, or out of it: walked here, each file sent as file-transfer.ts sends one, so it is whole and verified or
 * not there. Modes and times are kept, links are made anew; what is neither is left out, and said. Nothing that comes out leads the copy elsewhere: names are checked,
 * and a link that is in the way is replaced, not followed.
 */
import * as fs from 'node:fs/promises';
import { join } from 'node:path';
import { isDsecError, systemCode } from '#base';
import { fail } from '../errors.ts';
import { fetchFile, sendFile } from './file-transfer.ts';
import type { FileRow, SandboxClient } from './sandbox-client.ts';

const AT_ONCE = 8;

type Note = (text: string) => void;

/** @throws RUNTIME_FILE, SANDBOX_*, what the file system throws */
export async function sendTree(
  client: SandboxClient,
  name: string,
  from: string,
  to: string,
  note: Note,
): Promise<void> {
  // What is named is followed, what is found is not.
  if ((await fs.stat(from)).isFile()) return sendFile(client, name, from, to);
  const files: (() => Promise<void>)[] = [];
  const folder = async (source: string, target: string): Promise<void> => {
    await client.mkdir(name, target, (await fs.stat(source)).mode & 0o7777);
    for (const entry of await fs.readdir(source, { withFileTypes: true })) {
      const [path, inside] = [join(source, entry.name), `${target.replace(/\/+$/, '')}/${entry.name}`];
      if (entry.isDirectory()) await folder(path, inside);
      else if (entry.isFile()) files.push(() => sendFile(client, name, path, inside));
      else if (entry.isSymbolicLink()) await sendLink(client, name, await fs.readlink(path), inside);
      else note(`${path}: neither file, folder nor link; it is left out`);
    }
  };
  await folder(from, to);
  await inParallel(files);
}

export async function fetchTree(
  client: SandboxClient,
  name: string,
  from: string,
  to: string,
  note: Note,
): Promise<void> {
  if ((await client.stat(name, from)).kind !== 'directory') return fetchFile(client, name, from, to);
  const files: (() => Promise<void>)[] = [];
  const modes: (() => Promise<void>)[] = [];
  const folder = async (source: string, target: string, mode: number): Promise<void> => {
    await makeFolder(target);
    for (const row of await client.files(name, source)) {
      const child = checkedName(row, source);
      const [path, here] = [`${source.replace(/\/+$/, '')}/${child}`, join(target, child)];
      if (row.kind === 'directory') await folder(path, here, row.mode);
      else if (row.kind === 'file') files.push(() => fetchOver(client, name, path, here));
      else if (row.kind === 'symlink') {
        await removeLink(here);
        await fs.symlink(await client.link(name, path), here);
      } else note(`${path}: neither file, folder nor link; it is left out`);
    }
    modes.push(() => fs.chmod(target, mode & 0o777));
  };
  await folder(from, to, (await client.stat(name, from)).mode);
  await inParallel(files);
  // Last, since a folder may be closed to its owner.
  for (const set of modes) await set();
}

async function fetchOver(client: SandboxClient, name: string, path: string, here: string): Promise<void> {
  await removeLink(here);
  await fetchFile(client, name, path, here);
}

async function sendLink(client: SandboxClient, name: string, target: string, at: string): Promise<void> {
  try {
    await client.symlink(name, target, at);
  } catch (error) {
    if (!isDsecError(error, 'RUNTIME_FILE') || !/exist/i.test(error.message)) throw error;
    await client.removeFile(name, at);
    await client.symlink(name, target, at);
  }
}

/** @throws SANDBOX_PROTOCOL */
function checkedName({ name, nameBase64 }: FileRow, folder: string): string {
  if (nameBase64 !== undefined || name === '' || name === '.' || name === '..' || /[/\0]/.test(name)) {
    throw fail('SANDBOX_PROTOCOL', {
      problem: `${folder} has an entry whose name cannot be one here: ${JSON.stringify(name)}`,
    });
  }
  return name;
}

async function makeFolder(path: string): Promise<void> {
  await removeLink(path);
  await fs.mkdir(path, { recursive: true });
}

async function removeLink(path: string): Promise<void> {
  try {
    if ((await fs.lstat(path)).isSymbolicLink()) await fs.rm(path);
  } catch (error) {
    if (systemCode(error) !== 'ENOENT') throw error;
  }
}

async function inParallel(work: (() => Promise<void>)[]): Promise<void> {
  const left = [...work];
  const worker = async () => {
    for (let next = left.shift(); next !== undefined; next = left.shift()) await next();
  };
  await Promise.all(Array.from({ length: AT_ONCE }, worker));
}
