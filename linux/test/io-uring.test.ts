/** io_uring driven from here, on plain files. */
import { randomBytes } from 'node:crypto';
import { closeSync, mkdtempSync, openSync, readdirSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, test } from 'vitest';
import { IoUring, RING_FLAG, RING_OPERATION, ringObstacle } from '../io-uring.ts';
import { addressOf, mapPages } from '../memory.ts';
import { readNow } from '../read-now.ts';

const obstacle = ringObstacle();
if (obstacle !== undefined) console.log(`skipped: ${obstacle}`);

let folder: string;
beforeAll(() => {
  folder = mkdtempSync(join(tmpdir(), 'dsec-ring-'));
});
afterAll(() => rmSync(folder, { recursive: true, force: true }));

/** Submits until so many completions have come. */
function complete(ring: IoUring, count: number): Map<number, number> {
  const results = new Map<number, number>();
  while (results.size < count) {
    ring.submit(1);
    ring.reap((userData, result) => results.set(userData, result));
  }
  return results;
}

describe.skipIf(obstacle !== undefined)('a ring', () => {
  test('operations of one batch, their results by user data', () => {
    const ring = new IoUring({ entries: 8 });
    for (let i = 0; i < 8; i++) ring.prepare(RING_OPERATION.NOP, -1, 100 + i);
    expect(ring.pending).toBe(8);
    expect(() => ring.prepare(RING_OPERATION.NOP, -1, 0)).toThrow('full');
    const results = complete(ring, 8);
    expect([...results.keys()].sort()).toEqual([100, 101, 102, 103, 104, 105, 106, 107]);
    expect(ring.pending).toBe(0);
    ring.close();
    ring.close();
  });

  test('reads, writes and syncs a file; far more operations than entries', () => {
    const path = join(folder, 'file');
    writeFileSync(path, '');
    const fd = openSync(path, 'r+');
    const ring = new IoUring({ entries: 4 });
    const pages = mapPages(64 * 4096);
    const data = randomBytes(64 * 4096);
    data.copy(pages.bytes);
    for (let i = 0; i < 64; i += 4) {
      for (let k = i; k < i + 4; k++) ring.prepareWrite(fd, pages.address + k * 4096, 4096, k * 4096, k);
      for (const result of complete(ring, 4).values()) expect(result).toBe(4096);
    }
    ring.prepareSync(fd, 1);
    expect(complete(ring, 1).get(1)).toBe(0);
    expect(readFileSync(path).equals(data)).toBe(true);
    const into = Buffer.allocUnsafeSlow(4096);
    ring.prepareRead(fd, addressOf(into), 4096, 5 * 4096, 7);
    expect(complete(ring, 1).get(7)).toBe(4096);
    expect(into.equals(data.subarray(5 * 4096, 6 * 4096))).toBe(true);
    ring.prepareRead(fd, addressOf(into), 4096, 2 ** 40, 8);
    expect(complete(ring, 1).get(8)).toBe(0);
    closeSync(fd);
    ring.prepareRead(9999, addressOf(into), 4096, 0, 9);
    expect(complete(ring, 1).get(9)).toBe(-9);
    ring.close();
    pages.unmap();
  });

  test('128-byte submissions, and deferred completions', () => {
    const ring = new IoUring({
      entries: 4,
      completions: 64,
      flags: RING_FLAG.SQE128 | RING_FLAG.SINGLE_ISSUER | RING_FLAG.DEFER_TASKRUN,
    });
    expect(ring.completionEntries).toBe(64);
    for (let round = 0; round < 10; round++) {
      for (let i = 0; i < 4; i++) ring.prepare(RING_OPERATION.NOP, -1, round * 4 + i);
      complete(ring, 4);
    }
    ring.close();
  });

  test('what a callback throws loses no completion', () => {
    const ring = new IoUring({ entries: 4 });
    for (let i = 0; i < 3; i++) ring.prepare(RING_OPERATION.NOP, -1, i);
    ring.submit(3);
    const seen: number[] = [];
    expect(() =>
      ring.reap((userData) => {
        seen.push(userData);
        throw new Error('once');
      }),
    ).toThrow('once');
    ring.reap((userData) => seen.push(userData));
    expect(seen).toEqual([0, 1, 2]);
    ring.close();
  });

  test('a ring whose mappings are given back is there until its descriptor is closed', () => {
    const before = readdirSync('/proc/self/fd').length;
    const ring = new IoUring({ entries: 4, flags: RING_FLAG.SINGLE_ISSUER | RING_FLAG.COOP_TASKRUN });
    complete(ring, 0);
    expect(readFileSync('/proc/self/maps', 'latin1')).toContain('[io_uring]');
    expect(ring.unmap()).toBe(ring.fd);
    expect(readFileSync('/proc/self/maps', 'latin1')).not.toContain('[io_uring]');
    // Nothing more.
    ring.close();
    expect(readdirSync('/proc/self/fd').length).toBe(before + 1);
    closeSync(ring.fd);
  });

  test('wrong flags are an error, and leave no descriptor', () => {
    const before = readdirSync('/proc/self/fd').length;
    expect(() => new IoUring({ entries: 4, flags: 1 << 30 })).toThrow(expect.objectContaining({ code: 'EINVAL' }));
    expect(() => new IoUring({ entries: 0 })).toThrow(expect.objectContaining({ code: 'EINVAL' }));
    for (let i = 0; i < 20; i++) new IoUring({ entries: 4 }).close();
    expect(readdirSync('/proc/self/fd').length).toBe(before);
  });
});

describe('memory', () => {
  test('an address is that of the bytes, of a part too', () => {
    const buffer = Buffer.allocUnsafeSlow(100);
    expect(addressOf(buffer.subarray(10)) - addressOf(buffer)).toBe(10);
    const pages = mapPages(8192);
    expect(pages.address % 4096).toBe(0);
    expect(addressOf(pages.bytes)).toBe(pages.address);
    expect(pages.bytes.every((byte) => byte === 0)).toBe(true);
    pages.unmap();
    pages.unmap();
  });

  test('a read that does not wait gives what is in memory, or tells that it cannot', () => {
    const path = join(folder, 'cached');
    const data = randomBytes(16384);
    writeFileSync(path, data);
    const fd = openSync(path, 'r');
    const into = Buffer.alloc(5000);
    const count = readNow(fd, into, 100, 4096, 4096);
    if (count !== undefined && count > 0) {
      expect(into.subarray(100, 100 + count).equals(data.subarray(4096, 4096 + count))).toBe(true);
    }
    expect(into.subarray(0, 100).every((byte) => byte === 0)).toBe(true);
    expect(() => readNow(fd, into, 1000, 4096, 0)).toThrow();
    closeSync(fd);
    expect(() => readNow(fd, into, 0, 10, 0)).toThrow(expect.objectContaining({ code: 'EBADF' }));
  });
});
