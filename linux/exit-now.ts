/** Ends this process at once, with nothing of Node's or the C library's own that comes at an exit. */
import { type Call, call } from './libc.ts';

const EXIT: Call = { name: '_exit', result: 'int', args: ['int'] };

export function exitNow(status: number): never {
  call(EXIT, [status], 'exit');
  // It does not come back.
  return process.exit(status);
}
