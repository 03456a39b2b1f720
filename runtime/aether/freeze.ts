/**
 * Commands of a sandbox that stand still, all of them: the control group of each is frozen, in one hierarchy (command-group.ts). The agent is
 * in none of those. It goes on, so that the sandbox's time is kept whoever else has died, and so that it can be asked what it has.
 */
import { existsSync, readFileSync, writeFileSync } from 'node:fs';
import { setTimeout as delay } from 'node:timers/promises';
import { foldersOf, membersOf, thawCommands } from '../backend/cgroup-cleanup.ts';
import { fail } from '../errors.ts';
import type { CommandGroups } from './command-group.ts';

/** A process in the middle of a system call that cannot be left stands still when that is done. */
const PATIENCE_MS = 20_000;

const FREEZER = {
  1: { file: 'freezer.state', value: 'FROZEN' },
  2: { file: 'cgroup.freeze', value: '1' },
} as const;

/** Groups of its commands, each with all that the command has started. */
export function commandFolders({ parent }: CommandGroups): string[] {
  return foldersOf(parent)
    .filter((name) => /^c\d+$/.test(name))
    .map((name) => `${parent}/${name}`);
}

/** Processes of its commands. */
export function commandProcesses(groups: CommandGroups): number[] {
  return commandFolders(groups).flatMap((folder) => membersOf(folder));
}

/** Resolves when nothing moves any more; when that takes too long all go on. @throws RUNTIME_PAUSE_STUCK */
export async function freezeCommands(name: string, groups: CommandGroups, patienceMs = PATIENCE_MS): Promise<void> {
  const deadline = Date.now() + patienceMs;
  const folders = commandFolders(groups);
  const { file, value } = FREEZER[groups.version];
  for (const folder of folders) writeWhereThere(`${folder}/${file}`, value);
  for (const folder of folders) {
    for (let pauseMs = 1; !isFrozen(folder, groups.version); pauseMs = Math.min(pauseMs * 2, 50)) {
      if (Date.now() > deadline) {
        thawCommands(groups.parent);
        throw fail('RUNTIME_PAUSE_STUCK', { name, pids: membersOf(folder).join(', ') });
      }
      await delay(pauseMs);
      // In v1 a process that was missed is looked for only when it is asked again.
      if (groups.version === 1) writeWhereThere(`${folder}/${file}`, value);
    }
  }
}

/** One that has gone counts. */
export function isFrozen(folder: string, version: 1 | 2): boolean {
  try {
    if (version === 1) return readFileSync(`${folder}/freezer.state`, 'latin1').trim() === 'FROZEN';
    return /^frozen 1$/m.test(readFileSync(`${folder}/cgroup.events`, 'latin1'));
  } catch {
    return !existsSync(folder);
  }
}

function writeWhereThere(path: string, text: string): void {
  try {
    writeFileSync(path, text);
  } catch {
    // The command has ended.
  }
}
