/**
 * A process that is killed at any moment, or at the moments that matter most, loses nothing that had been answered, flushed or not, and
 * what it leaves opens. After a crash of the machine (another boot) each sector is as of the last answered flush.
 */
import { spawn } from 'node:child_process';
import { existsSync, mkdtempSync, readdirSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, beforeAll, expect, test } from 'vitest';
import { createDisk, openDisk } from '../disk-folder.ts';
import { plannedOperation } from './disk-crash-plan.ts';
import { DiskModel, operationsOf, SECTOR } from './disk-model.ts';

const SECTORS = 2048;
/** Without it nothing that was not flushed is kept. */
const KNOWS_ITS_BOOT = existsSync('/proc/sys/kernel/random/boot_id');
const ROOT = join(import.meta.dirname, '../..');

let root: string;
beforeAll(() => {
  root = mkdtempSync(join(tmpdir(), 'dsec-disk-crash-'));
});
afterAll(() => rmSync(root, { recursive: true, force: true }));

/** Runs until the process has died: at `failpoint`, or after it has begun `operations`. */
async function runAndKill(
  folder: string,
  seed: number,
  first: number,
  how: { failpoint?: string; operations?: number },
) {
  const child = spawn(
    process.execPath,
    [
      '--import',
      'tsx',
      join(import.meta.dirname, 'disk-crash.ts'),
      folder,
      String(seed),
      String(SECTORS),
      String(first),
    ],
    { cwd: ROOT, stdio: ['ignore', 'pipe', 'pipe'], env: { ...process.env, DSEC_FAILPOINT: how.failpoint ?? '' } },
  );
  let begun = first - 1;
  let flushed = first - 1;
  let rest = '';
  let errors = '';
  child.stderr.on('data', (chunk: Buffer) => {
    errors += chunk;
  });
  child.stdout.on('data', (chunk: Buffer) => {
    const lines = (rest + chunk).split('\n');
    rest = lines.pop()!;
    for (const line of lines) {
      const [kind, number] = line.split(' ');
      if (kind === 'b') begun = Number(number);
      else flushed = Number(number);
    }
    if (how.operations !== undefined && begun - first >= how.operations) child.kill('SIGKILL');
  });
  const signal = await new Promise((resolve) => child.once('close', (_, by) => resolve(by)));
  if (signal !== 'SIGKILL') throw new Error(`it ended by itself: ${errors}`);
  return { begun, flushed };
}

/** What each sector may hold, and that it does. @returns what it does hold */
async function check(
  folder: string,
  seed: number,
  before: Int32Array,
  first: number,
  { begun, flushed }: { begun: number; flushed: number },
) {
  const truth = Int32Array.from(before);
  // One after the other: whatever came before the last had been answered.
  const safe = KNOWS_ITS_BOOT ? begun - 1 : flushed;
  const maybe = new Map<number, number[]>();
  for (let operation = first; operation <= begun; operation++) {
    const { what, start, length } = plannedOperation(seed, operation, SECTORS);
    if (what !== 'write' && what !== 'discard') continue;
    for (let sector = start; sector < start + length; sector++) {
      const value = what === 'write' ? operation : 0;
      if (operation <= safe) truth[sector] = value;
      else maybe.set(sector, [...(maybe.get(sector) ?? []), value]);
    }
  }
  const { disk, lowers } = await openDisk(folder);
  const found = operationsOf(await disk.read(0, SECTORS * SECTOR), 0);
  for (let sector = 0; sector < SECTORS; sector++) {
    const value = found[sector]!;
    if (value === truth[sector] || maybe.get(sector)?.includes(value)) continue;
    throw new Error(
      `sector ${sector}: operation ${value}, flushed was ${truth[sector]} (${begun} begun, ${flushed} flushed)`,
    );
  }
  // Two files of the writable layer, the configuration, and the sealed ones: nothing else is left but what waits for a flush.
  const left = readdirSync(folder).filter((name) => !name.endsWith('.pending'));
  expect(left.length).toBe(3 + lowers.length);
  await disk.close();
  return found;
}

test.each([
  'disk-flush-data',
  'disk-flush-index',
  'disk-sealed',
  'disk-config-written',
  'disk-config-replaced',
  'disk-compact-written',
  'disk-compact-index',
])('killed at %s', { timeout: 300_000 }, async (failpoint) => {
  const folder = join(root, failpoint);
  await createDisk(folder, { sizeBytes: SECTORS * SECTOR });
  let found: Int32Array = new Int32Array(SECTORS);
  let first = 1;
  // Twice: what the first one left is what the second one works on.
  for (const seed of [3, 4]) {
    const died = await runAndKill(folder, seed, first, { failpoint });
    found = await check(folder, seed, found, first, died);
    first = died.begun + 1;
  }
});

test('killed at any moment', { timeout: 600_000 }, async () => {
  const folder = join(root, 'any');
  await createDisk(folder, { sizeBytes: SECTORS * SECTOR });
  let found: Int32Array = new Int32Array(SECTORS);
  let first = 1;
  for (let round = 0; round < 6; round++) {
    const died = await runAndKill(folder, 11 + round, first, { operations: 40 + round * 37 });
    found = await check(folder, 11 + round, found, first, died);
    first = died.begun + 1;
  }
});

test.skipIf(!KNOWS_ITS_BOOT)('what was not flushed counts in the boot that wrote it, and for its layer', async () => {
  const folder = join(root, 'boots');
  await createDisk(folder, { sizeBytes: SECTORS * SECTOR });
  const model = new DiskModel(SECTORS);
  const write = async (from: number, operation: number, flush: boolean) => {
    const { disk } = await openDisk(folder);
    await disk.write(from * SECTOR, model.write(from, 8, operation));
    if (flush) await disk.flush();
    await disk.abandon();
  };
  await write(0, 1, true);
  await write(8, 2, false);
  await write(16, 3, false);
  const pending = join(folder, readdirSync(folder).find((name) => name.endsWith('.pending'))!);
  const bytes = readFileSync(pending);
  expect(bytes.length).toBe(128 + 2 * 16);
  const opened = async () => {
    const { disk } = await openDisk(folder);
    const difference = await model.difference(disk);
    await disk.abandon();
    return difference;
  };
  expect(await opened()).toBeUndefined();
  // A torn end is none; what cannot be ends it.
  writeFileSync(pending, Buffer.concat([bytes, bytes.subarray(128, 137)]));
  expect(await opened()).toBeUndefined();
  writeFileSync(pending, Buffer.concat([bytes, Buffer.alloc(16), bytes.subarray(128)]));
  expect(await opened()).toBeUndefined();
  const other = Buffer.from(bytes);
  const bootId = bytes.indexOf('pending 1 ') + 'pending 1 '.length;
  other.write(bytes[bootId] === 0x30 ? '1' : '0', bootId);
  writeFileSync(pending, other);
  model.zero(8, 16);
  expect(await opened()).toBeUndefined();
  // Closed in good order there is nothing left to keep.
  const { disk } = await openDisk(folder);
  await disk.write(0, model.write(0, 8, 4));
  await disk.close();
  expect(existsSync(pending)).toBe(false);
  expect(await opened()).toBeUndefined();
});
