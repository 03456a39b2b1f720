/**
 * The mount table of a process as typed rows (/proc/PID/mountinfo), and which mount a path or descriptor lies on.
 * Paths in rows are byte strings with the kernel's octal escapes undone.
 */
import { closeSync, openSync, readFileSync } from 'node:fs';
import { dirname } from 'node:path';
import { type ByteString, fromText, nodePath, systemCode } from '#base';

export interface MountRow {
  /** Unique while the mount lives; may be given to another one afterwards. */
  readonly mountId: number;
  readonly parentId: number;
  /** `major:minor` of the file system. */
  readonly device: string;
  /** What part of the file system is mounted: `/` unless it is a bind mount. */
  readonly root: ByteString;
  readonly mountPoint: ByteString;
  /** Of this mount: `ro`, `nosuid`, `relatime`, ... */
  readonly options: readonly string[];
  /** `shared:N`, `master:N`, `propagate_from:N`, `unbindable`. */
  readonly propagation: readonly string[];
  /** `erofs`, `overlay`, `fuse.sshfs`, ... */
  readonly type: ByteString;
  readonly source: ByteString;
  /** Of the file system, as it shows them: `lowerdir+=/a`, `xino=on`. Not split: values may hold commas. */
  readonly superOptions: ByteString;
}

/** The rows in mount order. `mountinfo`: the file's content as a byte string. Lines that are not rows are left out. */
export function parseMountInfo(mountinfo: ByteString): MountRow[] {
  const rows: MountRow[] = [];
  for (const line of mountinfo.split('\n')) {
    const fields = line.split(' ');
    const dash = fields.indexOf('-', 6);
    if (dash === -1 || fields.length < dash + 4) continue;
    rows.push({
      mountId: Number(fields[0]),
      parentId: Number(fields[1]),
      device: fields[2]!,
      root: unescapeOctal(fields[3]!),
      mountPoint: unescapeOctal(fields[4]!),
      options: fields[5]!.split(','),
      propagation: fields.slice(6, dash),
      type: unescapeOctal(fields[dash + 1]!),
      source: unescapeOctal(fields[dash + 2]!),
      superOptions: unescapeOctal(fields.slice(dash + 3).join(' ')),
    });
  }
  return rows;
}

function unescapeOctal(text: ByteString): ByteString {
  return text.includes('\\')
    ? text.replace(/\\([0-3][0-7]{2})/g, (_, digits: string) => String.fromCharCode(Number.parseInt(digits, 8)))
    : text;
}

/** The mount table that `pid` sees. */
export function readMountInfo(pid: number | 'self' = 'self'): MountRow[] {
  return parseMountInfo(readFileSync(`/proc/${pid}/mountinfo`, 'latin1'));
}

/** Mounts whose mount point is `path` (text, absolute), the visible one last. */
export function mountsAt(path: string, rows: readonly MountRow[] = readMountInfo()): MountRow[] {
  const wanted = fromText(path);
  return rows.filter((row) => row.mountPoint === wanted);
}

/** Whether something is mounted at `path` (text, absolute, without symlinks). Nothing there: no. Reads no mount table. */
export function isMountPoint(path: string): boolean {
  try {
    return path === '/' || mountIdOf(path) !== mountIdOf(dirname(path));
  } catch (error) {
    if (['ENOENT', 'ENOTDIR'].includes(systemCode(error) ?? '')) return false;
    throw error;
  }
}

/** Id of the mount that an open descriptor lies on. Also that of a mount which is not attached yet. */
export function mountIdOfFd(fd: number): number {
  const info = readFileSync(`/proc/self/fdinfo/${fd}`, 'latin1');
  const found = /^mnt_id:\s*(\d+)/m.exec(info);
  return Number(found?.[1]);
}

const O_PATH = 0o10000000;
const O_NOFOLLOW = 0o400000;

/** Id of the topmost mount at `path` (text). A symlink is not followed. @throws ENOENT and the like */
export function mountIdOf(path: string): number {
  const fd = openSync(nodePath(path), O_PATH | O_NOFOLLOW);
  try {
    return mountIdOfFd(fd);
  } finally {
    closeSync(fd);
  }
}
