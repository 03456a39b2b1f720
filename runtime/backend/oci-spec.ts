/**
 * config.json of an OCI runtime (runtime-spec 1.0) for one sandbox: what it is isolated by. Container engines agree on
 * nearly all of this; the values are theirs: the usual fourteen capabilities, masked and read-only parts of /proc and
 * /sys, a private /dev.
 *
 * With `idBase`, a user namespace; the root's owners are shifted into its range then (id-ranges.ts). The sandbox's cgroup is not shown inside.
 */
import { readFileSync } from 'node:fs';
import { appArmor } from './apparmor.ts';
import type { LaunchSpec } from './backend.ts';
import { idExtents } from './id-ranges.ts';
import { groupPath } from './sandbox-group.ts';
import { defaultSeccompProfile, type SeccompProfile } from './seccomp-profile.ts';

const CAPABILITIES = [
  'CAP_AUDIT_WRITE',
  'CAP_CHOWN',
  'CAP_DAC_OVERRIDE',
  'CAP_FOWNER',
  'CAP_FSETID',
  'CAP_KILL',
  'CAP_MKNOD',
  'CAP_NET_BIND_SERVICE',
  'CAP_NET_RAW',
  'CAP_SETFCAP',
  'CAP_SETGID',
  'CAP_SETPCAP',
  'CAP_SETUID',
  'CAP_SYS_CHROOT',
];

/** Memory of the host (kpage*: reading them can take minutes), its logs, keys, hardware and timers. */
const MASKED_PATHS = [
  '/proc/acpi',
  '/proc/asound',
  '/proc/interrupts',
  '/proc/kcore',
  '/proc/keys',
  '/proc/kmsg',
  '/proc/kpagecgroup',
  '/proc/kpagecount',
  '/proc/kpageflags',
  '/proc/latency_stats',
  '/proc/sched_debug',
  '/proc/scsi',
  '/proc/timer_list',
  '/proc/timer_stats',
  '/sys/devices/virtual/powercap',
  '/sys/firmware',
  '/sys/fs/selinux',
  '/sys/kernel/debug',
  '/sys/kernel/tracing',
];

const READ_ONLY_PATHS = ['/proc/bus', '/proc/fs', '/proc/irq', '/proc/sys', '/proc/sysrq-trigger'];

export interface OciMount {
  readonly destination: string;
  readonly type: string;
  readonly source: string;
  readonly options: readonly string[];
}

/** What of config.json is ours to say. */
export interface OciSpec {
  readonly ociVersion: string;
  readonly root: { readonly path: string; readonly readonly: boolean };
  readonly hostname: string;
  readonly process: {
    readonly terminal: boolean;
    readonly consoleSize?: { readonly height: number; readonly width: number };
    readonly user: { readonly uid: number; readonly gid: number; readonly additionalGids: readonly number[] };
    readonly args: readonly string[];
    readonly env: readonly string[];
    readonly cwd: string;
    readonly apparmorProfile?: string;
    readonly capabilities: Readonly<
      Record<'bounding' | 'effective' | 'permitted' | 'inheritable' | 'ambient', readonly string[]>
    >;
    readonly rlimits: readonly { readonly type: string; readonly soft: number; readonly hard: number }[];
    readonly noNewPrivileges: boolean;
  };
  readonly mounts: readonly OciMount[];
  readonly linux: {
    readonly uidMappings?: readonly OciIdMapping[];
    readonly gidMappings?: readonly OciIdMapping[];
    readonly namespaces: readonly { readonly type: string }[];
    readonly cgroupsPath: string;
    readonly resources: {
      readonly devices: readonly { readonly allow: boolean; readonly access: string }[];
      readonly blockIO?: BlockIo;
    };
    readonly seccomp: SeccompProfile;
    readonly maskedPaths: readonly string[];
    readonly readonlyPaths: readonly string[];
  };
}

const mount = (destination: string, type: string, source: string, ...options: string[]): OciMount => ({
  destination,
  type,
  source,
  options,
});

const MOUNTS = [
  mount('/proc', 'proc', 'proc', 'nosuid', 'noexec', 'nodev'),
  mount('/dev', 'tmpfs', 'tmpfs', 'nosuid', 'noexec', 'strictatime', 'mode=755', 'size=65536k'),
  mount('/dev/pts', 'devpts', 'devpts', 'nosuid', 'noexec', 'newinstance', 'ptmxmode=0666', 'mode=0620', 'gid=5'),
  mount('/dev/shm', 'tmpfs', 'shm', 'nosuid', 'noexec', 'nodev', 'mode=1777', 'size=65536k'),
  mount('/dev/mqueue', 'mqueue', 'mqueue', 'nosuid', 'noexec', 'nodev'),
  mount('/sys', 'sysfs', 'sysfs', 'nosuid', 'noexec', 'nodev', 'ro'),
];

/** Folders of the root that the mounts need. */
export const MOUNT_POINTS = ['/proc', '/dev', '/sys'];

export function namespacesOf({ network, idBase }: Pick<LaunchSpec, 'network' | 'idBase'>): string[] {
  const user = idBase === undefined ? [] : ['user'];
  return [...user, 'pid', 'mount', 'ipc', 'uts', ...(network === 'none' ? ['network'] : [])];
}

/** `group`: below the sandbox's own, where that is not the runtime's to make. */
export function ociSpec(spec: LaunchSpec, group = ''): OciSpec {
  const { process } = spec;
  // A user other than root gets capabilities only by a file's, within the bounding set; and no_new_privs forbids that too.
  const held = process.uid === 0 ? CAPABILITIES : [];
  return {
    ociVersion: '1.0.2',
    root: { path: spec.root, readonly: false },
    hostname: spec.hostname,
    process: {
      terminal: process.terminal,
      consoleSize: process.terminalSize && { height: process.terminalSize.rows, width: process.terminalSize.columns },
      user: { uid: process.uid, gid: process.gid, additionalGids: process.additionalGids },
      args: process.args,
      env: process.env,
      cwd: process.cwd,
      capabilities: { bounding: CAPABILITIES, effective: held, permitted: held, inheritable: [], ambient: [] },
      rlimits: rlimits(),
      noNewPrivileges: true,
      apparmorProfile: appArmor().profile,
    },
    mounts: [
      ...MOUNTS,
      ...spec.binds.map(({ source, target, exec }) =>
        mount(target, 'bind', source, 'rbind', 'ro', 'nosuid', 'nodev', ...(exec ? [] : ['noexec'])),
      ),
    ],
    linux: {
      namespaces: namespacesOf(spec).map((type) => ({ type })),
      ...(spec.idBase === undefined ? {} : mappings(spec.idBase)),
      cgroupsPath: `/${groupPath(spec.id, spec.serviceClass)}${group}`,
      resources: { devices: [{ allow: false, access: 'rwm' }], blockIO: blockIo(spec) },
      seccomp: defaultSeccompProfile(spec.firstProcess),
      maskedPaths: MASKED_PATHS,
      readonlyPaths: READ_ONLY_PATHS,
    },
  };
}

type BlockIo = Readonly<
  Record<string, readonly { readonly major: number; readonly minor: number; readonly rate: number }[]>
>;

/** Other limits are on the group above (limit-groups.ts); v1 throttles each group for itself. */
function blockIo({ limits = {}, device }: LaunchSpec): BlockIo | undefined {
  const [major, minor] = (device ?? '').split(':').map(Number);
  const rates = [
    ['throttleReadBpsDevice', limits.ioReadBps],
    ['throttleWriteBpsDevice', limits.ioWriteBps],
    ['throttleReadIOPSDevice', limits.ioReadIops],
    ['throttleWriteIOPSDevice', limits.ioWriteIops],
  ] as const;
  const given = rates.flatMap(([name, rate]) =>
    rate === undefined ? [] : [[name, [{ major: major!, minor: minor!, rate }]] as const],
  );
  return given.length === 0 ? undefined : Object.fromEntries(given);
}

interface OciIdMapping {
  readonly containerID: number;
  readonly hostID: number;
  readonly size: number;
}

function mappings(idBase: number): { uidMappings: OciIdMapping[]; gidMappings: OciIdMapping[] } {
  const mapping = idExtents(idBase).map(({ inside, outside, count }) => ({
    containerID: inside,
    hostID: outside,
    size: count,
  }));
  return { uidMappings: mapping, gidMappings: mapping };
}

/** A soft limit that old programs (which loop over all descriptors) can bear; no core files in the upper unless asked for. */
const OPEN_FILES = { soft: 65_536, hard: 1_048_576 };

type ResourceLimit = { readonly type: string; readonly soft: number; readonly hard: number };
let knownLimits: readonly ResourceLimit[] | undefined;

/** Of this process's life. */
function rlimits(): readonly ResourceLimit[] {
  knownLimits ??= readLimits();
  return knownLimits;
}

function readLimits(): ResourceLimit[] {
  const hardFiles = Math.min(OPEN_FILES.hard, hardLimit('Max open files'));
  const limits = [{ type: 'RLIMIT_NOFILE', soft: Math.min(OPEN_FILES.soft, hardFiles), hard: hardFiles }];
  const hardCore = hardLimit('Max core file size');
  // "unlimited" cannot be written exactly as a JSON number of JavaScript; then the limit is inherited.
  if (Number.isSafeInteger(hardCore)) limits.push({ type: 'RLIMIT_CORE', soft: 0, hard: hardCore });
  return limits;
}

/** Infinity for "unlimited". Raising a hard limit may not be ours to do. */
function hardLimit(name: string): number {
  const line = readFileSync('/proc/self/limits', 'latin1')
    .split('\n')
    .find((candidate) => candidate.startsWith(name));
  const fields = (line ?? '').slice(name.length).trim().split(/\s+/);
  return /^\d+$/.test(fields[1] ?? '') ? Number(fields[1]) : Number.POSITIVE_INFINITY;
}
