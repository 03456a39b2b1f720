/** What is the same for all tasks of a container, and how the program that takes them is isolated itself. */
import { readFileSync } from 'node:fs';
import { join } from 'node:path';
import { readConfig } from '#imagesvc';
import { projectRoot } from '../backend/agent-binary.ts';
import type { LaunchSpec } from '../backend/backend.ts';
import { compiledFilter } from '../backend/launch-order.ts';
import { type OciSpec, ociSpec } from '../backend/oci-spec.ts';
import { defaultSeccompProfile } from '../backend/seccomp-profile.ts';
import type { ContainerGroups } from './container-groups.ts';
import type { ContainerSpec, PoolEnvironment, PoolOptions } from './pool-spec.ts';
import { checkedTaskLimits, DEFAULT_LIMITS, PRIVATE_FOLDERS, TASK_HOME } from './task.ts';
import type { TaskPlan } from './task-wire.ts';
import { zygoteFilters } from './zygote-filters.ts';

const TASK_ID = 1000;

/** New namespaces of mounts, message queues, processes and networks. */
const NAMESPACES = 0x20000n | 0x8000000n | 0x20000000n | 0x40000000n;
const INODES = 65_536;

/** It makes the tasks' namespaces, so it may mount and enter; it runs nothing of theirs itself. */
const CAPABILITIES = [
  'CAP_CHOWN',
  'CAP_DAC_OVERRIDE',
  'CAP_FOWNER',
  'CAP_KILL',
  'CAP_NET_ADMIN',
  'CAP_SETGID',
  'CAP_SETPCAP',
  'CAP_SETUID',
  'CAP_SYS_ADMIN',
  'CAP_SYS_CHROOT',
  'CAP_SYS_PTRACE',
];

/** /proc stays whole: it is the tasks' own that is masked, and in a user namespace the kernel makes another one only beside a whole one. */
export function taskOci(spec: LaunchSpec): OciSpec {
  const oci = ociSpec(spec);
  const set = {
    bounding: CAPABILITIES,
    effective: CAPABILITIES,
    permitted: CAPABILITIES,
    inheritable: [],
    ambient: [],
  };
  return {
    ...oci,
    process: { ...oci.process, capabilities: set, apparmorProfile: undefined },
    linux: { ...oci.linux, maskedPaths: oci.linux.maskedPaths.filter((path) => !inProc(path)), readonlyPaths: [] },
  };
}

const inProc = (path: string) => path.startsWith('/proc/');

export async function taskPlan(
  { environment, options }: ContainerSpec,
  groups: ContainerGroups,
  gpuEnv: readonly string[],
): Promise<TaskPlan> {
  const { maskedPaths, readonlyPaths } = ociSpec({
    id: 'x',
    folder: '/',
    root: '/',
    hostname: 'x',
    network: 'none',
    binds: [],
    process: { args: ['x'], env: [], cwd: '/', uid: 0, gid: 0, additionalGids: [], terminal: false },
    stdio: 'inherit',
  }).linux;
  const { python } = options;
  return {
    uid: TASK_ID,
    gid: TASK_ID,
    diskBytes: DEFAULT_LIMITS.diskBytes,
    inodes: INODES,
    namespaces: NAMESPACES,
    privateFolders: PRIVATE_FOLDERS.map(({ path, mode }) => [path, mode] as const),
    masked: maskedPaths.filter(inProc),
    readOnly: readonlyPaths.filter(inProc),
    groups: groups.plan,
    usual: usualWrites(options, groups),
    seccomp: compiledFilter(defaultSeccompProfile()),
    zygote: python === undefined ? undefined : zygote(options, await imageEnvironment(environment), gpuEnv),
  };
}

/** With less an interpreter that waits might not fit: then each task's limits are written when it comes. */
const USUAL_LEAST_BYTES = 64 * 2 ** 20;

function usualWrites({ defaults, most }: PoolOptions, groups: ContainerGroups): TaskPlan['usual'] {
  const limits = checkedTaskLimits({}, defaults, most);
  return limits.memoryBytes < USUAL_LEAST_BYTES ? [] : groups.writes(limits);
}

function zygote(
  { python, env = [] }: PoolOptions,
  image: readonly string[],
  gpuEnv: readonly string[],
): NonNullable<TaskPlan['zygote']> {
  const program = readFileSync(join(projectRoot(), 'runtime/fncall/zygote.py'), 'utf8');
  const { wholeButSetns, setns } = zygoteFilters(defaultSeccompProfile());
  const filters = { 'whole but setns': wholeButSetns.toString('base64'), setns: setns.toString('base64') };
  const setup = { imports: python?.imports ?? [], namespaces: Number(NAMESPACES), filters };
  return {
    args: [python?.program ?? 'python3', '-c', program],
    env: taskEnvironment(withGpu(image, gpuEnv), env),
    setup: JSON.stringify(setup),
  };
}

/** The card's own facts come first; an image's libraries stay, behind the driver's. */
export function withGpu(image: readonly string[], gpuEnv: readonly string[]): readonly string[] {
  if (gpuEnv.length === 0) return image;
  const folders = 'LD_LIBRARY_PATH=';
  const own = image.findLast((entry) => entry.startsWith(folders))?.slice(folders.length);
  const added = own ? `:${own}` : '';
  return [...image, ...gpuEnv.map((entry) => (entry.startsWith(folders) ? `${entry}${added}` : entry))];
}

/** What the image says about the environment of programs. */
export async function imageEnvironment({ store, base }: PoolEnvironment): Promise<readonly string[]> {
  return (await readConfig(store, base)).config?.Env ?? [];
}

const PATH = '/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin';

/** The last one to say something is right. */
export function taskEnvironment(...lists: readonly (readonly string[])[]): string[] {
  const all = new Map<string, string>();
  for (const entry of [`PATH=${PATH}`, `HOME=${TASK_HOME}`, 'LANG=C.UTF-8', ...lists.flat()]) {
    const end = entry.indexOf('=');
    if (end > 0) all.set(entry.slice(0, end), entry.slice(end + 1));
  }
  all.set('HOME', TASK_HOME);
  return [...all].map(([name, value]) => `${name}=${value}`);
}
