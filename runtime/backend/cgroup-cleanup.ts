/**
 * What is left of a sandbox in the cgroup hierarchies, v1 or v2, and how it is ended there: the group is what every
 * process of the sandbox is in, whatever it did to hide.
 */
import { existsSync, readdirSync, readFileSync, rmdirSync, writeFileSync } from 'node:fs';
import { setTimeout as delay } from 'node:timers/promises';
import { bytesOf, systemCode } from '#base';
import type { MountRow } from '#linux';
import { cgroupRows } from './cgroup-hierarchies.ts';
import { groupFolder, isGroupLine } from './sandbox-group.ts';

/** Folders of the sandbox's groups that exist, one a hierarchy; first the one that counts memory. */
export function cgroupsOf(id: string): string[] {
  return placesOf(id).filter((path) => existsSync(path));
}

function placesOf(id: string): string[] {
  const { counting, others } = cgroupPlaces();
  return [...counting, ...others].map((root) => groupFolder(root, id));
}

interface CgroupPlaces {
  readonly rows: readonly MountRow[];
  readonly counting: string[];
  readonly others: string[];
}
let places: CgroupPlaces | undefined;

function cgroupPlaces(): CgroupPlaces {
  const rows = cgroupRows();
  if (places?.rows === rows) return places;
  const root = (row: MountRow) => bytesOf(row.mountPoint).toString();
  const counts = ({ type, superOptions }: MountRow) => type === 'cgroup' && superOptions.split(',').includes('memory');
  places = { rows, counting: rows.filter(counts).map(root), others: rows.filter((row) => !counts(row)).map(root) };
  return places;
}

/** Whether process `pid` of this machine is one of the sandbox's, also in a group below the sandbox's own. */
export function isInCgroups(id: string, pid: number): boolean {
  try {
    const lines = readFileSync(`/proc/${pid}/cgroup`, 'latin1').split('\n');
    return lines.some((line) => isGroupLine(line, id));
  } catch {
    return false;
  }
}

/** Kills all that is in the groups and removes them. Gives up after some seconds: a process in an endless kernel wait cannot be ended. */
export async function endCgroups(id: string): Promise<void> {
  const deadline = Date.now() + 10_000;
  // Empty as a rule.
  let left = placesOf(id).filter((group) => !removeTree(group));
  for (let pauseMs = 1; left.length > 0 && Date.now() < deadline; pauseMs = Math.min(pauseMs * 2, 50)) {
    for (const group of left) {
      for (const pid of allMembersOf(group)) kill(pid);
      thawCommands(group);
    }
    await delay(pauseMs);
    left = left.filter((group) => !removeTree(group));
  }
}

/** Of a sandbox's group: who froze a command's group below it may have died at it. What is frozen neither goes on nor ends. */
export function thawCommands(group: string): void {
  const below = foldersOf(group);
  if (below.includes('commands')) thawCommands(`${group}/commands`);
  for (const name of below.filter((one) => /^c\d+$/.test(one))) {
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

/** Processes in a group and in all below it. */
export function allMembersOf(group: string): number[] {
  return [...membersOf(group), ...foldersOf(group).flatMap((name) => allMembersOf(`${group}/${name}`))];
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

/** False: it is busy, and stays for the next round. */
function removeTree(group: string): boolean {
  if (removeGroup(group)) return true;
  for (const name of foldersOf(group)) removeTree(`${group}/${name}`);
  return removeGroup(group);
}

function removeGroup(group: string): boolean {
  try {
    rmdirSync(group);
    return true;
  } catch (error) {
    return systemCode(error) === 'ENOENT';
  }
}

export function foldersOf(group: string): string[] {
  try {
    return readdirSync(group, { withFileTypes: true }).flatMap((child) => (child.isDirectory() ? [child.name] : []));
  } catch {
    return [];
  }
}
