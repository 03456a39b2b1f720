/** A raw file over ublk, whose bytes go straight between the caller and the file's pages where they can: the same as a plain file, whatever holds it. */
import { execFileSync } from 'node:child_process';
import { randomBytes } from 'node:crypto';
import {
  constants,
  mkdirSync,
  mkdtempSync,
  readFileSync,
  rmSync,
  statSync,
  truncateSync,
  writeFileSync,
} from 'node:fs';
import { type FileHandle, open } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, test } from 'vitest';
import { openFileTarget } from '../target/file-target.ts';
import { listUblk, serveUblk } from '../target/ublk/device.ts';
import { FEATURE } from '../target/ublk/features.ts';
import { aligned, O_DIRECT } from './aligned-buffer.ts';
import { randomNumbers } from './random-numbers.ts';
import { run } from './run-command.ts';

const MIB = 2 ** 20;
const OPERATIONS = process.env.CI ? 100 : 300;
let folder: string;

beforeAll(() => {
  folder = mkdtempSync(join(tmpdir(), 'dsec-lab-'));
  execFileSync('modprobe', ['ublk_drv']);
});
afterAll(() => rmSync(folder, { recursive: true, force: true }));

function sparseFile(place: string, sizeBytes: number): string {
  const path = join(place, 'disk.raw');
  writeFileSync(path, '');
  truncateSync(path, sizeBytes);
  return path;
}

async function withDevice(file: string, work: (handle: FileHandle, path: string, id: number) => Promise<void>) {
  const target = await openFileTarget(file);
  const device = await serveUblk({ target });
  const handle = await open(device.path, constants.O_RDWR | O_DIRECT);
  try {
    await work(handle, device.path, device.id);
  } finally {
    await handle.close();
    await device.stop();
    await target.close();
  }
}

async function put(handle: FileHandle, offset: number, data: Buffer): Promise<void> {
  const bytes = aligned(data.length);
  data.copy(bytes);
  expect((await handle.write(bytes, 0, bytes.length, offset)).bytesWritten).toBe(data.length);
}

async function get(handle: FileHandle, offset: number, length: number): Promise<Buffer> {
  const bytes = aligned(length);
  expect((await handle.read(bytes, 0, length, offset)).bytesRead).toBe(length);
  return bytes;
}

async function withTmpfs(sizeMiB: number, work: (place: string) => Promise<void>): Promise<void> {
  const place = mkdtempSync(join(folder, 'tmpfs-'));
  await run('mount', '-t', 'tmpfs', '-o', `size=${sizeMiB}m`, 'tmpfs', place);
  try {
    await work(place);
  } finally {
    await run('umount', place);
  }
}

async function agrees(place: string): Promise<void> {
  const file = sparseFile(place, 8 * MIB);
  const plain = Buffer.alloc(8 * MIB);
  const number = randomNumbers(7);
  const below = (limit: number) => Math.floor(number() * limit);
  await withDevice(file, async (handle, path) => {
    for (let i = 0; i < OPERATIONS; i++) {
      const sectors = below(8) === 0 ? 1 + below(2048) : 1 + below(16);
      const offset = below(8 * 2048 - sectors) * 512;
      const length = sectors * 512;
      const what = below(20);
      if (what < 10) {
        const data = randomBytes(length);
        await put(handle, offset, data);
        data.copy(plain, offset);
      } else if (what < 19) {
        expect((await get(handle, offset, length)).equals(plain.subarray(offset, offset + length))).toBe(true);
      } else {
        const start = Math.ceil(offset / 4096) * 4096;
        await run('blkdiscard', ...(below(2) === 0 ? ['-z'] : []), '-o', `${start}`, '-l', '131072', path).catch(
          // Beyond the end.
          () => expect(start + 131072).toBeGreaterThan(8 * MIB),
        );
        if (start + 131072 <= 8 * MIB) plain.fill(0, start, start + 131072);
      }
    }
    for (let at = 0; at < 8 * MIB; at += MIB) {
      expect((await get(handle, at, MIB)).equals(plain.subarray(at, at + MIB))).toBe(true);
    }
    await handle.datasync();
  });
  expect(readFileSync(file).equals(plain)).toBe(true);
}

describe('agrees with a plain file', () => {
  test('on tmpfs', () => withTmpfs(64, agrees));
  test('on ext4', async () => {
    const place = join(folder, 'ext4');
    mkdirSync(place);
    await agrees(place);
  });
});

test('its bytes are copied by the server, once', async () => {
  const place = mkdtempSync(join(folder, 'flags-'));
  await withDevice(sparseFile(place, MIB), async (_handle, _path, id) => {
    const device = (await listUblk()).find((one) => one.id === id);
    expect(device!.flags & FEATURE.USER_COPY).toBe(FEATURE.USER_COPY);
  });
});

test('reading a hole makes no pages of it', () =>
  withTmpfs(64, async (place) => {
    const file = sparseFile(place, 16 * MIB);
    await withDevice(file, async (handle) => {
      await put(handle, 4096, randomBytes(4096));
      for (let at = 0; at < 16 * MIB; at += MIB) await get(handle, at, MIB);
      for (let at = 0; at < MIB; at += 4096) await get(handle, at, 4096);
      expect(statSync(file).blocks * 512).toBeLessThan(64 * 1024);
    });
  }));

test('a full tmpfs refuses writes, reads go on, and writes again when there is room', () =>
  withTmpfs(2, async (place) => {
    const filler = join(place, 'filler');
    writeFileSync(filler, Buffer.alloc(MIB));
    const file = sparseFile(place, 8 * MIB);
    await withDevice(file, async (handle) => {
      const data = randomBytes(512 * 1024);
      await put(handle, 0, data);
      await expect(put(handle, MIB, randomBytes(MIB))).rejects.toMatchObject({ code: 'ENOSPC' });
      await expect(put(handle, 4 * MIB, randomBytes(MIB))).rejects.toMatchObject({ code: 'ENOSPC' });
      expect((await get(handle, 0, data.length)).equals(data)).toBe(true);
      rmSync(filler);
      await put(handle, 6 * MIB, data);
      expect((await get(handle, 6 * MIB, data.length)).equals(data)).toBe(true);
    });
  }));

test('a file that was cut behind its back answers errors, and the server goes on', () =>
  withTmpfs(64, async (place) => {
    const file = sparseFile(place, 4 * MIB);
    await withDevice(file, async (handle) => {
      const data = randomBytes(MIB);
      await put(handle, 0, data);
      await put(handle, 2 * MIB, data);
      await get(handle, 2 * MIB, MIB);
      truncateSync(file, MIB);
      await expect(get(handle, 2 * MIB, 4096)).rejects.toMatchObject({ code: 'EIO' });
      expect((await get(handle, 0, MIB)).equals(data)).toBe(true);
    });
  }));
