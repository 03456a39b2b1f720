/**
 * What is left of a sandbox in the cgroup hierarchies, v1 or v2, and how it is ended there: the group is what every
 * process of the sandbox is in, whatever it did to hide.
 */
import { existsSync, readdirSync, readFileSync, rmdirSync, writeFileSync } from 'node:fs';
import { setTimeout as delay } from 'node:timers/promises';
import { bytesOf, systemCode } from '#base';
import { readMountInfo } from '#linux';
import { CGROUP_PARENT } from './oci-spec.ts';

/** Folders of the sandbox's groups that exist, one a hierarchy. */
export function cgroupsOf(id: string): string[] {
  return readMountInfo()
    .filter((row) => row.type === 'cgroup' || row.type === 'cgroup2')
    .map((row) => `${bytesOf(row.mountPoint).toString()}/${CGROUP_PARENT}/${id}`)
    .filter((path) => existsSync(path));
}

/** Whether process `pid` of this machine is one of the sandbox's, also in a group below the sandbox's own. */
export function isInCgroups(id: string, pid: number): boolean {
  try {
    const lines = readFileSync(`/proc/${pid}/cgroup`, 'latin1').split('\n');
    return lines.some((line) => `${line}/`.includes(`/${CGROUP_PARENT}/${id}/`));
  } catch {
    return false;
  }
}

/** Kills all that is in the groups and removes them. Gives up after some seconds: a process in an endless kernel wait cannot be ended. */
export async function endCgroups(id: string): Promise<void> {
  const deadline = Date.now() + 10_000;
  for (let pauseMs = 1; ; pauseMs = Math.min(pauseMs * 2, 50)) {
    const groups = cgroupsOf(id);
    if (groups.length === 0) return;
    for (const group of groups) {
      for (const pid of membersOf(group)) kill(pid);
      thawCommands(group);
      removeTree(group);
    }
    if (Date.now() > deadline) return;
    await delay(pauseMs);
  }
}

/** Of a sandbox's group: who froze a command's group below it may have died at it. What is frozen neither goes on nor ends. */
export function thawCommands(group: string): void {
  for (const name of foldersOf(group).filter((one) => /^c\d+$/.test(one))) {
    for (const [file, thawed] of [
      ['freezer.state', 'THAWED'],
      ['cgroup.freeze', '0'],
    ] as const) {
      try {
        if (existsSync(`${group}/${name}/${file}`)) writeFileSync(`${group}/${name}/${file}`, thawed);
      } catch {
        // It has gone.
      }
    }
  }
}

export function membersOf(group: string): number[] {
  try {
    return readFileSync(`${group}/cgroup.procs`, 'latin1')
      .split('\n')
      .filter((line) => /^[1-9]\d*$/.test(line))
      .map(Number);
  } catch {
    return [];
  }
}

export function kill(pid: number): void {
  try {
    process.kill(pid, 'SIGKILL');
  } catch (error) {
    if (systemCode(error) !== 'ESRCH') throw error;
  }
}

/** A busy group stays for the next round. */
function removeTree(group: string): void {
  try {
    for (const name of foldersOf(group)) removeTree(`${group}/${name}`);
    rmdirSync(group);
  } catch {
    // Gone, or still busy.
  }
}

function foldersOf(group: string): string[] {
  try {
    return readdirSync(group, { withFileTypes: true }).flatMap((child) => (child.isDirectory() ? [child.name] : []));
  } catch {
    return [];
  }
}
