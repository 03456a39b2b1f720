/** The control groups of a virtual machine's process: its share of processors is held there, and all that it uses is counted. */
import { mkdirSync, readFileSync, writeFileSync } from 'node:fs';
import { dirname } from 'node:path';
import { systemCode } from '#base';
import { CONTROLLERS } from '../backend/limit-writes.ts';
import { type Hierarchy, limitWritesIn, sandboxHierarchies } from '../backend/sandbox-cgroups.ts';
import { groupFolder, groupPath } from '../backend/sandbox-group.ts';
import type { SandboxLimits } from '../sandbox-api/limits.ts';
import type { ServiceClass } from '../sandbox-api/sandbox.ts';

const CONTROLLERS_V2 = ['cpu', 'memory', 'pids', 'io'];

/** @returns files that the process enters them by */
export function makeMachineGroups(
  id: string,
  limits: Pick<SandboxLimits, 'cpus'>,
  serviceClass?: ServiceClass,
): string[] {
  return sandboxHierarchies().map((hierarchy) => {
    const { version, isCpuset } = hierarchy;
    const folder = `${hierarchy.root}/${groupPath(id, serviceClass)}`;
    makeFolder(dirname(folder));
    if (version === 2) enable(dirname(folder));
    makeFolder(folder);
    if (isCpuset) for (const one of [dirname(folder), folder]) inheritProcessors(one);
    writeLimits(hierarchy, id, limits, false);
    return `${folder}/${version === 1 ? 'tasks' : 'cgroup.procs'}`;
  });
}

export function limitMachine(id: string, limits: Pick<SandboxLimits, 'cpus'>): void {
  for (const hierarchy of sandboxHierarchies()) writeLimits(hierarchy, id, limits, true);
}

function writeLimits(hierarchy: Hierarchy, id: string, { cpus }: Pick<SandboxLimits, 'cpus'>, changing: boolean): void {
  const only = CONTROLLERS.filter((controller) => controller === 'cpu');
  for (const [file, value] of limitWritesIn(hierarchy, only, { cpus }, undefined, changing)) {
    writeFileSync(`${groupFolder(hierarchy.root, id)}/${file}`, value);
  }
}

function makeFolder(path: string): void {
  try {
    mkdirSync(path, { mode: 0o755 });
  } catch (error) {
    if (systemCode(error) !== 'EEXIST') throw error;
  }
}

function enable(folder: string): void {
  for (const above of [dirname(folder), folder]) {
    for (const controller of CONTROLLERS_V2) {
      try {
        writeFileSync(`${above}/cgroup.subtree_control`, `+${controller}`);
      } catch {
        // Those that cannot be had are done without.
      }
    }
  }
}

function inheritProcessors(folder: string): void {
  for (const file of ['cpuset.cpus', 'cpuset.mems']) {
    if (/\d/.test(readFileSync(`${folder}/${file}`, 'latin1'))) continue;
    writeFileSync(`${folder}/${file}`, readFileSync(`${dirname(folder)}/${file}`));
  }
}
