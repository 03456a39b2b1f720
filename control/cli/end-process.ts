/**
 * Ends the process with a status, also when the terminal that it was started on has gone. Node gives terminals their settings back at its exit,
 * takes it for a fault of its own when one has hung up, and crashes while it tells of that.
 */
import { isatty } from 'node:tty';
import { exitNow } from '#linux';

const terminals = [0, 1, 2].filter((fd) => isatty(fd));

export function endProcess(status: number): never {
  // One that has hung up answers nothing, not even that it is one.
  if (terminals.some((fd) => !isatty(fd))) {
    try {
      exitNow(status);
    } catch {
      // Without a C library to call.
    }
  }
  return process.exit(status);
}
