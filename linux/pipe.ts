/** Anonymous pipes. Node makes sockets where one asks it for a pipe; programs that open /dev/stdout again need the real thing. */
import { type Call, call } from './libc.ts';

const PIPE2: Call = { name: 'pipe2', result: 'int', args: ['void*', 'int'] };
const O_CLOEXEC = 0o2000000;

export interface Pipe {
  readonly readFd: number;
  readonly writeFd: number;
}

/** Both ends blocking and close-on-exec. */
export function makePipe(): Pipe {
  const ends = Buffer.alloc(8);
  call(PIPE2, [ends, O_CLOEXEC], 'pipe');
  return { readFd: ends.readInt32LE(0), writeFd: ends.readInt32LE(4) };
}
