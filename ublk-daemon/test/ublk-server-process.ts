/** A process that serves a raw file over ublk until SIGTERM: for tests that kill it. Arguments: the file, and a device to take over. */
import { openFileTarget } from '../target/file-target.ts';
import { recoverUblk, serveUblk } from '../target/ublk/device.ts';

const [file, id] = process.argv.slice(2);
const target = await openFileTarget(file!);
const device = id === undefined ? await serveUblk({ target, queues: 2 }) : await recoverUblk(Number(id), target);
process.once('SIGTERM', async () => {
  await device.stop();
  await target.close();
  process.exit(0);
});
console.log(`live ${device.id}`);
// The threads keep no process alive while they wait.
setInterval(() => {}, 60_000);
