/** The mount table's text, mounts, loop devices, features. */
import { execFileSync } from 'node:child_process';
import {
  closeSync,
  existsSync,
  mkdirSync,
  mkdtempSync,
  openSync,
  readdirSync,
  readFileSync,
  rmSync,
  writeFileSync,
} from 'node:fs';
import { release, tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, beforeEach, describe, expect, it } from 'vitest';
import { fromText } from '#base';
import { tinyErofs } from '../features.ts';
import {
  attachLoop,
  attachMount,
  bindMount,
  createMount,
  detachLoop,
  detect,
  fsopen,
  listLoops,
  MOUNT_ATTR,
  makePrivate,
  mount,
  mountIdOf,
  mountIdOfFd,
  mountsAt,
  parseMountInfo,
  readMountInfo,
  umount,
} from '../index.ts';

const isRoot = process.getuid?.() === 0;

describe('mountinfo', () => {
  it('rows: escapes, optional fields, odd lines', () => {
    const rows = parseMountInfo(
      [
        '36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 shared:7 - ext3 /dev/root rw,errors=continue',
        '40 36 0:40 /a\\040b /t\\011a\\134b\\012\xc3\xa9\\043 ro - overlay dsec:1 ro,lowerdir+=/a\\054b,xino=on',
        '41 36 0:41 / / rw - fuse.x  rw',
        'not a row',
        '',
      ].join('\n'),
    );
    expect(rows).toEqual([
      {
        mountId: 36,
        parentId: 35,
        device: '98:0',
        root: '/mnt1',
        mountPoint: '/mnt2',
        options: ['rw', 'noatime'],
        propagation: ['master:1', 'shared:7'],
        type: 'ext3',
        source: '/dev/root',
        superOptions: 'rw,errors=continue',
      },
      {
        mountId: 40,
        parentId: 36,
        device: '0:40',
        root: '/a b',
        mountPoint: '/t\ta\\b\n\xc3\xa9#',
        options: ['ro'],
        propagation: [],
        type: 'overlay',
        source: 'dsec:1',
        superOptions: 'ro,lowerdir+=/a,b,xino=on',
      },
      {
        mountId: 41,
        parentId: 36,
        device: '0:41',
        root: '/',
        mountPoint: '/',
        options: ['rw'],
        propagation: [],
        type: 'fuse.x',
        source: '',
        superOptions: 'rw',
      },
    ]);
  });

  it('of this process has /proc', () => {
    expect(mountsAt('/proc').at(-1)?.type).toBe('proc');
    expect(mountIdOf('/proc')).toBe(mountsAt('/proc').at(-1)?.mountId);
  });
});

describe.skipIf(!isRoot)('mounts', () => {
  let folder: string;
  let target: string;
  beforeEach(() => {
    folder = mkdtempSync(join(tmpdir(), 'dsec-linux-'));
    target = join(folder, 'a b,c:d\\é\n');
    mkdirSync(target);
  });
  afterEach(() => {
    for (const row of readMountInfo().reverse()) {
      const path = Buffer.from(row.mountPoint, 'latin1').toString('utf8');
      if (path.startsWith(`${folder}/`)) umount(path, { lazy: true });
    }
    rmSync(folder, { recursive: true, force: true });
  });

  it('appear in one step, under any name, with the id they had before', () => {
    const detached = createMount(
      'tmpfs',
      [
        ['size', '1m'],
        ['source', 'mine,too'],
      ],
      MOUNT_ATTR.NODEV,
    );
    const id = mountIdOfFd(detached.fd);
    expect(mountsAt(target)).toEqual([]);
    attachMount(detached, target);
    expect(mountIdOf(target)).toBe(id);
    const [row] = mountsAt(target);
    expect(row).toMatchObject({ mountId: id, type: 'tmpfs', source: 'mine,too', mountPoint: fromText(target) });
    expect(row!.options).toContain('nodev');
    umount(target);
    expect(mountsAt(target)).toEqual([]);
  });

  it('binds, read-only, and makes them private', () => {
    const source = join(folder, 'source');
    mkdirSync(source);
    writeFileSync(join(source, 'f'), 'x');
    bindMount(source, target, { readOnly: true });
    makePrivate(target);
    expect(readFileSync(join(target, 'f'), 'utf8')).toBe('x');
    expect(() => writeFileSync(join(target, 'g'), '')).toThrow(/EROFS/);
    writeFileSync(join(source, 'g'), '');
    expect(readdirSync(target)).toEqual(['f', 'g']);
  });

  it('refuse options that mount(2) would cut', () => {
    expect(() => mount('x', target, 'tmpfs', 0, `size=1m,${'x'.repeat(4090)}`)).toThrow(
      expect.objectContaining({ code: 'LINUX_OPTIONS_TOO_LONG' }),
    );
    expect(mountsAt(target)).toEqual([]);
  });

  it('errors carry what the kernel said', () => {
    const error = (() => {
      try {
        attachMount(createMount('overlay', [['lowerdir+', folder]]), target);
      } catch (thrown) {
        return thrown as Error & { code: string };
      }
      throw new Error('it was mounted');
    })();
    expect(error.code).toBe('EINVAL');
    expect(() => fsopen('nosuchfs')).toThrow(expect.objectContaining({ code: 'ENODEV', exit: 5 }));
    expect(() => umount(target)).toThrow(expect.objectContaining({ code: 'EINVAL' }));
  });

  it('without root are refused with a hint', () => {
    process.seteuid!(65534);
    try {
      umount('/proc');
      throw new Error('it was unmounted');
    } catch (error) {
      expect(error).toMatchObject({ code: 'EPERM', exit: 5, hint: expect.stringContaining('root') });
    } finally {
      process.seteuid!(0);
    }
  });

  it('loop devices: read-only, gone with their last user, or when detached', () => {
    const file = join(folder, 'tiny.erofs');
    writeFileSync(file, tinyErofs());
    const loop = attachLoop(file);
    expect(listLoops()).toContainEqual({ path: loop.path, file, autoclear: true });
    attachMount(createMount('erofs', [['source', loop.path], ['ro']]), target);
    loop.close();
    loop.close();
    expect(listLoops().map((found) => found.path)).toContain(loop.path);
    expect(readdirSync(target)).toEqual([]);
    umount(target);
    expect(listLoops().map((found) => found.file)).not.toContain(file);
    const kept = attachLoop(file, { autoclear: false });
    kept.close();
    expect(listLoops()).toContainEqual({ path: kept.path, file, autoclear: false });
    expect(detachLoop(kept.path)).toBe(true);
    expect(detachLoop(kept.path)).toBe(false);
    const fd = openSync(file, 'r');
    const named = attachLoop(fd, { name: '/some/name' });
    closeSync(fd);
    named.close();
  });

  it('the image that features are tried with is a valid one', () => {
    const file = join(folder, 'tiny.erofs');
    writeFileSync(file, tinyErofs());
    if (existsSync('/usr/bin/fsck.erofs')) execFileSync('fsck.erofs', [file], { stdio: 'pipe' });
    expect(detect({ folder }).find(({ name }) => name === 'erofs file-backed')).toBeDefined();
    expect(readdirSync(folder).filter((name) => name.startsWith('dsec-try'))).toEqual([]);
  });
});

it('features: every row says what was found and what takes its place', () => {
  const rows = detect();
  expect(rows.map(({ name }) => name)).toEqual([...new Set(rows.map(({ name }) => name))]);
  for (const row of rows) {
    expect(row.detail, row.name).not.toBe('');
    expect(row.usedFor, row.name).not.toBe('');
    expect(row.fallback, row.name).not.toBe('');
  }
  const found = (name: string) => rows.find((row) => row.name === name)?.present;
  expect(found('kernel')).toBe(true);
  expect(found('cgroups')).toBe(readMountInfo().some(({ type }) => type.startsWith('cgroup')));
});

it('core scheduling is there when the kernel takes the call, and else it is said why not', () => {
  const row = detect().find(({ name }) => name === 'core scheduling');
  const [yes, ...no] = ['PR_SCHED_CORE works', 'not in this kernel', 'this processor has no hyper-threads'];
  expect([yes, ...no]).toContain(row?.detail);
  expect(row?.present).toBe(row?.detail === yes);
  const config = `/boot/config-${release()}`;
  const isBuiltIn = existsSync(config) ? /^CONFIG_SCHED_CORE=y$/m.test(readFileSync(config, 'latin1')) : undefined;
  if (isBuiltIn === false) expect(row?.detail).toBe('not in this kernel');
  if (isBuiltIn === true) expect(row?.detail).not.toBe('not in this kernel');
});
