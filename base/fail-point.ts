/**
 * Named places where a test may kill the process, to prove that whatever it leaves behind is cleaned up. A no-op unless
 * DSEC_FAILPOINT names the place. SIGKILL, so that no handler, no `finally` and no exit hook runs: a crash, not an end.
 */
export function failPoint(name: string): void {
  if (process.env.DSEC_FAILPOINT === name) process.kill(process.pid, 'SIGKILL');
}
