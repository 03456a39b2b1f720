/**
 * A file in memory without a name (memfd_create), gone with the last who has it open. Sealed, nobody can change it any more, by a descriptor or by
 * a mapping; private mappings of it can still be written to.
 */
import { SyscallError } from './errors.ts';
import { type Call, call } from './libc.ts';

const MEMFD_CREATE: Call = { name: 'memfd_create', result: 'int', args: ['void*', 'uint'] };
const FCNTL: Call = { name: 'fcntl', result: 'int', args: ['int', 'int', 'int'] };
const MFD_CLOEXEC = 1;
const MFD_ALLOW_SEALING = 2;
/** Since 6.3; machines may ask for it (vm.memfd_noexec). */
const MFD_NOEXEC_SEAL = 8;
const EINVAL = 22;
const F_ADD_SEALS = 1033;
const SEAL_ALL = 0x1 | 0x2 | 0x4 | 0x8;

/** Close-on-exec; /proc/PID/fd/N opens it anew. `name` is what /proc shows. */
export function makeMemoryFile(name: string): number {
  const make = (flags: number) => call(MEMFD_CREATE, [Buffer.from(`${name}\0`), flags], name);
  const flags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
  try {
    return make(flags | MFD_NOEXEC_SEAL);
  } catch (error) {
    if (!(error instanceof SyscallError) || error.errno !== EINVAL) throw error;
    return make(flags);
  }
}

/** Size and contents stay as they are. @throws EBUSY while it is mapped writable by several */
export function sealMemoryFile(fd: number): void {
  call(FCNTL, [fd, F_ADD_SEALS, SEAL_ALL], `fd ${fd}`);
}
