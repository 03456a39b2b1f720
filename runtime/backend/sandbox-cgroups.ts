/**
 * The groups that a sandbox gets: one in each v1 hierarchy, and one in the v2 tree where no v1 hierarchy says which devices may be
 * opened. Where neither can say it nothing runs: root in a sandbox could open the machine's disk.
 */
import { bytesOf } from '#base';
import { type MountRow, readMountInfo } from '#linux';
import { fail } from '../errors.ts';
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

export interface SandboxLimits {
  readonly memoryBytes?: number;
  /** Processes and threads. */
  readonly pids?: number;
}

function limitWrites(
  controllers: readonly string[],
  { memoryBytes, pids }: SandboxLimits,
): (readonly [string, string])[] {
  const writes: (readonly [string, string])[] = [];
  if (memoryBytes !== undefined && controllers.includes('memory'))
    writes.push(['memory.limit_in_bytes', String(memoryBytes)]);
  if (pids !== undefined && controllers.includes('pids')) writes.push(['pids.max', String(pids)]);
  return writes;
}

function limitWritesV2({ memoryBytes, pids }: SandboxLimits): (readonly [string, string])[] {
  const memory = memoryBytes === undefined ? [] : [['memory.max', String(memoryBytes)] as const];
  return [...memory, ...(pids === undefined ? [] : [['pids.max', String(pids)] as const])];
}

/** Beside v1 controllers a v2 tree has none itself: only the v1 hierarchies count then, as OCI runtimes have it. @throws RUNTIME_START_FAILED */
export function sandboxCgroups(
  id: string,
  rows: readonly MountRow[] = readMountInfo(),
  limits: SandboxLimits = {},
): SandboxCgroup[] {
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
      writes: [...(controllers.includes('devices') ? deviceLines() : []), ...limitWrites(controllers, limits)],
    };
  });
  if (v1.some(({ writes }) => writes.some(([file]) => file.startsWith('devices.')))) return v1;
  // A v1 hierarchy without controllers (name=systemd, for old containers) may lie beside a v2 tree that is in use.
  const [v2] = distinct('cgroup2');
  if (v2 === undefined) {
    const reason = 'no control group can close devices to it: neither the v1 devices controller nor cgroup2 is mounted';
    throw fail('RUNTIME_START_FAILED', { runtime: 'dsec', reason });
  }
  return [
    ...v1,
    { folder: folderIn(v2), isCpuset: false, writes: limitWritesV2(limits), deviceProgram: deviceProgram() },
  ];
}
