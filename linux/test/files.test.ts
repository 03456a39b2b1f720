/** Attributes, special files, times, holes. */
import { execFileSync } from 'node:child_process';
import {
  closeSync,
  constants,
  ftruncateSync,
  lstatSync,
  mkdtempSync,
  openSync,
  readFileSync,
  rmSync,
  statSync,
  symlinkSync,
  writeFileSync,
  writeSync,
} from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, beforeEach, describe, expect, it } from 'vitest';
import { bytesOf, fromText } from '#base';
import {
  copyFileRange,
  dataRuns,
  fgetxattr,
  flistxattr,
  fsetxattr,
  lchown,
  lgetxattr,
  llistxattr,
  lremovexattr,
  lsetxattr,
  lutimes,
  lxattrs,
  makeDevice,
  mkfifo,
  mknod,
  punchHole,
  S_IFBLK,
  S_IFCHR,
  seekData,
  seekHole,
  splitDevice,
} from '../index.ts';

const isRoot = process.getuid?.() === 0;
let folder: string;
beforeEach(() => {
  folder = mkdtempSync(join(tmpdir(), 'dsec-linux-'));
});
afterEach(() => rmSync(folder, { recursive: true, force: true }));

describe('extended attributes', () => {
  it('keep any bytes, in names of paths that are not UTF-8', () => {
    const path = `${fromText(folder)}/\xff\xfe`;
    writeFileSync(bytesOf(path), '');
    const value = Buffer.from(Array.from({ length: 256 }, (_, byte) => byte));
    lsetxattr(path, 'user.all', value);
    lsetxattr(path, 'user.empty', Buffer.alloc(0));
    lsetxattr(path, `user.${fromText('é')}`, Buffer.from('x'));
    expect(lgetxattr(path, 'user.all')).toEqual(value);
    expect([...lxattrs(path)]).toEqual([
      ['user.all', value],
      ['user.empty', Buffer.alloc(0)],
      ['user.\xc3\xa9', Buffer.from('x')],
    ]);
    expect(lgetxattr(path, 'user.none')).toBeUndefined();
    expect(lremovexattr(path, 'user.empty')).toBe(true);
    expect(lremovexattr(path, 'user.empty')).toBe(false);
    expect(llistxattr(path).sort()).toEqual(['user.all', 'user.\xc3\xa9']);
  });

  it('are created or replaced only, when asked', () => {
    const path = join(folder, 'f');
    writeFileSync(path, '');
    const set = (only: 'create' | 'replace') => () => lsetxattr(path, 'user.a', Buffer.from(only), only);
    expect(set('replace')).toThrow(expect.objectContaining({ code: 'ENODATA' }));
    set('create')();
    expect(set('create')).toThrow(expect.objectContaining({ code: 'EEXIST' }));
    set('replace')();
    expect(lgetxattr(path, 'user.a')?.toString()).toBe('replace');
  });

  it('of an open file', () => {
    const fd = openSync(join(folder, 'f'), 'w+');
    fsetxattr(fd, 'user.a', Buffer.from([0]));
    expect(fgetxattr(fd, 'user.a')).toEqual(Buffer.from([0]));
    expect(fgetxattr(fd, 'user.b')).toBeUndefined();
    expect(flistxattr(fd)).toEqual(['user.a']);
    closeSync(fd);
  });

  it.skipIf(!isRoot)('of a symlink are its own', () => {
    const path = join(folder, 'link');
    symlinkSync('nowhere', path);
    lsetxattr(path, 'trusted.a', Buffer.from('1'));
    expect(llistxattr(path)).toEqual(['trusted.a']);
  });

  it('errors name call, path and errno', () => {
    expect(() => lgetxattr(join(folder, 'none'), 'user.a')).toThrow(
      expect.objectContaining({
        code: 'ENOENT',
        syscall: 'lgetxattr',
        exit: 4,
        message: `lgetxattr ${join(folder, 'none')}: No such file or directory (ENOENT)`,
      }),
    );
    expect(() => llistxattr('a\0b')).toThrow(expect.objectContaining({ code: 'EINVAL' }));
  });
});

describe('special files', () => {
  it('device numbers survive, the largest too', () => {
    for (const [major, minor] of [
      [0, 0],
      [1, 3],
      [4095, 1048575],
      [8, 256],
    ] as const) {
      expect(splitDevice(makeDevice(major, minor))).toEqual({ major, minor });
    }
  });

  it.skipIf(!isRoot)('are made with their exact mode and device', () => {
    mknod(join(folder, 'c'), S_IFCHR | 0o7666, 4095, 1048575);
    mknod(join(folder, 'b'), S_IFBLK | 0o600, 8, 256);
    mknod(join(folder, 'w'), S_IFCHR, 0, 0);
    const c = statSync(join(folder, 'c'), { bigint: true });
    expect(Number(c.mode) & 0o7777).toBe(0o7666);
    expect(splitDevice(c.rdev)).toEqual({ major: 4095, minor: 1048575 });
    expect(splitDevice(statSync(join(folder, 'b')).rdev)).toEqual({ major: 8, minor: 256 });
    expect(statSync(join(folder, 'w')).rdev).toBe(0);
    expect(() => mknod(join(folder, 'w'), S_IFCHR)).toThrow(expect.objectContaining({ code: 'EEXIST' }));
  });

  it('pipes and byte names', () => {
    const path = `${fromText(folder)}/p\xe9`;
    mkfifo(path, 0o622);
    const stat = statSync(bytesOf(path));
    expect(stat.isFIFO()).toBe(true);
    expect(stat.mode & 0o7777).toBe(0o622);
  });

  it('times of a symlink, to the nanosecond, before 1970 too', () => {
    const path = join(folder, 'link');
    symlinkSync('nowhere', path);
    lutimes(path, { sec: 1, nsec: 2 }, { sec: -5, nsec: 999_999_999 });
    expect(lstatSync(path, { bigint: true }).mtimeNs).toBe(-4_000_000_001n);
  });

  it.skipIf(!isRoot)('owners of a symlink, large ids', () => {
    const path = join(folder, 'link');
    symlinkSync('nowhere', path);
    lchown(path, 4_000_000_000, 70_000);
    expect([lstatSync(path).uid, lstatSync(path).gid]).toEqual([4_000_000_000, 70_000]);
  });
});

describe('data and holes', () => {
  it('are found, past 4 GiB too', () => {
    const far = 5 * 1024 ** 3;
    const fd = openSync(join(folder, 'sparse'), 'w+');
    writeSync(fd, 'a', 0);
    writeSync(fd, 'b', far);
    ftruncateSync(fd, far + 8192);
    expect([...dataRuns(fd, far + 8192)]).toEqual([
      { offset: 0, length: 4096 },
      { offset: far, length: 4096 },
    ]);
    expect(seekData(fd, far + 4096)).toBeUndefined();
    expect(seekHole(fd, far)).toBe(far + 4096);
    punchHole(fd, far, 4096);
    expect([...dataRuns(fd, far + 8192)]).toEqual([{ offset: 0, length: 4096 }]);
    closeSync(fd);
  });

  it('a file that is all hole, and an empty one, have no data', () => {
    const fd = openSync(join(folder, 'hole'), 'w+');
    expect([...dataRuns(fd, 0)]).toEqual([]);
    ftruncateSync(fd, 1 << 20);
    expect([...dataRuns(fd, 1 << 20)]).toEqual([]);
    closeSync(fd);
  });

  it('copies inside the kernel', () => {
    writeFileSync(join(folder, 'from'), 'hello world');
    const from = openSync(join(folder, 'from'), 'r');
    const to = openSync(join(folder, 'to'), constants.O_CREAT | constants.O_RDWR);
    expect(copyFileRange(from, 6, to, 0, 100)).toBe(5);
    expect(copyFileRange(from, 11, to, 5, 100)).toBe(0);
    expect(readFileSync(join(folder, 'to'), 'utf8')).toBe('world');
    closeSync(from);
    closeSync(to);
  });
});

it('importing the folder does not load koffi', () => {
  const script = `await import('${join(import.meta.dirname, '..', 'index.ts')}');
    const { createRequire } = await import('node:module');
    console.log(Object.keys(createRequire(import.meta.url).cache).some((name) => name.includes('koffi')), !!process.report.getReport().sharedObjects.find((name) => name.includes('koffi')));`;
  const out = execFileSync(process.execPath, ['--import', 'tsx', '--input-type=module', '-e', script], {
    encoding: 'utf8',
  });
  expect(out.trim()).toBe('false false');
});
