/**
 * How a machine should be set before other people's code runs on it: `dsec doctor --edge`. Only what a sandbox, or many of them, could feel; each row says
 * what was found, why it matters and what to do. Nothing is changed. `root`: where /proc and /sys lie, for tests.
 */
import { existsSync, readdirSync, readFileSync, statSync } from 'node:fs';
import { join } from 'node:path';
import { appArmor, runtimeFolders, usernsSupport } from '#runtime';

export interface EdgeRow {
  readonly name: string;
  readonly ok: boolean;
  /** Without it untrusted code has an easier way out, or the machine can be brought down; else it is slower or tells less. */
  readonly severity: 'must' | 'should';
  readonly found: string;
  readonly why: string;
  readonly remedy: string;
}

const SYSCTL_FILE = '/etc/sysctl.d/90-dsec-edge.conf';

interface Setting {
  readonly key: string;
  readonly least: number;
  readonly severity: EdgeRow['severity'];
  readonly why: string;
}

const SETTINGS: readonly Setting[] = [
  { key: 'kernel.kptr_restrict', least: 1, severity: 'must', why: 'addresses of the kernel help exploits' },
  {
    key: 'kernel.dmesg_restrict',
    least: 1,
    severity: 'must',
    why: 'the kernel log tells addresses, and what others do',
  },
  {
    key: 'kernel.unprivileged_bpf_disabled',
    least: 1,
    severity: 'must',
    why: 'the BPF verifier is a way into the kernel; only root needs it',
  },
  { key: 'kernel.perf_event_paranoid', least: 2, severity: 'must', why: 'perf events tell of other processes' },
  { key: 'kernel.randomize_va_space', least: 2, severity: 'must', why: 'exploits should not know addresses' },
  { key: 'fs.protected_symlinks', least: 1, severity: 'should', why: 'links planted in shared folders lead nowhere' },
  { key: 'fs.protected_hardlinks', least: 1, severity: 'should', why: 'links to files of others cannot be planted' },
  {
    key: 'kernel.pid_max',
    least: 1 << 20,
    severity: 'must',
    why: 'all sandboxes together have no more processes than this',
  },
  { key: 'kernel.threads-max', least: 200_000, severity: 'should', why: 'the same for their threads' },
  { key: 'fs.file-max', least: 1_000_000, severity: 'must', why: 'open files of all sandboxes together' },
  { key: 'fs.inotify.max_user_instances', least: 4096, severity: 'should', why: 'watches of files count for one user' },
  {
    key: 'fs.inotify.max_user_watches',
    least: 500_000,
    severity: 'should',
    why: 'watches of files count for one user',
  },
  {
    key: 'vm.max_map_count',
    least: 262_144,
    severity: 'should',
    why: 'some databases and runtimes do not start below',
  },
  { key: 'user.max_user_namespaces', least: 4096, severity: 'must', why: 'each sandbox has one' },
  {
    key: 'kernel.keys.maxkeys',
    least: 2000,
    severity: 'should',
    why: 'container runtimes take a key for each sandbox',
  },
  {
    key: 'net.ipv4.neigh.default.gc_thresh3',
    least: 4096,
    severity: 'should',
    why: 'each sandbox with a network is a neighbour',
  },
  {
    key: 'kernel.panic_on_oops',
    least: 1,
    severity: 'should',
    why: 'a kernel that has failed goes on in an unknown state',
  },
  { key: 'kernel.panic', least: 1, severity: 'should', why: 'a machine whose kernel failed comes back by itself' },
];

const OPEN_FILES = 65_536;

export async function edgeRows(root = '/'): Promise<EdgeRow[]> {
  return [
    corePattern(root),
    ...SETTINGS.flatMap((setting) => settingRow(root, setting)),
    kernelPages(root),
    vulnerabilities(root),
    await userNamespaces(),
    armor(),
    swap(root),
    pressure(root),
    openFiles(root),
    taskLimit(root),
    clock(root),
  ];
}

function corePattern(root: string): EdgeRow {
  const pattern = textOf(join(root, 'proc/sys/kernel/core_pattern')) ?? '';
  const isPipe = pattern.startsWith('|');
  return {
    name: 'kernel.core_pattern',
    ok: !isPipe || /^\|\/(?:usr\/)?bin\/(?:false|true)$/.test(pattern),
    severity: 'must',
    found: pattern === '' ? 'empty' : pattern,
    why: 'a program named here runs as root, outside, for each crash inside, on what a sandbox wrote',
    remedy: set('kernel.core_pattern', '/dev/null'),
  };
}

/** None where the kernel has no such setting. */
function settingRow(root: string, { key, least, severity, why }: Setting): EdgeRow[] {
  const text = textOf(join(root, 'proc/sys', ...key.split('.')));
  if (text === undefined) return [];
  const value = Number(text);
  return [{ name: key, ok: value >= least, severity, found: text, why, remedy: set(key, String(least)) }];
}

function set(key: string, value: string): string {
  return `sysctl -w ${key}=${value}, and the line ${key}=${value} in ${SYSCTL_FILE}`;
}

function kernelPages(root: string): EdgeRow {
  const open = ['kpagecgroup', 'kpagecount', 'kpageflags'].filter((name) => {
    try {
      return (statSync(join(root, 'proc', name)).mode & 0o077) !== 0;
    } catch {
      return false;
    }
  });
  return {
    name: '/proc/kpagecgroup',
    ok: open.length === 0,
    severity: 'must',
    found: open.length === 0 ? 'root’s alone, or not there' : `${open.join(', ')} can be read by others`,
    why: 'it tells what memory belongs to whom, and walking it can hold up the kernel; sandboxes have it hidden besides',
    remedy: `chmod 0400 ${open.map((name) => `/proc/${name}`).join(' ')}`.trim(),
  };
}

function vulnerabilities(root: string): EdgeRow {
  const folder = join(root, 'sys/devices/system/cpu/vulnerabilities');
  const open = namesIn(folder).filter((name) => textOf(join(folder, name))?.startsWith('Vulnerable') === true);
  return {
    name: 'processor mitigations',
    ok: open.length === 0,
    severity: 'must',
    found: open.length === 0 ? 'nothing open that the kernel knows of' : `open: ${open.join(', ')}`,
    why: 'a sandbox can read what is not its own',
    remedy:
      'update kernel and microcode, and take mitigations=off from the kernel’s command line; in a virtual machine its host has to',
  };
}

async function userNamespaces(): Promise<EdgeRow> {
  const lacks = process.geteuid?.() === 0 ? (await usernsSupport(runtimeFolders())).lacks : 'it takes root to try';
  return {
    name: 'user namespaces',
    ok: lacks === undefined,
    severity: 'must',
    found: lacks ?? 'a range of ids for each sandbox',
    why: 'root in a sandbox is nobody outside',
    remedy: 'Linux 6.6 or newer, and a file system for the state that can be mounted with other ids (ext4, xfs, btrfs)',
  };
}

function armor(): EdgeRow {
  const { profile, lacks } =
    process.geteuid?.() === 0 ? appArmor() : { profile: undefined, lacks: 'it takes root to try' };
  return {
    name: 'AppArmor',
    ok: profile !== undefined,
    severity: 'should',
    found: profile ?? lacks ?? '',
    why: 'a second wall around mounts, /proc and /sys of sandboxes',
    remedy: 'boot with apparmor=1 security=apparmor, and install the package apparmor',
  };
}

function swap(root: string): EdgeRow {
  const areas = (textOf(join(root, 'proc/swaps')) ?? '')
    .split('\n')
    .slice(1)
    .filter((line) => line.trim() !== '');
  const kib = areas.reduce((sum, line) => sum + Number(line.trim().split(/\s+/)[2] ?? 0), 0);
  return {
    name: 'swap',
    ok: kib > 0,
    severity: 'should',
    found: kib > 0 ? `${Math.round(kib / 1024)} MiB` : 'none',
    why: 'memory of paused sandboxes goes there',
    remedy: 'zram or a swap file: docs/sandboxes.md',
  };
}

function pressure(root: string): EdgeRow {
  const has = textOf(join(root, 'proc/pressure/memory')) !== undefined;
  return {
    name: 'PSI',
    ok: has,
    severity: 'should',
    found: has ? 'memory, io and cpu' : 'not there',
    why: 'an edge sees trouble before memory has run out, and takes nothing then',
    remedy: 'boot with psi=1',
  };
}

/** Of whoever asks; a service has its unit's. */
function openFiles(root: string): EdgeRow {
  const line = /^Max open files +(\S+) +(\S+)/m.exec(textOf(join(root, 'proc/self/limits')) ?? '');
  const hard = line?.[2] ?? 'unknown';
  return {
    name: 'open files',
    ok: hard === 'unlimited' || Number(hard) >= OPEN_FILES,
    severity: 'must',
    found: `${line?.[1] ?? 'unknown'}, up to ${hard}`,
    why: 'the edge has some for each sandbox',
    remedy: 'LimitNOFILE=1048576 in the unit of the service, ulimit -n in a shell',
  };
}

function taskLimit(root: string): EdgeRow {
  const own = (textOf(join(root, 'proc/self/cgroup')) ?? '').split('\n');
  const path = own.map((line) => /^\d+:(pids|):(.*)$/.exec(line)).find((match) => match !== null);
  const folder = path?.[1] === 'pids' ? 'sys/fs/cgroup/pids' : 'sys/fs/cgroup';
  const most = path === undefined ? undefined : textOf(join(root, folder, path?.[2] ?? '', 'pids.max'));
  return {
    name: 'tasks',
    ok: most === undefined || most === 'max' || Number(most) >= 100_000,
    severity: 'should',
    found: most === undefined || most === 'max' ? 'no limit' : most,
    why: 'a limit on the group that the edge runs in holds for all its sandboxes',
    remedy: 'TasksMax=infinity in the unit of the service, where its sandboxes are in its group',
  };
}

const TIME_DAEMONS: ReadonlySet<string> = new Set([
  'chronyd',
  'ntpd',
  'openntpd',
  'systemd-timesyn',
  'ptp4l',
  'phc2sys',
  'timesyncd',
]);

function clock(root: string): EdgeRow {
  const running = namesIn(join(root, 'proc'))
    .filter((name) => /^\d+$/.test(name))
    .map((pid) => textOf(join(root, 'proc', pid, 'comm')) ?? '')
    .find((name) => TIME_DAEMONS.has(name));
  const synchronized = existsSync(join(root, 'run/systemd/timesync/synchronized'));
  return {
    name: 'time',
    ok: running !== undefined || synchronized,
    severity: 'should',
    found: running ?? (synchronized ? 'was synchronized' : 'no daemon sets the clock'),
    why: 'times to live, tokens and rosters go by the clock',
    remedy: 'install chrony; in a virtual machine its host’s clock may be enough',
  };
}

function textOf(path: string): string | undefined {
  try {
    return readFileSync(path, 'latin1').trim();
  } catch {
    return undefined;
  }
}

function namesIn(folder: string): string[] {
  try {
    return readdirSync(folder);
  } catch {
    return [];
  }
}
