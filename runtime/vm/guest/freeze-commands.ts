/** All commands of a guest stand still, by its own control groups, and go on; its agent and its first process do not. */
import { setTimeout as delay } from 'node:timers/promises';
import { fail } from '../../errors.ts';
import { GUEST_COMMANDS } from './guest-groups.ts';
import type { GuestLink } from './guest-link.ts';
import { filesRead, guestWork } from './guest-order.ts';

/** An emulated guest on a machine that is pressed takes seconds. */
const FROZEN_MS = 30_000;
const FILE = `${GUEST_COMMANDS}/cgroup.freeze`;
const EVENTS = `${GUEST_COMMANDS}/cgroup.events`;

type Guest = Pick<GuestLink, 'work'>;

/** All go on when it fails. @param name For errors. @throws VM_GUEST_STUCK when a process does not stand still, VM_GUEST_SILENT, GuestFailure */
export async function freezeCommands(guest: Guest, name: string): Promise<void> {
  try {
    await guest.work(guestWork.write(FILE, '1'));
    const until = performance.now() + FROZEN_MS;
    for (let pause = 1; ; pause = Math.min(50, pause * 2)) {
      const [events] = filesRead(await guest.work(guestWork.read([EVENTS])), 1);
      if (/^frozen 1$/m.test(events ?? '')) return;
      if (performance.now() > until) throw fail('VM_GUEST_STUCK', { name, seconds: FROZEN_MS / 1000 });
      await delay(pause);
    }
  } catch (error) {
    // A guest that is late does what it was told all the same, in its order. It is not waited for once more.
    thawCommands(guest).catch(() => {});
    throw error;
  }
}

/** Of those that run already: nothing. */
export async function thawCommands(guest: Guest): Promise<void> {
  await guest.work(guestWork.write(FILE, '0'));
}
