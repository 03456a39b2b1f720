/**
 * Where the groups of a sandbox are: below `dsec` in each hierarchy, those of best effort below `dsec-best-effort`, which is idle as a whole beside all else on
 * the machine. Processors are shared out level by level: if best effort were below `dsec`, idle among sandboxes alone, it would use up what is theirs, and a
 * latency-sensitive sandbox would then wait for processes of the host that have no more right to run than it has.
 */
import { existsSync } from 'node:fs';
import { basename, dirname } from 'node:path';
import { SERVICE_CLASSES, type ServiceClass } from '../sandbox-api/sandbox.ts';

export const CGROUP_PARENT = 'dsec';
export const BEST_EFFORT_PARENT = 'dsec-best-effort';

/** Path from the root of a hierarchy, of one that is to be made. */
export function groupPath(id: string, serviceClass: ServiceClass = 'ls'): string {
  return `${serviceClass === 'be' ? BEST_EFFORT_PARENT : CGROUP_PARENT}/${id}`;
}

/** Where it is; of one that is not there yet, where it will be. @param root mount point of a hierarchy */
export function groupFolder(root: string, id: string, serviceClass?: ServiceClass): string {
  const made = SERVICE_CLASSES.map((one) => `${root}/${groupPath(id, one)}`).find((folder) => existsSync(folder));
  return made ?? `${root}/${groupPath(id, serviceClass)}`;
}

/** The group that makes a sandbox one of best effort: the one above its own. Its own, where that is elsewhere. */
export function classGroup(folder: string): string {
  const above = dirname(folder);
  return basename(above) === BEST_EFFORT_PARENT ? above : folder;
}

/** Whether a line of /proc/PID/cgroup says that a process is in a sandbox's group, or below. */
export function isGroupLine(line: string, id: string): boolean {
  return SERVICE_CLASSES.some((serviceClass) => `${line}/`.includes(`/${groupPath(id, serviceClass)}/`));
}
