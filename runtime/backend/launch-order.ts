/**
 * The order for a sandbox as the launcher reads it (runtime/agent/src/order.rs), made from the same specification that an OCI
 * runtime gets: what a sandbox is isolated by is said once, in oci-spec.ts. In two parts: the preparation, which needs neither a
 * root nor a command and can be under way while the root is mounted, and the rest.
 */
import { PayloadWriter, PROTOCOL_VERSION } from './agent-wire.ts';
import type { LaunchSpec, PreparationSpec } from './backend.ts';
import { cgroupRows } from './cgroup-hierarchies.ts';
import { DEVICE_LINKS, DEVICE_NODES } from './device-rules.ts';
import { idExtents } from './id-ranges.ts';
import { namespacesOf, type OciMount, type OciSpec, ociSpec } from './oci-spec.ts';
import { type SandboxCgroup, sandboxCgroups } from './sandbox-cgroups.ts';
import { seccompFilter } from './seccomp-filter.ts';
import type { SeccompProfile } from './seccomp-profile.ts';

/** Standard streams: the launcher's own, or those that a client of the service has sent. */
export type OrderStdio = 'own' | { readonly client: number };

const UMASK = 0o022;

export function preparation(
  { id, network, idBase, limits, device }: Pick<PreparationSpec, 'id' | 'network' | 'idBase' | 'limits' | 'device'>,
  stdio: OrderStdio,
  cgroups: readonly SandboxCgroup[] = sandboxCgroups(id, cgroupRows(), { limits, device }),
): Buffer {
  const out = new PayloadWriter();
  out.u32(PROTOCOL_VERSION);
  out.u8(stdio === 'own' ? 0 : 1).u32(stdio === 'own' ? 0 : stdio.client);
  // The mount namespace comes with the order: the root is not mounted yet.
  const types = namespacesOf({ network, idBase }).filter((type) => type !== 'mount');
  out.u64(BigInt(types.reduce((flags, type) => flags | namespaceFlag(type), 0)));
  out.list(cgroups, ({ folder, isCpuset, isShared, writes, deviceProgram, leaf }) => {
    out.bytes(folder).u8((isCpuset ? 1 : 0) | (isShared ? 2 : 0));
    out.list(writes, ([file, value]) => out.bytes(file).bytes(value));
    out.bytes(deviceProgram ?? '').bytes(leaf ?? '');
  });
  out.list(idBase === undefined ? [] : idExtents(idBase), ({ inside, outside, count }) => {
    out.u32(inside).u32(outside).u32(count);
  });
  return out.done();
}

/**
 * `agent`: in place of the command, for so many milliseconds (0: without an end). `task`: what takes tasks (fncall/), which filters the calls of
 * those, not its own.
 */
export function launchOrder(
  spec: LaunchSpec,
  oci: OciSpec = ociSpec(spec),
  agent?: { readonly lifetimeMs: number } | 'task',
): Buffer {
  const { process, linux } = oci;
  const out = new PayloadWriter();
  out.u8(process.terminal ? 1 : 0);
  out.u16(process.consoleSize?.height ?? 0).u16(process.consoleSize?.width ?? 0);
  out.bytes(oci.root.path).bytes(oci.hostname);
  const binds = oci.mounts.filter(({ type }) => type === 'bind');
  out.list(binds, (mount) => {
    out
      .bytes(mount.source)
      .bytes(mount.destination)
      .u64(BigInt(mountOptions(mount).flags));
  });
  const mounts = oci.mounts.filter(({ type }) => type !== 'bind');
  out.list(mounts, (mount) => {
    const { flags, data } = mountOptions(mount);
    const [kind, what] = isPartOf(mounts, mount) ? ['folder', modeOf(mount)] : [mount.type, data];
    out.bytes(mount.destination).bytes(kind).bytes(mount.source).u64(BigInt(flags)).bytes(what);
  });
  out.list([...DEVICE_NODES, ...(spec.devices ?? [])], ({ path, mode, major, minor }) =>
    out.bytes(path).u32(mode).u32(major).u32(minor),
  );
  out.list(DEVICE_LINKS, ([path, target]) => out.bytes(path).bytes(target));
  out.list(linux.maskedPaths, (path) => out.bytes(path));
  out.list(linux.readonlyPaths, (path) => out.bytes(path));
  out.list(process.rlimits, ({ type, soft, hard }) => {
    out.u32(limitNumber(type)).u64(BigInt(soft)).u64(BigInt(hard));
  });
  const { bounding, effective } = process.capabilities;
  out.u64(capabilityBits(bounding)).u64(capabilityBits(effective));
  out.u32(process.user.uid).u32(process.user.gid);
  out.list(process.user.additionalGids, (gid) => out.u32(gid));
  out.u32(UMASK).bytes(process.cwd);
  out.list(process.args, (arg) => out.bytes(arg));
  out.list(process.env, (entry) => out.bytes(entry));
  if (agent === 'task') {
    out.bytes('').u8(2).u64(0n);
  } else {
    out.bytes(compiledFilter(linux.seccomp));
    out.u8(agent === undefined ? 0 : 1).u64(BigInt(agent?.lifetimeMs ?? 0));
  }
  out.bytes(process.apparmorProfile ?? '');
  return out.done();
}

const NAMESPACES: Readonly<Record<string, number>> = {
  user: 0x10000000,
  mount: 0x20000,
  uts: 0x4000000,
  ipc: 0x8000000,
  pid: 0x20000000,
  network: 0x40000000,
};

function namespaceFlag(type: string): number {
  const flag = NAMESPACES[type];
  if (flag === undefined) throw new TypeError(`namespace ${type}`);
  return flag;
}

const MOUNT_FLAGS: Readonly<Record<string, number>> = {
  ro: 1,
  nosuid: 2,
  nodev: 4,
  noexec: 8,
  strictatime: 1 << 24,
  // How a bind is made is the launcher's business.
  rbind: 0,
};

/** A tmpfs below another is a folder of that one, and counts towards its size: a file system less that the kernel keeps for each sandbox. */
function isPartOf(mounts: readonly OciMount[], { type, destination }: OciMount): boolean {
  const above = mounts.filter((mount) => destination.startsWith(`${mount.destination}/`));
  return type === 'tmpfs' && above.some((mount) => mount.type === 'tmpfs');
}

function modeOf({ options }: OciMount): string {
  return options.find((option) => option.startsWith('mode='))?.slice('mode='.length) ?? '1777';
}

function mountOptions({ options }: OciMount): { flags: number; data: string } {
  const known = options.filter((option) => option in MOUNT_FLAGS);
  return {
    flags: known.reduce((flags, option) => flags | MOUNT_FLAGS[option]!, 0),
    data: options.filter((option) => !(option in MOUNT_FLAGS)).join(','),
  };
}

const LIMITS: Readonly<Record<string, number>> = { RLIMIT_CORE: 4, RLIMIT_NOFILE: 7 };

function limitNumber(type: string): number {
  const number = LIMITS[type];
  if (number === undefined) throw new TypeError(`limit ${type}`);
  return number;
}

const CAPABILITIES = [
  'CHOWN DAC_OVERRIDE DAC_READ_SEARCH FOWNER FSETID KILL SETGID SETUID SETPCAP LINUX_IMMUTABLE NET_BIND_SERVICE',
  'NET_BROADCAST NET_ADMIN NET_RAW IPC_LOCK IPC_OWNER SYS_MODULE SYS_RAWIO SYS_CHROOT SYS_PTRACE SYS_PACCT SYS_ADMIN',
  'SYS_BOOT SYS_NICE SYS_RESOURCE SYS_TIME SYS_TTY_CONFIG MKNOD LEASE AUDIT_WRITE AUDIT_CONTROL SETFCAP MAC_OVERRIDE',
  'MAC_ADMIN SYSLOG WAKE_ALARM BLOCK_SUSPEND AUDIT_READ PERFMON BPF CHECKPOINT_RESTORE',
]
  .join(' ')
  .split(' ');

function capabilityBits(names: readonly string[]): bigint {
  return names.reduce((bits, name) => {
    const number = CAPABILITIES.indexOf(name.slice('CAP_'.length));
    if (number < 0) throw new TypeError(`capability ${name}`);
    return bits | (1n << BigInt(number));
  }, 0n);
}

const filters = new WeakMap<SeccompProfile, Buffer>();

/** The same profile for every sandbox: compiled once. */
export function compiledFilter(profile: SeccompProfile): Buffer {
  const bytes = filters.get(profile) ?? seccompFilter(profile);
  filters.set(profile, bytes);
  return bytes;
}

const STAGES: Readonly<Record<number, string>> = {
  1: 'its order was not understood',
  2: 'making its control group',
  3: 'making its namespaces',
  4: 'taking its standard streams',
  5: 'entering its root',
  6: 'mounting',
  7: 'making the device',
  8: 'hiding',
  9: 'setting up its network and host name',
  10: 'making its terminal',
  11: 'setting the limit',
  12: 'taking up its user and capabilities',
  13: 'setting up its system call filter',
  14: 'starting it by',
  15: 'taking on the AppArmor profile',
  16: 'starting a program of a task,',
  20: 'entering the working directory',
  21: 'executing',
};

export const STAGE_EXEC = 21;

export function stageText(stage: number): string {
  return STAGES[stage] ?? `step ${stage}`;
}
