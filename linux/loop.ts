/**
 * Loop devices: a file as a block device, for kernels that mount EROFS from block devices only.
 *
 * A device is configured in one step (LOOP_CONFIGURE, kernel 5.8) with autoclear: it frees itself when its last opener or
 * mount is gone. So a process killed between attaching and mounting leaves none behind, and nobody has to detach.
 */
import { closeSync, constants, openSync, readdirSync, readFileSync } from 'node:fs';
import { join } from 'node:path';
import { systemCode } from '#base';
import { fail, SyscallError } from './errors.ts';
import { type Argument, type Call, call } from './libc.ts';

const IOCTL_ARG: Call = { name: 'ioctl', result: 'int', args: ['int', 'ulong', 'ulong'] };
const IOCTL_POINTER: Call = { name: 'ioctl', result: 'int', args: ['int', 'ulong', 'void*'] };

const LOOP_CONFIGURE = 0x4c0a;
const LOOP_CLR_FD = 0x4c01;
const LOOP_SET_CAPACITY = 0x4c07;
const LOOP_CTL_GET_FREE = 0x4c82;
const FLAG_READ_ONLY = 1;
const FLAG_AUTOCLEAR = 4;
const FLAG_DIRECT_IO = 16;

export interface LoopDevice {
  /** `/dev/loop3` */
  readonly path: string;
  readonly number: number;
  /** Holds the device; once it is mounted this may be closed. */
  readonly fd: number;
  close(): void;
}

export interface LoopOptions {
  readonly readOnly?: boolean;
  /** On by default: the device ends with its last user. */
  readonly autoclear?: boolean;
  /** Reads around the file's page cache, so that a page is cached once. Used where the file system can. */
  readonly directIo?: boolean;
  /** What `losetup` shows as the file when a descriptor is given. */
  readonly name?: string;
  /** Of the device; the kernel's choice by default. */
  readonly blockSize?: number;
}

/** Attaches `file`: its path, or an open descriptor. @throws LINUX_LOOP_UNAVAILABLE, SyscallError */
export function attachLoop(file: string | number, options: LoopOptions = {}): LoopDevice {
  const { readOnly = true, autoclear = true, directIo = true, blockSize = 0 } = options;
  const name = options.name ?? (typeof file === 'string' ? file : `fd ${file}`);
  const access = readOnly ? constants.O_RDONLY : constants.O_RDWR;
  const backing = typeof file === 'string' ? openSync(file, access) : file;
  try {
    let flags = (readOnly ? FLAG_READ_ONLY : 0) | (autoclear ? FLAG_AUTOCLEAR : 0) | (directIo ? FLAG_DIRECT_IO : 0);
    for (let attempt = 0; ; attempt++) {
      const number = freeNumber(name);
      const path = `/dev/loop${number}`;
      const fd = openDevice(path, name, access);
      try {
        configure(fd, path, backing, name, flags, blockSize);
        return device(path, number, fd);
      } catch (error) {
        closeSync(fd);
        const code = systemCode(error);
        // Somebody else took this one between asking and taking.
        if (code === 'EBUSY' && attempt < 64) continue;
        if (code === 'EINVAL' && flags & FLAG_DIRECT_IO) {
          flags &= ~FLAG_DIRECT_IO;
          continue;
        }
        throw error;
      }
    }
  } finally {
    if (typeof file === 'string') closeSync(backing);
  }
}

function freeNumber(name: string): number {
  let control: number;
  try {
    control = openSync('/dev/loop-control', constants.O_RDWR);
  } catch (error) {
    throw fail('LINUX_LOOP_UNAVAILABLE', { path: name, reason: String((error as Error).message) }, error);
  }
  try {
    return ioctl(IOCTL_ARG, control, LOOP_CTL_GET_FREE, 0, '/dev/loop-control');
  } finally {
    closeSync(control);
  }
}

function openDevice(path: string, name: string, access: number): number {
  try {
    return openSync(path, access);
  } catch (error) {
    throw fail('LINUX_LOOP_UNAVAILABLE', { path: name, reason: String((error as Error).message) }, error);
  }
}

function configure(fd: number, path: string, backing: number, name: string, flags: number, blockSize: number): void {
  // struct loop_config: fd u32, block_size u32, struct loop_info64 (232 bytes), 8 reserved u64. In loop_info64: lo_flags
  // u32 at 52, lo_file_name[64] at 56.
  const config = Buffer.alloc(8 + 232 + 64);
  config.writeUInt32LE(backing, 0);
  config.writeUInt32LE(blockSize, 4);
  config.writeUInt32LE(flags, 8 + 52);
  config.write(name.slice(-63), 8 + 56, 63, 'utf8');
  ioctl(IOCTL_POINTER, fd, LOOP_CONFIGURE, config, path);
}

function device(path: string, number: number, fd: number): LoopDevice {
  let open = true;
  return {
    path,
    number,
    fd,
    close() {
      if (!open) return;
      open = false;
      closeSync(fd);
    },
  };
}

function ioctl(spec: Call, fd: number, request: number, argument: Argument, path: string): number {
  return call(spec, [fd, request, argument], path);
}

/** After its file has grown. @throws SyscallError */
export function resizeLoop(path: string): void {
  const fd = openSync(path, constants.O_RDWR);
  try {
    ioctl(IOCTL_ARG, fd, LOOP_SET_CAPACITY, 0, path);
  } finally {
    closeSync(fd);
  }
}

/** Detaches `/dev/loopN`; in use, it goes when its last user is. False when nothing was attached. */
export function detachLoop(path: string): boolean {
  const fd = openSync(path, constants.O_RDONLY);
  try {
    ioctl(IOCTL_ARG, fd, LOOP_CLR_FD, 0, path);
    return true;
  } catch (error) {
    if (error instanceof SyscallError && error.code === 'ENXIO') return false;
    throw error;
  } finally {
    closeSync(fd);
  }
}

/** Every attached loop device and the file behind it. */
export function listLoops(): { path: string; file: string; autoclear: boolean }[] {
  const found: { path: string; file: string; autoclear: boolean }[] = [];
  for (const name of readdirSync('/sys/block')) {
    if (!name.startsWith('loop')) continue;
    try {
      const folder = join('/sys/block', name, 'loop');
      const file = readFileSync(join(folder, 'backing_file'), 'utf8').replace(/\n$/, '');
      const autoclear = readFileSync(join(folder, 'autoclear'), 'latin1').trim() === '1';
      found.push({ path: `/dev/${name}`, file, autoclear });
    } catch {
      // Not attached, or no longer.
    }
  }
  return found;
}
