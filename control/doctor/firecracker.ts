/** Whether Firecracker could run machines here: its programs, a version that is not refused, KVM that runs what is started. */
import type { Feature } from '#linux';
import { firecrackerState } from '#runtime';

export function firecrackerRow(): Feature {
  const { missing, binary, jailer, version } = firecrackerState();
  const found = version === undefined ? '' : ` ${version.major}.${version.minor}.${version.patch}`;
  return {
    name: 'firecracker',
    present: missing === undefined,
    detail: missing ?? `${binary}${found}, ${jailer === undefined ? 'without its jailer' : jailer}`,
    usedFor: 'dsec sandbox create --backend microvm',
    fallback: 'they run under QEMU',
    later: true,
  };
}
