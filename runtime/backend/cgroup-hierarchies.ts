/**
 * The control group hierarchies that are mounted here. The mount table that tells of them has a row for every sandbox of the machine,
 * and each creation and each end asks several times, so what was read is good for some seconds.
 */
import { type MountRow, readMountInfo } from '#linux';

const GOOD_FOR_MS = 5_000;

let known: { readonly rows: readonly MountRow[]; readonly atMs: number } | undefined;

export function cgroupRows(): readonly MountRow[] {
  const now = performance.now();
  if (known === undefined || now - known.atMs > GOOD_FOR_MS) {
    const rows = readMountInfo().filter(({ type }) => type === 'cgroup' || type === 'cgroup2');
    known = { rows, atMs: now };
  }
  return known.rows;
}
