/**
 * ext4 on a disk as a loop device over a file: filled to the end, trimmed, its server killed in the middle of writing, a snapshot of it while it
 * is written, and no room below it. More kills: DSEC_KILL_ROUNDS=200.
 */
import { type ChildProcess, spawn, spawnSync } from 'node:child_process';
import { createHash, randomBytes, randomInt } from 'node:crypto';
import { once } from 'node:events';
import {
  closeSync,
  existsSync,
  fsyncSync,
  mkdirSync,
  mkdtempSync,
  openSync,
  readdirSync,
  readFileSync,
  rmSync,
  statSync,
  writeSync,
} from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { createInterface } from 'node:readline';
import { fileURLToPath } from 'node:url';
import { afterAll, afterEach, beforeAll, describe, expect, test } from 'vitest';
import { listLoops, readMountInfo, umount } from '#linux';
import { createDisk, openDisk, type UpperMode } from '../disk-folder.ts';
import { endHolders, findHolders } from '../target/file/fuse-holder.ts';
import { DiskFile } from './disk-file.ts';
import { run } from './run-command.ts';

const MIB = 2 ** 20;
const ROUNDS = Number(process.env.DSEC_KILL_ROUNDS ?? 12);
const WRITER = fileURLToPath(new URL('./synced-writer.mjs', import.meta.url));
process.env.PATH += ':/usr/sbin:/sbin';
const missing =
  process.getuid?.() !== 0
    ? 'mounting needs root'
    : ['mkfs.ext4', 'e2fsck', 'fstrim'].find((tool) => spawnSync('sh', ['-c', `command -v ${tool}`]).status !== 0);
if (missing !== undefined) console.log(`skipped: ${missing} is missing`);

let folder: string;
let mounted: string;
const disks = new Set<DiskFile>();

async function serve(disk: string, name = 'img', hold = false): Promise<DiskFile> {
  const served = await DiskFile.serve(disk, join(folder, name), hold);
  disks.add(served);
  return served;
}

async function stop(served: DiskFile, signal?: 'SIGKILL' | 'SIGUSR2'): Promise<void> {
  await served.end(signal);
  disks.delete(served);
}

/** The kernel replays the journal; what is there then has to be without fault. */
async function isClean(device: string): Promise<void> {
  await run('mount', device, mounted);
  await run('umount', mounted);
  await run('e2fsck', '-fn', device);
}

function allocated(disk: string): number {
  return readdirSync(disk).reduce((sum, name) => sum + statSync(join(disk, name)).blocks * 512, 0);
}

function sha256(path: string): string {
  return createHash('sha256').update(readFileSync(path)).digest('hex');
}

/** What a writer says is safe, by name. */
class Writer {
  readonly synced = new Map<string, string>();
  readonly #child: ChildProcess;
  readonly #ended: Promise<unknown>;
  #last = '';
  #onLine: () => void = () => {};

  constructor(place: string, prefix: string) {
    this.#child = spawn(process.execPath, [WRITER, place, prefix], { stdio: ['pipe', 'pipe', 'inherit'] });
    createInterface({ input: this.#child.stdout! }).on('line', (line) => {
      const [name, hash] = line.split(' ') as [string, string | undefined];
      this.#last = line;
      if (hash?.length === 64) this.synced.set(name, hash);
      this.#onLine();
    });
    this.#ended = once(this.#child, 'close');
  }

  /** Until so many are safe, or it has ended. */
  async wrote(count: number): Promise<void> {
    while (this.synced.size < count && this.#child.exitCode === null) {
      await Promise.race([
        this.#ended,
        new Promise<void>((done) => {
          this.#onLine = done;
        }),
      ]);
    }
  }

  /** What it says last: `stopped`, or `failed` with a code. */
  async end(stop: boolean): Promise<string> {
    if (stop) this.#child.stdin!.end();
    await this.#ended;
    return this.#last;
  }
}

describe.skipIf(missing !== undefined)('ext4 on a loop device over a disk as a file', { timeout: 600_000 }, () => {
  beforeAll(() => {
    folder = mkdtempSync(join(tmpdir(), 'dsec-ext4-'));
    mounted = join(folder, 'mounted');
    mkdirSync(mounted);
  });
  afterEach(async () => {
    for (const served of disks) await stop(served, 'SIGKILL');
    await endHolders(join(folder, 'held.img'));
    spawnSync('umount', ['-q', mounted]);
    for (const { path, file } of listLoops()) if (file.startsWith(folder)) spawnSync('losetup', ['-d', path]);
    for (const { mountPoint } of readMountInfo().reverse()) {
      if (mountPoint.startsWith(`${folder}/`)) umount(mountPoint, { lazy: true });
    }
  });
  afterAll(() => {
    expect(readMountInfo().filter(({ mountPoint }) => mountPoint.startsWith(folder))).toEqual([]);
    expect(listLoops().filter(({ file }) => file.startsWith(folder))).toEqual([]);
    rmSync(folder, { recursive: true, force: true });
  });

  test.each<UpperMode>(['log', 'sparse'])('is filled, read again, trimmed (%s)', async (mode) => {
    const disk = join(folder, `filled-${mode}`);
    await createDisk(disk, { sizeBytes: 96 * MIB, mode });
    const served = await serve(disk);
    await run('mkfs.ext4', '-q', served.loop);
    await run('mount', served.loop, mounted);
    const hashes = fill(mounted, 4 * MIB);
    expect(hashes.size).toBeGreaterThan(15);
    await run('sync', '-f', mounted);
    await run('sh', '-c', 'echo 3 > /proc/sys/vm/drop_caches');
    for (const [name, hash] of hashes) expect(sha256(join(mounted, name))).toBe(hash);
    const full = allocated(disk);
    expect(full).toBeGreaterThan(60 * MIB);
    for (const name of hashes.keys()) rmSync(join(mounted, name));
    await run('sync', '-f', mounted);
    await run('fstrim', mounted);
    if (mode === 'log') await served.ask('compact');
    expect(allocated(disk)).toBeLessThan(full - 50 * MIB);
    await run('umount', mounted);
    await run('e2fsck', '-fn', served.loop);
    await stop(served);
    expect(existsSync(served.path)).toBe(false);
  });

  test(
    `keeps every synced file while its server is killed ${ROUNDS} times`,
    async () => {
      const disk = join(folder, 'killed');
      await createDisk(disk, { sizeBytes: 256 * MIB });
      const synced = new Map<string, string>();
      let served = await serve(disk);
      await run('mkfs.ext4', '-q', served.loop);
      for (let round = 0; round < ROUNDS; round++) {
        await run('mount', served.loop, mounted);
        // Room for all rounds: what was checked goes.
        for (const [name, hash] of synced) {
          expect(sha256(join(mounted, name)), `${name} in round ${round}`).toBe(hash);
          rmSync(join(mounted, name));
        }
        synced.clear();
        const writer = new Writer(mounted, `round-${round}`);
        await writer.wrote(randomInt(1, 24));
        await new Promise((done) => setTimeout(done, randomInt(0, 20)));
        await stop(served, 'SIGKILL');
        expect(await writer.end(false)).toMatch(/^failed /);
        for (const [name, hash] of writer.synced) synced.set(name, hash);
        await run('umount', mounted);
        served = await serve(disk);
        await isClean(served.loop);
      }
      await run('mount', served.loop, mounted);
      for (const [name, hash] of synced) expect(sha256(join(mounted, name))).toBe(hash);
      await run('umount', mounted);
      await stop(served);
    },
    120_000 + ROUNDS * 90_000,
  );

  test('goes on, without an error, while its servers are killed and replaced', async () => {
    const disk = join(folder, 'held');
    await createDisk(disk, { sizeBytes: 192 * MIB });
    let served = await serve(disk, 'held.img', true);
    const { loop, path } = served;
    await run('mkfs.ext4', '-q', loop);
    await run('mount', loop, mounted);
    const writer = new Writer(mounted, 'held');
    for (let round = 0; round < 6; round++) {
      await writer.wrote(writer.synced.size + randomInt(1, 12));
      await stop(served, round % 3 === 2 ? 'SIGUSR2' : 'SIGKILL');
      // Somebody asks while nobody serves.
      await new Promise((done) => setTimeout(done, randomInt(0, 200)));
      served = await serve(disk, 'held.img', true);
      expect(served).toMatchObject({ loop, path });
    }
    await writer.wrote(writer.synced.size + 3);
    expect(await writer.end(true)).toBe('stopped');
    await run('sh', '-c', 'echo 3 > /proc/sys/vm/drop_caches');
    for (const [name, hash] of writer.synced) expect(sha256(join(mounted, name))).toBe(hash);
    await run('umount', mounted);
    await run('e2fsck', '-fn', loop);
    await stop(served);
    expect(findHolders(path)).toEqual([]);
    expect(existsSync(path)).toBe(false);
  });

  test('is copied by a snapshot while it is written', async () => {
    const disk = join(folder, 'live');
    await createDisk(disk, { sizeBytes: 128 * MIB });
    const served = await serve(disk);
    await run('mkfs.ext4', '-q', served.loop);
    await run('mount', served.loop, mounted);
    const writer = new Writer(mounted, 'live');
    const points: { lowers: string[]; before: Map<string, string> }[] = [];
    for (const wanted of [5, 15, 30]) {
      await writer.wrote(wanted);
      const before = new Map(writer.synced);
      points.push({ lowers: (await served.ask(`snapshot s${wanted}`)).lowers as string[], before });
    }
    await writer.wrote(40);
    expect(await writer.end(true)).toBe('stopped');
    for (const [name, hash] of writer.synced) expect(sha256(join(mounted, name))).toBe(hash);
    await run('umount', mounted);
    await run('e2fsck', '-fn', served.loop);
    await stop(served);
    for (const [number, { lowers, before }] of points.entries()) {
      const copy = join(folder, `copy-${number}`);
      await createDisk(copy, { sizeBytes: 128 * MIB, lowers });
      const copied = await serve(copy, `copy-${number}.img`);
      await isClean(copied.loop);
      await run('mount', copied.loop, mounted);
      for (const [name, hash] of before) expect(sha256(join(mounted, name))).toBe(hash);
      await run('umount', mounted);
      await stop(copied);
    }
  });

  test('has no room below: writes fail, reads go on; with room it goes on', async () => {
    const small = join(folder, 'small');
    mkdirSync(small);
    await run('mount', '-t', 'tmpfs', '-o', 'size=40m', 'dsec-test', small);
    const disk = join(small, 'disk');
    await createDisk(disk, { sizeBytes: 128 * MIB });
    let served = await serve(disk);
    await run('mkfs.ext4', '-q', served.loop);
    await run('mount', served.loop, mounted);
    const synced = fill(mounted, MIB, true);
    expect(synced.size).toBeGreaterThan(10);
    expect(synced.size).toBeLessThan(40);
    await run('sh', '-c', 'echo 3 > /proc/sys/vm/drop_caches');
    for (const [name, hash] of synced) expect(sha256(join(mounted, name))).toBe(hash);
    await run('mount', '-o', 'remount,size=200m', small);
    // A file system that could not write its journal takes no more until it is mounted again; its own choice, not the disk's.
    await run('umount', mounted);
    await isClean(served.loop);
    await run('mount', served.loop, mounted);
    for (const [name, hash] of synced) expect(sha256(join(mounted, name))).toBe(hash);
    for (const [name, hash] of fill(mounted, MIB, true, 30)) synced.set(name, hash);
    await run('umount', mounted);
    await stop(served);
    served = await serve(disk);
    await run('e2fsck', '-fn', served.loop);
    await run('mount', served.loop, mounted);
    for (const [name, hash] of synced) expect(sha256(join(mounted, name))).toBe(hash);
    await run('umount', mounted);
    await stop(served);
    const opened = await openDisk(disk);
    await opened.disk.close();
    umount(small);
  });
});

/** Files of so many bytes until there is no room; with `sync` each is on the disk before the next, and only those are told. */
function fill(place: string, sizeBytes: number, sync = false, most = 1000): Map<string, string> {
  const hashes = new Map<string, string>();
  const first = readdirSync(place).length;
  for (let count = 0; count < most; count++) {
    const name = `fill-${first + count}`;
    const bytes = randomBytes(sizeBytes);
    let file: number | undefined;
    try {
      file = openSync(join(place, name), 'w');
      for (let done = 0; done < sizeBytes; ) done += writeSync(file, bytes, done);
      if (sync) fsyncSync(file);
      hashes.set(name, createHash('sha256').update(bytes).digest('hex'));
    } catch (error) {
      expect(['ENOSPC', 'EIO', 'EROFS']).toContain((error as NodeJS.ErrnoException).code);
      break;
    } finally {
      if (file !== undefined) closeSync(file);
    }
  }
  return hashes;
}
