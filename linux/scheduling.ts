/** How a process is scheduled; what it starts afterwards inherits it. */
import { SyscallError } from './errors.ts';
import { type Call, call } from './libc.ts';

const SCHED_SETSCHEDULER: Call = { name: 'sched_setscheduler', result: 'int', args: ['int', 'int', 'void*'] };
const SCHED_GETSCHEDULER: Call = { name: 'sched_getscheduler', result: 'int', args: ['int'] };
const PRCTL: Call = { name: 'prctl', result: 'int', args: ['int', 'ulong', 'ulong', 'ulong', 'void*'] };
const SCHED_IDLE = 5;
const PR_SCHED_CORE = 62;
const PR_SCHED_CORE_GET = 0;
const PR_SCHED_CORE_CREATE = 1;
const THIS_THREAD = 0;
const THREAD_GROUP = 1;

/** It runs when nobody else wants to. @throws ESRCH, EPERM */
export function scheduleWhenIdle(pid: number): void {
  // struct sched_param: a priority, which this class has none of.
  call(SCHED_SETSCHEDULER, [pid, SCHED_IDLE, Buffer.alloc(4)], `pid ${pid}`);
}

export function isScheduledWhenIdle(pid: number): boolean {
  return call(SCHED_GETSCHEDULER, [pid], `pid ${pid}`) === SCHED_IDLE;
}

/** Why there is no core scheduling; undefined: there is. */
export function coreSchedulingMissing(): string | undefined {
  return coreCall(PR_SCHED_CORE_GET, 0, THIS_THREAD, Buffer.alloc(8));
}

/**
 * From now on the process and what it starts share a processor core (its hyper-threads) with nobody else. Why not, where the kernel or the
 * processor has no such thing. @throws ESRCH, EPERM
 */
export function takeCoreAlone(pid: number): string | undefined {
  return coreCall(PR_SCHED_CORE_CREATE, pid, THREAD_GROUP, null);
}

function coreCall(command: number, pid: number, scope: number, result: Buffer | null): string | undefined {
  try {
    call(PRCTL, [PR_SCHED_CORE, command, pid, scope, result]);
    return undefined;
  } catch (error) {
    if (!(error instanceof SyscallError)) throw error;
    if (error.code === 'EINVAL') return 'not in this kernel';
    if (error.code === 'ENODEV') return 'this processor has no hyper-threads';
    throw error;
  }
}
