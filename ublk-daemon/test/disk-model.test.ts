/** Random operations on disks against a plain model: equal at every read, after every reopening, whatever was killed before. */
import { appendFileSync, mkdtempSync, readdirSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, test } from 'vitest';
import { createDisk, type OpenDisk, openDisk, type UpperMode } from '../disk-folder.ts';
import { commitLayer } from '../layer/commit.ts';
import { openStack } from '../layer/stack.ts';
import type { LayerPlace } from '../layer/store-layer.ts';
import { DiskModel, operationsOf, SECTOR } from './disk-model.ts';
import { randomNumbers } from './random-numbers.ts';

let root: string;
beforeAll(() => {
  root = mkdtempSync(join(tmpdir(), 'dsec-disk-model-'));
});
afterAll(() => rmSync(root, { recursive: true, force: true }));

const SECTORS = 4096;

interface Snapshot {
  readonly lowers: readonly LayerPlace[];
  readonly model: DiskModel;
}

/** One disk with what it should hold, and what of that has been flushed. */
class Subject {
  open!: OpenDisk;
  readonly folder: string;
  readonly model: DiskModel;
  /** What each sector may hold after a crash: operations since the last flush, besides what was flushed. */
  private readonly maybe = new Map<number, Set<number>>();
  private flushed: Uint32Array;

  constructor(folder: string, model: DiskModel) {
    this.folder = folder;
    this.model = model;
    this.flushed = Uint32Array.from(model.now);
  }

  async start(): Promise<void> {
    this.open = await openDisk(this.folder);
  }

  wrote(start: number, sectors: number, operation: number): void {
    for (let sector = start; sector < start + sectors; sector++) {
      const set = this.maybe.get(sector) ?? new Set();
      set.add(operation);
      this.maybe.set(sector, set);
    }
  }

  wasFlushed(): void {
    this.maybe.clear();
    this.flushed = Uint32Array.from(this.model.now);
  }

  /** Each sector is as flushed, or as an operation after that left it; whatever it is becomes the truth. */
  async adopt(): Promise<void> {
    const found = operationsOf(await this.open.disk.read(0, SECTORS * SECTOR), 0);
    for (let sector = 0; sector < SECTORS; sector++) {
      const operation = found[sector]!;
      if (operation === this.flushed[sector] || this.maybe.get(sector)?.has(operation)) continue;
      throw new Error(`sector ${sector}: operation ${operation}, flushed was ${this.flushed[sector]}`);
    }
    this.model.now = Uint32Array.from(found);
    this.wasFlushed();
  }
}

function runOperations(mode: UpperMode, count: number, seed: number): Promise<Record<string, number>> {
  const next = randomNumbers(seed);
  const pick = (below: number) => Math.floor(next() * below);
  const base = join(root, `${mode}-${seed}`);
  const done: Record<string, number> = {};
  const subjects: Subject[] = [];
  const snapshots: Snapshot[] = [];
  let disks = 0;
  let merged = 0;

  async function makeSubject(lowers: readonly LayerPlace[], model: DiskModel): Promise<Subject> {
    const folder = join(base, `disk-${disks++}`);
    await createDisk(folder, { sizeBytes: SECTORS * SECTOR, lowers, mode });
    const subject = new Subject(folder, model);
    await subject.start();
    return subject;
  }

  const range = (): [number, number] => {
    const length = next() < 0.05 ? 1 + pick(600) : 1 + pick(24);
    const start = pick(SECTORS - length);
    // As file systems do, mostly.
    return next() < 0.5 ? [start & ~7, (length + 7) & ~7] : [start, length];
  };

  async function step(operation: number): Promise<string> {
    const at = pick(subjects.length);
    const subject = subjects[at]!;
    const { disk } = subject.open;
    const dice = next();
    if (dice < 0.5) {
      const [start, length] = range();
      const sectors = Math.min(length, SECTORS - start);
      const bytes = subject.model.write(start, sectors, operation);
      subject.wrote(start, sectors, operation);
      const fua = next() < 0.02;
      if (fua || next() < 0.5 || !disk.writeNow(start * SECTOR, bytes))
        await disk.write(start * SECTOR, bytes, { fua });
      if (fua) subject.wasFlushed();
      return 'write';
    }
    if (dice < 0.55) {
      // Several at once, apart from each other.
      const part = SECTORS / 8;
      await Promise.all(
        Array.from({ length: 8 }, (_, n) => {
          const sectors = 1 + pick(200);
          const start = n * part + pick(part - sectors);
          subject.wrote(start, sectors, operation);
          return disk.write(start * SECTOR, subject.model.write(start, sectors, operation));
        }),
      );
      return 'write';
    }
    if (dice < 0.65) {
      const [start, length] = range();
      const sectors = Math.min(length, SECTORS - start);
      subject.model.zero(start, sectors);
      subject.wrote(start, sectors, 0);
      if (next() < 0.7) await disk.discard(start * SECTOR, sectors * SECTOR);
      else await disk.writeZeroes(start * SECTOR, sectors * SECTOR);
      return 'discard';
    }
    if (dice < 0.87) {
      const [start, length] = range();
      const sectors = Math.min(length, SECTORS - start);
      expect(await subject.model.difference(disk, start, sectors)).toBeUndefined();
      const now = Buffer.alloc(sectors * SECTOR + 10, 0xee);
      if (disk.readNow(now, 5, start * SECTOR, sectors * SECTOR)) {
        expect(now.subarray(5, -5).equals(subject.model.expected(start, sectors))).toBe(true);
        expect([now[4], now[now.length - 5]]).toEqual([0xee, 0xee]);
      }
      return 'read';
    }
    if (dice < 0.94) {
      await disk.flush();
      subject.wasFlushed();
      return 'flush';
    }
    if (dice < 0.955) {
      const { lowers } = await subject.open.snapshot();
      subject.wasFlushed();
      snapshots.push({ lowers, model: new DiskModel(subject.model.now) });
      if (lowers.length > 8) subjects[at] = await merge(subject, lowers);
      return 'snapshot';
    }
    if (dice < 0.96) {
      const from = snapshots[pick(snapshots.length)];
      if (from === undefined) return 'nothing';
      if (subjects.length > 2) await subjects.shift()!.open.disk.close();
      subjects.push(await makeSubject(from.lowers, new DiskModel(from.model.now)));
      return 'fork';
    }
    if (dice < 0.975) {
      const [start, length] = range();
      const sectors = Math.min(length, SECTORS - start);
      subject.wrote(start, sectors, operation);
      const bytes = subject.model.write(start, sectors, operation);
      await Promise.all([disk.compact(), disk.read(0, 100 * SECTOR), disk.write(start * SECTOR, bytes)]);
      expect(await subject.model.difference(disk)).toBeUndefined();
      return 'compact';
    }
    if (dice < 0.985) {
      await disk.close();
      await subject.start();
      subject.wasFlushed();
      expect(await subject.model.difference(subject.open.disk)).toBeUndefined();
      return 'reopen';
    }
    await disk.abandon();
    tear(subject.folder);
    await subject.start();
    await subject.adopt();
    return 'kill';
  }

  /** What a machine may leave of a write that nobody was told about. */
  function tear(folder: string): void {
    const newest = (ending: string) => {
      const number = (name: string) => Number(/\d+/.exec(name)![0]);
      return readdirSync(folder)
        .filter((name) => name.endsWith(ending))
        .sort((a, b) => number(a) - number(b))
        .at(-1);
    };
    const data = join(folder, newest('.data')!);
    const index = newest('.index');
    if (index === undefined) return;
    if (next() < 0.3) appendFileSync(data, Buffer.alloc(1 + pick(5000), 0xa5));
    if (next() < 0.3) appendFileSync(join(folder, index), Buffer.alloc(1 + pick(100)));
    if (next() < 0.2) appendFileSync(join(folder, index), Buffer.alloc(16 * pick(10), 0x11));
  }

  /** All layers become one: what a long chain needs. */
  async function merge(subject: Subject, lowers: readonly LayerPlace[]): Promise<Subject> {
    const stack = await openStack(lowers);
    const path = join(base, `merged-${merged++}.lsmt`);
    const zfile = next() < 0.5 ? ({ algorithm: next() < 0.5 ? 'lz4' : 'zstd' } as const) : undefined;
    await commitLayer(path, stack.index, stack.sources, { virtualSize: stack.virtualSize, zfile });
    await stack.close();
    await subject.open.disk.close();
    return makeSubject([path], subject.model);
  }

  return (async () => {
    subjects.push(await makeSubject([], new DiskModel(SECTORS)));
    for (let operation = 1; operation <= count; operation++) {
      const what = await step(operation).catch((error) => {
        throw new Error(`operation ${operation} of seed ${seed}: ${error.stack}`);
      });
      done[what] = (done[what] ?? 0) + 1;
    }
    for (const subject of subjects) {
      expect(await subject.model.difference(subject.open.disk)).toBeUndefined();
      await subject.open.disk.close();
    }
    // Snapshots are for good, whatever was written on top of them.
    for (const { lowers, model } of snapshots.slice(-20)) {
      const folder = join(base, `disk-${disks++}`);
      await createDisk(folder, { sizeBytes: SECTORS * SECTOR, lowers });
      const { disk } = await openDisk(folder);
      expect(await model.difference(disk)).toBeUndefined();
      await disk.close();
    }
    rmSync(base, { recursive: true });
    return done;
  })();
}

describe('random operations', () => {
  test('10,000 on log-structured disks', { timeout: 600_000 }, async () => {
    const done = await runOperations('log', 10_000, Number(process.env.DSEC_TEST_SEED ?? 1));
    for (const what of ['write', 'read', 'discard', 'flush', 'snapshot', 'fork', 'compact', 'reopen', 'kill']) {
      expect(done[what], what).toBeGreaterThan(10);
    }
  });

  test('2,000 on sparse disks', { timeout: 600_000 }, async () => {
    const done = await runOperations('sparse', 2_000, Number(process.env.DSEC_TEST_SEED ?? 2));
    expect(done.kill).toBeGreaterThan(1);
  });
});
