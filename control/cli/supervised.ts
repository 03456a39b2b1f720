/** A service that another process looks after ends with that one: it sees the end of its standard input, which nothing else can bring about. */
import { SUPERVISED } from '../cluster/supervisor.ts';

export function endWithSupervisor(): void {
  if (process.env[SUPERVISED] !== '1') return;
  // What this one starts is not looked after.
  delete process.env[SUPERVISED];
  const end = () => process.kill(process.pid, 'SIGTERM');
  process.stdin.once('end', end);
  process.stdin.once('error', end);
  process.stdin.resume();
}
