/** The daemon's ways out through FUSE: attached, used, left and taken over, swept. Clients are other processes: this one serves. */
import { existsSync, mkdtempSync, realpathSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, test } from 'vitest';
import { listLoops, readMountInfo } from '#linux';
import { fileWay, loopWay } from '../daemon/file-way.ts';
import type { WayOptions } from '../daemon/way-out.ts';
import { findHolders } from '../target/file/fuse-holder.ts';
import { MemoryTarget } from './memory-target.ts';
import { run } from './run-command.ts';

const MIB = 2 ** 20;
const MARK = 0x80000000 + (process.pid % 0x10000);
const isRoot = process.getuid?.() === 0;
if (!isRoot) console.log('skipped: mounting needs root');

describe.skipIf(!isRoot)('file and loop', { timeout: 300_000 }, () => {
  let folder: string;
  const options = (label: string, more: Partial<WayOptions> = {}): WayOptions => {
    return { name: label, label, readOnly: false, runDir: folder, mark: MARK, ...more };
  };
  const place = () => ({ runDir: folder, mark: MARK });
  const left = () => [
    ...readMountInfo().filter(({ mountPoint }) => mountPoint.startsWith(folder)),
    ...listLoops().filter(({ file }) => file.startsWith(folder)),
  ];

  beforeAll(() => {
    folder = realpathSync(mkdtempSync(join(tmpdir(), 'dsec-way-')));
  });
  afterAll(async () => {
    for (const way of [fileWay, loopWay]) await way.sweep?.([], place());
    rmSync(folder, { recursive: true, force: true });
  });

  test('a file: shown, used, detached', async () => {
    expect(await fileWay.available()).toBeUndefined();
    const target = new MemoryTarget(4 * MIB);
    target.bytes.fill(7);
    const attached = await fileWay.attach(target, options('a'));
    expect(attached.at).toBe(join(folder, 'a.img'));
    expect(await run('sh', '-c', `od -An -tu1 -N4 '${attached.at}'`)).toMatch(/7\s+7\s+7\s+7/);
    // Any bytes, not only whole blocks.
    await run('sh', '-c', `printf dsec | dd of='${attached.at}' bs=1 seek=1021 conv=notrunc status=none`);
    expect(target.bytes.toString('latin1', 1020, 1026)).toBe('\u0007dsec\u0007');
    // Opened to be overwritten it keeps its size, as a device does; it takes no other.
    await run('sh', '-c', `printf x > '${attached.at}'`);
    expect((await run('stat', '-c', '%s', attached.at)).trim()).toBe(String(4 * MIB));
    await expect(run('truncate', '-s', '100', attached.at)).rejects.toThrow();
    await expect(
      run('sh', '-c', `printf xx | dd of='${attached.at}' bs=1 seek=4194304 conv=notrunc`),
    ).rejects.toThrow();
    expect(await attached.usedBy()).toBeUndefined();
    await attached.detach(5000);
    await attached.detach(5000);
    expect(existsSync(attached.at)).toBe(false);
    expect(left()).toEqual([]);
  });

  test('a loop device: who uses it, left and taken over at the same place', async () => {
    const target = new MemoryTarget(16 * MIB);
    const first = await loopWay.attach(target, options('b'));
    expect(first.at).toMatch(/^\/dev\/loop\d+$/);
    await run('mkfs.ext4', '-q', first.at);
    const mounted = join(folder, 'mounted');
    await run('mkdir', mounted);
    await run('mount', first.at, mounted);
    expect(await first.usedBy()).toBe(`mounted at ${mounted}`);
    await run('sh', '-c', `echo kept > '${mounted}/file' && sync '${mounted}/file'`);
    expect(first.leave).toBeDefined();
    await first.leave!();
    const waiting = run('sh', '-c', `echo more > '${mounted}/more' && sync '${mounted}/more' && cat '${mounted}/file'`);
    const second = await loopWay.recover(JSON.parse(JSON.stringify(first.record)), target, options('b'));
    expect(second.at).toBe(first.at);
    expect(await waiting).toBe('kept\n');
    await run('umount', mounted);
    await run('e2fsck', '-fn', second.at);
    expect(await second.usedBy()).toBeUndefined();
    await second.detach(5000);
    expect(findHolders(join(folder, 'b.img'))).toEqual([]);
    expect(left()).toEqual([]);
  });

  test('what nobody names is swept; what is named stays', async () => {
    const kept = await loopWay.attach(new MemoryTarget(MIB), options('kept'));
    const lost = await loopWay.attach(new MemoryTarget(MIB), options('lost'));
    await lost.leave!();
    const removed = await loopWay.sweep!([kept.record], place());
    expect(removed).toEqual([join(folder, 'lost.img')]);
    expect(await fileWay.sweep!([], place())).toEqual([]);
    expect(findHolders(join(folder, 'lost.img'))).toEqual([]);
    await run('dd', `if=${kept.at}`, 'of=/dev/null', 'bs=64k', 'status=none');
    await kept.leave!();
    await loopWay.forget!(kept.record);
    expect(left()).toEqual([]);
  });

  test('in use, it ends all the same: its users get errors', async () => {
    const target = new MemoryTarget(MIB);
    const attached = await fileWay.attach(target, options('used'));
    const reader = run('sh', '-c', `exec 3<'${attached.at}'; echo; sleep 1000 & wait $!`).catch(() => 'ended');
    for (let used: string | undefined; used === undefined; ) used = await attached.usedBy();
    const pid = Number(/process (\d+)/.exec((await attached.usedBy())!)?.[1]);
    await attached.detach(100);
    expect(left()).toEqual([]);
    const children = (await run('pgrep', '-P', String(pid))).trim().split('\n').map(Number);
    for (const one of [pid, ...children]) process.kill(one, 'SIGKILL');
    await reader;
  });

  test('places that are none', async () => {
    const full = join(folder, 'full');
    writeFileSync(full, 'something');
    const target = new MemoryTarget(MIB);
    const at = (address: string) => fileWay.attach(target, options('c', { address }));
    await expect(at(full)).rejects.toMatchObject({ code: 'FILE_PATH' });
    await expect(at(folder)).rejects.toMatchObject({ code: 'FILE_PATH' });
    await expect(at(join(folder, 'none/c.img'))).rejects.toMatchObject({ code: 'FILE_PATH' });
    await expect(at('/dev/loop7')).rejects.toMatchObject({ code: 'UBLKD_ADDRESS' });
    const attached = await fileWay.attach(target, options('d'));
    await expect(at(attached.at)).rejects.toMatchObject({ code: 'FILE_TAKEN' });
    await attached.detach(5000);
    expect(left()).toEqual([]);
  });

  test('a read-only disk is a read-only file', async () => {
    const attached = await loopWay.attach(new MemoryTarget(MIB, { readOnly: true }), options('ro', { readOnly: true }));
    await expect(run('dd', 'if=/dev/zero', `of=${attached.at}`, 'bs=4k', 'count=1')).rejects.toThrow();
    await expect(run('sh', '-c', `printf x >> '${join(folder, 'ro.img')}'`)).rejects.toThrow();
    await attached.detach(5000);
    expect(left()).toEqual([]);
  });
});
