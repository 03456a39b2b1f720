/** What a sandbox is to be, as callers say it, and as the API takes it. */
import { InvalidRequest } from './errors.ts';

/** Names of services (`pypi`), or hosts and ranges (`*.debian.org`, `10.0.0.0/8`): whether they may be reached. Nothing else may. */
export type NetworkRules = Readonly<Record<string, boolean>>;

/** docs/network.md has its form. */
export type NetworkPolicy = Readonly<Record<string, unknown>>;

export interface SandboxLimits {
  readonly cpus?: number;
  readonly memoryBytes?: number;
  readonly memorySwapBytes?: number;
  readonly pids?: number;
  readonly ioReadBps?: number;
  readonly ioWriteBps?: number;
  readonly ioReadIops?: number;
  readonly ioWriteIops?: number;
  readonly diskBytes?: number;
  readonly inodes?: number;
}

export interface DSecRunArgs {
  /** MiB. */
  readonly memoryLimitMb?: number;
  readonly cpuCoresLimit?: number;
  /** MiB. */
  readonly diskLimitMb?: number;
  readonly pidsLimit?: number;
  /** Seconds: when nobody has used it for so long, it ends. */
  readonly ttlRunningStop?: number;
  /** What happens then: `stop`, the default, or `pause`. */
  readonly idleAction?: 'stop' | 'pause';
  /** Seconds that it lives at most, used or not. */
  readonly ttlSeconds?: number;
  readonly networkRules?: NetworkRules;
  /** In place of `networkRules`: all that a policy can say. */
  readonly networkPolicy?: NetworkPolicy;
  /** `none` when neither rules nor a policy are given. */
  readonly networkMode?: 'none' | 'host' | 'policy';
  readonly initUser?: string;
  readonly workdir?: string;
  readonly env?: Readonly<Record<string, string>> | readonly string[];
  readonly workspace?: string;
  readonly toolkits?: readonly string[];
  readonly store?: string;
  readonly name?: string;
  readonly project?: string;
  readonly job?: string;
  /** The same one gives the same sandbox; made anew when it is left out. */
  readonly requestId?: string;
  /** `ls`, latency-sensitive, or `be`, best effort. */
  readonly serviceClass?: 'ls' | 'be';
  /** Of nodes that may have it. */
  readonly labels?: readonly string[];
  /** On a node that has no other user's sandboxes. */
  readonly alone?: boolean;
  /** Graphics processors of its own. */
  readonly gpus?: number;
  /** `h100-80gb-hbm3`: one unless `gpus` says more. */
  readonly gpuKind?: string;
  readonly userns?: 'private' | 'host';
  readonly runtime?: string;
  /** Further ones, above those before. */
  readonly limits?: SandboxLimits;
}

export interface DSecContainerRunArgs extends DSecRunArgs {
  readonly containerImage: string;
}
export interface DSecMicroVMRunArgs extends DSecRunArgs {
  readonly image: string;
}
export interface DSecVMRunArgs extends DSecRunArgs {
  readonly image: string;
  /** `bios` by default. */
  readonly firmware?: 'bios' | 'uefi';
  /** Of its screen: 1024 x 768 by default. */
  readonly width?: number;
  readonly height?: number;
}

/** As records name them; `fncall` makes no sandbox that stays: `runFncall`. */
export type Backend = 'container' | 'fncall' | 'microvm' | 'vm';

export function createBody(
  backend: Backend,
  args: DSecContainerRunArgs | DSecMicroVMRunArgs | DSecVMRunArgs,
  requestId: string,
): Record<string, unknown> {
  const { env } = args;
  return {
    backend: backend === 'container' ? undefined : backend,
    image: 'containerImage' in args ? args.containerImage : args.image,
    store: args.store,
    workspace: args.workspace,
    toolkits: args.toolkits,
    name: args.name,
    requestId: args.requestId ?? requestId,
    project: args.project,
    job: args.job,
    env: env === undefined || isList(env) ? env : Object.entries(env).map(([key, value]) => `${key}=${value}`),
    user: args.initUser,
    workdir: args.workdir,
    ttlMs: milliseconds(args.ttlSeconds),
    idleMs: milliseconds(args.ttlRunningStop),
    idleAction: args.idleAction,
    class: args.serviceClass,
    cpus: args.cpuCoresLimit,
    memoryBytes: mebibytes(args.memoryLimitMb),
    diskBytes: mebibytes(args.diskLimitMb),
    pids: args.pidsLimit,
    ...args.limits,
    network: networkOf(args),
    machine: machineOf(args),
    userns: args.userns,
    runtime: args.runtime,
    labels: args.labels,
    alone: args.alone,
    gpus: args.gpus,
    gpuKind: args.gpuKind,
  };
}

export function policyOf(rules: NetworkRules): NetworkPolicy {
  const services: Record<string, boolean> = {};
  const targets: Record<string, string>[] = [];
  for (const [name, allowed] of Object.entries(rules)) {
    if (/[.:/*]/.test(name)) targets.push({ [allowed ? 'allow' : 'deny']: name });
    else services[name] = allowed;
  }
  return { default: 'deny', rules: targets, services };
}

function machineOf({ firmware, width, height }: Partial<DSecVMRunArgs>): object | undefined {
  const isSaid = firmware !== undefined || width !== undefined || height !== undefined;
  return isSaid ? { firmware, width, height } : undefined;
}

function networkOf({ networkRules, networkPolicy, networkMode }: DSecRunArgs): object | undefined {
  if (networkRules !== undefined && networkPolicy !== undefined) {
    const message = 'networkRules and networkPolicy: give one of them';
    throw new InvalidRequest({ code: 'INVALID_ARGUMENT', message });
  }
  const policy = networkPolicy ?? (networkRules === undefined ? undefined : policyOf(networkRules));
  if (policy === undefined) return networkMode === undefined ? undefined : { mode: networkMode };
  return { mode: networkMode ?? 'policy', policy };
}

function isList(env: Readonly<Record<string, string>> | readonly string[]): env is readonly string[] {
  return Array.isArray(env);
}

export function milliseconds(seconds: number | undefined): number | undefined {
  return seconds === undefined ? undefined : Math.round(seconds * 1000);
}

export function mebibytes(count: number | undefined): number | undefined {
  return count === undefined ? undefined : Math.round(count * 2 ** 20);
}
