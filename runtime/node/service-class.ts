/**
 * Service classes. `ls`, latency-sensitive, is what every sandbox is by default: an equal among equals. `be`, best effort, runs when no other sandbox
 * wants the processor: cpu.idle of its control group, else the lowest weight and SCHED_IDLE; and where the kernel has core scheduling
 * it shares a core's hyper-threads with nobody. Nothing inside can leave its class.
 */
import { existsSync, writeFileSync } from 'node:fs';
import { scheduleWhenIdle, takeCoreAlone } from '#linux';
import type { ServiceClass } from '../sandbox-api/sandbox.ts';

/** What was done, for whoever wants to know. */
export interface AppliedClass {
  /** `file=value` of its control groups. */
  readonly writes: readonly string[];
  readonly scheduledWhenIdle: boolean;
  readonly coreAlone: boolean;
}

/** To a sandbox before it runs a command: `pid`, its first process, hands it on. Twice is no error. @throws EPERM, ESRCH */
export function applyClass(serviceClass: ServiceClass, pid: number, cgroups: readonly string[]): AppliedClass {
  const writes: string[] = [];
  if (serviceClass === 'ls') return { writes, scheduledWhenIdle: false, coreAlone: false };
  const set = (file: string, value: string) => {
    const path = cgroups.map((folder) => `${folder}/${file}`).find((one) => existsSync(one));
    if (path === undefined) return false;
    writeFileSync(path, value);
    writes.push(`${file}=${value}`);
    return true;
  };
  const idle = set('cpu.idle', '1');
  if (!idle) {
    if (!set('cpu.weight', '1')) set('cpu.shares', '2');
    scheduleWhenIdle(pid);
  }
  set('io.weight', 'default 1');
  return { writes, scheduledWhenIdle: !idle, coreAlone: takeCoreAlone(pid) === undefined };
}
