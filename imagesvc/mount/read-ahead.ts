/** How far the kernel reads ahead of a sequential reader of a mount. Best effort: a container may show /sys read-only. */
import { statSync, writeFileSync } from 'node:fs';
import { splitDevice } from '#linux';

/** The largest request of FUSE: what lies behind each read is remote, or at least another process. */
export const READ_AHEAD_KIB = 1024;

export function setReadAhead(mountPoint: string, kib: number): void {
  const { major, minor } = splitDevice(statSync(mountPoint).dev);
  setReadAheadOf(`${major}:${minor}`, kib);
}

/** `major:minor` of the file system. */
export function setReadAheadOf(device: string, kib: number): void {
  try {
    writeFileSync(`/sys/class/bdi/${device}/read_ahead_kb`, String(kib));
  } catch {
    // Then reads are smaller.
  }
}
