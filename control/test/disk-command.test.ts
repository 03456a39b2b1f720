/** `dsec disk`: each subcommand once, and what it refuses. What the library does is tested where it is. */
import { spawn, spawnSync } from 'node:child_process';
import { once } from 'node:events';
import { mkdirSync, mkdtempSync, readFileSync, rmSync, statSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, test } from 'vitest';
import { openNamedDisk } from '#ublk-daemon';
import { runCommand } from './command-run.ts';

const MIB = 2 ** 20;
const PATH = `${process.env.PATH}:/usr/sbin:/sbin`;
const has = (tool: string) => spawnSync(tool, ['--version'], { env: { ...process.env, PATH } }).error === undefined;

let root: string;
const dsec = (...argv: string[]) => runCommand('disk', ...argv);
const json = async (...argv: string[]) => JSON.parse((await dsec(...argv, '--json')).text);
const at = (name: string) => join(root, name);

beforeAll(() => {
  root = mkdtempSync(join(tmpdir(), 'dsec-disk-command-'));
  process.env.DSEC_STATE = at('state');
  process.env.DSEC_STORE = at('store');
});
afterAll(() => {
  delete process.env.DSEC_STATE;
  delete process.env.DSEC_STORE;
  rmSync(root, { recursive: true, force: true });
});

async function write(name: string, offset: number, bytes: Buffer): Promise<void> {
  const { disk } = await openNamedDisk(name);
  await disk.write(offset, bytes);
  await disk.close();
}

test('create, snapshot, restore, pack-diff, export, rm: the life of a disk', async () => {
  expect(await json('ls')).toEqual([]);
  expect(await json('create', 'work', '--size', '8M')).toMatchObject({ name: 'work', sizeBytes: 8 * MIB, layers: 1 });
  await write('work', 0, Buffer.alloc(4096, 1));
  expect(await json('snapshot', 'work', 'one')).toMatchObject({ disk: 'work', snapshot: 'one' });
  await write('work', 4096, Buffer.alloc(4096, 2));
  await expect(dsec('snapshot', 'work', 'one')).rejects.toMatchObject({ code: 'DISK_SNAPSHOT_EXISTS' });
  await json('restore', 'work', 'one', 'again');
  await json('export', 'raw', 'work', at('work.raw'));
  await json('export', 'raw', 'again', at('again.raw'));
  const raw = readFileSync(at('work.raw'));
  expect(raw.length).toBe(8 * MIB);
  expect(raw.subarray(0, 8192)).toEqual(Buffer.concat([Buffer.alloc(4096, 1), Buffer.alloc(4096, 2)]));
  expect(readFileSync(at('again.raw')).subarray(0, 8192)).toEqual(
    Buffer.concat([Buffer.alloc(4096, 1), Buffer.alloc(4096)]),
  );
  expect(statSync(at('work.raw')).blocks * 512).toBeLessThan(MIB);

  const packed = await json('pack-diff', 'work', '--since', 'one', '-o', at('diff.lsmt'));
  const { lsmt } = await json('dump', at('diff.lsmt'));
  expect(lsmt.trailer).toMatchObject({ uuid: packed.uuid, parentUuid: (await json('ls')).at(-1).snapshots[0].uuid });
  expect(lsmt.segments).toEqual([{ offset: 8, length: 8, moffset: 8, zeroed: false, tag: 0 }]);
  await json('pack-diff', 'work', '--whole', '--compress', 'zstd', '--block-size', '16', '--tar', '-o', at('all.tar'));
  expect(await json('verify', at('diff.lsmt'), at('all.tar'))).toMatchObject([
    { ok: true, zfile: false },
    { ok: true, zfile: true, tar: true, checksummed: true },
  ]);
  writeFileSync(at('config.v1.json'), JSON.stringify({ lowers: [{ file: at('all.tar') }] }));
  await json('create', 'imported', '--from', `config:${at('config.v1.json')}`);
  await json('export', 'raw', 'imported', at('imported.raw'));
  expect(readFileSync(at('imported.raw')).equals(raw)).toBe(true);
  expect(await json('create', 'copy', '--from', `raw:${at('work.raw')}`)).toMatchObject({ sizeBytes: 8 * MIB });
  await json('export', 'raw', 'copy', at('copy.raw'));
  expect(readFileSync(at('copy.raw')).equals(raw)).toBe(true);

  await expect(dsec('rm', 'work')).rejects.toMatchObject({ code: 'DISK_IN_USE' });
  expect(await json('rm', 'again', 'work', 'imported', 'copy')).toEqual({
    removed: ['again', 'work', 'imported', 'copy'],
  });
  expect(await json('ls')).toEqual([]);
});

test('compact gives back what was overwritten', async () => {
  await dsec('create', 'worn', '--size', '8M');
  for (let round = 0; round < 4; round++) await write('worn', 0, Buffer.alloc(MIB, round + 1));
  expect(await json('compact', 'worn')).toMatchObject({ reclaimedBytes: 3 * MIB, indexEntriesAfter: 1 });
  await dsec('rm', 'worn');
});

describe('what is refused', () => {
  test('names, sizes, sources, disks that are not there or in use', async () => {
    await dsec('create', 'busy', '--size', '1M');
    const { disk } = await openNamedDisk('busy');
    await expect(dsec('snapshot', 'busy', 's')).rejects.toMatchObject({ code: 'DISK_BUSY' });
    await expect(dsec('rm', 'busy')).rejects.toMatchObject({ code: 'DISK_BUSY' });
    await disk.close();
    await expect(dsec('create', 'busy', '--size', '1M')).rejects.toMatchObject({ code: 'DISK_EXISTS' });
    await expect(dsec('create', '../evil', '--size', '1M')).rejects.toMatchObject({ code: 'DISK_NAME' });
    await expect(dsec('create', 'odd', '--size', '1000')).rejects.toMatchObject({ code: 'LSMT_OPTION' });
    await expect(dsec('create', 'none')).rejects.toMatchObject({ code: 'CLI_USAGE' });
    await expect(dsec('create', 'none', '--from', 'nothing:1')).rejects.toMatchObject({
      code: 'CATALOG_NOT_FOUND',
    });
    await expect(dsec('create', 'none', '--from', 'raw:/nowhere')).rejects.toMatchObject({ code: 'CLI_INPUT_MISSING' });
    await expect(dsec('export', 'raw', 'nobody', at('x'))).rejects.toMatchObject({ code: 'DISK_NOT_FOUND' });
    await expect(dsec('export', 'vmdk', 'busy', at('x'))).rejects.toMatchObject({ code: 'CLI_USAGE' });
    await expect(dsec('restore', 'busy', 'never', 'new')).rejects.toMatchObject({ code: 'DISK_SNAPSHOT_MISSING' });
    await expect(dsec('pack-diff', 'busy', '--since', 'never', '-o', at('x'))).rejects.toMatchObject({
      code: 'CLI_DISK_SNAPSHOT',
    });
    // Told before anything is sealed or packed.
    for (const command of [
      ['snapshot', 'busy', 'p'],
      ['pack-diff', 'busy'],
    ]) {
      await expect(dsec(...command, '--name', '../x')).rejects.toMatchObject({ code: 'STORE_NAME' });
    }
    expect((await json('ls'))[0]).toMatchObject({ layers: 1, snapshots: [] });
    // A disk that is damaged is listed with what is wrong, and keeps no other from being made.
    await dsec('create', 'broken', '--size', '1M');
    writeFileSync(at('state/disks/broken/config.v1.json'), '{');
    expect(await json('create', 'whole', '--size', '1M')).toMatchObject({ name: 'whole' });
    expect((await json('ls'))[0]).toMatchObject({ name: 'broken', problem: expect.stringContaining('config.v1.json') });
    expect((await dsec('ls')).stderr).toContain('broken');
    rmSync(at('state/disks/broken'), { recursive: true });
    await dsec('rm', 'whole');
    writeFileSync(at('there'), '');
    await expect(dsec('export', 'raw', 'busy', at('there'))).rejects.toMatchObject({ code: 'CLI_OUTPUT_EXISTS' });
    await dsec('rm', 'busy');
    expect(await json('ls')).toEqual([]);
  });

  test('verify tells what is damaged and goes on', async () => {
    writeFileSync(at('junk'), Buffer.alloc(10_000));
    const { exitCode, text } = await dsec('verify', at('junk'), at('diff.lsmt'), '--json');
    expect(exitCode).toBe(3);
    expect(JSON.parse(text)).toMatchObject([{ ok: false, code: 'DISK_NOT_A_LAYER' }, { ok: true }]);
  });
});

test.skipIf(!has('mkfs.ext4') || !has('e2fsck'))('ext4: empty, and of a folder', async () => {
  await dsec('create', 'fs', '--size', '32M', '--ext4');
  mkdirSync(at('tree/sub'), { recursive: true });
  writeFileSync(at('tree/sub/file'), 'hello\n');
  await dsec('create', 'site', '--size', '32M', '--from', `dir:${at('tree')}`);
  for (const name of ['fs', 'site']) {
    await dsec('export', 'raw', name, at(`${name}.raw`));
    expect(spawnSync('e2fsck', ['-fn', at(`${name}.raw`)], { env: { ...process.env, PATH } }).status).toBe(0);
  }
  const { stdout } = spawnSync('debugfs', ['-R', 'cat /sub/file', at('site.raw')], {
    env: { ...process.env, PATH },
    encoding: 'utf8',
  });
  expect(stdout).toBe('hello\n');
  await dsec('rm', 'fs', 'site');
});

test.skipIf(!has('qemu-img'))('qcow2: out and in again', async () => {
  await dsec('create', 'q', '--size', '4M');
  await write('q', MIB, Buffer.alloc(8192, 7));
  await dsec('export', 'qcow2', 'q', at('q.qcow2'));
  await dsec('create', 'q2', '--from', `qcow2:${at('q.qcow2')}`, '--size', '8M');
  const { disk } = await openNamedDisk('q2');
  expect(disk.sizeBytes).toBe(8 * MIB);
  expect((await disk.read(MIB, 8192)).equals(Buffer.alloc(8192, 7))).toBe(true);
  await disk.close();
  await dsec('rm', 'q', 'q2');
});

test('serve: a disk by its name, for a client of another program; what it flushed stays when the server is killed', {
  timeout: 120_000,
}, async (context) => {
  if (!has('qemu-io')) return context.skip('qemu-io is not on this machine');
  await dsec('create', 'served', '--size', '8M');
  const server = spawn(
    process.execPath,
    [
      join(import.meta.dirname, '../../bin/dsec'),
      'disk',
      'serve',
      'disk:served',
      '--nbd',
      `unix:${at('s.sock')}`,
      '--json',
    ],
    {
      stdio: ['ignore', 'pipe', 'inherit'],
    },
  );
  const ended = once(server, 'close');
  const [first] = (await once(server.stdout, 'data')) as [Buffer];
  const { uri } = JSON.parse(first.toString());
  await expect(dsec('snapshot', 'served', 's')).rejects.toMatchObject({ code: 'DISK_BUSY' });
  const { status, stdout } = spawnSync('qemu-io', ['-f', 'raw', '-c', 'write -P 5 64k 64k', '-c', 'flush', uri], {
    encoding: 'utf8',
  });
  expect(status, stdout).toBe(0);
  server.kill('SIGKILL');
  await ended;
  const { disk } = await openNamedDisk('served');
  expect((await disk.read(65_536, 65_536)).equals(Buffer.alloc(65_536, 5))).toBe(true);
  await disk.close();
  await dsec('rm', 'served');
});
