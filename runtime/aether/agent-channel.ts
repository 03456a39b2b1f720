/**
 * The way between one sandbox's agent and this process, and what is known of its commands where they run: on this machine through the keeper and
 * control groups here (`keptChannel`, `cgroupTrees`), in a virtual machine through its port and the guest's groups (vm/vm-link.ts). What
 * an agent sends comes to whoever made the channel, once and in order, whoever dies in between.
 */
import { readFileSync } from 'node:fs';
import { AGENT_FRAME, PayloadWriter } from '../backend/agent-wire.ts';
import { kill, membersOf, thawCommands } from '../backend/cgroup-cleanup.ts';
import { type CommandGroups, groupOf, killGroup, memoryGroupOf, outOfMemoryIn, removeGroup } from './command-group.ts';
import type { KeeperChannel } from './keeper-channel.ts';

export interface AgentChannel {
  /** A frame. `group`: folder of the control group that goes with it; it is made where the agent is. */
  toAgent(kind: number, about: number, payload?: Buffer, group?: string): void;
  /** Ends the agent, and the sandbox with it. */
  cancel(): void;
}

/** All that a command has started, as a whole. */
export interface CommandTrees {
  /** Folder of its control group. Undefined where there are none: it is a process group then. */
  groupOf(command: number): string | undefined;
  /** Resolves when nothing of it is left, or after some seconds. */
  killAll(command: number): Promise<void>;
  /** SIGKILL to all but `pid`, its number inside. */
  killOthers(command: number, pid: number): Promise<void>;
  /** It is over; what is still in it stays. */
  remove(command: number): void;
  /** How often memory ran out so far. */
  outOfMemoryCount(): number;
  /** Nothing stands still any more. */
  thaw(): void;
}

export function keptChannel(keeper: KeeperChannel, keptId: number): AgentChannel {
  return {
    toAgent: (kind, about, payload, group) => keeper.toAgent(keptId, kind, about, payload, group),
    cancel: () => keeper.cancel(keptId),
  };
}

const SIGKILL = 9;

/** @param cgroups All groups of the sandbox. */
export function cgroupTrees(
  groups: CommandGroups | undefined,
  cgroups: readonly string[],
  channel: AgentChannel,
): CommandTrees {
  let memory: string | undefined;
  return {
    groupOf: (command) => groups && groupOf(groups, command),
    async killAll(command) {
      if (groups !== undefined) return killGroup(groups, command);
      channel.toAgent(AGENT_FRAME.kill, command, new PayloadWriter().u32(SIGKILL).u8(0).done());
    },
    async killOthers(command, pid) {
      if (groups === undefined) return;
      for (const member of membersOf(groupOf(groups, command))) {
        if (pidInside(member) !== pid) kill(member);
      }
    },
    remove(command) {
      if (groups !== undefined) removeGroup(groups, command);
    },
    outOfMemoryCount() {
      memory ??= memoryGroupOf(cgroups);
      return memory === undefined ? 0 : outOfMemoryIn(memory);
    },
    thaw() {
      if (groups !== undefined) thawCommands(groups.parent);
    },
  };
}

/** Of a process of this machine: its number in the innermost namespace. */
function pidInside(pid: number): number | undefined {
  try {
    const line = /^NSpid:\s*(.*)$/m.exec(readFileSync(`/proc/${pid}/status`, 'latin1'))?.[1];
    return line === undefined ? undefined : Number(line.trim().split(/\s+/).at(-1));
  } catch {
    return undefined;
  }
}
