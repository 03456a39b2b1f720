/** Which control groups a sandbox gets: whatever is mounted, something must keep devices closed. */
import { expect, it } from 'vitest';
import { readMountInfo } from '#linux';
import { sandboxCgroups } from '../backend/sandbox-cgroups.ts';

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
    ['/c/systemd/dsec/id', false],
  ]);
});

it('takes the v2 tree alone, or beside a v1 hierarchy that cannot close devices', () => {
  expect(foldersOf(v2)).toEqual([['/c/unified/dsec/id', true]]);
  expect(foldersOf(named, v2)).toEqual([
    ['/c/systemd/dsec/id', false],
    ['/c/unified/dsec/id', true],
  ]);
});

it.each([[[]], [[named]]])('runs nothing where devices would be open', (rows) => {
  expect(() => sandboxCgroups('id', rows)).toThrow('no control group can close devices');
});
