/**
 * The ways out through FUSE: the disk as one file, and as a loop device over such a file. The file lies in the run folder, or where the caller
 * wants it. The mount outlives the daemon where the kernel can send requests again: who asks waits for the next daemon. Else it is dead
 * without one, and the next one serves at the same path.
 *
 * Ours are known by the mark in the mount table's source column. There is one daemon with a mark: what has it and is in no record is nobody's.
 */
import { existsSync } from 'node:fs';
import { readdir, readlink } from 'node:fs/promises';
import { join } from 'node:path';
import { readMountInfo } from '#linux';
import { fail } from '../errors.ts';
import type { BlockTarget } from '../target/block-target.ts';
import { carryOut } from '../target/file/device-order.ts';
import { type FileServer, resumeFile, serveFile } from '../target/file/file-server.ts';
import { clear, loopsOf, SOURCE_PREFIX } from '../target/file/mount-place.ts';
import { mountOf, openOf } from './block-device-users.ts';
import type { Attachment, WayOptions, WayOut } from './way-out.ts';

export const fileWay: WayOut = way('file');
export const loopWay: WayOut = way('loop');

function way(name: 'file' | 'loop'): WayOut {
  const loop = name === 'loop';
  return {
    name,
    available: () => fileObstacle(name),
    async attach(target, options) {
      const wish = optionsOf(target, options, loop, pathOf(options, name));
      return attachment(await serveFile(wish), wish.mark);
    },
    async recover({ path }, target, options) {
      const wish = optionsOf(target, options, loop, String(path));
      const resumed = await resumeFile(wish);
      if (resumed !== undefined) return attachment(resumed, wish.mark);
      await clearOurs(wish.path, wish.mark);
      return attachment(await serveFile(wish), wish.mark);
    },
    async forget({ path, mark }) {
      await clearOurs(String(path), String(mark));
    },
    async sweep(records, { mark }) {
      // Both ways have the same mounts: each looks after its own.
      const kept = new Set(records.map(({ path }) => path));
      const removed: string[] = [];
      for (const { source, mountPoint } of readMountInfo()) {
        if (source !== `${SOURCE_PREFIX}-${markText(mark, loop)}` || kept.has(mountPoint)) continue;
        await clear(mountPoint);
        removed.push(mountPoint);
      }
      return removed;
    },
  };
}

/** Why it does not work here. */
async function fileObstacle(way: 'file' | 'loop'): Promise<string | undefined> {
  if (process.geteuid?.() !== 0) return 'mounting needs root';
  if (!existsSync('/dev/fuse')) return 'no /dev/fuse (modprobe fuse)';
  return way === 'loop' && !existsSync('/dev/loop-control') ? 'no /dev/loop-control (modprobe loop)' : undefined;
}

function markText(mark: number, loop: boolean): string {
  return `${(mark >>> 0).toString(16).padStart(8, '0')}${loop ? '-loop' : ''}`;
}

function pathOf({ address, runDir, label }: WayOptions, way: string): string {
  if (address === undefined) return join(runDir, `${label}.img`);
  if (address.startsWith('/') && !address.startsWith('/dev/')) return address;
  throw fail('UBLKD_ADDRESS', { address, way, problem: 'it is the path of a file, /run/work.img' });
}

function optionsOf(target: BlockTarget, { readOnly, mark }: WayOptions, loop: boolean, path: string) {
  return { target, path, readOnly, loop, hold: true, mark: markText(mark, loop) };
}

function attachment(server: FileServer, mark: string): Attachment {
  return {
    at: server.loop ?? server.path,
    record: { path: server.path, mark },
    failed: server.failed,
    usedBy: () => usersOf(server),
    detach: (graceMs) => server.stop(graceMs),
    leave: server.leave,
  };
}

/** The device is not opened here to ask: this process would wait for itself if it were killed in the middle. */
async function usersOf({ path, loop }: FileServer): Promise<string | undefined> {
  for (const device of loopsOf(path)) {
    if (device !== loop) return `behind ${device}`;
    const user = (await mountOf(device)) ?? (await openOf(device, new Set([process.pid])));
    if (user !== undefined) return user;
    if ((await carryOut({ do: 'claim', path: device }, ['EBUSY'])) === undefined) {
      return 'held by another device, a mount or swap';
    }
  }
  return openFile(path);
}

async function openFile(path: string): Promise<string | undefined> {
  for (const pid of await readdir('/proc')) {
    if (!/^\d+$/.test(pid)) continue;
    for (const fd of await readdir(`/proc/${pid}/fd`).catch(() => [])) {
      if ((await readlink(`/proc/${pid}/fd/${fd}`).catch(() => '')) === path) return `open in process ${pid}`;
    }
  }
  return undefined;
}

/** Only what no daemon but this one can have made: another server may have taken the place. */
async function clearOurs(path: string, mark: string): Promise<void> {
  const source = `${SOURCE_PREFIX}-${mark}`;
  if (readMountInfo().some((row) => row.mountPoint === path && row.source === source)) await clear(path);
}
