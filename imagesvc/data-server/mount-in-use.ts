/** Who still uses a FUSE mount of ours, as far as tables tell: other mount namespaces, copies of it, requests without an answer. */
import { readdirSync, readFileSync, readlinkSync } from 'node:fs';
import { type MountRow, mountsAt, readMountInfo } from '#linux';

/**
 * Whether another mount namespace shows the file system in a mount of its own. Copies that follow ours (services of systemd
 * have them) do not count: unmounting reaches them, and fails while one of them is in use.
 */
export function mountedElsewhere(source: string): boolean {
  const seen = new Set([readlinkSync('/proc/self/ns/mnt')]);
  const group = readMountInfo()
    .find((row) => row.source === source)
    ?.propagation.find((one) => one.startsWith('shared:'))
    ?.slice('shared:'.length);
  const follows = ({ propagation }: MountRow) =>
    group !== undefined && (propagation.includes(`shared:${group}`) || propagation.includes(`master:${group}`));
  for (const pid of readdirSync('/proc')) {
    if (!/^\d+$/.test(pid)) continue;
    try {
      const namespace = readlinkSync(`/proc/${pid}/ns/mnt`);
      if (seen.has(namespace)) continue;
      seen.add(namespace);
      if (readMountInfo(Number(pid)).some((row) => row.source === source && !follows(row))) return true;
    } catch {
      // Ended meanwhile.
    }
  }
  return false;
}

/** Requests that the kernel has no answer to; 1 when it does not say. */
export function waiting(mountPoint: string): number {
  try {
    const connection = mountsAt(mountPoint).at(-1)?.device.split(':')[1];
    return Number(readFileSync(`/sys/fs/fuse/connections/${connection}/waiting`, 'latin1'));
  } catch {
    return 1;
  }
}

/** Whether the file system of `source` is mounted in this namespace more than once. */
export function hasCopies(source: string): boolean {
  return readMountInfo().filter((row) => row.source === source).length > 1;
}
