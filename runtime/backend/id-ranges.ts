/**
 * Which ids a sandbox's users have outside. Each has 65,536 of its own, from its base on; what files of images have above those is shared by all
 * sandboxes, and is nobody's on this machine. Ids beyond 2^30 have no place: such files show as owned by nobody (65534).
 *
 * The ids are above those that systemd, useradd and other container engines give out. A range is taken by a link in the state folder,
 * made in one step, that names its sandbox, and is noted in the sandbox's record; both go when nothing of it runs any more. On disk nothing has these
 * ids: the upper is written through a mount that shifts them back.
 */
import { randomInt } from 'node:crypto';
import { mkdirSync, readdirSync, readlinkSync, rmSync, symlinkSync } from 'node:fs';
import { join } from 'node:path';
import { systemCode } from '#base';
import { fail } from '../errors.ts';

export interface IdExtent {
  readonly inside: number;
  readonly outside: number;
  readonly count: number;
}

const RANGE = 0x1_0000;
const FIRST = 0x8000_0000;
const SHARED = 0xc000_0000;
/** Of no sandbox: to try what this machine can. */
export const PROBE_BASE = SHARED - RANGE;
const RANGES = (PROBE_BASE - FIRST) / RANGE;

/** Of users and of groups. */
export function idExtents(base: number): IdExtent[] {
  return [
    { inside: 0, outside: base, count: RANGE },
    { inside: RANGE, outside: SHARED + RANGE, count: 0x4000_0000 - 2 * RANGE },
  ];
}

function rangesFolder(stateDir: string): string {
  return join(stateDir, 'ids');
}

/** A free range for a sandbox, by its name. Its record has to name it next. @throws RUNTIME_NO_IDS */
export function takeRange(stateDir: string, name: string): number {
  const folder = rangesFolder(stateDir);
  mkdirSync(folder, { recursive: true, mode: 0o700 });
  const first = randomInt(RANGES);
  for (let i = 0; i < RANGES; i++) {
    const number = (first + i) % RANGES;
    try {
      symlinkSync(name, join(folder, String(number)));
      return FIRST + number * RANGE;
    } catch (error) {
      if (systemCode(error) !== 'EEXIST') throw error;
    }
  }
  throw fail('RUNTIME_NO_IDS', { folder, count: RANGES });
}

/** Of the sandbox of that name; what is another's by now stays. */
export function releaseRange(stateDir: string, name: string, base: number): void {
  const path = linkOf(stateDir, base);
  if (ownerOf(path) === name) rmSync(path, { force: true });
}

/** Ranges whose sandbox is not among `names`: somebody was killed between taking it and its record, or after. */
export function orphanedRanges(stateDir: string, names: ReadonlySet<string>): { name: string; base: number }[] {
  const folder = rangesFolder(stateDir);
  const numbers = entriesOf(folder).filter((entry) => /^\d{1,5}$/.test(entry) && Number(entry) < RANGES);
  return numbers.flatMap((entry) => {
    const name = ownerOf(join(folder, entry));
    return name === undefined || names.has(name) ? [] : [{ name, base: FIRST + Number(entry) * RANGE }];
  });
}

function linkOf(stateDir: string, base: number): string {
  return join(rangesFolder(stateDir), String((base - FIRST) / RANGE));
}

function ownerOf(path: string): string | undefined {
  try {
    return readlinkSync(path);
  } catch {
    return undefined;
  }
}

function entriesOf(folder: string): string[] {
  try {
    return readdirSync(folder);
  } catch {
    return [];
  }
}
