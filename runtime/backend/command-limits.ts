/**
 * The limits of a sandbox that stays: on groups of its own, `commands`, below the sandbox's, which commands enter and the agent does
 * not. So a fork bomb, a full memory or used-up processor time never keep the agent from answering, and memory that nobody can free
 * (a tmpfs) never ends it.
 *
 * In v1 there is one in each hierarchy that has a limit when the sandbox is created, and the agent sends each command into it. In a v2 tree
 * there is one, and the groups of commands are below it. A limit that is added later in v1 is the sandbox's as a whole.
 */
import { existsSync, mkdirSync, readFileSync, writeFileSync } from 'node:fs';
import { writeFile } from 'node:fs/promises';
import { isDsecError, messageOf, systemCode } from '#base';
import { fail } from '../errors.ts';
import type { SandboxLimits } from '../sandbox-api/limits.ts';
import { CONTROLLERS, type Controller, limitedControllers, V1_NAMES } from './limit-writes.ts';
import { type Hierarchy, limitWritesIn, refuseUnavailable, sandboxHierarchies } from './sandbox-cgroups.ts';
import { groupFolder } from './sandbox-group.ts';

export const COMMANDS_GROUP = 'commands';

/** Folders of the groups that the agent has to send commands into; the ones of v2 are not among them. */
export function makeCommandGroups(
  id: string,
  limits: SandboxLimits,
  device: string | undefined,
  hierarchies: readonly Hierarchy[] = sandboxHierarchies(),
): string[] {
  const limited = limitedControllers(limits);
  const entered: string[] = [];
  for (const hierarchy of hierarchies) {
    const sandbox = groupFolder(hierarchy.root, id);
    const folder = `${sandbox}/${COMMANDS_GROUP}`;
    const here = limited.filter((controller) => hierarchy.controllers.includes(V1_NAMES[controller]));
    if (hierarchy.version === 1 && here.length === 0) continue;
    makeFolder(folder);
    if (hierarchy.version === 2) enable(sandbox, here);
    if (hierarchy.isCpuset) inheritProcessors(sandbox, folder);
    writeAll(folder, limitWritesIn(hierarchy, here, limits, device));
    if (hierarchy.version === 1) entered.push(folder);
  }
  return entered;
}

/** Those that `makeCommandGroups` has made before; undefined when it has not. */
export function madeCommandGroups(
  id: string,
  hierarchies: readonly Hierarchy[] = sandboxHierarchies(),
): string[] | undefined {
  const made = hierarchies
    .map(({ root, version }) => ({ version, folder: `${groupFolder(root, id)}/${COMMANDS_GROUP}` }))
    .filter(({ folder }) => existsSync(folder));
  if (made.length === 0) return undefined;
  return made.filter(({ version }) => version === 1).map(({ folder }) => folder);
}

/**
 * To a running sandbox. Not in this thread: less memory means that the kernel writes some of it out first.
 * @throws RUNTIME_LIMIT_UNAVAILABLE, RUNTIME_LIMIT_REFUSED; then some may be as they were
 */
export async function applyLimits(
  id: string,
  limits: SandboxLimits,
  device: string | undefined,
  controllers: readonly Controller[] = CONTROLLERS,
  hierarchies: readonly Hierarchy[] = sandboxHierarchies(),
): Promise<void> {
  refuseUnavailable(limits, device, hierarchies);
  for (const hierarchy of hierarchies) {
    const here = controllers.filter((controller) => hierarchy.controllers.includes(V1_NAMES[controller]));
    const sandbox = groupFolder(hierarchy.root, id);
    const below = `${sandbox}/${COMMANDS_GROUP}`;
    const folder = existsSync(below) ? below : sandbox;
    for (const controller of here) {
      // Nothing was limited there, and nothing shall be.
      if (controller === 'io' && device === undefined) continue;
      try {
        if (hierarchy.version === 2) enable(sandbox, [controller]);
        if (hierarchy.version === 2 && controller === 'memory') refuseBelowUse(folder, limits);
        for (const [file, value] of limitWritesIn(hierarchy, [controller], limits, device, true)) {
          await writeFile(`${folder}/${file}`, value);
        }
      } catch (error) {
        if (isDsecError(error)) throw error;
        const reason = systemCode(error) === 'EBUSY' ? IN_USE : messageOf(error);
        throw fail('RUNTIME_LIMIT_REFUSED', { limit: controller, reason }, error);
      }
    }
  }
}

const IN_USE = 'more than that is in use, and cannot be given back';

/** v1 does that by itself; v2 would end processes instead. */
function refuseBelowUse(folder: string, { memoryBytes }: SandboxLimits): void {
  const stat = readFileSync(`${folder}/memory.stat`, 'latin1');
  const value = (name: string) => Number(new RegExp(`^${name} (\\d+)$`, 'm').exec(stat)?.[1] ?? 0);
  const current = Number(readFileSync(`${folder}/memory.current`, 'latin1'));
  const firm = current - (value('file') - value('shmem')) - value('slab_reclaimable');
  if (memoryBytes !== undefined && firm > memoryBytes) {
    throw fail('RUNTIME_LIMIT_REFUSED', { limit: 'memory', reason: IN_USE });
  }
}

function makeFolder(path: string): void {
  try {
    mkdirSync(path, { mode: 0o755 });
  } catch (error) {
    if (systemCode(error) !== 'EEXIST') throw error;
  }
}

function writeAll(folder: string, writes: readonly (readonly [string, string])[]): void {
  for (const [file, value] of writes) writeFileSync(`${folder}/${file}`, value);
}

/** What the groups below it are to be limited in. */
function enable(sandbox: string, controllers: readonly Controller[]): void {
  const file = `${sandbox}/cgroup.subtree_control`;
  const has = readFileSync(file, 'latin1').trim().split(/\s+/);
  for (const controller of controllers) if (!has.includes(controller)) writeFileSync(file, `+${controller}`);
}

function inheritProcessors(from: string, to: string): void {
  for (const file of ['cpuset.cpus', 'cpuset.mems']) {
    writeFileSync(`${to}/${file}`, readFileSync(`${from}/${file}`));
  }
}
