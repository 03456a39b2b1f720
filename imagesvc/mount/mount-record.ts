/**
 * One mount of this node as its mount table remembers it: a JSON file, `<run>/mounts/<id>.json`, replaced atomically. It
 * is written before the effect it tells of, so that whoever finds it after a crash can undo the effect.
 */
import { randomBytes } from 'node:crypto';
import { readdirSync, readFileSync, renameSync, rmSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { type Digest, isDigest } from '#base';
import type { ProcessIdentity } from '#linux';

/** A layer whose data a data server answers for. Every record that names such a layer says so. */
export interface LazyLayer {
  /** Of its metadata. */
  readonly layer: Digest;
  /** Id of the data server. */
  readonly server: string;
  /** Read through the server's mount; else straight from files of its cache. */
  readonly served: boolean;
  /** The server is the layer server: it shows the layer's tree, whether or not its data is on this machine. */
  readonly reader?: boolean;
  /** The data blobs: the cache keeps those that are whole. */
  readonly blobs: readonly Digest[];
}

export interface MountRecord {
  readonly id: string;
  /** Absolute, symlinks resolved. */
  readonly target: string;
  /** What was mounted, where it was an image. */
  readonly image?: { readonly name: string; readonly manifest: Digest };
  /** Metadata digests of the EROFS layers, bottom first, each once. */
  readonly layers: readonly Digest[];
  readonly lazy?: readonly LazyLayer[];
  readonly upper?: string;
  readonly work?: string;
  /** Who mounted it. It need not live on. */
  readonly owner: ProcessIdentity;
  /** Mount namespace it lies in: `mnt:[4026531841]`. */
  readonly namespace: string;
  readonly createdAt: string;
  /** `mounting`: what is at the target, if anything, is not finished. */
  readonly state: 'mounting' | 'mounted';
  /** Of the mount at the target, known before it is attached. */
  readonly mountId?: number;
  /** `major:minor` of its file system. */
  readonly device?: string;
}

export function newMountId(): string {
  return randomBytes(6).toString('hex');
}

/** What the mount table of the kernel shows as the source of an OverlayFS of ours. */
export function mountSource(id: string): string {
  return `dsec:${id}`;
}

export function writeRecord(folder: string, record: MountRecord): void {
  const fresh = join(folder, `.${record.id}.tmp`);
  writeFileSync(fresh, `${JSON.stringify(record, null, 1)}\n`, { mode: 0o644 });
  renameSync(fresh, join(folder, `${record.id}.json`));
}

export function removeRecord(folder: string, id: string): void {
  rmSync(join(folder, `${id}.json`), { force: true });
}

/** All records, oldest first. Files that are no records (only a foreign hand makes those) are listed in `damaged`. */
export function readRecords(folder: string): { records: MountRecord[]; damaged: string[]; unfinished: string[] } {
  const records: MountRecord[] = [];
  const damaged: string[] = [];
  const unfinished: string[] = [];
  for (const name of readdirSync(folder)) {
    if (name.startsWith('.')) {
      unfinished.push(name);
      continue;
    }
    const record = parseRecord(folder, name);
    if (record === 'gone') continue;
    if (record === undefined) damaged.push(name);
    else records.push(record);
  }
  records.sort((a, b) => (a.createdAt < b.createdAt ? -1 : a.createdAt > b.createdAt ? 1 : a.id < b.id ? -1 : 1));
  return { records, damaged, unfinished };
}

function parseRecord(folder: string, name: string): MountRecord | undefined | 'gone' {
  let text: string;
  try {
    text = readFileSync(join(folder, name), 'utf8');
  } catch {
    return 'gone'; // a reader without the lock: it went meanwhile
  }
  try {
    const value = JSON.parse(text) as Partial<MountRecord>;
    const owner = value.owner as Partial<ProcessIdentity> | undefined;
    const whole =
      typeof value.id === 'string' &&
      `${value.id}.json` === name &&
      typeof value.target === 'string' &&
      Array.isArray(value.layers) &&
      value.layers.every(isDigest) &&
      typeof owner?.pid === 'number' &&
      typeof owner.startTime === 'string' &&
      typeof owner.bootId === 'string' &&
      typeof value.namespace === 'string' &&
      typeof value.createdAt === 'string' &&
      (value.state === 'mounting' || value.state === 'mounted');
    return whole ? (value as MountRecord) : undefined;
  } catch {
    return undefined;
  }
}
