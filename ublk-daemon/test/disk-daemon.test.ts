/** The daemon of attached disks without its HTTP, and its parts: the table, and the target that counts. */
import {
  existsSync,
  mkdirSync,
  mkdtempSync,
  readdirSync,
  readFileSync,
  rmSync,
  symlinkSync,
  truncateSync,
  writeFileSync,
} from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, beforeEach, describe, expect, test, vi } from 'vitest';
import { CountedTarget } from '../daemon/counted-target.ts';
import { type DaemonOptions, DiskDaemon } from '../daemon/disk-daemon.ts';
import { DiskTable } from '../daemon/disk-table.ts';
import { type Attachment, WAYS_OUT } from '../daemon/way-out.ts';
import { createNamedDisk } from '../disks.ts';
import { fail } from '../errors.ts';
import { immediateOf } from '../target/capabilities.ts';
import { openFileTarget } from '../target/file-target.ts';
import { MemoryTarget } from './memory-target.ts';

const MIB = 2 ** 20;
let folder: string;
let notes: string[];

beforeEach(() => {
  folder = mkdtempSync(join(tmpdir(), 'dsec-dd-'));
  notes = [];
});
afterEach(() => rmSync(folder, { recursive: true, force: true }));

function start(options: Partial<DaemonOptions> = {}): Promise<DiskDaemon> {
  return DiskDaemon.start({
    ...options,
    stateDir: join(folder, 'state'),
    runDir: join(folder, 'run'),
    disksRoot: join(folder, 'disks'),
    log: (level, text, facts) => notes.push(`${level} ${text} ${JSON.stringify(facts)}`),
  });
}

describe('the table', () => {
  const row = {
    name: 'a',
    kind: 'disk',
    readOnly: false,
    way: 'nbd',
    at: 'x',
    record: { id: 1 },
    attachedAt: 'x',
  } as const;
  const good = { format: 'dsec-attached-disks', version: 1, disks: [row] };

  test('gives what was written, and is empty before', async () => {
    const table = new DiskTable(folder);
    expect(await table.read()).toEqual([]);
    await Promise.all([table.write([]), table.write([row, { ...row, name: '/b', kind: 'file', address: 'tcp:x' }])]);
    expect((await table.read()).map(({ name, address }) => [name, address])).toEqual([
      ['a', undefined],
      ['/b', 'tcp:x'],
    ]);
    expect(readdirSync(folder)).toEqual(['table.json']);
  });

  test.each([
    '',
    '{',
    'null',
    '[]',
    '7',
    '{"format":"x"}',
    JSON.stringify({ ...good, version: 2 }),
    JSON.stringify({ ...good, disks: {} }),
    JSON.stringify({ ...good, disks: [null] }),
    JSON.stringify({ ...good, disks: [{ ...row, name: '' }] }),
    JSON.stringify({ ...good, disks: [{ ...row, kind: 'x' }] }),
    JSON.stringify({ ...good, disks: [{ ...row, way: 'x' }] }),
    JSON.stringify({ ...good, disks: [{ ...row, readOnly: 'no' }] }),
    JSON.stringify({ ...good, disks: [row, row] }),
    JSON.stringify({ ...good, disks: [{ ...row, record: [] }] }),
    JSON.stringify({ ...good, disks: [{ ...row, record: { a: {} } }] }),
    JSON.stringify({ ...good, disks: [{ ...row, at: undefined }] }),
  ])('is refused whole and left as it is: %s', async (text) => {
    mkdirSync(join(folder, 'state'));
    const path = join(folder, 'state/table.json');
    writeFileSync(path, text);
    await expect(start()).rejects.toMatchObject({ code: 'UBLKD_TABLE', message: expect.stringContaining(path) });
    expect(readFileSync(path, 'utf8')).toBe(text);
    // The locks are free.
    writeFileSync(path, JSON.stringify({ ...good, disks: [] }));
    await (await start()).close();
  });

  test('a disk that is gone keeps no other from being served', async () => {
    mkdirSync(join(folder, 'state'));
    await createNamedDisk('b', { sizeBytes: MIB }, join(folder, 'disks'));
    const rows = [
      { ...row, name: 'b', record: { address: `unix:${folder}/b.sock` } },
      { ...row, name: 'gone', record: { address: `unix:${folder}/gone.sock` } },
    ];
    writeFileSync(join(folder, 'state/table.json'), JSON.stringify({ ...good, disks: rows }));
    const daemon = await start();
    expect(daemon.list().map(({ name, state }) => [name, state])).toEqual([
      ['b', 'attached'],
      ['gone', 'failed'],
    ]);
    await daemon.close({ detach: true });
    expect(JSON.parse(readFileSync(join(folder, 'state/table.json'), 'utf8')).disks).toEqual([]);
    expect(existsSync(join(folder, 'b.sock'))).toBe(false);
  });
});

describe('the daemon', () => {
  test('a disk is resized while it is attached, never smaller', async () => {
    await createNamedDisk('a', { sizeBytes: MIB }, join(folder, 'disks'));
    const daemon = await start();
    await daemon.attach({ name: 'a', kind: 'disk', way: 'nbd' });
    const disk = daemon.attached('a');
    await disk.source.target.write(0, Buffer.alloc(512, 7));
    expect(await disk.resize(2 * MIB)).toEqual({ sizeBytes: 2 * MIB, told: false });
    expect(daemon.view('a').sizeBytes).toBe(2 * MIB);
    await disk.source.target.write(2 * MIB - 512, Buffer.alloc(512, 8));
    await expect(disk.resize(MIB)).rejects.toMatchObject({ code: 'UBLKD_SHRINK' });
    await expect(disk.resize(2 * MIB + 1)).rejects.toMatchObject({ code: 'DISK_SIZE' });
    await daemon.close();
    const next = await start();
    const again = next.attached('a').source.target;
    expect([(await again.read(0, 512))[0], (await again.read(2 * MIB - 512, 512))[0]]).toEqual([7, 8]);
    await next.close({ detach: true });
  });

  test('a raw file is one disk by whatever path, and has neither snapshots nor layers', async () => {
    const path = join(folder, 'a.raw');
    writeFileSync(path, '');
    truncateSync(path, MIB);
    const daemon = await start();
    const { disk } = await daemon.attach({ name: path, kind: 'file', way: 'nbd' });
    expect(await daemon.attach({ name: `${folder}/./a.raw`, kind: 'file' })).toEqual({ disk, created: false });
    expect(disk.at).toMatch(/^nbd\+unix:\/\/\/a\.raw\?socket=.*file-a\.raw-[0-9a-f]{12}\.nbd$/);
    const served = daemon.attached(path);
    await expect(served.snapshot('x')).rejects.toMatchObject({ code: 'UBLKD_RAW' });
    await expect(served.compact()).rejects.toMatchObject({ code: 'UBLKD_RAW' });
    await expect(served.packDiff({ output: join(folder, 'x') })).rejects.toMatchObject({ code: 'UBLKD_RAW' });
    // A name that leads to it is as good, also for taking it away; two at once are one.
    symlinkSync('a.raw', join(folder, 'link.raw'));
    const twice = await Promise.allSettled([daemon.detach(join(folder, 'link.raw')), daemon.detach(path)]);
    expect(twice).toMatchObject([
      { value: { name: path, state: 'detached' } },
      { reason: { code: 'UBLKD_NOT_ATTACHED' } },
    ]);
    await daemon.close({ detach: true });
    await expect(daemon.attach({ name: path, kind: 'file' })).rejects.toMatchObject({ code: 'UBLKD_ENDING' });
  });

  test('a sparse disk is not packed or exported while it is written in place', async () => {
    await createNamedDisk('s', { sizeBytes: MIB, mode: 'sparse' }, join(folder, 'disks'));
    const daemon = await start();
    await daemon.attach({ name: 's', kind: 'disk', way: 'nbd' });
    const output = join(folder, 'x');
    for (const refused of [
      daemon.attached('s').packDiff({ output }),
      daemon.attached('s').exportTo('raw', `${output}.raw`),
    ]) {
      await expect(refused).rejects.toMatchObject({ code: 'DISK_SPARSE_UNSUPPORTED' });
    }
    await daemon.detach('s');
    await daemon.attach({ name: 's', kind: 'disk', way: 'nbd', readOnly: true });
    expect((await daemon.attached('s').packDiff({ output })).segments).toBe(0);
    expect(await daemon.attached('s').exportTo('raw', `${output}.raw`)).toEqual({ sizeBytes: MIB });
    await daemon.close({ detach: true });
  });

  test('an export has what was written until it began, whatever is written meanwhile', async () => {
    await createNamedDisk('a', { sizeBytes: 8 * MIB }, join(folder, 'disks'));
    const daemon = await start();
    await daemon.attach({ name: 'a', kind: 'disk', way: 'nbd' });
    const disk = daemon.attached('a');
    const { target } = disk.source;
    for (let at = 0; at < 8; at++) await target.write(at * MIB, Buffer.alloc(MIB, at + 1));
    const exported = disk.exportTo('raw', join(folder, 'out.raw'));
    const packed = disk.packDiff({ output: join(folder, 'out.lsmt'), whole: true });
    for (let at = 0; at < 8; at++) await target.write(at * MIB, Buffer.alloc(MIB, 0x77));
    await disk.snapshot('meanwhile');
    await target.discard(0, 8 * MIB);
    await Promise.all([exported, packed]);
    const raw = readFileSync(join(folder, 'out.raw'));
    expect(Array.from({ length: 8 }, (_, at) => raw[at * MIB + 5])).toEqual([1, 2, 3, 4, 5, 6, 7, 8]);
    // And the compaction that was not allowed meanwhile is now.
    await disk.compact();
    await daemon.close({ detach: true });
  });

  test('while a layer is written, compaction and detaching are refused; it ends with its caller, and with the disk', async () => {
    await createNamedDisk('a', { sizeBytes: 8 * MIB }, join(folder, 'disks'));
    const daemon = await start();
    await daemon.attach({ name: 'a', kind: 'disk', way: 'nbd' });
    const disk = daemon.attached('a');
    await disk.source.target.write(0, Buffer.alloc(8 * MIB, 1));
    const output = join(folder, 'x');
    const caller = new AbortController();
    const gone = disk.packDiff({ output, signal: caller.signal });
    await expect(disk.packDiff({ output })).rejects.toMatchObject({ code: 'UBLKD_WORKING' });
    caller.abort(new Error('gone'));
    await expect(gone).rejects.toThrow('gone');
    const ended = disk.packDiff({ output });
    const outcome = expect(ended).rejects.toMatchObject({ code: 'UBLKD_NOT_ATTACHED' });
    await expect(disk.compact()).rejects.toMatchObject({ code: 'UBLKD_WORKING' });
    disk.stop();
    await outcome;
    expect(readdirSync(folder).filter((name) => name.startsWith('x'))).toEqual([]);
    disk.working.add('it is at work');
    await expect(daemon.detach('a')).rejects.toMatchObject({ code: 'UBLKD_WORKING' });
    expect(await daemon.detach('a', { force: true })).toEqual({ name: 'a', state: 'detached' });
    await daemon.close();
  });

  test('a disk that does not answer is let go all the same, and is in the list until it is', async () => {
    await createNamedDisk('a', { sizeBytes: MIB }, join(folder, 'disks'));
    const daemon = await start({ detachMs: 200 });
    await daemon.attach({ name: 'a', kind: 'disk', way: 'nbd' });
    const { target } = daemon.attached('a').source;
    let answer = () => {};
    const close = target.close.bind(target);
    target.close = () =>
      new Promise<void>((done) => {
        answer = done;
      }).then(close);
    expect(await daemon.detach('a')).toEqual({ name: 'a', state: 'detaching' });
    expect(daemon.view('a').state).toBe('detaching');
    expect(await daemon.detach('a')).toEqual({ name: 'a', state: 'detaching' });
    await expect(daemon.attach({ name: 'a', kind: 'disk' })).rejects.toMatchObject({ code: 'UBLKD_WORKING' });
    expect(() => daemon.attached('a')).toThrowError(/being detached/);
    expect(JSON.parse(readFileSync(join(folder, 'state/table.json'), 'utf8')).disks).toEqual([]);
    answer();
    await expect.poll(() => daemon.list(), { timeout: 60_000 }).toEqual([]);
    const { created } = await daemon.attach({ name: 'a', kind: 'disk', way: 'nbd' });
    expect(created).toBe(true);
    await daemon.close({ detach: true });
  });

  test('an attach that waits for a store that is away does not keep the daemon from ending', async () => {
    await createNamedDisk('a', { sizeBytes: MIB }, join(folder, 'disks'));
    const config = join(folder, 'disks/a/config.v1.json');
    const digest = `sha256:${'a'.repeat(64)}`;
    const lower = { digest, size: 4096, dsec: { store: 's3://away', chunkDigests: digest } };
    writeFileSync(config, JSON.stringify({ ...JSON.parse(readFileSync(config, 'utf8')), lowers: [lower] }));
    let giveUp = () => {};
    const openStoreLayer = () =>
      new Promise<never>((_, refuse) => {
        giveUp = () => refuse(new Error('away'));
      });
    const daemon = await start({ detachMs: 100, openStoreLayer });
    const attached = expect(daemon.attach({ name: 'a', kind: 'disk', way: 'nbd' })).rejects.toThrow('away');
    await expect.poll(() => giveUp.length === 0 && daemon.size).toBe(0);
    await daemon.close();
    giveUp();
    await attached;
  });

  test('a target that fails its last flush is said to, and is detached', async () => {
    await createNamedDisk('a', { sizeBytes: MIB }, join(folder, 'disks'));
    const daemon = await start();
    await daemon.attach({ name: 'a', kind: 'disk', way: 'nbd' });
    const { target } = daemon.attached('a').source;
    const close = target.close.bind(target);
    target.close = async () => {
      await close();
      throw new Error('no flush');
    };
    await expect(daemon.detach('a')).rejects.toThrow('no flush');
    expect(daemon.list()).toEqual([]);
    await daemon.close();
  });

  test('a disk that the kernel does not let go of stays open and in the table, and is detached when it is asked for again', async () => {
    await createNamedDisk('a', { sizeBytes: MIB }, join(folder, 'disks'));
    const daemon = await start();
    await daemon.attach({ name: 'a', kind: 'disk', way: 'nbd' });
    const { attachment, source } = daemon.attached('a');
    const detach = attachment.detach.bind(attachment);
    const late = fail('UBLK_TIMEOUT', { command: 'STOP_DEV', id: 3, seconds: 60 });
    attachment.detach = () => Promise.reject(late);
    await expect(daemon.detach('a')).rejects.toBe(late);
    await expect.poll(() => daemon.view('a')).toMatchObject({ state: 'failed', problem: late.message });
    expect(await source.target.read(0, 512)).toEqual(Buffer.alloc(512));
    await expect
      .poll(() => JSON.parse(readFileSync(join(folder, 'state/table.json'), 'utf8')).disks)
      .toMatchObject([{ name: 'a' }]);
    expect(notes.at(-1)).toContain('error not detached');
    attachment.detach = detach;
    expect(await daemon.detach('a')).toEqual({ name: 'a', state: 'detached' });
    expect(daemon.list()).toEqual([]);
    expect(JSON.parse(readFileSync(join(folder, 'state/table.json'), 'utf8')).disks).toEqual([]);
    await daemon.close();
  });
});

describe('an attachment that cannot be put on record', () => {
  const failsToAttach = async (daemon: DiskDaemon, change: (attachment: Attachment) => void = () => {}) => {
    const way = WAYS_OUT.nbd!;
    const attach = way.attach.bind(way);
    // In the way of the table: no file takes a folder's place.
    const table = join(folder, 'state/table.json');
    rmSync(table, { force: true });
    mkdirSync(table);
    const attached = vi.spyOn(way, 'attach').mockImplementationOnce(async (...args) => {
      const attachment = await attach(...args);
      change(attachment);
      return attachment;
    });
    try {
      await expect(daemon.attach({ name: 'a', kind: 'disk', way: 'nbd' })).rejects.toMatchObject({
        code: 'UBLKD_TABLE_WRITE',
      });
    } finally {
      attached.mockRestore();
      rmSync(table, { recursive: true });
    }
  };

  test('is undone', async () => {
    await createNamedDisk('a', { sizeBytes: MIB }, join(folder, 'disks'));
    const daemon = await start();
    await failsToAttach(daemon);
    expect(daemon.list()).toEqual([]);
    expect((await daemon.attach({ name: 'a', kind: 'disk', way: 'nbd' })).created).toBe(true);
    await daemon.close({ detach: true });
  });

  test('is kept where the kernel does not let go of it: open, in the list, and detached when that is asked for', async () => {
    await createNamedDisk('a', { sizeBytes: MIB }, join(folder, 'disks'));
    const daemon = await start();
    const late = fail('UBLK_TIMEOUT', { command: 'STOP_DEV', id: 3, seconds: 60 });
    let letGo!: () => void;
    await failsToAttach(daemon, (attachment) => {
      const detach = attachment.detach.bind(attachment);
      attachment.detach = () => Promise.reject(late);
      letGo = () => {
        attachment.detach = detach;
      };
    });
    expect(daemon.view('a')).toMatchObject({ state: 'failed', problem: late.message });
    letGo();
    expect(await daemon.detach('a')).toEqual({ name: 'a', state: 'detached' });
    expect(daemon.list()).toEqual([]);
    await daemon.close();
  });
});

describe('a counted target', () => {
  test('counts what is asked, what fails, and how long it takes', async () => {
    const inner = new MemoryTarget(MIB);
    const target = new CountedTarget(inner, false);
    await target.write(0, Buffer.alloc(4096, 1));
    expect((await target.read(0, 512))[0]).toBe(1);
    await target.flush();
    await target.discard(0, 512);
    await target.writeZeroes(0, 1024);
    await expect(target.read(1, 1)).rejects.toMatchObject({ code: 'EINVAL' });
    expect(target.counts.read).toMatchObject({ count: 2, bytes: 512, errors: 1 });
    expect(target.counts.write).toMatchObject({ count: 1, bytes: 4096, errors: 0 });
    expect([target.counts.flush.count, target.counts.discard.bytes, target.counts.writeZeroes.bytes]).toEqual([
      1, 512, 1024,
    ]);
    expect(target.counts.write.seconds).toBeGreaterThan(0);
    expect(target.lastError).toContain('whole 512-byte blocks');
  });

  test('read-only it refuses what changes, also of a file that could be written', async () => {
    const path = join(folder, 'a.raw');
    writeFileSync(path, '');
    truncateSync(path, MIB);
    const target = new CountedTarget(await openFileTarget(path), true);
    expect(target.readOnly).toBe(true);
    for (const refused of [target.write(0, Buffer.alloc(512)), target.discard(0, 512), target.writeZeroes(0, 512)]) {
      await expect(refused).rejects.toMatchObject({ code: 'EPERM' });
    }
    expect(() => immediateOf(target)!.writeNow(0, Buffer.alloc(512))).toThrowError(/read-only/);
    expect(immediateOf(target)!.readNow(Buffer.alloc(512), 0, 0, 512)).toBe(true);
    await target.close();
  });

  test('held, it answers nothing any more', async () => {
    const path = join(folder, 'a.raw');
    writeFileSync(path, '');
    truncateSync(path, MIB);
    const target = new CountedTarget(await openFileTarget(path), false);
    target.hold();
    let answered = false;
    const note = () => {
      answered = true;
    };
    target.read(0, 512).then(note, note);
    target.flush().then(note, note);
    expect(immediateOf(target)!.readNow(Buffer.alloc(512), 0, 0, 512)).toBe(false);
    expect(immediateOf(target)!.writeNow(0, Buffer.alloc(512))).toBe(false);
    await target.close();
    expect(answered).toBe(false);
  });
});
