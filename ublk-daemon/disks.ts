/**
 * The disks of this node by name: a folder each (disk-folder.ts) in the state folder. What one makes of another's snapshot shares its
 * layers, so a disk whose layers others use is not removed. Whoever makes or removes one holds the lock of the folder.
 */
import { spawn } from 'node:child_process';
import { existsSync } from 'node:fs';
import { link, mkdir, mkdtemp, open, readdir, rm, stat } from 'node:fs/promises';
import { homedir } from 'node:os';
import { dirname, join, resolve } from 'node:path';
import { systemCode } from '#base';
import { dataRuns, withLock } from '#linux';
import { lowerFiles, readDiskConfig } from './config/config-v1.ts';
import {
  createDisk,
  diskFacts,
  type NamedSnapshot,
  type OpenDisk,
  openDisk,
  readConfig,
  relocateDisk,
  type UpperMode,
} from './disk-folder.ts';
import { fail } from './errors.ts';
import { writeAll } from './layer/byte-sink.ts';
import { syncFolder } from './layer/commit.ts';
import { openStack } from './layer/stack.ts';
import { SECTOR } from './lsmt/header.ts';
import type { StackedDisk } from './stacked-disk.ts';
import { readHeader } from './writable/log-upper.ts';

const CONFIG = 'config.v1.json';
const LOCK = '.lock';
const NAME = /^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$/;
const COPY_BYTES = 256 * 1024;
const ZERO_BYTES = 4096;
const ZEROS = Buffer.alloc(ZERO_BYTES);

export interface DiskSummary {
  readonly name: string;
  readonly sizeBytes: number;
  readonly layers: number;
  /** What the disk's own files take. */
  readonly diskBytes: number;
  readonly snapshots: readonly NamedSnapshot[];
}

/** Where the disks are: $DSEC_STATE/disks. */
export function disksFolder(): string {
  if (process.env.DSEC_STATE) return resolve(process.env.DSEC_STATE, 'disks');
  if (process.geteuid?.() === 0) return '/var/lib/dsec/disks';
  return join(process.env.XDG_STATE_HOME || join(homedir(), '.local/state'), 'dsec/disks');
}

export function diskFolder(name: string, root = disksFolder()): string {
  if (!NAME.test(name)) throw fail('DISK_NAME', { name, problem: 'not a name' });
  return join(root, name);
}

export type DiskOrigin =
  /** Layers of a `config.v1.json`. */
  | { readonly kind: 'config'; readonly path: string }
  | { readonly kind: 'raw'; readonly path: string }
  | { readonly kind: 'qcow2'; readonly path: string }
  /** A new ext4 file system, with what a folder has where one is named. */
  | { readonly kind: 'ext4'; readonly folder?: string };

export async function createNamedDisk(
  name: string,
  options: { readonly sizeBytes?: number; readonly origin?: DiskOrigin; readonly mode?: UpperMode },
  root = disksFolder(),
): Promise<void> {
  const folder = diskFolder(name, root);
  const refuseTwin = () => {
    if (existsSync(join(folder, CONFIG))) throw fail('DISK_EXISTS', { folder });
  };
  await mkdir(root, { recursive: true, mode: 0o700 });
  refuseTwin();
  await sweep(root);
  const work = await mkdtemp(join(root, `.new-${process.pid}-`));
  try {
    const made = join(work, 'disk');
    const { origin, mode = 'log' } = options;
    if (origin?.kind === 'config') {
      const at = dirname(resolve(origin.path));
      const lowers = lowerFiles(await readDiskConfig(origin.path), at, existsSync);
      const stack = await openStack(lowers);
      await stack.close();
      await createDisk(made, { sizeBytes: options.sizeBytes ?? stack.virtualSize, lowers, mode });
    } else {
      const raw = await rawOf(origin, options.sizeBytes, work);
      await createDisk(made, { sizeBytes: raw.sizeBytes, mode });
      if (raw.path !== undefined) await importRaw(made, raw.path);
    }
    // The work is done without the lock; under it the disk gets its name.
    await withLock(join(root, LOCK), async () => {
      refuseTwin();
      await rm(folder, { recursive: true, force: true });
      await relocateDisk(made, folder);
    });
  } finally {
    await rm(work, { recursive: true, force: true });
  }
}

/** What processes that died while they made a disk have left. */
async function sweep(root: string): Promise<void> {
  for (const name of await readdir(root)) {
    const pid = Number(/^\.new-(\d+)-/.exec(name)?.[1]);
    if (!Number.isSafeInteger(pid) || isAlive(pid)) continue;
    await rm(join(root, name), { recursive: true, force: true });
  }
}

function isAlive(pid: number): boolean {
  try {
    process.kill(pid, 0);
    return true;
  } catch (error) {
    return systemCode(error) === 'EPERM';
  }
}

/** A new disk of a snapshot of another one. */
export async function restoreDisk(from: string, snapshot: string, name: string, root = disksFolder()): Promise<void> {
  const folder = diskFolder(name, root);
  await withLock(join(root, LOCK), async () => {
    if (existsSync(join(folder, CONFIG))) throw fail('DISK_EXISTS', { folder });
    const source = diskFolder(from, root);
    const config = await readConfig(source);
    const found = diskFacts(config).snapshots.find((one) => one.name === snapshot);
    if (found === undefined) throw fail('DISK_SNAPSHOT_MISSING', { name: from, snapshot });
    const lowers = lowerFiles(config, source, existsSync).slice(0, found.layers);
    const stack = await openStack(lowers);
    await stack.close();
    await createDisk(folder, { sizeBytes: stack.virtualSize, lowers });
  });
}

export async function listDisks(root = disksFolder()): Promise<DiskSummary[]> {
  const disks: DiskSummary[] = [];
  for (const name of await diskNames(root)) {
    const folder = join(root, name);
    const config = await readConfig(folder);
    const top = config.upper?.data ?? config.lowers.at(-1)?.file;
    disks.push({
      name,
      sizeBytes: top === undefined ? 0 : await virtualSizeOf(resolve(folder, top)),
      layers: config.lowers.length + (config.upper === undefined ? 0 : 1),
      diskBytes: await folderBytes(folder),
      snapshots: diskFacts(config).snapshots,
    });
  }
  return disks;
}

/** @throws DISK_IN_USE, DISK_BUSY */
export async function removeDisk(name: string, root = disksFolder()): Promise<void> {
  const folder = diskFolder(name, root);
  await withLock(join(root, LOCK), async () => {
    await readConfig(folder);
    const others: string[] = [];
    for (const other of await diskNames(root)) {
      if (other === name) continue;
      const config = await readConfig(join(root, other));
      if (config.lowers.some(({ file }) => file?.startsWith(`${folder}/`))) others.push(other);
    }
    if (others.length > 0) throw fail('DISK_IN_USE', { name, others: others.join(', ') });
    // Nobody writes to it while it goes; one that does not even open goes too.
    const opened = await openDisk(folder).catch((error) => {
      if (error.code === 'DISK_BUSY') throw error;
      return undefined;
    });
    try {
      // The configuration last would leave a disk without layers: it goes first.
      await rm(join(folder, CONFIG));
      await syncFolder(folder);
    } finally {
      await opened?.disk.close().catch(() => {});
    }
    await rm(folder, { recursive: true, force: true });
  });
}

export async function openNamedDisk(name: string, root = disksFolder()): Promise<OpenDisk> {
  return openDisk(diskFolder(name, root));
}

/** A sparse raw file of what the disk holds. It appears when it is whole. */
export async function exportRaw(disk: StackedDisk, path: string): Promise<void> {
  const file = await open(path, 'wx', 0o600);
  try {
    await file.truncate(disk.sizeBytes);
    for (const [start, end] of disk.dataRuns(0, disk.sizeBytes / SECTOR)) {
      for (let at = start * SECTOR; at < end * SECTOR; at += COPY_BYTES) {
        const bytes = await disk.read(at, Math.min(COPY_BYTES, end * SECTOR - at));
        await writeAll(file, bytes, at);
      }
    }
    await file.sync();
    await file.close();
  } catch (error) {
    await file.close().catch(() => {});
    await rm(path, { force: true });
    throw error;
  }
}

export async function exportQcow2(disk: StackedDisk, path: string): Promise<void> {
  const raw = `${path}.raw-${process.pid}`;
  const part = `${path}.part-${process.pid}`;
  try {
    await exportRaw(disk, raw);
    await runTool('qemu-img', 'qemu-utils', ['convert', '-f', 'raw', '-O', 'qcow2', raw, part]);
    // Unlike a rename it does not replace a file.
    await link(part, path);
  } finally {
    await rm(raw, { force: true });
    await rm(part, { force: true });
  }
}

async function rawOf(
  origin: Exclude<DiskOrigin, { kind: 'config' }> | undefined,
  wanted: number | undefined,
  work: string,
): Promise<{ path?: string; sizeBytes: number }> {
  const grown = (sizeBytes: number) => Math.max(wanted ?? 0, Math.ceil(sizeBytes / 4096) * 4096);
  if (origin === undefined || origin.kind === 'ext4') {
    if (wanted === undefined) throw fail('LSMT_OPTION', { what: 'size', problem: 'a new disk needs one' });
    if (origin === undefined) return { sizeBytes: wanted };
    const path = join(work, 'raw');
    const file = await open(path, 'wx', 0o600);
    await file.truncate(wanted);
    await file.close();
    const from = origin.folder === undefined ? [] : ['-d', origin.folder];
    await runTool('mkfs.ext4', 'e2fsprogs', ['-q', '-F', ...from, path]);
    return { path, sizeBytes: wanted };
  }
  if (origin.kind === 'raw') return { path: origin.path, sizeBytes: grown((await stat(origin.path)).size) };
  const path = join(work, 'raw');
  await runTool('qemu-img', 'qemu-utils', ['convert', '-f', 'qcow2', '-O', 'raw', origin.path, path]);
  return { path, sizeBytes: grown((await stat(path)).size) };
}

async function importRaw(folder: string, path: string): Promise<void> {
  const { disk } = await openDisk(folder);
  const file = await open(path, 'r');
  try {
    const { size } = await file.stat();
    const bytes = Buffer.alloc(COPY_BYTES);
    for (const run of dataRuns(file.fd, size)) {
      const end = Math.ceil((run.offset + run.length) / SECTOR) * SECTOR;
      for (let at = run.offset - (run.offset % SECTOR); at < end; at += COPY_BYTES) {
        const length = Math.min(COPY_BYTES, end - at);
        const { bytesRead } = await file.read(bytes, 0, length, at);
        bytes.fill(0, bytesRead, length);
        for (const [from, to] of dataParts(bytes, length)) await disk.write(at + from, bytes.subarray(from, to));
      }
    }
  } finally {
    await file.close();
    await disk.close();
  }
}

/** Parts that are not whole blocks of zeros: the disk is new, and has zeros there. */
function* dataParts(bytes: Buffer, length: number): Generator<[number, number]> {
  let start: number | undefined;
  for (let at = 0; at < length; at += ZERO_BYTES) {
    const end = Math.min(length, at + ZERO_BYTES);
    const isZero = bytes.compare(ZEROS, 0, end - at, at, end) === 0;
    if (!isZero) start ??= at;
    else if (start !== undefined) {
      yield [start, at];
      start = undefined;
    }
  }
  if (start !== undefined) yield [start, length];
}

async function diskNames(root: string): Promise<string[]> {
  try {
    const names = await readdir(root);
    return names.filter((name) => NAME.test(name) && existsSync(join(root, name, CONFIG))).sort();
  } catch (error) {
    if (systemCode(error) === 'ENOENT') return [];
    throw error;
  }
}

async function virtualSizeOf(path: string): Promise<number> {
  const file = await open(path, 'r');
  try {
    return (await readHeader(file, path)).virtualSize;
  } finally {
    await file.close();
  }
}

async function folderBytes(folder: string): Promise<number> {
  let bytes = 0;
  for (const name of await readdir(folder)) bytes += (await stat(join(folder, name))).blocks * 512;
  return bytes;
}

function runTool(tool: string, aptPackage: string, args: string[]): Promise<void> {
  const path = `${process.env.PATH ?? ''}:/usr/sbin:/sbin`;
  return new Promise((done, refuse) => {
    const child = spawn(tool, args, { stdio: ['ignore', 'ignore', 'pipe'], env: { ...process.env, PATH: path } });
    let errors = '';
    child.stderr.on('data', (chunk: Buffer) => {
      errors = (errors + chunk).slice(-2000);
    });
    child.once('error', (error) =>
      refuse(systemCode(error) === 'ENOENT' ? fail('DISK_TOOL_MISSING', { tool, package: aptPackage }, error) : error),
    );
    child.once('close', (status) => {
      if (status === 0) done();
      else refuse(fail('DISK_IMPORT_FAILED', { tool, problem: errors.trim() || `exit status ${status}` }));
    });
  });
}
