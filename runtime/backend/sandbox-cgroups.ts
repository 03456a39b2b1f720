/** The groups that a sandbox gets: one in each v1 hierarchy, or one in the v2 tree where there is nothing else. */
import { bytesOf } from '#base';
import { type MountRow, readMountInfo } from '#linux';
import { deviceLines, deviceProgram } from './device-rules.ts';
import { CGROUP_PARENT } from './oci-spec.ts';

export interface SandboxCgroup {
  readonly folder: string;
  readonly isCpuset: boolean;
  /** File in the group, value. */
  readonly writes: readonly (readonly [string, string])[];
  /** For a v2 group. */
  readonly deviceProgram?: Buffer;
}

/** Beside v1 controllers a v2 tree has none itself: only the v1 hierarchies count then, as OCI runtimes have it. */
export function sandboxCgroups(id: string, rows: readonly MountRow[] = readMountInfo()): SandboxCgroup[] {
  const folderIn = (row: MountRow) => `${bytesOf(row.mountPoint).toString()}/${CGROUP_PARENT}/${id}`;
  // One hierarchy can be mounted in several places.
  const distinct = (type: string) => [
    ...new Map(rows.filter((row) => row.type === type).map((row) => [row.device, row])).values(),
  ];
  const v1 = distinct('cgroup').map((row): SandboxCgroup => {
    const controllers = row.superOptions.split(',');
    return {
      folder: folderIn(row),
      isCpuset: controllers.includes('cpuset'),
      writes: controllers.includes('devices') ? deviceLines() : [],
    };
  });
  if (v1.length > 0) return v1;
  return distinct('cgroup2')
    .slice(0, 1)
    .map((row) => ({ folder: folderIn(row), isCpuset: false, writes: [], deviceProgram: deviceProgram() }));
}
