/**
 * The control group of one command: below the sandbox's, in one hierarchy, the freezer's or the v2 tree. Nothing inside can leave it,
 * so killing what is in it is killing the command with all that it ever started.
 */
import { existsSync, readFileSync, rmdirSync, writeFileSync } from 'node:fs';
import { setTimeout as delay } from 'node:timers/promises';
import { bytesOf, systemCode } from '#base';
import type { MountRow } from '#linux';
import { cgroupRows } from '../backend/cgroup-hierarchies.ts';
import { COMMANDS_GROUP } from '../backend/command-limits.ts';
import { groupFolder } from '../backend/sandbox-group.ts';
import type { ServiceClass } from '../sandbox-api/sandbox.ts';

export interface CommandGroups {
  /** The sandbox's group in that hierarchy. */
  readonly parent: string;
  readonly version: 1 | 2;
}

/** Undefined where no hierarchy can end a group as a whole. */
export function commandGroupsOf(
  sandboxId: string,
  serviceClass?: ServiceClass,
  rows: readonly MountRow[] = cgroupRows(),
): CommandGroups | undefined {
  const place = (row: MountRow) => groupFolder(bytesOf(row.mountPoint).toString(), sandboxId, serviceClass);
  const freezer = rows.find((row) => row.type === 'cgroup' && row.superOptions.split(',').includes('freezer'));
  if (freezer !== undefined) return { parent: place(freezer), version: 1 };
  const v2 = rows.find((row) => row.type === 'cgroup2');
  return v2 === undefined ? undefined : { parent: `${place(v2)}/${COMMANDS_GROUP}`, version: 2 };
}

export function groupOf(groups: CommandGroups, command: number): string {
  return `${groups.parent}/c${command}`;
}

const PATIENCE_MS = 10_000;

/** Resolves when nothing is left in it, or after ten seconds: a process in an endless kernel wait cannot be ended. */
export async function killGroup(groups: CommandGroups, command: number): Promise<void> {
  const group = groupOf(groups, command);
  const deadline = Date.now() + PATIENCE_MS;
  for (let pauseMs = 1; existsSync(group) && Date.now() < deadline; pauseMs = Math.min(pauseMs * 2, 50)) {
    if (groups.version === 2 && existsSync(`${group}/cgroup.kill`)) write(`${group}/cgroup.kill`, '1');
    else await killFrozen(group, groups.version);
    if (removeGroup(groups, command)) return;
    await delay(pauseMs);
  }
}

/** Frozen first, so that nothing is started while we look. SIGKILL takes effect when it thaws. */
async function killFrozen(group: string, version: 1 | 2): Promise<void> {
  const [file, frozen, thawed] = version === 1 ? ['freezer.state', 'FROZEN', 'THAWED'] : ['cgroup.freeze', '1', '0'];
  write(`${group}/${file}`, frozen);
  for (let i = 0; i < 100 && version === 1 && read(`${group}/${file}`).trim() !== frozen; i++) await delay(1);
  for (const line of read(`${group}/cgroup.procs`).split('\n')) {
    if (!/^[1-9]\d*$/.test(line)) continue;
    try {
      process.kill(Number(line), 'SIGKILL');
    } catch (error) {
      if (systemCode(error) !== 'ESRCH') throw error;
    }
  }
  write(`${group}/${file}`, thawed);
}

/** False while something is in it. */
export function removeGroup(groups: CommandGroups, command: number): boolean {
  try {
    rmdirSync(groupOf(groups, command));
    return true;
  } catch (error) {
    return systemCode(error) === 'ENOENT';
  }
}

function write(path: string, text: string): void {
  try {
    writeFileSync(path, text);
  } catch {
    // The group has gone.
  }
}

function read(path: string): string {
  try {
    return readFileSync(path, 'utf8');
  } catch {
    return '';
  }
}

/** How often memory ran out in the sandbox so far. */
export function outOfMemoryCount(groups: readonly string[]): number {
  const group = memoryGroupOf(groups);
  return group === undefined ? 0 : outOfMemoryIn(group);
}

/** The one of a sandbox's groups that counts its memory; undefined where none does, or not yet. */
export function memoryGroupOf(groups: readonly string[]): string | undefined {
  return groups.find((group) => COUNTING.some((file) => existsSync(`${group}/${file}`)));
}

/** In v1 each group counts for itself, in a v2 tree with those below it. */
export function outOfMemoryIn(group: string): number {
  const count = (file: string) => {
    // Asked after each command: what is thrown would cost more than all the rest of the question.
    const text = existsSync(file) ? read(file) : '';
    return Number(/^oom_kill (\d+)$/m.exec(text)?.[1] ?? 0);
  };
  const [v2, v1] = COUNTING;
  if (existsSync(`${group}/${v2}`)) return count(`${group}/${v2}`);
  return count(`${group}/${v1}`) + count(`${group}/${COMMANDS_GROUP}/${v1}`);
}

const COUNTING = ['memory.events', 'memory.oom_control'] as const;
