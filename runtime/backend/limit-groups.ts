/**
 * The limits of a sandbox that an OCI runtime starts: on groups of ours, in which the runtime makes its own. So they are the same writes
 * whichever launcher it is, and what the kernel counted is there when the runtime has removed its own: whether memory ran out.
 *
 * A v2 group counts for those below it. A v1 group does not; but it tells whoever listens, through an eventfd, each time that its limit
 * has ended a process.
 */
import { closeSync, mkdirSync, openSync, readFileSync, readSync, writeFileSync } from 'node:fs';
import { dirname } from 'node:path';
import { messageOf } from '#base';
import { makeEventFd, raiseEventFd } from '#linux';
import { outOfMemoryCount } from '../aether/command-group.ts';
import { fail } from '../errors.ts';
import { cgroupRows } from './cgroup-hierarchies.ts';
import { type Controller, limitedControllers } from './limit-writes.ts';
import { type CgroupOptions, sandboxCgroups, sandboxHierarchies } from './sandbox-cgroups.ts';

/** Where the runtime puts the sandbox then. */
export const RUNTIME_GROUP = 'run';

export interface LimitGroups {
  /** Memory ran out since they were made. Once: what it hangs on is closed. */
  ranOutOfMemory(): boolean;
}

/** Undefined without limits: then the runtime makes the sandbox's group itself. @throws RUNTIME_LIMIT_UNAVAILABLE, RUNTIME_START_FAILED */
export function makeLimitGroups(id: string, options: CgroupOptions): LimitGroups | undefined {
  const limited = limitedControllers(options.limits ?? {});
  if (limited.length === 0) return undefined;
  const versions = new Map(sandboxHierarchies().map(({ root, version }) => [root, version]));
  const folders: string[] = [];
  let listening: number | undefined;
  for (const { folder, writes } of sandboxCgroups(id, cgroupRows(), options)) {
    const limits = writes.filter(([file]) => !file.startsWith('devices.'));
    if (limits.length === 0) continue;
    try {
      mkdirSync(folder, { recursive: true, mode: 0o755 });
      const root = dirname(dirname(folder));
      if (versions.get(root) === 2) for (const above of [root, dirname(folder)]) handDown(above, limited);
      for (const [file, value] of limits) writeFileSync(`${folder}/${file}`, value);
      if (limits.some(([file]) => file === 'memory.limit_in_bytes')) listening = listen(folder);
    } catch (error) {
      const reason = `its control group ${folder}: ${messageOf(error)}`;
      throw fail('RUNTIME_START_FAILED', { runtime: 'dsec', reason }, error);
    }
    folders.push(folder);
  }
  return {
    ranOutOfMemory() {
      const ran = outOfMemoryCount(folders) > 0 || (listening !== undefined && wasRaised(listening));
      if (listening !== undefined) closeSync(listening);
      listening = undefined;
      return ran;
    },
  };
}

function handDown(folder: string, controllers: readonly Controller[]): void {
  const file = `${folder}/cgroup.subtree_control`;
  const has = readFileSync(file, 'latin1').trim().split(/\s+/);
  for (const controller of controllers) if (!has.includes(controller)) writeFileSync(file, `+${controller}`);
}

function listen(folder: string): number {
  const event = makeEventFd();
  const control = openSync(`${folder}/memory.oom_control`, 'r');
  try {
    writeFileSync(`${folder}/cgroup.event_control`, `${event} ${control}`);
  } finally {
    closeSync(control);
  }
  return event;
}

/** Raised once more first, so that reading it never waits. */
function wasRaised(event: number): boolean {
  raiseEventFd(event);
  const count = Buffer.alloc(8);
  readSync(event, count);
  return count.readBigUInt64LE() > 1n;
}
