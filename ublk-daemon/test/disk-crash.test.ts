/**
 * A process that is killed at any moment, or at the moments that matter most, loses nothing that a flush had answered, and what it leaves
 * opens. Each sector must be as of the last answered flush, or as an operation that had begun after it.
 */
import { spawn } from 'node:child_process';
import { mkdtempSync, readdirSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, beforeAll, expect, test } from 'vitest';
import { createDisk, openDisk } from '../disk-folder.ts';
import { plannedOperation } from './disk-crash-plan.ts';
import { operationsOf, SECTOR } from './disk-model.ts';

const SECTORS = 2048;
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
  const maybe = new Map<number, number[]>();
  for (let operation = first; operation <= begun; operation++) {
    const { what, start, length } = plannedOperation(seed, operation, SECTORS);
    if (what !== 'write' && what !== 'discard') continue;
    for (let sector = start; sector < start + length; sector++) {
      const value = what === 'write' ? operation : 0;
      if (operation <= flushed) truth[sector] = value;
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
  // Two files of the writable layer, the configuration, and the sealed ones: nothing else is left.
  expect(readdirSync(folder).length).toBe(3 + lowers.length);
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
