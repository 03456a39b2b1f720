/** `dsec disk serve` as a user types it: a process that says where it listens, serves, and ends when it is told to. */
import { type ChildProcess, spawn } from 'node:child_process';
import { once } from 'node:events';
import { existsSync, mkdtempSync, realpathSync, rmSync, truncateSync, writeFileSync } from 'node:fs';
import { connect } from 'node:net';
import { tmpdir } from 'node:os';
import { basename, join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { afterAll, afterEach, beforeAll, expect, test } from 'vitest';
import { runCommand } from './command-run.ts';

const PROGRAM = fileURLToPath(new URL('../../bin/dsec', import.meta.url));
const children = new Set<ChildProcess>();
let folder: string;
let disk: string;

beforeAll(() => {
  folder = mkdtempSync(join(tmpdir(), 'dsec-disk-serve-'));
  disk = join(folder, 'disk.raw');
  writeFileSync(disk, '');
  truncateSync(disk, 2 ** 20);
});
afterEach(async () => {
  for (const child of children) {
    child.kill('SIGKILL');
    await once(child, 'close');
  }
});
afterAll(() => rmSync(folder, { recursive: true, force: true }));

async function serve(...args: string[]) {
  const child = spawn(process.execPath, [PROGRAM, 'disk', 'serve', ...args], { stdio: ['ignore', 'pipe', 'inherit'] });
  children.add(child);
  const ended = once(child, 'close').then(([status]) => {
    children.delete(child);
    return status as number;
  });
  const [line] = (await once(child.stdout!.setEncoding('utf8'), 'data')) as [string];
  return { child, ended, line };
}

async function greeting(where: string | { host: string; port: number }): Promise<string> {
  const socket = typeof where === 'string' ? connect(where) : connect(where.port, where.host);
  const [bytes] = (await once(socket, 'data')) as [Buffer];
  socket.destroy();
  return bytes.toString('latin1', 0, 16);
}

test.each(['SIGINT', 'SIGTERM'] as const)('serves on a socket until %s, and takes the socket away', async (signal) => {
  const path = join(folder, `${signal}.sock`);
  const { child, ended, line } = await serve(disk, '--nbd', `unix:${path}`);
  expect(line).toBe(`${disk} (1048576 bytes) at nbd+unix:///disk.raw?socket=${path}\n`);
  expect(await greeting(path)).toBe('NBDMAGICIHAVEOPT');
  child.kill(signal);
  expect(await ended).toBe(0);
  expect(existsSync(path)).toBe(false);
});

test('--json says where, on a port that was free', async () => {
  const args = ['--nbd', 'tcp:127.0.0.1:0', '--name', 'd', '--read-only', '--json'];
  const { child, ended, line } = await serve(disk, ...args);
  const at = JSON.parse(line);
  expect(at).toMatchObject({ file: disk, name: 'd', sizeBytes: 1048576, readOnly: true });
  expect(at.uri).toMatch(/^nbd:\/\/127\.0\.0\.1:\d+\/d$/);
  const port = Number(at.address.split(':').at(-1));
  expect(await greeting({ host: '127.0.0.1', port })).toBe('NBDMAGICIHAVEOPT');
  // A second writer is kept out, a second reader is not.
  await expect(runCommand('disk', 'serve', disk, '--nbd', `unix:${folder}/w.sock`)).rejects.toMatchObject({
    code: 'TARGET_BUSY',
    exit: 1,
  });
  child.kill('SIGINT');
  expect(await ended).toBe(0);
});

test.each([
  [['none.raw', '--nbd', 'unix:x.sock'], 'CLI_INPUT_MISSING', 4],
  [['DISK', '--nbd', 'tcp:0.0.0.0:1'], 'NBD_ADDRESS', 2],
  [['DISK', '--nbd', 'x.sock'], 'NBD_ADDRESS', 2],
  [['DISK', '--nbd', 'unix:/none/x.sock'], 'NBD_LISTEN', 1],
  [['DISK'], 'CLI_USAGE', 2],
  [['DISK', '--nbd', 'unix:x.sock', '--file', 'x.img'], 'CLI_USAGE', 2],
  [['DISK', '--nbd', 'unix:x.sock', '--loop'], 'CLI_USAGE', 2],
  [['DISK', '--file', 'x.img', '--name', 'x'], 'CLI_USAGE', 2],
  [['DISK', '--file', '/none/x.img'], 'FILE_PATH', 2],
  [['/dev/null', '--nbd', 'unix:x.sock'], 'TARGET_FILE_KIND', 3],
] as const)('refuses %j', async (args, code, exit) => {
  const argv = args.map((arg) => (arg === 'DISK' ? disk : arg));
  await expect(runCommand('disk', 'serve', ...argv)).rejects.toMatchObject({ code, exit });
});

test.skipIf(process.getuid?.() !== 0)('shows it as a file and a loop device, and takes both away', async () => {
  const path = join(realpathSync(folder), 'shown.img');
  const { child, ended, line } = await serve(disk, '--file', path, '--loop', '--json');
  const at = JSON.parse(line);
  expect(at).toMatchObject({ file: disk, sizeBytes: 1048576, readOnly: false, path });
  expect(at.loop).toMatch(/^\/dev\/loop\d+$/);
  // By other programs: this test must be able to end the server that it would wait for.
  const written = spawn('dd', ['if=/dev/urandom', `of=${at.loop}`, 'bs=64k', 'oflag=direct', 'conv=fsync'], {
    stdio: 'ignore',
  });
  await once(written, 'close');
  const compared = spawn('cmp', [path, disk], { stdio: 'inherit' });
  expect((await once(compared, 'close'))[0]).toBe(0);
  child.kill('SIGINT');
  expect(await ended).toBe(0);
  expect(existsSync(path)).toBe(false);
  expect(existsSync(`/sys/block/${basename(at.loop)}/loop`)).toBe(false);
});
