/**
 * Reads that never wait for the disk: what the page cache holds is copied at once, anything else is told apart from an error.
 *
 * A server that answers from its own thread reads this way first; a thread of the pool reads the rest (Node's fs.read).
 */
import { type Bound, bind, syscallError } from './libc.ts';
import { addressOf } from './memory.ts';

const PREADV2 = { name: 'preadv2', result: 'long', args: ['int', 'void*', 'int', 'int64_t', 'int'] } as const;
const RWF_NOWAIT = 8;
const EINTR = 4;
const EAGAIN = 11;
const EINVAL = 22;
const ENOSYS = 38;
const EOPNOTSUPP = 95;

let preadv2: Bound | undefined;
const vector = Buffer.alloc(16);
const words = new Uint32Array(vector.buffer, vector.byteOffset, 4);

/**
 * Copies up to `length` bytes of the file from `position` to `into[at..]`.
 * @returns how many: fewer than asked where the rest is not in memory, or the file ends; 0 where nothing is.
 *   Undefined: this file system cannot tell, so that trying again is of no use.
 * @throws SyscallError
 */
export function readNow(fd: number, into: Buffer, at: number, length: number, position: number): number | undefined {
  if (at < 0 || length < 0 || at + length > into.length) throw syscallError('preadv2', EINVAL, `fd ${fd}`);
  preadv2 ??= bind(PREADV2);
  const address = addressOf(into) + at;
  words[0] = address >>> 0;
  words[1] = Math.floor(address / 2 ** 32);
  words[2] = length;
  words[3] = 0;
  const count = preadv2.call(fd, vector, 1, position, RWF_NOWAIT);
  if (count >= 0) return count;
  const errno = preadv2.errno();
  if (errno === EAGAIN || errno === EINTR) return 0;
  if (errno === EOPNOTSUPP || errno === ENOSYS) return undefined;
  throw syscallError('preadv2', errno, `fd ${fd}`);
}
