/**
 * What every way out (NBD, ublk, a file) owes its clients, whatever it serves. A way out shows how a client attaches; the suite
 * looks at the disk from the client's side, and at the target from the inside.
 */
import { randomBytes } from 'node:crypto';
import { afterEach, describe, expect, test } from 'vitest';
import type { BlockTarget } from '../target/block-target.ts';
import { TargetError } from '../target/target-error.ts';
import { ImmediateMemoryTarget, MemoryTarget } from './memory-target.ts';

/** A disk as a client has it. Errors carry `errno`. */
export interface Attached {
  readonly sizeBytes: number;
  /** The smallest that the way out passes on: whole blocks of it may be asked for. */
  readonly blockSize: number;
  read(offset: number, length: number): Promise<Buffer>;
  write(offset: number, data: Buffer, options?: { fua?: boolean }): Promise<void>;
  flush(): Promise<void>;
  discard(offset: number, length: number): Promise<void>;
  writeZeroes(offset: number, length: number): Promise<void>;
  /** Goes away in good order. */
  detach(): Promise<void>;
}

export interface WayOut {
  readonly name: string;
  /** Serves the target until the end of the test, and attaches a client; called again, another client of the same disk. */
  attach(target: BlockTarget): Promise<Attached>;
  /** Ends every server of this test. */
  stop(): Promise<void>;
  /** What the way out does not pass on as it is: the kernel's block layer merges, splits and retries. */
  readonly exact: boolean;
}

const MIB = 2 ** 20;
const SIZE = 8 * MIB;

export function targetConformance(wayOut: WayOut): void {
  afterEach(() => wayOut.stop());

  describe.each([
    ['a target that answers later', MemoryTarget],
    ['a target that answers at once', ImmediateMemoryTarget],
  ] as const)(`${wayOut.name}, %s`, (_, Target) => {
    test('shows size and block size', async () => {
      for (const blockSize of [512, 4096] as const) {
        const disk = await wayOut.attach(new Target(SIZE, { blockSize }));
        expect(disk.sizeBytes).toBe(SIZE);
        expect(disk.blockSize).toBe(blockSize);
        await disk.detach();
      }
    });

    test('what was never written reads as zeros', async () => {
      const disk = await wayOut.attach(new Target(SIZE));
      expect(await disk.read(0, 4096)).toEqual(Buffer.alloc(4096));
      expect(await disk.read(SIZE - 4096, 4096)).toEqual(Buffer.alloc(4096));
      await disk.detach();
    });

    test('first and last block, and everything at once', async () => {
      const target = new Target(SIZE);
      const disk = await wayOut.attach(target);
      const first = randomBytes(disk.blockSize);
      const last = randomBytes(disk.blockSize);
      await disk.write(0, first);
      await disk.write(SIZE - last.length, last);
      await disk.flush();
      expect(target.bytes.subarray(0, first.length).equals(first)).toBe(true);
      expect(target.bytes.subarray(SIZE - last.length).equals(last)).toBe(true);
      const whole = randomBytes(SIZE);
      await disk.write(0, whole);
      expect((await disk.read(0, SIZE)).equals(whole)).toBe(true);
      await disk.flush();
      expect(target.bytes.equals(whole)).toBe(true);
      await disk.detach();
    });

    test('random writes, zeros, discards and reads agree with a plain buffer', async () => {
      const target = new Target(SIZE);
      const disk = await wayOut.attach(target);
      const model = Buffer.alloc(SIZE);
      let seed = 7;
      const random = (below: number) => {
        seed = (Math.imul(seed, 1103515245) + 12345) & 0x7fffffff;
        return seed % below;
      };
      for (let i = 0; i < 300; i++) {
        const unit = 4096;
        const length = unit * (1 + random(i % 10 === 0 ? 64 : 4));
        const offset = unit * random((SIZE - length) / unit);
        switch (random(5)) {
          case 0:
          case 1: {
            const data = Buffer.alloc(length, 1 + random(255));
            await disk.write(offset, data, { fua: random(8) === 0 });
            data.copy(model, offset);
            break;
          }
          case 2:
            await disk.writeZeroes(offset, length);
            model.fill(0, offset, offset + length);
            break;
          case 3:
            await disk.discard(offset, length);
            model.fill(0, offset, offset + length);
            break;
          default:
            expect((await disk.read(offset, length)).equals(model.subarray(offset, offset + length))).toBe(true);
        }
      }
      await disk.flush();
      expect(target.bytes.equals(model)).toBe(true);
      expect((await disk.read(0, SIZE)).equals(model)).toBe(true);
      await disk.detach();
    });

    test('a flush reaches the target after every write that was answered before', async () => {
      const target = new Target(SIZE);
      const disk = await wayOut.attach(target);
      await Promise.all([0, 1, 2, 3].map((i) => disk.write(i * 4096, randomBytes(4096))));
      const before = target.calls.length;
      await disk.flush();
      expect(target.calls.slice(0, before).filter(({ name }) => name === 'write').length).toBeGreaterThan(0);
      expect(target.calls.slice(before).some(({ name }) => name === 'flush')).toBe(true);
      await disk.detach();
    });

    test('FUA reaches the target, as a write with fua or as a flush behind it', async () => {
      const target = new Target(SIZE);
      const disk = await wayOut.attach(target);
      await disk.write(4096, randomBytes(4096), { fua: true });
      const write = target.calls.findIndex(({ name }) => name === 'write');
      expect(write).toBeGreaterThanOrEqual(0);
      expect(target.calls.slice(write).some(({ name, fua }) => name === 'flush' || fua === true)).toBe(true);
      await disk.detach();
    });

    test('errors of the target reach the client that asked, and nobody else', async () => {
      const target = new Target(SIZE);
      const disk = await wayOut.attach(target);
      target.before = ({ name, offset }) => {
        if (name === 'write' && offset === 65536) throw Object.assign(new Error('full'), { code: 'ENOSPC' });
        if (name === 'read' && offset === 131072) throw Object.assign(new Error('broken'), { code: 'EIO' });
      };
      await expect(disk.write(65536, randomBytes(4096))).rejects.toMatchObject({ errno: 28 });
      await expect(disk.read(131072, 4096)).rejects.toMatchObject({ errno: 5 });
      await disk.write(0, Buffer.alloc(4096, 9));
      expect((await disk.read(0, 4096)).equals(Buffer.alloc(4096, 9))).toBe(true);
      await disk.detach();
    });

    test('a read-only target takes no write', async () => {
      const target = new Target(SIZE, { readOnly: true });
      const disk = await wayOut.attach(target);
      await expect(disk.write(0, randomBytes(4096))).rejects.toBeDefined();
      await expect(disk.discard(0, 4096)).rejects.toBeDefined();
      expect(target.calls.some(({ name }) => name === 'write' || name === 'discard')).toBe(false);
      expect((await disk.read(0, 4096)).equals(Buffer.alloc(4096))).toBe(true);
      await disk.detach();
    });

    test('many requests at once', async () => {
      const target = new Target(SIZE);
      const disk = await wayOut.attach(target);
      const blocks = Array.from({ length: 256 }, () => randomBytes(4096));
      await Promise.all(blocks.map((block, i) => disk.write(i * 8192, block)));
      const read = await Promise.all(blocks.map((_, i) => disk.read(i * 8192, 4096)));
      expect(read.every((block, i) => block.equals(blocks[i]!))).toBe(true);
      await disk.detach();
    });
  });

  describe(wayOut.name, () => {
    test('a request that waits holds up no other', async () => {
      const target = new MemoryTarget(SIZE);
      const disk = await wayOut.attach(target);
      let release: () => void = () => {};
      const held = new Promise<void>((done) => {
        release = done;
      });
      target.before = ({ name, offset }) => (name === 'read' && offset === MIB ? held : undefined);
      const slow = disk.read(MIB, 4096);
      await disk.write(0, Buffer.alloc(4096, 3));
      expect((await disk.read(0, 4096)).equals(Buffer.alloc(4096, 3))).toBe(true);
      release();
      expect((await slow).equals(Buffer.alloc(4096))).toBe(true);
      await disk.detach();
    });

    test('a target that is being closed answers as a device that is gone', async () => {
      const target = new MemoryTarget(SIZE);
      const disk = await wayOut.attach(target);
      target.before = () => {
        throw new TargetError('TARGET_CLOSED');
      };
      await expect(disk.read(0, 4096)).rejects.toBeDefined();
      target.before = () => {};
      await disk.detach();
    });
  });
}
