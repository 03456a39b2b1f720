/**
 * Named places where a test may kill the process, to prove that whatever it leaves behind is cleaned up. A no-op unless
 * DSEC_FAILPOINT names the place. SIGKILL, so that no handler, no `finally` and no exit hook runs: a crash, not an end.
 *
 * And places where something may go wrong: a test in this process can have some of them throw (`injectFaults`).
 */
export class InjectedFault extends Error {
  readonly code = 'EIO';
}

let fails: ((name: string) => boolean) | undefined;

/** From now on each place for which `at` says so throws; undefined: none does. For tests. */
export function injectFaults(at: ((name: string) => boolean) | undefined): void {
  fails = at;
}

export function failPoint(name: string): void {
  if (process.env.DSEC_FAILPOINT === name) process.kill(process.pid, 'SIGKILL');
  if (fails?.(name) === true) throw new InjectedFault(`injected at ${name}`);
}

/** The same, once all that this turn has written is on its way. */
export async function failPointSent(name: string): Promise<void> {
  if (process.env.DSEC_FAILPOINT !== name && fails === undefined) return;
  await new Promise((done) => setImmediate(done));
  failPoint(name);
}
