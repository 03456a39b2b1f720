/**
 * Disks of guests are logs: each write takes new room, also one over an older one. Looked at now and then, and compacted when what was written over takes
 * more than what is there, so that a guest that writes one block again and again does not fill this machine.
 */
import type { StackedDisk } from '#ublk-daemon';

const EVERY_MS = 5_000;
/** Of overwritten data, beside as much as there is data. */
const SLACK_BYTES = 256 << 20;

/** @returns what ends it; a compaction that is under way is waited for by the disk's `close` */
export function keepCompact(
  disks: readonly StackedDisk[],
  { everyMs = EVERY_MS, slackBytes = SLACK_BYTES } = {},
): () => void {
  /** What each disk had taken in its life when it was last compacted. */
  const before = new Map<StackedDisk, number>();
  const busy = new Set<StackedDisk>();
  const look = (disk: StackedDisk) => {
    const { liveBytes, usedBytes } = disk.usage ?? { liveBytes: 0, usedBytes: 0 };
    if (busy.has(disk) || usedBytes - (before.get(disk) ?? 0) <= liveBytes + slackBytes) return;
    busy.add(disk);
    disk
      .compact()
      .then(
        // The data stays where it is: what has been taken grows on.
        () => before.set(disk, usedBytes - liveBytes),
        // A full or broken disk says so to whoever writes.
        () => {},
      )
      .finally(() => busy.delete(disk));
  };
  const timer = setInterval(() => disks.forEach(look), everyMs).unref();
  return () => clearInterval(timer);
}
