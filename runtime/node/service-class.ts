/**
 * Service classes. `ls`, latency-sensitive, is what every sandbox is by default: an equal among equals. `be`, best effort, runs when nothing else on the machine
 * wants the processor: cpu.idle of the control group that all of best effort are in, else the lowest weight and SCHED_IDLE; and where the kernel has core
 * scheduling it shares a core's hyper-threads with nobody. Nothing inside can leave its class. A virtual machine is its process: virtual processors and I/O are
 * threads of it.
 */
import { existsSync, readdirSync, writeFileSync } from 'node:fs';
import { systemCode } from '#base';
import { isScheduledWhenIdle, scheduleWhenIdle, takeCoreAlone } from '#linux';
import { classGroup } from '../backend/sandbox-group.ts';
import type { ServiceClass } from '../sandbox-api/sandbox.ts';

/** What was done, for whoever wants to know. */
export interface AppliedClass {
  /** `file=value` of its control groups. */
  readonly writes: readonly string[];
  readonly scheduledWhenIdle: boolean;
  readonly coreAlone: boolean;
}

/** To a sandbox before it runs a command: `pid`, its first process, hands it on; all threads that it has by now are meant. Twice is no error. @throws EPERM, ESRCH */
export function applyClass(serviceClass: ServiceClass, pid: number, cgroups: readonly string[]): AppliedClass {
  const writes: string[] = [];
  if (serviceClass === 'ls') return { writes, scheduledWhenIdle: false, coreAlone: false };
  const groups = cgroups.map(classGroup);
  const set = (file: string, value: string) => {
    const path = groups.map((folder) => `${folder}/${file}`).find((one) => existsSync(one));
    if (path === undefined) return false;
    writeFileSync(path, value);
    writes.push(`${file}=${value}`);
    return true;
  };
  const idle = set('cpu.idle', '1');
  if (!idle) {
    if (!set('cpu.weight', '1')) set('cpu.shares', '2');
    scheduleThreads(pid);
  }
  set('io.weight', 'default 1');
  return { writes, scheduledWhenIdle: !idle, coreAlone: takeCoreAlone(pid) === undefined };
}

/** Until none is left that was started meanwhile by one whose turn had not come. */
function scheduleThreads(pid: number): void {
  scheduleWhenIdle(pid);
  for (;;) {
    const left = readdirSync(`/proc/${pid}/task`).filter(
      (thread) => !isGoneOr(() => isScheduledWhenIdle(Number(thread))),
    );
    if (left.length === 0) return;
    for (const thread of left) {
      isGoneOr(() => {
        scheduleWhenIdle(Number(thread));
        return true;
      });
    }
  }
}

/** A thread that has ended needs none. */
function isGoneOr(work: () => boolean): boolean {
  try {
    return work();
  } catch (error) {
    if (systemCode(error) === 'ESRCH') return true;
    throw error;
  }
}
