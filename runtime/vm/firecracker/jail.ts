/**
 * Where a Firecracker lives: `root` in its machine's folder, with its sockets, and `files/` with what it may open. Under the jailer that is the
 * root of its file system, and it is nobody: a user id of its own, its own mount namespace, the cgroups and network namespace it was given. The files
 * are bind mounts there (a hard link would change the times of a layer that was proved to be its digest); else they are links.
 *
 * All of it is in the folder at fixed places, so whoever comes after a crash takes it away without a record.
 */
import {
  chmodSync,
  chownSync,
  existsSync,
  lstatSync,
  mkdirSync,
  realpathSync,
  rmSync,
  statSync,
  symlinkSync,
  writeFileSync,
} from 'node:fs';
import { basename, join } from 'node:path';
import { bytesOf, systemCode } from '#base';
import { bindMount, readMountInfo, umount } from '#linux';
import { fail } from '../../errors.ts';
import type { VmSpec } from '../vm-driver.ts';
import { API_SOCKET, inside, type PlacedFile } from './requests.ts';

export interface JailerOptions {
  readonly jailer: string;
  readonly uid: number;
  readonly gid: number;
  /** Path of a network namespace. */
  readonly netns?: string;
  /** `file=value` of groups that the jailer makes; our own are entered before. */
  readonly cgroups?: readonly string[];
  readonly cgroupVersion?: 1 | 2;
  readonly parentCgroup?: string;
  readonly maxFileBytes?: number;
  readonly maxOpenFiles?: number;
}

const LOG = 'firecracker.log';
const JAIL = 'jail';
const ROOT = 'root';

export const rootOf = (folder: string) => join(folder, ROOT);
export const logOf = (folder: string) => join(folder, ROOT, LOG);

/** What Firecracker is started with. Info: its last line says how it ended. */
export function firecrackerArguments(): string[] {
  return ['--api-sock', API_SOCKET, '--log-path', LOG, '--level', 'Info', '--enable-pci'];
}

/** As it takes ids: letters, digits and `-`, 64 at most. */
export function instanceId(id: string): string {
  return id.replace(/[^A-Za-z0-9-]/g, '-').slice(0, 64);
}

/** The jailer and all that follows it. */
export function jailerCommand(binary: string, folder: string, id: string, options: JailerOptions): string[] {
  const { jailer, uid, gid, netns, cgroups = [], cgroupVersion, parentCgroup, maxFileBytes, maxOpenFiles } = options;
  const option = (name: string, value: string | number | undefined) =>
    value === undefined ? [] : [`--${name}`, String(value)];
  return [
    jailer,
    ...option('id', instanceId(id)),
    ...option('exec-file', binary),
    ...option('uid', uid),
    ...option('gid', gid),
    ...option('chroot-base-dir', join(folder, JAIL)),
    ...option('netns', netns),
    ...cgroups.flatMap((one) => option('cgroup', one)),
    ...option('cgroup-version', cgroupVersion),
    ...option('parent-cgroup', parentCgroup),
    ...option('resource-limit', maxFileBytes === undefined ? undefined : `fsize=${maxFileBytes}`),
    ...option('resource-limit', maxOpenFiles === undefined ? undefined : `no-file=${maxOpenFiles}`),
    '--',
    ...firecrackerArguments(),
  ];
}

/** Makes `root`, with `files` in it. What is there of an earlier one goes first. @throws VM_SPEC for a file that it could not read */
export function makeRoot(
  spec: VmSpec,
  binary: string,
  files: readonly PlacedFile[],
  jailer: JailerOptions | undefined,
): string {
  removeRoot(spec.folder);
  const root = rootOf(spec.folder);
  if (jailer === undefined) mkdirSync(root, { mode: 0o700 });
  else {
    const real = join(spec.folder, JAIL, basename(binary), instanceId(spec.id), 'root');
    mkdirSync(real, { recursive: true });
    symlinkSync(real, root);
  }
  mkdirSync(join(root, inside('')));
  for (const file of files) placeFile(spec, file, jailer);
  return realpathSync(root);
}

function placeFile(spec: VmSpec, file: PlacedFile, jailer: JailerOptions | undefined): void {
  const { name, source, readOnly, isServed = false } = file;
  const target = join(rootOf(spec.folder), inside(name));
  const bad = (problem: string) => fail('VM_SPEC', { id: spec.id, field: name, problem: `${source}: ${problem}` });
  if (isServed) {
    // Who may open it is its server's business; a bind mount asks nobody.
    if (jailer === undefined) symlinkSync(source, target);
    else {
      writeFileSync(target, '');
      bindMount(source, target, { readOnly });
    }
    return;
  }
  const facts = statSync(source, { throwIfNoEntry: false });
  if (facts === undefined) throw bad('is not there');
  if (!facts.isFile() && !facts.isBlockDevice()) throw bad('is neither a file nor a block device');
  if (jailer === undefined) {
    symlinkSync(source, target);
    return;
  }
  if (readOnly) {
    if (!mayRead(facts, jailer)) throw bad(`cannot be read by user ${jailer.uid}, which Firecracker runs as`);
  } else chownSync(source, jailer.uid, jailer.gid);
  writeFileSync(target, '');
  bindMount(source, target, { readOnly });
}

function mayRead(facts: { uid: number; gid: number; mode: number }, { uid, gid }: JailerOptions): boolean {
  if (facts.uid === uid) return (facts.mode & 0o400) !== 0;
  if (facts.gid === gid) return (facts.mode & 0o040) !== 0;
  return (facts.mode & 0o004) !== 0;
}

/** A folder below `root` that Firecracker may write. */
export function makeWritable(folder: string, name: string, jailer: JailerOptions | undefined): string {
  const path = join(rootOf(folder), name);
  rmSync(path, { recursive: true, force: true });
  mkdirSync(path, { mode: 0o700 });
  if (jailer !== undefined) {
    chmodSync(path, 0o700);
    chownSync(path, jailer.uid, jailer.gid);
  }
  return path;
}

/** Mounts first. Twice is no error. */
export function removeRoot(folder: string): void {
  const root = rootOf(folder);
  const jail = join(folder, JAIL);
  if (existsSync(jail)) {
    const below = `${realpathSync(jail)}/`;
    for (const row of readMountInfo().reverse()) {
      const point = bytesOf(row.mountPoint).toString();
      if (point.startsWith(below)) unmount(point);
    }
    rmSync(jail, { recursive: true, force: true });
  }
  if (lstatSync(root, { throwIfNoEntry: false }) !== undefined) rmSync(root, { recursive: true, force: true });
}

function unmount(point: string): void {
  try {
    umount(point, { lazy: true });
  } catch (error) {
    if (systemCode(error) !== 'EINVAL' && systemCode(error) !== 'ENOENT') throw error;
  }
}
