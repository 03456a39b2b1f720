/**
 * Which descriptors have something to read: asked by one thread that sleeps, for another that serves them. Each is watched once
 * (EPOLLONESHOT) and then has to be watched again, so that the sleeper is not woken by what is being served.
 */
import { type Bound, bind, type Call, call, syscallError } from './libc.ts';

const EPOLL_CREATE: Call = { name: 'epoll_create1', result: 'int', args: ['int'] };
const EPOLL_CTL = { name: 'epoll_ctl', result: 'int', args: ['int', 'int', 'int', 'void*'] } as const;
const EPOLL_WAIT: Call = { name: 'epoll_wait', result: 'int', args: ['int', 'void*', 'int', 'int'] };
const CLOEXEC = 0o2000000;
const CTL = { ADD: 1, DELETE: 2, MODIFY: 3 } as const;
const IN = 1;
const ONESHOT = 1 << 30;
/** struct epoll_event is packed on x64 alone. */
const EVENT_BYTES = process.arch === 'x64' ? 12 : 16;
const DATA = EVENT_BYTES - 8;

let control: Bound | undefined;
const event = Buffer.alloc(EVENT_BYTES);

export function makeEpoll(): number {
  return call(EPOLL_CREATE, [CLOEXEC], 'epoll');
}

/** Reports `tag` once, when `fd` has something to read or is broken; `again`: it was watched before. */
export function watchOnce(epoll: number, fd: number, tag: number, again: boolean): void {
  event.writeUInt32LE(IN | ONESHOT, 0);
  event.writeUInt32LE(tag, DATA);
  change(epoll, again ? CTL.MODIFY : CTL.ADD, fd);
}

/** Before it is closed: a copy that another process has would keep it watched. */
export function unwatch(epoll: number, fd: number): void {
  change(epoll, CTL.DELETE, fd);
}

function change(epoll: number, how: number, fd: number): void {
  control ??= bind(EPOLL_CTL);
  if (control.call(epoll, how, fd, event) !== 0) throw syscallError('epoll_ctl', control.errno(), `fd ${fd}`);
}

/** Sleeps until there is something; the tags. */
export function waitForTags(epoll: number): number[] {
  const MOST = 32;
  const events = Buffer.alloc(MOST * EVENT_BYTES);
  const count = call(EPOLL_WAIT, [epoll, events, MOST, -1], 'epoll');
  return Array.from({ length: count }, (_, index) => events.readUInt32LE(index * EVENT_BYTES + DATA));
}
