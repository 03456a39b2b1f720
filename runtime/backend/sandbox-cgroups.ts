/**
 * The groups that a sandbox gets: one in each v1 hierarchy, and one in the v2 tree where no v1 hierarchy says which devices may be
 * opened. Where neither can say it nothing runs: root in a sandbox could open the machine's disk. A v1 hierarchy in which nothing is a
 * sandbox's own (which processors there are, systemd's names) has one for all of them: each group is six KiB of the kernel's memory.
 *
 * Limits are on these groups where one command is run. In a sandbox that stays they are on groups below (command-limits.ts), which its
 * agent is not in.
 */
import { existsSync, readFileSync } from 'node:fs';
import { bytesOf } from '#base';
import type { MountRow } from '#linux';
import { fail } from '../errors.ts';
import type { SandboxLimits } from '../sandbox-api/limits.ts';
import type { ServiceClass } from '../sandbox-api/sandbox.ts';
import { cgroupRows } from './cgroup-hierarchies.ts';
import { type DeviceNode, deviceLines, deviceProgram, rulesWith } from './device-rules.ts';
import {
  CONTROLLERS,
  type Controller,
  type GroupWrite,
  limitedControllers,
  V1_NAMES,
  writesV1,
  writesV2,
} from './limit-writes.ts';
import { CGROUP_PARENT, groupPath } from './sandbox-group.ts';

export interface SandboxCgroup {
  readonly folder: string;
  readonly isCpuset: boolean;
  /** One for all sandboxes, which stays. */
  readonly isShared?: boolean;
  readonly writes: readonly GroupWrite[];
  /** For a v2 group. */
  readonly deviceProgram?: Buffer;
  /** The group below it that the first process is in. */
  readonly leaf?: string;
}

/** Where the agent is in a v2 tree, in which no process may be beside groups with limits. */
export const AGENT_LEAF = 'agent';

export interface CgroupOptions {
  readonly limits?: SandboxLimits;
  /** `major:minor` that I/O limits are for. */
  readonly device?: string;
  /** That it may open, beside those of every sandbox. */
  readonly devices?: readonly DeviceNode[];
  /** A sandbox that stays: its agent is in the group, without limits. */
  readonly agent?: boolean;
  readonly serviceClass?: ServiceClass;
}

/** One mounted hierarchy; `root` is its mount point. */
export interface Hierarchy {
  readonly root: string;
  readonly version: 1 | 2;
  /** As v1 calls them. */
  readonly controllers: readonly string[];
  readonly isCpuset: boolean;
}

/** Those that sandboxes are in, v1 first. Beside v1 controllers a v2 tree has none itself: only the v1 hierarchies count then, as OCI runtimes have it. @throws RUNTIME_START_FAILED */
export function sandboxHierarchies(rows: readonly MountRow[] = cgroupRows()): Hierarchy[] {
  // One hierarchy can be mounted in several places.
  const distinct = (type: string) => [
    ...new Map(rows.filter((row) => row.type === type).map((row) => [row.device, row])).values(),
  ];
  const rootOf = (row: MountRow) => bytesOf(row.mountPoint).toString();
  const v1 = distinct('cgroup').map((row): Hierarchy => {
    const controllers = row.superOptions.split(',');
    return { root: rootOf(row), version: 1, controllers, isCpuset: controllers.includes('cpuset') };
  });
  if (v1.some(({ controllers }) => controllers.includes('devices'))) return v1;
  // A v1 hierarchy without controllers (name=systemd, for old containers) may lie beside a v2 tree that is in use.
  const [v2] = distinct('cgroup2');
  if (v2 === undefined) {
    const reason = 'no control group can close devices to it: neither the v1 devices controller nor cgroup2 is mounted';
    throw fail('RUNTIME_START_FAILED', { runtime: 'dsec', reason });
  }
  const root = rootOf(v2);
  const controllers = wordsOf(`${root}/cgroup.controllers`).map((name) => (name === 'io' ? V1_NAMES.io : name));
  return [...v1, { root, version: 2, controllers, isCpuset: false }];
}

/** Of v1: those by which one sandbox is limited, counted, closed off or stopped. */
const OWN_CONTROLLERS = new Set([...Object.values(V1_NAMES), 'cpuacct', 'devices', 'freezer']);

/** @throws RUNTIME_START_FAILED, RUNTIME_LIMIT_UNAVAILABLE */
export function sandboxCgroups(
  id: string,
  rows: readonly MountRow[] = cgroupRows(),
  { limits = {}, device, devices = [], agent = false, serviceClass }: CgroupOptions = {},
): SandboxCgroup[] {
  const hierarchies = sandboxHierarchies(rows);
  refuseUnavailable(limits, device, hierarchies);
  const writes = (hierarchy: Hierarchy) => (agent ? [] : limitWritesIn(hierarchy, CONTROLLERS, limits, device));
  return hierarchies.map((hierarchy): SandboxCgroup => {
    const { root, version, controllers, isCpuset } = hierarchy;
    if (version === 1 && !controllers.some((controller) => OWN_CONTROLLERS.has(controller))) {
      return { folder: `${root}/${CGROUP_PARENT}`, isCpuset, isShared: true, writes: [] };
    }
    const folder = `${root}/${groupPath(id, serviceClass)}`;
    if (version === 2) {
      const leaf = agent ? AGENT_LEAF : undefined;
      return { folder, isCpuset, writes: writes(hierarchy), deviceProgram: deviceProgram(rulesWith(devices)), leaf };
    }
    const lines = controllers.includes('devices') ? deviceLines(rulesWith(devices)) : [];
    return { folder, isCpuset, writes: [...lines, ...writes(hierarchy)] };
  });
}

/** What one hierarchy is told of these controllers. */
export function limitWritesIn(
  hierarchy: Hierarchy,
  controllers: readonly Controller[],
  limits: SandboxLimits,
  device: string | undefined,
  changing = false,
): GroupWrite[] {
  const here = controllers.filter((controller) => hierarchy.controllers.includes(V1_NAMES[controller]));
  const options = { device, swap: here.includes('memory') && countsSwap(hierarchy), changing };
  const writes = hierarchy.version === 1 ? writesV1 : writesV2;
  return here.flatMap((controller) => writes(controller, limits, options));
}

/** A limit that nothing would hold is none. @throws RUNTIME_LIMIT_UNAVAILABLE */
export function refuseUnavailable(
  limits: SandboxLimits,
  device: string | undefined,
  hierarchies: readonly Hierarchy[] = sandboxHierarchies(),
): void {
  for (const controller of limitedControllers(limits)) {
    const name = V1_NAMES[controller];
    const found = hierarchies.find(({ controllers }) => controllers.includes(name));
    if (found === undefined) {
      const reason = `no hierarchy of control groups has the ${controller} controller`;
      throw fail('RUNTIME_LIMIT_UNAVAILABLE', { limit: controller, reason });
    }
    if (controller === 'memory' && limits.memorySwapBytes !== undefined && !countsSwap(found)) {
      throw fail('RUNTIME_LIMIT_UNAVAILABLE', { limit: 'memorySwapBytes', reason: 'this kernel does not count swap' });
    }
    if (controller === 'io' && device === undefined) {
      const reason = 'the file system of its changes is on no block device';
      throw fail('RUNTIME_LIMIT_UNAVAILABLE', { limit: 'io', reason });
    }
  }
}

/** What can be limited here. @throws RUNTIME_START_FAILED */
export function limitSupport(): { readonly version: 1 | 2; readonly missing: Controller[]; readonly swap: boolean } {
  const hierarchies = sandboxHierarchies();
  const holder = (controller: Controller) =>
    hierarchies.find(({ controllers }) => controllers.includes(V1_NAMES[controller]));
  const memory = holder('memory');
  return {
    version: (memory ?? holder('pids'))?.version ?? 1,
    missing: CONTROLLERS.filter((controller) => holder(controller) === undefined),
    swap: memory !== undefined && countsSwap(memory),
  };
}

/** Whether swap can be limited. */
export function countsSwap({ root, version }: Hierarchy): boolean {
  return version === 1 ? existsSync(`${root}/memory.memsw.limit_in_bytes`) : existsSync('/proc/swaps');
}

function wordsOf(path: string): string[] {
  try {
    return readFileSync(path, 'latin1').trim().split(/\s+/);
  } catch {
    return [];
  }
}
