/** The NBD server used by programs that know nothing of it: qemu-img, qemu-io, nbdinfo, nbdcopy, fio. */
import { spawn, spawnSync } from 'node:child_process';
import { randomBytes } from 'node:crypto';
import { mkdtempSync, readFileSync, rmSync, statSync, truncateSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, afterEach, beforeAll, expect, test } from 'vitest';
import { type FileTarget, openFileTarget } from '../target/file-target.ts';
import { type NbdServer, serveNbd } from '../target/nbd/server.ts';

const MIB = 2 ** 20;
const SIZE = 32 * MIB;
const PACKAGE: Readonly<Record<string, string>> = {
  'qemu-img': 'qemu-utils',
  'qemu-io': 'qemu-utils',
  nbdinfo: 'libnbd-bin',
  nbdcopy: 'libnbd-bin',
  fio: 'fio',
};

let folder: string;
const open: { server: NbdServer; target: FileTarget }[] = [];
let count = 0;

beforeAll(() => {
  folder = mkdtempSync(join(tmpdir(), 'dsec-nbd-'));
});
afterEach(async () => {
  for (const { server, target } of open.splice(0)) {
    await server.close();
    await target.close();
  }
});
afterAll(() => rmSync(folder, { recursive: true, force: true }));

function withTools(tools: readonly string[], name: string, work: () => Promise<void>): void {
  const missing = tools.filter((tool) => spawnSync('sh', ['-c', `command -v ${tool}`]).status !== 0);
  if (missing.length > 0) {
    console.log(`skipped: ${name}: ${missing.join(', ')} missing (apt-get install ${PACKAGE[missing[0]!]})`);
  }
  test.skipIf(missing.length > 0)(name, { timeout: 600_000 }, work);
}

/** A file with data at both ends and in the middle, holes between. */
function diskFile(): string {
  const path = join(folder, `${count++}.raw`);
  writeFileSync(path, randomBytes(3 * MIB));
  truncateSync(path, SIZE);
  const bytes = readFileSync(path);
  randomBytes(MIB).copy(bytes, 16 * MIB);
  randomBytes(4096).copy(bytes, SIZE - 4096);
  writeFileSync(path, bytes);
  // Written whole it has no holes: copied sparsely it has.
  spawnSync('cp', ['--sparse=always', path, `${path}.sparse`]);
  return `${path}.sparse`;
}

async function serve(path: string, options: { readOnly?: boolean; tcp?: boolean } = {}): Promise<NbdServer> {
  const target = await openFileTarget(path, { readOnly: options.readOnly });
  const server = await serveNbd({
    listen: options.tcp ? 'tcp:127.0.0.1:0' : `unix:${folder}/${count++}.sock`,
    exports: [{ name: 'disk', target, description: 'a test' }],
  });
  open.push({ server, target });
  return server;
}

/** Not spawnSync: this process has to answer meanwhile. */
function run(command: string, ...args: string[]): Promise<{ status: number | null; stdout: string; stderr: string }> {
  return new Promise((done, failed) => {
    const child = spawn(command, args, { stdio: ['ignore', 'pipe', 'pipe'], cwd: folder });
    let stdout = '';
    let stderr = '';
    child.stdout.setEncoding('utf8').on('data', (text: string) => {
      stdout += text;
    });
    child.stderr.setEncoding('utf8').on('data', (text: string) => {
      stderr += text;
    });
    child.once('error', failed);
    child.once('close', (status) => done({ status, stdout, stderr }));
  });
}

async function ok(command: string, ...args: string[]): Promise<string> {
  const { status, stdout, stderr } = await run(command, ...args);
  expect({ command: [command, ...args].join(' '), status, stderr }).toMatchObject({ status: 0 });
  return stdout;
}

withTools(['nbdinfo'], 'nbdinfo shows what the export can do', async () => {
  const server = await serve(diskFile());
  const { exports } = JSON.parse(await ok('nbdinfo', '--json', server.uri('disk')));
  expect(exports[0]).toMatchObject({
    'export-name': 'disk',
    description: 'a test',
    'export-size': SIZE,
    is_read_only: false,
    can_flush: true,
    can_fua: true,
    can_trim: true,
    can_zero: true,
    can_df: true,
    can_multi_conn: true,
    can_cache: true,
    block_size_minimum: 512,
    block_size_maximum: 32 * MIB,
  });
  expect(exports[0].contexts).toEqual(['base:allocation']);
  const listed = await ok('nbdinfo', '--list', server.uri());
  expect(listed).toContain('disk');
  const map = JSON.parse(await ok('nbdinfo', '--map', '--json', server.uri('disk')));
  expect(map.some((run: { description: string }) => run.description === 'hole,zero')).toBe(true);
  expect(map.reduce((sum: number, run: { length: number }) => sum + run.length, 0)).toBe(SIZE);
});

withTools(['qemu-img'], 'qemu-img: info, compare, convert there and back', async () => {
  const path = diskFile();
  const server = await serve(path, { readOnly: true });
  const uri = server.uri('disk');
  expect(JSON.parse(await ok('qemu-img', 'info', '--output=json', uri))).toMatchObject({ 'virtual-size': SIZE });
  expect(await ok('qemu-img', 'compare', '-f', 'raw', '-F', 'raw', path, uri)).toContain('identical');
  const copy = join(folder, 'copy.qcow2');
  await ok('qemu-img', 'convert', '-f', 'raw', '-O', 'qcow2', uri, copy);
  // Holes stayed holes.
  expect(statSync(copy).size).toBeLessThan(8 * MIB);
  const blank = join(folder, 'blank.raw');
  writeFileSync(blank, '');
  truncateSync(blank, SIZE);
  const into = await serve(blank, { tcp: true });
  await ok('qemu-img', 'convert', '-n', '-f', 'qcow2', '-O', 'raw', copy, into.uri('disk'));
  expect(readFileSync(blank).equals(readFileSync(path))).toBe(true);
});

withTools(['qemu-io'], 'qemu-io: patterns, zeros, discards, flush, FUA; a read-only export refuses', async () => {
  const path = diskFile();
  const server = await serve(path);
  const args = (...commands: string[]) => commands.flatMap((command) => ['-c', command]);
  const output = await ok(
    'qemu-io',
    '-f',
    'raw',
    ...args(
      'write -P 0xab 0 1M',
      'read -P 0xab 0 1M',
      'write -f -P 0xcd 1M 64k',
      'read -P 0xcd 1M 64k',
      'write -z 512k 256k',
      'read -P 0 512k 256k',
      'discard 0 64k',
      'read -P 0 0 64k',
      'flush',
      'read -P 0xab 64k 448k',
    ),
    server.uri('disk'),
  );
  expect(output).not.toMatch(/fail|error/i);
  expect(
    readFileSync(path)
      .subarray(MIB, MIB + 65536)
      .equals(Buffer.alloc(65536, 0xcd)),
  ).toBe(true);
  const readOnly = await serve(diskFile(), { readOnly: true });
  const refused = await run('qemu-io', '-f', 'raw', ...args('write 0 4k'), readOnly.uri('disk'));
  expect(refused.status).not.toBe(0);
});

withTools(['nbdcopy'], 'nbdcopy: out and in, over several connections', async () => {
  const path = diskFile();
  const server = await serve(path);
  const copy = join(folder, 'nbdcopy.raw');
  await ok('nbdcopy', '--connections=4', server.uri('disk'), copy);
  expect(readFileSync(copy).equals(readFileSync(path))).toBe(true);
  const blank = join(folder, 'nbdcopy-in.raw');
  writeFileSync(blank, '');
  truncateSync(blank, SIZE);
  const into = await serve(blank);
  await ok('nbdcopy', '--connections=4', '--flush', copy, into.uri('disk'));
  expect(readFileSync(blank).equals(readFileSync(path))).toBe(true);
});

withTools(['fio'], 'fio: what it wrote at random it reads back and verifies', async () => {
  const help = await run('fio', '--enghelp');
  if (!/\bnbd\b/.test(help.stdout)) {
    console.log('skipped: this fio has no nbd engine');
    return;
  }
  const server = await serve(diskFile());
  const report = await ok(
    'fio',
    '--name=verify',
    '--ioengine=nbd',
    `--uri=${server.uri('disk')}`,
    `--size=${SIZE}`,
    '--rw=randwrite',
    '--bssplit=4k/80:64k/20',
    '--serialize_overlap=1',
    '--iodepth=16',
    '--io_size=24m',
    '--verify=crc32c',
    '--verify_fatal=1',
    '--output-format=json',
  );
  const [job] = JSON.parse(report.slice(report.indexOf('{'))).jobs;
  expect(job.error).toBe(0);
  expect(job.write.total_ios).toBeGreaterThan(100);
});

/** What a VM has of a disk whose service is started anew: QEMU waits, connects again, and sends again what was not answered. */
withTools(['qemu-io'], 'qemu goes on when the server comes back at its address', async () => {
  const path = diskFile();
  const socket = join(folder, `${count++}.sock`);
  const start = async () => {
    const target = await openFileTarget(path);
    return { target, server: await serveNbd({ listen: `unix:${socket}`, exports: [{ name: 'vm', target }] }) };
  };
  let { server, target } = await start();
  const node = { driver: 'nbd', 'reconnect-delay': 600, server: { type: 'unix', path: socket }, export: 'vm' };
  // Into a pipe it says nothing before its end otherwise.
  const qemu = spawn('stdbuf', ['-oL', 'qemu-io', `json:${JSON.stringify({ driver: 'raw', file: node })}`]);
  const ended = new Promise((done) => qemu.once('close', done));
  let text = '';
  let heard = () => {};
  for (const stream of [qemu.stdout, qemu.stderr]) {
    stream.setEncoding('utf8').on('data', (more: string) => {
      text += more;
      heard();
    });
  }
  /** As often as it was said so far. */
  const said = async (what: RegExp, times: number) => {
    while ((text.match(what) ?? []).length < times) {
      await Promise.race([
        new Promise<void>((done) => (heard = done)),
        ended.then(() => Promise.reject(new Error(text))),
      ]);
    }
  };
  try {
    qemu.stdin.write('write -P 1 0 64k\n');
    await said(/wrote 65536/g, 1);
    await server.close();
    await target.close();
    qemu.stdin.write('write -P 2 64k 64k\n');
    ({ server, target } = await start());
    await said(/wrote 65536/g, 2);
    // It looks at its input for each line anew: one at a time.
    qemu.stdin.write('read -P 1 0 64k\n');
    await said(/read 65536/g, 1);
    qemu.stdin.write('read -P 2 64k 64k\n');
    await said(/read 65536/g, 2);
    qemu.stdin.end('quit\n');
    await ended;
    expect(text).not.toMatch(/failed|error/i);
  } finally {
    qemu.kill('SIGKILL');
    await server.close();
    await target.close();
  }
});
