/**
 * A private folder for the main job, on a file system that EROFS images can be mounted from where there is one. What killed
 * runs have left is removed first.
 */
import { mkdtempSync, readdirSync, rmSync, statfsSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { systemCode } from '#base';

/** ext4, xfs, btrfs: file systems whose files the kernel mounts as EROFS. */
const MOUNTABLE = new Set([0xef53, 0x58465342, 0x9123683e]);
const PREFIX = 'dsec-main-job-';

export function makeWorkFolder(): string {
  const candidates = [tmpdir(), '/var/tmp'];
  for (const candidate of candidates) removeAbandoned(candidate);
  const parent = candidates.find(isMountable) ?? tmpdir();
  return mkdtempSync(join(parent, `${PREFIX}${process.pid}-`));
}

function isMountable(folder: string): boolean {
  try {
    return MOUNTABLE.has(statfsSync(folder).type);
  } catch {
    return false;
  }
}

function removeAbandoned(parent: string): void {
  let names: string[];
  try {
    names = readdirSync(parent);
  } catch {
    return;
  }
  for (const name of names) {
    const pid = new RegExp(`^${PREFIX}(\\d+)-`).exec(name)?.[1];
    if (pid === undefined || isAlive(Number(pid))) continue;
    try {
      rmSync(join(parent, name), { recursive: true, force: true });
    } catch {
      // Somebody else's.
    }
  }
}

function isAlive(pid: number): boolean {
  try {
    process.kill(pid, 0);
    return true;
  } catch (error) {
    return systemCode(error) !== 'ESRCH';
  }
}
