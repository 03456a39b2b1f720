/** Which control groups a sandbox gets, and what is written to them: whatever is mounted, something must keep devices closed. */
import { mkdirSync, mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { expect, it } from 'vitest';
import { readMountInfo } from '#linux';
import { CONTROLLERS, writesV1, writesV2 } from '../backend/limit-writes.ts';
import { sandboxCgroups } from '../backend/sandbox-cgroups.ts';
import { classGroup, groupFolder, groupPath, isGroupLine } from '../backend/sandbox-group.ts';

const [any] = readMountInfo();
const row = (type: string, path: string, superOptions: string, device = path) => ({
  ...any!,
  type,
  mountPoint: path,
  superOptions,
  device,
});
const v2 = row('cgroup2', '/c/unified', 'rw');
const devices = row('cgroup', '/c/devices', 'rw,devices');
const named = row('cgroup', '/c/systemd', 'rw,name=systemd');
const foldersOf = (...rows: Parameters<typeof sandboxCgroups>[1] & {}) =>
  sandboxCgroups('id', rows).map(({ folder, writes, deviceProgram }) => [
    folder,
    writes.length > 0 || deviceProgram !== undefined,
  ]);

it('takes the v1 hierarchies where one of them has devices, each once', () => {
  const again = row('cgroup', '/elsewhere', 'rw,devices', '/c/devices');
  expect(foldersOf(again, devices, named, v2)).toEqual([
    ['/c/devices/dsec/id', true],
    ['/c/systemd/dsec', false],
  ]);
});

it('takes the v2 tree alone, or beside a v1 hierarchy that cannot close devices', () => {
  expect(foldersOf(v2)).toEqual([['/c/unified/dsec/id', true]]);
  expect(foldersOf(named, v2)).toEqual([
    ['/c/systemd/dsec', false],
    ['/c/unified/dsec/id', true],
  ]);
});

it('shares a group where nothing is a sandbox’s own', () => {
  const mounted = ['cpuset', 'freezer', 'cpuset,cpu', 'pids'].map((names) =>
    row('cgroup', `/c/${names}`, `rw,${names}`),
  );
  const groups = sandboxCgroups('id', [...mounted, devices]);
  expect(groups.map(({ folder, isCpuset, isShared = false }) => [folder, isCpuset, isShared])).toEqual([
    ['/c/cpuset/dsec', true, true],
    ['/c/freezer/dsec/id', false, false],
    ['/c/cpuset,cpu/dsec/id', true, false],
    ['/c/pids/dsec/id', false, false],
    ['/c/devices/dsec/id', false, false],
  ]);
});

it('has those of best effort beside all others, and finds each where it was made', () => {
  const folders = sandboxCgroups('id', [v2], { serviceClass: 'be' }).map(({ folder }) => folder);
  expect(folders).toEqual(['/c/unified/dsec-best-effort/id']);
  expect(folders.map(classGroup)).toEqual(['/c/unified/dsec-best-effort']);
  expect(classGroup('/c/unified/dsec/id')).toBe('/c/unified/dsec/id');
  const root = mkdtempSync(join(tmpdir(), 'dsec-groups-'));
  try {
    expect(groupFolder(root, 'id')).toBe(`${root}/dsec/id`);
    expect(groupFolder(root, 'id', 'be')).toBe(`${root}/dsec-best-effort/id`);
    mkdirSync(join(root, groupPath('id', 'be')), { recursive: true });
    expect(groupFolder(root, 'id')).toBe(`${root}/dsec-best-effort/id`);
  } finally {
    rmSync(root, { recursive: true });
  }
  const lines = ['4:cpu:/dsec/id', '4:cpu:/dsec-best-effort/id/commands', '0::/dsec/id2', '0::/other-dsec/x'];
  expect(lines.map((line) => isGroupLine(line, 'id'))).toEqual([true, true, false, false]);
});

it.each([[[]], [[named]]])('runs nothing where devices would be open', (rows) => {
  expect(() => sandboxCgroups('id', rows)).toThrow('no control group can close devices');
});

const limits = { cpus: 1.5, memoryBytes: 100, pids: 7, ioReadBps: 5, ioWriteIops: 6 };

it('writes limits as v1 and v2 have them', () => {
  const options = { device: '8:0', swap: true };
  expect(CONTROLLERS.flatMap((controller) => writesV1(controller, limits, options))).toEqual([
    ['cpu.cfs_period_us', '100000'],
    ['cpu.cfs_quota_us', '150000'],
    ['memory.limit_in_bytes', '100'],
    ['memory.memsw.limit_in_bytes', '200'],
    ['pids.max', '7'],
    ['blkio.throttle.read_bps_device', '8:0 5'],
    ['blkio.throttle.write_iops_device', '8:0 6'],
  ]);
  expect(CONTROLLERS.flatMap((controller) => writesV2(controller, limits, options))).toEqual([
    ['cpu.max', '150000 100000'],
    ['memory.max', '100'],
    ['memory.swap.max', '100'],
    ['pids.max', '7'],
    ['io.max', '8:0 rbps=5 wiops=6'],
  ]);
  const none = { device: '8:0', swap: false };
  expect(CONTROLLERS.flatMap((controller) => writesV1(controller, {}, none))).toEqual([]);
  expect(CONTROLLERS.flatMap((controller) => writesV2(controller, {}, none))).toEqual([]);
});

it('takes limits away, memory and swap in an order that the kernel takes', () => {
  const options = { device: '8:0', swap: true, changing: true };
  expect(writesV1('memory', { memoryBytes: 9, memorySwapBytes: 9 }, options)).toEqual([
    ['memory.memsw.limit_in_bytes', '-1'],
    ['memory.limit_in_bytes', '9'],
    ['memory.memsw.limit_in_bytes', '9'],
  ]);
  expect(writesV1('memory', {}, options)).toEqual([
    ['memory.memsw.limit_in_bytes', '-1'],
    ['memory.limit_in_bytes', '-1'],
  ]);
  expect(writesV1('cpu', {}, options)).toEqual([['cpu.cfs_quota_us', '-1']]);
  expect(CONTROLLERS.flatMap((controller) => writesV2(controller, {}, options))).toEqual([
    ['cpu.max', 'max 100000'],
    ['memory.max', 'max'],
    ['memory.swap.max', 'max'],
    ['pids.max', 'max'],
    ['io.max', '8:0 rbps=max wbps=max riops=max wiops=max'],
  ]);
});

it('puts the agent of a v2 sandbox in a group of its own, and limits on none that it is in', () => {
  const pids = row('cgroup', '/c/pids', 'rw,pids');
  const of = (...rows: Parameters<typeof sandboxCgroups>[1] & {}) =>
    sandboxCgroups('id', rows, { limits: { pids: 7 }, agent: true }).map(({ folder, writes, leaf }) => [
      folder,
      writes.filter(([file]) => !file.startsWith('devices.')),
      leaf,
    ]);
  expect(of(devices, pids)).toEqual([
    ['/c/devices/dsec/id', [], undefined],
    ['/c/pids/dsec/id', [], undefined],
  ]);
  expect(sandboxCgroups('id', [devices, pids], { limits: { pids: 7 } })[1]!.writes).toEqual([['pids.max', '7']]);
});

it('refuses a limit that no hierarchy holds', () => {
  const wanted = (asked: object, device?: string) => () => sandboxCgroups('id', [devices], { limits: asked, device });
  expect(wanted({ pids: 7 })).toThrow(/limit pids cannot be held.*pids controller/);
  const io = row('cgroup', '/c/blkio', 'rw,blkio');
  expect(() => sandboxCgroups('id', [devices, io], { limits: { ioReadBps: 9 } })).toThrow(/no block device/);
  const memory = row('cgroup', '/c/memory', 'rw,memory');
  const both = { memoryBytes: 9, memorySwapBytes: 9 };
  expect(() => sandboxCgroups('id', [devices, memory], { limits: both })).toThrow(/does not count swap/);
  expect(sandboxCgroups('id', [devices, memory], { limits: { memoryBytes: 9 } })[1]!.writes).toEqual([
    ['memory.limit_in_bytes', '9'],
  ]);
});
