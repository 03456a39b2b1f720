/** Control groups in a guest: a command with all that it started, and what all commands use, asked of the guest's first process. */
import { setTimeout as delay } from 'node:timers/promises';
import type { CommandTrees } from '../../aether/agent-channel.ts';
import { GuestFailure, type GuestLink } from './guest-link.ts';
import { filesRead, guestWork } from './guest-order.ts';

/** Of all commands; the agent is not in it. */
export const GUEST_COMMANDS = '/sys/fs/cgroup/commands';
const ENOENT = 2;
const PATIENCE_MS = 10_000;

export function guestTrees(link: GuestLink): CommandTrees {
  const groupOf = (command: number) => `${GUEST_COMMANDS}/c${command}`;
  const isGone = async (command: number) => {
    try {
      await link.work(guestWork.removeFolder(groupOf(command)));
      return true;
    } catch (error) {
      if (error instanceof GuestFailure) return error.errno === ENOENT;
      return true;
    }
  };
  return {
    groupOf,
    async killAll(command) {
      const deadline = Date.now() + PATIENCE_MS;
      for (let pauseMs = 1; Date.now() < deadline; pauseMs = Math.min(pauseMs * 2, 50)) {
        await link.work(guestWork.write(`${groupOf(command)}/cgroup.kill`, '1')).catch(() => {});
        if (await isGone(command)) return;
        await delay(pauseMs);
      }
    },
    async killOthers(command, pid) {
      await link.work(guestWork.killOthers(groupOf(command), pid)).catch(() => {});
    },
    remove(command) {
      isGone(command).catch(() => {});
    },
    outOfMemoryCount: () => link.outOfMemoryCount,
    thaw() {},
  };
}

export interface GuestUsage {
  /** Processes of commands. */
  readonly pids: number;
  readonly memoryBytes: number;
  readonly outOfMemory: number;
  readonly io: {
    readonly readBytes: number;
    readonly writeBytes: number;
    readonly reads: number;
    readonly writes: number;
  };
}

/** @throws what the link was closed with */
export async function guestUsage(link: GuestLink): Promise<GuestUsage> {
  const names = ['pids.current', 'memory.current', 'memory.events', 'io.stat'];
  const answer = await link.work(guestWork.read(names.map((name) => `${GUEST_COMMANDS}/${name}`)));
  const [pids, memory, events, io = ''] = filesRead(answer, names.length);
  const sum = (key: string) =>
    [...io.matchAll(new RegExp(`\\b${key}=(\\d+)`, 'g'))].reduce((total, found) => total + Number(found[1]), 0);
  return {
    pids: Number(pids ?? 0),
    memoryBytes: Number(memory ?? 0),
    outOfMemory: Number(/^oom_kill (\d+)$/m.exec(events ?? '')?.[1] ?? 0),
    io: { readBytes: sum('rbytes'), writeBytes: sum('wbytes'), reads: sum('rios'), writes: sum('wios') },
  };
}
