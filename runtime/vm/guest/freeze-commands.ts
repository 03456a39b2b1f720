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

/** @param name For errors. @throws VM_GUEST_STUCK when a process does not stand still; then all go on. VM_GUEST_SILENT */
export async function freezeCommands(guest: GuestLink, name: string): Promise<void> {
  await guest.work(guestWork.write(FILE, '1'));
  const until = performance.now() + FROZEN_MS;
  for (let pause = 1; ; pause = Math.min(50, pause * 2)) {
    const [events] = filesRead(await guest.work(guestWork.read([EVENTS])), 1);
    if (/^frozen 1$/m.test(events ?? '')) return;
    if (performance.now() > until) {
      await thawCommands(guest).catch(() => {});
      throw fail('VM_GUEST_STUCK', { name, seconds: FROZEN_MS / 1000 });
    }
    await delay(pause);
  }
}

/** Of those that run already: nothing. */
export async function thawCommands(guest: GuestLink): Promise<void> {
  await guest.work(guestWork.write(FILE, '0'));
}
