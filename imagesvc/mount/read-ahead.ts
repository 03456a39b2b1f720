/** How far the kernel reads ahead of a sequential reader of a mount. Best effort: a container may show /sys read-only. */
import { readdirSync, statSync, writeFileSync } from 'node:fs';
import { splitDevice } from '#linux';

/** The largest request of FUSE: what lies behind each read is remote, or at least another process. */
export const READ_AHEAD_KIB = 1024;

const SETTINGS = '/sys/class/bdi';

/**
 * Runs `mount`, which mounts an EROFS at `mountPoint`, and sets the read-ahead of it. The kernel keeps the setting of a
 * file-backed EROFS under a name that no mount tells, `erofs-<number>`: it is the one that was not there before. One that
 * somebody else made at the same moment gets it too, which does no harm. A block device's setting has its number as a name.
 */
export function withErofsReadAhead(mountPoint: string, kib: number, mount: () => void): void {
  const before = new Set(erofsSettings());
  mount();
  for (const name of erofsSettings()) if (!before.has(name)) setReadAheadOf(name, kib);
  const { major, minor } = splitDevice(statSync(mountPoint).dev);
  if (major !== 0) setReadAheadOf(`${major}:${minor}`, kib);
}

function erofsSettings(): string[] {
  try {
    return readdirSync(SETTINGS).filter((name) => name.startsWith('erofs-'));
  } catch {
    return [];
  }
}

/** `name`: `major:minor`, or what the kernel calls it. */
export function setReadAheadOf(name: string, kib: number): void {
  try {
    writeFileSync(`${SETTINGS}/${name}/read_ahead_kb`, String(kib));
  } catch {
    // Then reads are smaller.
  }
}
