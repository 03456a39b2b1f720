/** `dsec disk attach` over ublk, as a user has it: a mounted disk under load while its service is killed, restarted, asked for a snapshot. */
import { type ChildProcess, execFileSync, spawn } from 'node:child_process';
import { randomBytes } from 'node:crypto';
import { once } from 'node:events';
import { existsSync, mkdirSync, mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { setTimeout as delay } from 'node:timers/promises';
import { afterAll, beforeAll, expect, test } from 'vitest';
import { listUblk, removeUblk } from '#ublk-daemon';

const MIB = 2 ** 20;
/** The command line of the bundle that this test is in. */
const MAIN = 'import(process.argv[1]).then(({ main }) => main(process.argv.slice(2), { isFresh: () => true }))';
const bundle = process.env.DSEC_LAB_BUNDLE ?? '';
const services = new Set<ChildProcess>();
let folder: string;
let mounted: string;
let env: NodeJS.ProcessEnv;

beforeAll(() => {
  folder = mkdtempSync(join(tmpdir(), 'dsec-lab-'));
  mounted = join(folder, 'mounted');
  mkdirSync(mounted);
  execFileSync('modprobe', ['ublk_drv']);
  env = { ...process.env };
  for (const name of ['STORE', 'RUN', 'CACHE', 'STATE']) env[`DSEC_${name}`] = join(folder, name.toLowerCase());
});
afterAll(async () => {
  for (const service of services) await end(service, 'SIGKILL');
  // Of a test that failed: what waits on a device without a server would wait for ever.
  for (const { id } of await listUblk()) await removeUblk(id);
  await command('umount', ['-l', mounted]);
  rmSync(folder, { recursive: true, force: true });
});

const argv = (args: readonly string[]) => ['-e', MAIN, join(bundle, 'dsec.mjs'), ...args];

function command(program: string, args: readonly string[]): Promise<{ status: number; text: string }> {
  return new Promise((done, failed) => {
    const child = spawn(program, args, { env, stdio: ['ignore', 'pipe', 'pipe'] });
    let text = '';
    for (const stream of [child.stdout, child.stderr]) {
      stream.setEncoding('utf8').on('data', (more: string) => {
        text += more;
      });
    }
    child.once('error', failed);
    child.once('close', (status) => done({ status: status ?? 1, text }));
  });
}

async function run(program: string, ...args: string[]): Promise<string> {
  const { status, text } = await command(program, args);
  if (status !== 0) throw new Error(`${program} ${args.join(' ')}: ${status}\n${text}`);
  return text;
}

const dsec = (...args: string[]) => run(process.execPath, ...argv(args));

/** In the foreground; resolves when it answers. */
async function startService(): Promise<ChildProcess> {
  const child = spawn(process.execPath, argv(['serve', 'ublkd']), { env, stdio: ['ignore', 'inherit', 'inherit'] });
  services.add(child);
  const ready = async () => {
    const { status } = await command('curl', [
      ...['-sf', '--max-time', '20', '--unix-socket', join(folder, 'run/ublkd.sock'), 'http://dsec/v1/disks'],
    ]);
    return status === 0;
  };
  for (let i = 0; !(await ready()); i++) {
    if (i > 600 || child.exitCode !== null) throw new Error('the service does not answer');
    await delay(200);
  }
  return child;
}

async function end(child: ChildProcess, signal: NodeJS.Signals): Promise<void> {
  services.delete(child);
  if (child.exitCode !== null || child.signalCode !== null) return;
  const ended = once(child, 'exit');
  child.kill(signal);
  await ended;
}

test('doctor tells what the driver has', async () => {
  const { disks } = JSON.parse(await dsec('doctor', '--json')) as { disks: { name: string; present: boolean }[] };
  const present = Object.fromEntries(disks.map((row) => [row.name, row.present]));
  expect(present).toMatchObject({ ublk: true, 'ublk unprivileged': true, 'FUSE and loop devices': true });
});

test('a mounted disk, under load, whose service is killed and restarted', async () => {
  let service = await startService();
  await dsec('disk', 'create', 'work', '--size', '128M');
  const device = (await dsec('disk', 'attach', 'work', '--way', 'ublk')).trim();
  expect(device).toMatch(/^\/dev\/ublkb\d+$/);
  await run('mkfs.ext4', '-q', device);
  await run('mount', device, mounted);
  const data = join(folder, 'data');
  writeFileSync(data, randomBytes(4 * MIB));
  await run('dd', `if=${data}`, `of=${mounted}/before`, 'bs=1M', 'oflag=direct', 'status=none');
  const load = run(
    'fio',
    ...['--name=load', '--ioengine=libaio', `--directory=${mounted}`, '--direct=1', '--size=32m', '--io_size=12m'],
    ...['--rw=randwrite', '--bs=4k', '--iodepth=8', '--verify=crc32c', '--verify_fatal=1', '--rate_iops=500'],
  );
  load.catch(() => {});
  await delay(1000);
  await end(service, 'SIGKILL');
  // Nobody serves it, nobody notices.
  expect(existsSync(device)).toBe(true);
  service = await startService();
  await dsec('disk', 'snapshot', 'work', 'monday');
  await load;
  // In good order, and the device is left in place.
  await end(service, 'SIGTERM');
  expect(existsSync(device)).toBe(true);
  const copying = run('sh', '-c', `cp ${data} ${mounted}/after && sync -f ${mounted}`);
  service = await startService();
  await copying;
  await run('sh', '-c', 'echo 3 > /proc/sys/vm/drop_caches');
  for (const name of ['before', 'after']) await run('cmp', data, join(mounted, name));
  const refused = await command(process.execPath, argv(['disk', 'detach', 'work']));
  expect(refused.status).not.toBe(0);
  expect(refused.text).toContain(mounted);
  await run('umount', mounted);
  await run('e2fsck', '-fn', device);
  await dsec('disk', 'detach', 'work');
  expect(existsSync(device)).toBe(false);
  // What the snapshot holds is a disk that lost power at that moment.
  await dsec('disk', 'restore', 'work', 'monday', 'tuesday');
  const restored = (await dsec('disk', 'attach', 'tuesday', '--way', 'ublk')).trim();
  await run('sh', '-c', `e2fsck -fp ${restored} || [ $? = 1 ]`);
  await run('e2fsck', '-fn', restored);
  await dsec('disk', 'detach', 'tuesday');
  await end(service, 'SIGTERM');
});
