/**
 * A disk as something that programs of this machine open: `/dev/ublkbN` where the kernel has ublk, else a file through FUSE. For one owner who has a
 * folder for it (a virtual machine), without the daemon and its table.
 *
 * What it is made of is recorded in that folder before it is there, so whoever comes after a crash serves it again at the same place, or takes it
 * away (`endOwnDevices`) by the folder alone. Who has it open waits meanwhile. Where the kernel cannot have them wait there is none: with its server a
 * guest would lose a disk that it writes to.
 */
import { randomBytes } from 'node:crypto';
import { existsSync, readdirSync, readFileSync, rmSync } from 'node:fs';
import { join } from 'node:path';
import { messageOf } from '#base';
import { atLeast, mountsAt, replaceFile } from '#linux';
import { fail } from '../errors.ts';
import type { BlockTarget } from './block-target.ts';
import { type FileServer, resumeFile, serveFile } from './file/file-server.ts';
import { clear, isOurs } from './file/mount-place.ts';
import { UblkControl } from './ublk/control.ts';
import { listUblk, recoverUblk, removeUblk, serveUblk, type UblkDevice } from './ublk/device.ts';
import { ublkSupport } from './ublk/support.ts';

export interface OwnDevice {
  /** What to open. */
  readonly path: string;
  /** Answered by this process: a call on the path that waits, in a thread of ours, may wait for ever. */
  readonly isFile: boolean;
  /** As if this process had died: who has it open waits for the next one. */
  leave(): Promise<void>;
  /** Ends it, and whoever still has it open. Twice is no error. */
  end(): Promise<void>;
}

type OwnRecord = { readonly way: 'ublk'; readonly id: number; readonly mark: number } | { readonly way: 'file' };

const RECORD = /^device-([A-Za-z0-9-]+)\.json$/;
/** Numbers that the kernel gives out by itself come from below. */
const FIRST_ID = 100_000;
const IDS = 900_000;
const TRIES = 20;
const NOT_HELD = 'whoever has it open would lose it with this process, before Linux 6.9';

/** Why there can be none here; undefined: there can. At once, and so from versions where `serveOwnDevice` asks the drivers themselves. */
export function ownDeviceObstacle(): string | undefined {
  if (process.geteuid?.() !== 0) return 'it needs root';
  const noFile = fileObstacle();
  if (noFile === undefined) return undefined;
  const noUblk = ublkObstacle();
  return noUblk === undefined ? undefined : `no ublk (${noUblk}), and no FUSE that waits (${noFile})`;
}

function fileObstacle(): string | undefined {
  if (!existsSync('/dev/fuse')) return 'no /dev/fuse';
  return atLeast(6, 9) ? undefined : NOT_HELD;
}

function ublkObstacle(): string | undefined {
  try {
    void new UblkControl().close();
  } catch (error) {
    return messageOf(error);
  }
  // From then on drivers have all that is needed.
  return atLeast(6, 5) ? undefined : 'its driver is older than Linux 6.5';
}

/** Where a process before this one had it, at the same place. @param name Letters, digits, `-`. @throws UBLK_*, FILE_* */
export async function serveOwnDevice(target: BlockTarget, folder: string, name: string): Promise<OwnDevice> {
  const place = placeOf(folder, name);
  const note = (record: OwnRecord) => replaceFile(place, JSON.stringify(record));
  const forget = () => rmSync(place, { force: true });
  const before = readRecord(folder, name);
  if (before?.way === 'ublk') return ublkDevice(await ublkAgain(before, target), forget);
  if (before === undefined && (await ublkSupport()).obstacle === undefined) {
    for (let tries = 0; ; tries++) {
      const id = FIRST_ID + (randomBytes(4).readUInt32LE() % IDS);
      const mark = randomBytes(4).readUInt32LE();
      await note({ way: 'ublk', id, mark });
      try {
        return ublkDevice(await serveUblk({ target, id, mark }), forget);
      } catch (error) {
        forget();
        // It may be somebody's number.
        if (tries >= TRIES || !(await listUblk()).some((device) => device.id === id)) throw error;
      }
    }
  }
  await note({ way: 'file' });
  return fileDevice(await fileAgain(fileOf(folder, name), target), forget);
}

/** All of the folder, whoever served them. Whoever has them open is gone, or gets errors. Twice is no error. */
export async function endOwnDevices(folder: string): Promise<void> {
  for (const entry of existsSync(folder) ? readdirSync(folder) : []) {
    const name = RECORD.exec(entry)?.[1];
    if (name === undefined) continue;
    const record = readRecord(folder, name)!;
    if (record.way === 'ublk') {
      const devices = (await ublkSupport()).obstacle === undefined ? await listUblk() : [];
      const found = devices.find(({ id, mark }) => id === record.id && mark === record.mark);
      if (found !== undefined) await removeUblk(found.id);
    } else {
      await endFile(fileOf(folder, name));
      rmSync(fileOf(folder, name), { force: true });
    }
    rmSync(placeOf(folder, name), { force: true });
  }
}

async function ublkAgain({ id, mark }: { id: number; mark: number }, target: BlockTarget): Promise<UblkDevice> {
  const found = (await listUblk()).find((device) => device.id === id);
  if (found?.mark === mark) return recoverUblk(id, target);
  return serveUblk({ target, id, mark });
}

async function fileAgain(path: string, target: BlockTarget): Promise<FileServer> {
  const wish = { target, path, hold: true, shared: true, mark: 'own' };
  const resumed = await resumeFile(wish);
  if (resumed !== undefined) return resumed;
  await endFile(path);
  const served = await serveFile(wish);
  if (served.leave !== undefined) return served;
  await served.stop(0);
  throw fail('FILE_UNAVAILABLE', { reason: NOT_HELD });
}

async function endFile(path: string): Promise<void> {
  const row = mountsAt(path).at(-1);
  if (row !== undefined && isOurs(row)) await clear(path);
}

function ublkDevice(device: UblkDevice, forget: () => void): OwnDevice {
  return {
    path: device.path,
    isFile: false,
    leave: () => device.leave(),
    end: () => device.stop(0).then(forget),
  };
}

function fileDevice(server: FileServer, forget: () => void): OwnDevice {
  return {
    path: server.path,
    isFile: true,
    leave: () => server.leave!(),
    end: () => server.stop(0).then(forget),
  };
}

/** One that cannot be read is of no device that has a number. */
function readRecord(folder: string, name: string): OwnRecord | undefined {
  const place = placeOf(folder, name);
  if (!existsSync(place)) return undefined;
  try {
    const record = JSON.parse(readFileSync(place, 'utf8')) as OwnRecord;
    if (record.way === 'ublk' && Number.isInteger(record.id) && Number.isInteger(record.mark)) return record;
  } catch {
    // Then it is a file, if it is anything.
  }
  return { way: 'file' };
}

const placeOf = (folder: string, name: string) => join(folder, `device-${name}.json`);
const fileOf = (folder: string, name: string) => join(folder, `${name}.img`);
