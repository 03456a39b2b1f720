/**
 * A sandbox's changes in a file system of their own: a sparse image beside its record, on a loop device. For file systems that cannot
 * limit a folder; what the sandbox does not write costs nothing.
 *
 *     <sandbox>/disk.img             ext4, as large as what may be written and what the file system itself needs
 *               disk/                where it is mounted while the sandbox runs or is packed
 *               upper -> disk/upper  so that whoever knows the upper need not know this
 *               work -> disk/work
 *
 * The loop device frees itself with its last user. One image is never behind two devices: a mount that somebody keeps busy is
 * found and used again.
 */
import { execFile } from 'node:child_process';
import { closeSync, existsSync, ftruncateSync, mkdirSync, openSync, statfsSync, statSync, symlinkSync } from 'node:fs';
import { delimiter, join } from 'node:path';
import { promisify } from 'node:util';
import { failPoint, messageOf, systemCode } from '#base';
import { attachLoop, CAPABILITY, hasEffective, listLoops, MS, mount, mountsAt, resizeLoop, umount } from '#linux';
import { fail } from '../errors.ts';
import type { SandboxFolders } from '../sandbox/state-folders.ts';
import type { DiskLimits } from '../sandbox-api/limits.ts';
import type { DiskUsage } from '../sandbox-api/usage.ts';

const execFileAsync = promisify(execFile);

const BLOCK = 4096;
const INODE_BYTES = 256;
const MIB = 1 << 20;
/** As mkfs.ext4 has it. */
const BYTES_PER_INODE = 16_384;
/** Whatever this machine's defaults are. */
const FEATURES = 'has_journal,extent,huge_file,flex_bg,64bit,dir_nlink,extra_isize,metadata_csum';
/** Space of removed files goes back to the machine; inode tables are zeros already. */
const OPTIONS = 'discard,noinit_itable,errors=remount-ro';

const TOOL_FOLDERS = ['/usr/sbin', '/sbin', '/usr/bin', '/bin'];

/** Of e2fsprogs. */
export function findTool(name: string): string | undefined {
  return [...(process.env.PATH ?? '').split(delimiter), ...TOOL_FOLDERS]
    .filter((folder) => folder.startsWith('/'))
    .map((folder) => join(folder, name))
    .find((path) => existsSync(path));
}

function toolNamed(name: string): string {
  const path = findTool(name);
  if (path === undefined) {
    throw fail('RUNTIME_LIMIT_UNAVAILABLE', {
      limit: 'diskBytes',
      reason: `${name} is missing: apt-get install e2fsprogs`,
    });
  }
  return path;
}

interface Layout {
  readonly imageBytes: number;
  readonly inodes: number;
  readonly journalMiB: number;
}

/** What the image has to be, so that `diskBytes` can be written to it. */
function layoutFor({ diskBytes = 0, inodes: given }: DiskLimits): Layout {
  const inodes = (given ?? Math.max(1024, Math.ceil(diskBytes / BYTES_PER_INODE))) + OWN_INODES;
  const journalMiB = Math.min(64, Math.max(4, Math.floor(diskBytes / (256 * MIB))));
  const tables = inodes * INODE_BYTES + journalMiB * MIB;
  // Bitmaps, descriptors, copies of the superblock, and the trees of large files: below one part in 128.
  const rest = Math.ceil((diskBytes + tables) / 128) + MIB;
  return { imageBytes: Math.ceil((diskBytes + tables + rest) / BLOCK) * BLOCK, inodes, journalMiB };
}

/** Reserved ones, lost+found, upper, work and what OverlayFS has in that. */
const OWN_INODES = 11 + 5;

/** @throws RUNTIME_LIMIT_UNAVAILABLE */
export async function makeDiskImage(places: SandboxFolders, limits: DiskLimits): Promise<void> {
  const { imageBytes, inodes, journalMiB } = layoutFor(limits);
  const mkfs = toolNamed('mkfs.ext4');
  const fd = openSync(places.diskImage, 'wx', 0o600);
  try {
    ftruncateSync(fd, imageBytes);
  } finally {
    closeSync(fd);
  }
  const args = [
    ...['-q', '-F', '-b', String(BLOCK), '-I', String(INODE_BYTES), '-m', '0', '-N', String(inodes)],
    // No room kept for growing: it grows without it too.
    ...[
      '-J',
      `size=${journalMiB}`,
      '-O',
      `${FEATURES},^resize_inode`,
      '-E',
      'lazy_itable_init=1,lazy_journal_init=1,nodiscard',
    ],
    places.diskImage,
  ];
  try {
    await execFileAsync(mkfs, args);
  } catch (error) {
    throw fail('RUNTIME_LIMIT_UNAVAILABLE', { limit: 'diskBytes', reason: messageOf(error).trim() }, error);
  }
  failPoint('disk-made');
  mkdirSync(places.disk, { mode: 0o700 });
  attachDiskImage(places);
  failPoint('disk-mounted');
  for (const [link, name] of [
    [places.upper, 'upper'],
    [places.work, 'work'],
  ] as const) {
    mkdirSync(join(places.disk, name), { mode: 0o755 });
    symlinkSync(`disk/${name}`, link);
  }
}

/** Mounted already is no error. @throws RUNTIME_DISK */
export function attachDiskImage(places: SandboxFolders): void {
  if (mountsAt(places.disk).length > 0) return;
  mkdirSync(places.disk, { recursive: true, mode: 0o700 });
  const flags = MS.NOSUID | MS.NODEV;
  try {
    const used = loopOf(places.diskImage);
    if (used !== undefined) {
      try {
        mount(used, places.disk, 'ext4', flags, OPTIONS);
        return;
      } catch (error) {
        // It went meanwhile.
        if (loopOf(places.diskImage) !== undefined) throw error;
      }
    }
    const loop = attachLoop(places.diskImage, { readOnly: false });
    failPoint('disk-attached');
    try {
      mount(loop.path, places.disk, 'ext4', flags, OPTIONS);
    } finally {
      loop.close();
    }
  } catch (error) {
    throw fail('RUNTIME_DISK', { path: places.diskImage, reason: messageOf(error) }, error);
  }
}

function loopOf(image: string): string | undefined {
  return listLoops().find(({ file }) => file === image)?.path;
}

/**
 * In a process of its own: what is not on the disk yet is written first, which may take its time.
 * @returns false when somebody still has it open: it goes when they do
 */
export async function detachDiskImage(places: SandboxFolders): Promise<boolean> {
  while (mountsAt(places.disk).length > 0) {
    try {
      await execFileAsync('umount', [places.disk]);
    } catch {
      if (mountsAt(places.disk).length === 0) break;
      umount(places.disk, { lazy: true });
      return false;
    }
  }
  return true;
}

/** While it is mounted. @throws RUNTIME_LIMIT_REFUSED */
export async function growDiskImage(places: SandboxFolders, limits: DiskLimits): Promise<void> {
  const before = statSync(places.diskImage).size;
  const { imageBytes } = layoutFor(limits);
  const refuse = (reason: string, cause?: unknown) =>
    fail('RUNTIME_LIMIT_REFUSED', { limit: 'diskBytes', reason }, cause);
  if (imageBytes < before) throw refuse('a disk that is an image cannot become smaller');
  const loop = loopOf(places.diskImage);
  if (loop === undefined) throw refuse('it is not attached');
  // Nor can a child of ours have it then.
  if (!hasEffective(CAPABILITY.SYS_RESOURCE))
    throw refuse('growing a mounted ext4 takes CAP_SYS_RESOURCE, which is missing here');
  const resize = toolNamed('resize2fs');
  const fd = openSync(places.diskImage, 'r+');
  try {
    ftruncateSync(fd, imageBytes);
    resizeLoop(loop);
    await execFileAsync(resize, [loop]);
  } catch (error) {
    throw refuse(messageOf(error).trim(), error);
  } finally {
    closeSync(fd);
  }
}

export function diskImageUsage(places: SandboxFolders): DiskUsage | undefined {
  try {
    const { blocks, bfree, bsize, files, ffree } = statfsSync(places.disk);
    return {
      usedBytes: (blocks - bfree) * bsize,
      limitBytes: blocks * bsize,
      usedInodes: Math.max(0, files - ffree - OWN_INODES),
      limitInodes: Math.max(0, files - OWN_INODES),
    };
  } catch (error) {
    if (systemCode(error) === 'ENOENT') return undefined;
    throw error;
  }
}
