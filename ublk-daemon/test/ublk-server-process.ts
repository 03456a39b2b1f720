/**
 * A process that serves a disk over ublk until SIGTERM: for tests that kill it. Arguments: a raw file or the folder of a disk, and a device to
 * take over. SIGUSR1: it leaves the device and ends.
 */
import { statSync } from 'node:fs';
import { openDisk } from '../disk-folder.ts';
import { openFileTarget } from '../target/file-target.ts';
import { recoverUblk, serveUblk } from '../target/ublk/device.ts';

const [path, id] = process.argv.slice(2);
const target = statSync(path!).isDirectory() ? (await openDisk(path!)).disk : await openFileTarget(path!);
try {
  const device = id === undefined ? await serveUblk({ target, queues: 2 }) : await recoverUblk(Number(id), target);
  const end = (how: () => Promise<void>) => async () => {
    await how();
    await target.close();
    process.exit(0);
  };
  process.once(
    'SIGTERM',
    end(() => device.stop()),
  );
  process.once(
    'SIGUSR1',
    end(() => device.leave()),
  );
  console.log(`live ${device.id}${device.recoverable ? '' : ' not recoverable'}`);
} catch (error) {
  console.error(error);
  process.exit(1);
}
// The threads keep no process alive while they wait.
setInterval(() => {}, 60_000);
