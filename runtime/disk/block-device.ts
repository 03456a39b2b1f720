/** Which block device has a folder: what limits on I/O are about. */
import { existsSync, readFileSync, statSync } from 'node:fs';
import { resolve } from 'node:path';
import { bytesOf, systemCode } from '#base';
import { type MountRow, readMountInfo, splitDevice } from '#linux';
import type { SandboxFolders } from '../sandbox/state-folders.ts';
import { type AllLimits, IO_LIMITS } from '../sandbox-api/limits.ts';

/** What has a sandbox's upper; undefined where it has no limit on I/O, and nobody has to know. */
export function sandboxDevice(limits: AllLimits, places: SandboxFolders): string | undefined {
  if (IO_LIMITS.every((name) => limits[name] === undefined)) return undefined;
  return blockDeviceOf(existsSync(places.disk) ? places.disk : places.folder);
}

/** The mount that has `path`, as far as paths can tell. */
export function holdsPath(path: string, rows: readonly MountRow[] = readMountInfo()): MountRow | undefined {
  const wanted = resolve(path);
  const points = rows.map((row) => ({ row, point: bytesOf(row.mountPoint).toString() }));
  let best: { row: MountRow; point: string } | undefined;
  for (const one of points) {
    const holds = wanted === one.point || wanted.startsWith(one.point === '/' ? '/' : `${one.point}/`);
    // The last of several at one point is the one that shows.
    if (holds && (best === undefined || one.point.length >= best.point.length)) best = one;
  }
  return best?.row;
}

/** `major:minor` of the whole device: limits are not for partitions. Undefined where the file system is on none. */
export function blockDeviceOf(path: string): string | undefined {
  let { major, minor } = splitDevice(statSync(path).dev);
  if (major === 0) {
    // btrfs, for one, has numbers of its own; its mount says what it is on.
    const source = holdsPath(path)?.source;
    const device = source?.startsWith('/dev/') === true ? blockNumber(bytesOf(source).toString()) : undefined;
    if (device === undefined) return undefined;
    ({ major, minor } = device);
  }
  const place = `/sys/dev/block/${major}:${minor}`;
  if (!existsSync(place)) return undefined;
  return existsSync(`${place}/partition`) ? readFileSync(`${place}/../dev`, 'latin1').trim() : `${major}:${minor}`;
}

function blockNumber(path: string): { major: number; minor: number } | undefined {
  try {
    const stat = statSync(path);
    return stat.isBlockDevice() ? splitDevice(stat.rdev) : undefined;
  } catch (error) {
    if (systemCode(error) !== undefined) return undefined;
    throw error;
  }
}
