/**
 * A short look into another network namespace. What the kernel makes belongs to the namespace of the thread that asks, so the calling thread
 * goes there, runs something synchronous and comes back; sockets made meanwhile stay there, and so does /proc/sys/net as it was opened.
 */
import { closeSync, openSync, readlinkSync } from 'node:fs';
import { type Call, call } from './libc.ts';

const SETNS: Call = { name: 'setns', result: 'int', args: ['int', 'int'] };
const CLONE_NEWNET = 0x40000000;
const OWN = '/proc/thread-self/ns/net';

/** @param fd An open /proc/PID/ns/net. @param work Must not wait: all of this thread is there. */
export function inNetworkNamespace<T>(fd: number, work: () => T): T {
  const home = openSync(OWN, 'r');
  try {
    call(SETNS, [fd, CLONE_NEWNET], 'network namespace');
    try {
      return work();
    } finally {
      comeBack(home);
    }
  } finally {
    closeSync(home);
  }
}

/** In the wrong namespace this process would do other things than it is asked for. */
function comeBack(home: number): void {
  try {
    call(SETNS, [home, CLONE_NEWNET], OWN);
  } catch (error) {
    process.stderr.write(`cannot return to the network namespace of this process: ${error}\n`);
    process.abort();
  }
}

/** The same text for the same namespace. */
export function networkNamespaceOf(pid: number | 'thread-self'): string {
  return readlinkSync(`/proc/${pid}/ns/net`);
}
