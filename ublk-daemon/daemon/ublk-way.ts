/**
 * The way out over the kernel: /dev/ublkbN. A device outlives the daemon: its requests wait until the next one takes it over.
 *
 * Ours are known by a mark that the driver keeps for servers (`ublksrv_flags`): "DSec" and a number that is the same for every daemon on one
 * state folder. So a device that was made just before a crash is found, and one of another program is never touched.
 */

import { messageOf } from '#base';
import { fail } from '../errors.ts';
import { listUblk, recoverUblk, removeUblk, serveUblk, type UblkDevice } from '../target/ublk/device.ts';
import { usersOfBlockDevice } from './block-device-users.ts';
import type { Attachment, WayOut } from './way-out.ts';

const DEVICE = /^\/dev\/ublkb(\d{1,7})$/;

export const ublkWay: WayOut = {
  name: 'ublk',
  async available() {
    try {
      await listUblk();
      return undefined;
    } catch (error) {
      return messageOf(error);
    }
  },
  async attach(target, { address, mark }) {
    const id = address === undefined ? undefined : DEVICE.exec(address)?.[1];
    if (address !== undefined && id === undefined) {
      throw fail('UBLKD_ADDRESS', { address, way: 'ublk', problem: 'it is /dev/ublkbN' });
    }
    return attachment(await serveUblk({ target, mark, id: id === undefined ? undefined : Number(id) }));
  },
  async recover(record, target, { mark }) {
    const id = Number(record.id);
    const found = (await listUblk()).find((device) => device.id === id);
    if (found?.mark === mark) return attachment(await recoverUblk(id, target));
    // It is gone, with a reboot or by hand; or the number is somebody else's now, which adding it says.
    return attachment(await serveUblk({ target, mark, id }));
  },
  async sweep(records, { mark }) {
    if ((await ublkWay.available()) !== undefined) return [];
    const kept = new Set(records.map(({ id }) => id));
    const removed: string[] = [];
    for (const { id, mark: of } of await listUblk()) {
      if (of !== mark || kept.has(id)) continue;
      await removeUblk(id);
      removed.push(`/dev/ublkb${id}`);
    }
    return removed;
  },
};

function attachment(device: UblkDevice): Attachment {
  return {
    at: device.path,
    record: { id: device.id },
    failed: device.failed,
    usedBy: () => usersOfBlockDevice(device.path),
    resized: () => device.resized(),
    detach: (graceMs) => device.stop(graceMs),
    leave: device.recoverable ? () => device.leave() : undefined,
  };
}
