/**
 * For threads that a block device or file system is served by.
 *
 * When memory is short, the kernel makes a thread that asks for some write dirty pages out first, and slows down who makes pages dirty. A
 * thread that serves the very device which those pages go to would wait for itself. Told so (PR_SET_IO_FLUSHER, Linux 5.6), the kernel
 * gives this thread memory without writing anything, and slows it down only for what it writes to itself. Threads and programs that
 * it starts inherit this, so it comes before the first of them.
 */
import { systemCode } from '#base';
import { type Call, call } from './libc.ts';

const PRCTL: Call = { name: 'prctl', result: 'int', args: ['int', 'ulong', 'ulong', 'ulong', 'ulong'] };
const PR_SET_IO_FLUSHER = 57;

/** False where the kernel refuses: it takes CAP_SYS_RESOURCE. Serving works without, as long as memory is not short. */
export function becomeIoFlusher(): boolean {
  try {
    call(PRCTL, [PR_SET_IO_FLUSHER, 1, 0, 0, 0], 'this thread');
    return true;
  } catch (error) {
    if (['EPERM', 'EINVAL', 'ENOSYS'].includes(systemCode(error) ?? '')) return false;
    throw error;
  }
}
