/** Commands that the kernel does not end: nobody waits for them for ever, and what is asked for afterwards is done. */
import { type ChildProcess, execFileSync, spawn } from 'node:child_process';
import { once } from 'node:events';
import { mkdtempSync, readdirSync, readFileSync, rmSync, truncateSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { setTimeout as delay } from 'node:timers/promises';
import { afterAll, afterEach, beforeAll, expect, test } from 'vitest';
import { processEntry } from '#base';
import { UblkControl } from '../target/ublk/control.ts';
import { listUblk, removeUblk } from '../target/ublk/device.ts';
import { FEATURE } from '../target/ublk/features.ts';
import { run } from './run-command.ts';

const MIB = 2 ** 20;
/** Long enough for every command that ends, emulated on a busy machine: a test of one that does not end waits for it. */
const LIMIT_MS = 5000;
let folder: string;
let child: ChildProcess | undefined;

beforeAll(() => {
  folder = mkdtempSync(join(tmpdir(), 'dsec-lab-'));
  execFileSync('modprobe', ['ublk_drv']);
});
afterAll(() => rmSync(folder, { recursive: true, force: true }));
afterEach(async () => {
  if (child !== undefined && child.exitCode === null && child.signalCode === null) {
    const ended = once(child, 'exit');
    child.kill('SIGKILL');
    await ended;
  }
  child = undefined;
  for (const { id } of await listUblk()) await removeUblk(id);
  expect(readdirSync('/dev').filter((name) => name.startsWith('ublkb'))).toEqual([]);
});

test('a start that waits for queues nobody serves is called off, and the device can be removed', async () => {
  const control = new UblkControl({ limitMs: LIMIT_MS });
  const flags = FEATURE.CMD_IOCTL_ENCODE;
  const { id } = await control.add({ id: -1, queues: 1, depth: 4, maxIoBytes: MIB, pid: process.pid, flags });
  await control.setParams(id, { sizeBytes: MIB, blockSize: 512, readOnly: false, maxIoBytes: MIB });
  await expect(control.start(id)).rejects.toMatchObject({
    code: 'UBLK_TIMEOUT',
    message: `ublk device ${id}: the kernel has not ended START_DEV in ${LIMIT_MS / 1000} s`,
  });
  expect(await control.info(id)).toMatchObject({ id, state: 0 });
  await control.stop(id);
  await control.remove(id);
  await expect(control.info(id)).rejects.toMatchObject({ code: 'ENODEV' });
  await control.close();
});

test('a stop that waits for a request nobody answers is given up, other devices are served, and it ends when the request does', async () => {
  const disk = join(folder, 'hangs.raw');
  writeFileSync(disk, '');
  truncateSync(disk, 8 * MIB);
  const id = await serveElsewhere(disk);
  const server = child!;
  server.kill('SIGSTOP');
  const reading = run('dd', `if=/dev/ublkb${id}`, 'of=/dev/null', 'bs=4k', 'count=1', 'iflag=direct', 'status=none');
  reading.catch(() => {});
  // It is at work when the kernel says so.
  for (let i = 0; inFlight(id) === 0; i++) {
    if (i > 6000) throw new Error('the read did not arrive in a minute');
    await delay(10);
  }
  const control = new UblkControl({ limitMs: LIMIT_MS });
  await expect(control.stop(id)).rejects.toMatchObject({ code: 'UBLK_TIMEOUT' });
  const flags = FEATURE.CMD_IOCTL_ENCODE;
  const other = await control.add({ id: -1, queues: 1, depth: 4, maxIoBytes: MIB, pid: process.pid, flags });
  expect(other.id).not.toBe(id);
  await control.remove(other.id);
  // Again, and it is given up again.
  await expect(control.stop(id)).rejects.toMatchObject({ code: 'UBLK_TIMEOUT' });
  server.kill('SIGCONT');
  await control.stop(id);
  await control.remove(id);
  await control.close();
  await reading.catch(() => {});
});

/** Requests that the device has been given and has not answered. */
function inFlight(id: number): number {
  const text = readFileSync(`/sys/block/ublkb${id}/inflight`, 'latin1');
  return text
    .trim()
    .split(/\s+/)
    .reduce((sum, count) => sum + Number(count), 0);
}

async function serveElsewhere(disk: string): Promise<number> {
  const entry = processEntry('ublk-server', new URL('./ublk-server-process.ts', import.meta.url));
  child = spawn(process.execPath, [...entry, disk], { stdio: ['ignore', 'pipe', 'inherit'] });
  const [line] = (await Promise.race([
    once(child.stdout!.setEncoding('utf8'), 'data'),
    once(child, 'exit').then(() => ['ended']),
  ])) as [string];
  const id = /live (\d+)/.exec(line)?.[1];
  if (id === undefined) throw new Error(`the server said ${line}`);
  return Number(id);
}
