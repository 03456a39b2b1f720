/**
 * Control groups of a container. Limits of a task are on a group of the task alone, below the container's own, which the program in the container makes
 * and removes: through descriptors of these folders, which belong to its root then. Only the hierarchies that count something are gone through.
 * The container's own are limited too, so that what is no task's (an interpreter that waits, files on their way) does not grow without end either.
 */
import { chownSync, writeFileSync } from 'node:fs';
import type { DeviceNode } from '../backend/device-rules.ts';
import {
  limitWritesIn,
  refuseUnavailable,
  type SandboxCgroup,
  sandboxCgroups,
  sandboxHierarchies,
} from '../backend/sandbox-cgroups.ts';
import type { PoolOptions } from './pool-spec.ts';
import { highestLimits } from './task.ts';
import type { GroupFileWrite, GroupPlan } from './task-wire.ts';

export interface ContainerGroups {
  readonly groups: readonly SandboxCgroup[];
  readonly plan: GroupPlan;
  /** What a task's group is told. */
  writes(limits: { readonly memoryBytes: number; readonly pids: number }): GroupFileWrite[];
}

/** Kinds of limits that are remembered. */
const MOST_KNOWN = 100;
/** Beside one task: the program, an interpreter that waits with what it imported, and files that go in. */
const OWN_BYTES = 4 * 2 ** 30;
const OWN_PROCESSES = 64;

/** @throws RUNTIME_START_FAILED, RUNTIME_LIMIT_UNAVAILABLE */
export function containerGroups(
  id: string,
  { cpus, defaults, most }: PoolOptions,
  devices?: readonly DeviceNode[],
): ContainerGroups {
  const hierarchies = sandboxHierarchies();
  const { memoryBytes, pids: processes } = highestLimits(defaults, most);
  const whole = { cpus, memoryBytes: memoryBytes + OWN_BYTES, pids: processes + OWN_PROCESSES };
  refuseUnavailable(whole, undefined, hierarchies);
  const plain = sandboxCgroups(id, undefined, { agent: true, devices });
  const groups = plain.map((group, i) => ({
    ...group,
    writes: [...group.writes, ...limitWritesIn(hierarchies[i]!, ['cpu', 'memory', 'pids'], whole, undefined)],
  }));
  const holding = (controller: string) => hierarchies.findIndex(({ controllers }) => controllers.includes(controller));
  const [memory, pids] = [holding('memory'), holding('pids')];
  const v2 = hierarchies.findIndex(({ version }) => version === 2);
  const cpu = v2 >= 0 ? v2 : holding('cpuacct');
  const isV2 = (number: number) => hierarchies[number]?.version === 2;
  const place = (number: number, v1File: string, v2File: string) =>
    number < 0 ? undefined : ([number, isV2(number) ? v2File : v1File] as const);
  const dirs = [...new Set([memory, pids, cpu].filter((number) => number >= 0))];
  const known = new Map<string, GroupFileWrite[]>();
  return {
    groups,
    plan: {
      dirs,
      peak: place(memory, 'memory.max_usage_in_bytes', 'memory.peak'),
      killed: place(memory, 'memory.oom_control', 'memory.events'),
      cpu: place(cpu, 'cpuacct.usage', 'cpu.stat'),
    },
    writes({ memoryBytes, pids: most }) {
      // The kernel is asked for what it has only once: most tasks have the same limits.
      const key = `${memoryBytes} ${most}`;
      const found = known.get(key);
      if (found !== undefined) return found;
      const limits = { memoryBytes, memorySwapBytes: memoryBytes, pids: most };
      const writes = dirs.flatMap((dir) =>
        limitWritesIn(hierarchies[dir]!, ['memory', 'pids'], limits, undefined, true).map(
          ([file, value]): GroupFileWrite => [dir, file, value],
        ),
      );
      if (known.size < MOST_KNOWN) known.set(key, writes);
      return writes;
    },
  };
}

/** From here on the container's root may make groups in them. Its first process runs. */
export function giveGroups({ groups, plan }: ContainerGroups, idBase: number | undefined): void {
  for (const dir of plan.dirs) {
    const { folder, leaf } = groups[dir]!;
    if (leaf !== undefined) {
      for (const controller of ['memory', 'pids', 'cpu']) {
        try {
          writeFileSync(`${folder}/cgroup.subtree_control`, `+${controller}`);
        } catch {
          // Not to be had here; what depends on it says so.
        }
      }
    }
    if (idBase === undefined) continue;
    chownSync(folder, idBase, idBase);
    for (const file of leaf === undefined ? [] : ['cgroup.procs', 'cgroup.subtree_control']) {
      chownSync(`${folder}/${file}`, idBase, idBase);
    }
  }
}
