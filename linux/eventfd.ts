/** A counter that one thread raises and another waits for: how a thread that sits in a system call is woken. */
import { writeSync } from 'node:fs';
import { type Call, call } from './libc.ts';

const EVENTFD = { name: 'eventfd', result: 'int', args: ['uint32_t', 'int'] } as const satisfies Call;
const EFD_CLOEXEC = 0o2000000;
const ONE = Buffer.from([1, 0, 0, 0, 0, 0, 0, 0]);

/** Reading 8 bytes of it waits until it is raised, and sets it to zero. */
export function makeEventFd(): number {
  return call(EVENTFD, [0, EFD_CLOEXEC], 'eventfd');
}

export function raiseEventFd(fd: number): void {
  writeSync(fd, ONE);
}
