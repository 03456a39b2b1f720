/**
 * What this machine's kernel offers, what DSec uses it for, and what takes its place: the rows of `dsec doctor`.
 *
 * Looked at rather than derived from the version wherever that is possible: distributions backport, containers forbid.
 * Nothing is changed: mounts that are tried out are never attached. A look that fails makes a row that says so, no error.
 */
import { closeSync, constants, existsSync, mkdtempSync, openSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { release, tmpdir } from 'node:os';
import { join } from 'node:path';
import { humanSize, messageOf, systemCode } from '#base';
import { gunzipFallback } from './gunzip.ts';
import { createMount, fsconfigFlag, fsconfigString, fsopen } from './mount.ts';
import { readMountInfo } from './mount-info.ts';
import { coreSchedulingMissing } from './scheduling.ts';
import { sha256Fallback } from './sha256.ts';
import { swapSpace } from './swap.ts';

export interface Feature {
  readonly name: string;
  readonly present: boolean;
  /** What was found: a version, a reason. */
  readonly detail: string;
  readonly usedFor: string;
  /** What happens without it. */
  readonly fallback: string;
  /** Nothing uses it yet: it tells what this machine could do once something does. */
  readonly later?: true;
}

export interface DetectOptions {
  /** An existing folder on the file system that metadata images will be mounted from; tried with a tiny image. */
  readonly folder?: string;
}

type Found = readonly [present: boolean, detail: string];

const isRoot = () => process.geteuid?.() === 0;

/** One row a feature, always the same rows in the same order. */
export function detect(options: DetectOptions = {}): Feature[] {
  const row = (name: string, usedFor: string, fallback: string, look: () => Found): Feature => {
    let found: Found;
    try {
      found = look();
    } catch (error) {
      found = [false, messageOf(error)];
    }
    return { name, present: found[0], detail: found[1], usedFor, fallback };
  };
  return [
    row('kernel', 'everything', 'none: Linux 5.16 or newer is needed to mount', () => [atLeast(5, 16), release()]),
    row('erofs', 'mounting images', 'our reader behind FUSE', () => filesystem('erofs')),
    row('erofs file-backed', 'mounting images straight from files', 'loop devices, else our reader behind FUSE', () =>
      fileBacked(options.folder),
    ),
    row('overlay', 'images of several layers, writable mounts', 'none: one layer at a time, read-only', () =>
      filesystem('overlay'),
    ),
    row('mount API', 'mounts that appear in one step', 'mount(2)', mountApi),
    row(
      'overlay lowerdir+',
      'up to 500 layers whatever their paths',
      'mount(2): as many as fit in 4 KiB',
      lowerdirPlus,
    ),
    row('loop devices', 'EROFS where it is not file-backed', 'our reader behind FUSE', loopDevices),
    row('fuse', 'lazy mounts: only what is read is fetched', 'pull into a folder store, mount that', () =>
      filesystem('fuse'),
    ),
    row('/dev/fuse', 'lazy mounts: the data server speaks to the kernel directly', 'fuse-native, over fusermount', () =>
      device('/dev/fuse'),
    ),
    row(
      'FUSE resend',
      'lazy mounts that outlive the death of their data server',
      'reads in flight fail when it dies',
      () => [atLeast(6, 9), `by version: ${release()}`],
    ),
    row(
      'FUSE over io_uring',
      'nothing: faster, but the kernel ends the connection, and with it all mounts, when the serving process dies',
      'requests through /dev/fuse',
      uringFuse,
    ),
    row('EROFS directio', 'pages of lazy mounts cached once', 'they are cached twice', erofsDirectIo),
    row('native sha256', 'hashing a blob and its chunks in one pass', 'node:crypto, in one pass each', nativeSha256),
    row('native gunzip', 'inflating gzip layers', 'ISA-L, else the zlib in Node', nativeGunzip),
    row('cgroups', 'keeping the processes of a sandbox together', 'none: crun and runc need them', cgroups),
    row('swap', 'giving back memory of paused sandboxes', 'pausing freezes only: set up zram or a swap file', swap),
    row(
      'memory.reclaim',
      'giving back memory of paused sandboxes',
      'process_madvise, then memory.force_empty of v1',
      memoryReclaim,
    ),
    row(
      'process_madvise',
      'giving back memory on cgroup v1; reading it back when a sandbox is resumed',
      'memory.force_empty alone; it is read back as it is touched',
      processMadvise,
    ),
    row(
      'cpu.idle',
      'best-effort sandboxes that run when no other wants to',
      'the lowest weight, and SCHED_IDLE',
      cpuIdle,
    ),
    row('PSI', 'refusing new sandboxes under pressure', 'an edge refuses by what is free alone', () =>
      file('/proc/pressure/memory'),
    ),
    row('zram', 'compressed swap in memory for paused sandboxes', 'a swap file', zram),
    row(
      'core scheduling',
      'keeping best-effort sandboxes off the hyper-threads of others',
      'they share them',
      coreScheduling,
    ),
    row('/dev/kvm', 'virtual machines at full speed', 'they are emulated: some ten times slower', () =>
      device('/dev/kvm'),
    ),
  ];
}

/** Whether the running kernel's version is at least this one. */
export function atLeast(major: number, minor: number): boolean {
  const found = /^(\d+)\.(\d+)/.exec(release());
  const [haveMajor, haveMinor] = [Number(found?.[1]), Number(found?.[2])];
  return haveMajor > major || (haveMajor === major && haveMinor >= minor);
}

/**
 * Whether the kernel has a file system. As root its module is loaded by asking for it (the kernel does that by itself);
 * without root only what is loaded shows.
 */
export function kernelHas(type: string): boolean {
  const listed = () =>
    readFileSync('/proc/filesystems', 'latin1')
      .split('\n')
      .some((line) => line.split('\t')[1] === type);
  if (listed()) return true;
  if (!isRoot()) return false;
  try {
    closeSync(fsopen(type));
    return true;
  } catch {
    return listed();
  }
}

function nativeSha256(): Found {
  const reason = sha256Fallback();
  return [reason === undefined, reason ?? 'SHA extensions'];
}

function nativeGunzip(): Found {
  const reason = gunzipFallback();
  return [reason === undefined, reason ?? 'built'];
}

function filesystem(type: string): Found {
  if (!kernelHas(type)) return [false, isRoot() ? `modprobe ${type} finds none` : 'not loaded'];
  if (type !== 'erofs') return [true, 'loaded'];
  const features = readFeatures('/sys/fs/erofs/features');
  return [true, features.length > 0 ? `loaded: ${features.join(', ')}` : 'loaded'];
}

function readFeatures(folder: string): string[] {
  const known = ['device_table', 'chunked_file', 'zero_padding', 'big_pcluster', 'compr_cfgs', '48bit', 'metabox'];
  return known.filter((name) => existsSync(join(folder, name)));
}

function fileBacked(folder: string | undefined): Found {
  if (!isRoot()) return [atLeast(6, 12), 'by version; not tried without root'];
  const reasons: string[] = [];
  for (const parent of folder === undefined ? ['/var/tmp', tmpdir()] : [folder]) {
    const reason = tryFileBacked(parent);
    if (reason === undefined) return [true, `tried in ${parent}`];
    reasons.push(`${parent}: ${reason}`);
  }
  return [false, reasons.join('; ')];
}

function tryFileBacked(parent: string): string | undefined {
  let scratch: string | undefined;
  try {
    scratch = mkdtempSync(join(parent, 'dsec-try-'));
    const image = join(scratch, 'tiny.erofs');
    writeFileSync(image, tinyErofs());
    closeSync(createMount('erofs', [['source', image], ['ro']]).fd);
    return undefined;
  } catch (error) {
    return systemCode(error) === 'ENOTBLK' ? 'the kernel wants a block device (ENOTBLK)' : messageOf(error);
  } finally {
    if (scratch !== undefined) rmSync(scratch, { recursive: true, force: true });
  }
}

/** The smallest image there is: an empty root folder in one block. */
export function tinyErofs(): Buffer {
  const image = Buffer.alloc(4096);
  const rootNid = 36;
  image.writeUInt32LE(0xe0f5e1e2, 1024);
  image.writeUInt8(12, 1024 + 12); // block size 4096
  image.writeUInt16LE(rootNid, 1024 + 14);
  image.writeBigUInt64LE(1n, 1024 + 16); // inodes
  image.writeUInt32LE(1, 1024 + 36); // blocks
  const inode = rootNid * 32;
  const entries = 2 * 12 + 3;
  image.writeUInt16LE(2 << 1, inode); // compact, data inline behind it
  image.writeUInt16LE(0o040755, inode + 4);
  image.writeUInt16LE(2, inode + 6);
  image.writeUInt32LE(entries, inode + 8);
  image.writeUInt32LE(1, inode + 20);
  for (const [index, nameOffset] of [24, 25].entries()) {
    const entry = inode + 32 + 12 * index;
    image.writeBigUInt64LE(BigInt(rootNid), entry);
    image.writeUInt16LE(nameOffset, entry + 8);
    image.writeUInt8(2, entry + 10);
  }
  image.write('...', inode + 32 + 24, 'latin1');
  return image;
}

function erofsDirectIo(): Found {
  if (!isRoot()) return [atLeast(6, 15), 'by version; not tried without root'];
  const context = fsopen('erofs');
  try {
    fsconfigFlag(context, 'directio');
    return [true, 'tried'];
  } catch (error) {
    if (systemCode(error) === 'EINVAL') return [false, 'unknown to this kernel'];
    throw error;
  } finally {
    closeSync(context);
  }
}

function uringFuse(): Found {
  const path = '/sys/module/fuse/parameters/enable_uring';
  if (!existsSync(path)) return [false, 'not in this kernel'];
  const on = ['Y', '1'].includes(readFileSync(path, 'latin1').trim());
  return [on, on ? 'switched on; not used' : 'switched off'];
}

function mountApi(): Found {
  try {
    closeSync(fsopen('tmpfs'));
    return [true, 'fsopen works'];
  } catch (error) {
    if (systemCode(error) === 'ENOSYS') return [false, 'no fsopen'];
    if (systemCode(error) === 'EPERM') return [true, 'needs root'];
    throw error;
  }
}

function lowerdirPlus(): Found {
  if (!isRoot()) return [atLeast(6, 5), 'by version; not tried without root'];
  const context = fsopen('overlay');
  try {
    fsconfigString(context, 'lowerdir+', '/');
    return [true, 'tried'];
  } catch (error) {
    if (systemCode(error) === 'EINVAL') return [false, 'unknown to this kernel'];
    throw error;
  } finally {
    closeSync(context);
  }
}

function device(path: string): Found {
  if (!existsSync(path)) return [false, `no ${path}`];
  try {
    closeSync(openSync(path, constants.O_RDWR));
    return [true, path];
  } catch (error) {
    const code = systemCode(error);
    if (code === 'EACCES' || code === 'EPERM') return [false, `${path} cannot be opened: needs root or its group`];
    return [false, `${path} cannot be opened (${code})`];
  }
}

function loopDevices(): Found {
  if (!atLeast(5, 8)) return [false, 'LOOP_CONFIGURE needs Linux 5.8'];
  return device('/dev/loop-control');
}

function file(path: string): Found {
  try {
    readFileSync(path);
    return [true, path];
  } catch (error) {
    return [false, `${path}: ${systemCode(error)}`];
  }
}

function cgroups(): Found {
  const mounts = readMountInfo().filter(({ type }) => type === 'cgroup' || type === 'cgroup2');
  const v1 = mounts.filter(({ type }) => type === 'cgroup');
  const v2 = mounts.filter(({ type }) => type === 'cgroup2');
  const controllers = v2.flatMap(({ mountPoint }) => {
    try {
      return readFileSync(join(mountPoint, 'cgroup.controllers'), 'latin1').trim().split(' ').filter(Boolean);
    } catch {
      return [];
    }
  });
  if (v1.length > 0) {
    const names = v1.flatMap(({ superOptions }) =>
      superOptions.split(',').filter((option) => /^(cpu|cpuset|memory|freezer|pids|devices|blkio)$/.test(option)),
    );
    return [
      true,
      `${v2.length > 0 ? 'hybrid' : 'v1'}: ${names.join(', ')} on v1${v2.length > 0 ? `; v2: ${controllers.join(', ') || 'no controllers'}` : ''}`,
    ];
  }
  return v2.length > 0 ? [true, `v2: ${controllers.join(', ')}`] : [false, 'none is mounted'];
}

function memoryReclaim(): Found {
  const mounted = readMountInfo().find(({ type }) => type === 'cgroup2');
  if (mounted === undefined) return [false, 'no cgroup v2'];
  const own = /^0::(.*)$/m.exec(readFileSync('/proc/self/cgroup', 'latin1'))?.[1] ?? '/';
  if (existsSync(join(mounted.mountPoint, own, 'memory.reclaim'))) return [true, 'cgroup v2'];
  const controllers = readFileSync(join(mounted.mountPoint, 'cgroup.controllers'), 'latin1').split(/\s+/);
  // The root group has no such file; its children will.
  if (controllers.includes('memory')) return [atLeast(5, 19), 'by version'];
  return [false, 'cgroup v2 has no memory controller'];
}

function zram(): Found {
  if (existsSync('/sys/class/zram-control')) return [true, 'loaded'];
  return [false, 'not loaded (modprobe zram)'];
}

function coreScheduling(): Found {
  const missing = coreSchedulingMissing();
  return [missing === undefined, missing ?? 'PR_SCHED_CORE works'];
}

function swap(): Found {
  const { places, totalBytes, freeBytes } = swapSpace();
  if (places.length === 0) return [false, 'none in /proc/swaps'];
  return [true, `${places.join(', ')}: ${humanSize(freeBytes)} of ${humanSize(totalBytes)} free`];
}

function processMadvise(): Found {
  return [atLeast(5, 13), `by version: ${release()}`];
}

function cpuIdle(): Found {
  for (const { type, superOptions, mountPoint } of readMountInfo()) {
    if (type === 'cgroup' && superOptions.split(',').includes('cpu'))
      return [existsSync(join(mountPoint, 'cpu.idle')), 'cgroup v1'];
  }
  return [atLeast(5, 15), 'by version'];
}
