/** What a pool is: its environment, how many containers it may have, and how long a call waits for one. */
import { createHash } from 'node:crypto';
import type { BlobStore, Image } from '#imagesvc';
import type { AgentBinary } from '../backend/agent-binary.ts';
import type { UsernsMode } from '../backend/user-namespace.ts';
import { fail } from '../errors.ts';
import type { RuntimeFolders } from '../sandbox/state-folders.ts';
import type { GpuRequest } from './gpu/gpu-scheduler.ts';
import { checkGpuRequest, type NodeGpus } from './gpu/node-gpus.ts';
import type { Language, LanguageTable } from './languages.ts';
import { checkedTaskLimits, type TaskLimits } from './task.ts';

/** What tasks run in. Two pools never share a container. */
export interface PoolEnvironment {
  readonly store: BlobStore;
  readonly base: Image;
  readonly workspace?: Image;
  /** Topmost last. */
  readonly toolkits?: readonly Image[];
}

export interface PoolOptions {
  /** Containers that are there though nobody calls. */
  readonly floor?: number;
  readonly ceiling?: number;
  /** Calls that may wait; one more is refused. */
  readonly queue?: number;
  /** How long one waits before it is refused. */
  readonly queueMs?: number;
  /** A container above the floor that nobody used for so long is given up. */
  readonly idleMs?: number;
  /** A container is replaced after so many tasks, whatever was found. */
  readonly tasks?: number;
  /** Names of the table; all by default. */
  readonly languages?: readonly string[];
  /** Rows in place of the table's, or beside them. */
  readonly table?: LanguageTable;
  /** `NAME=VALUE`, for every task. */
  readonly env?: readonly string[];
  /** A Python that waits in each container, with these modules imported. */
  readonly python?: { readonly imports?: readonly string[]; readonly program?: string };
  /** Of tasks that say nothing. */
  readonly defaults?: TaskLimits;
  /** No task may have more. */
  readonly most?: TaskLimits;
  /** Of this machine: each container has one, from its start to its end. */
  readonly gpu?: GpuRequest;
  /** Processors of one container. */
  readonly cpus?: number;
  readonly userns?: UsernsMode;
}

export interface ContainerSpec {
  readonly environment: PoolEnvironment;
  readonly options: PoolOptions;
  readonly folders: RuntimeFolders;
  readonly agent: AgentBinary;
  readonly gpus?: NodeGpus;
  /** Whose container it is to be: on record with it. */
  readonly pool?: string;
}

export interface PoolSettings {
  readonly floor: number;
  readonly ceiling: number;
  readonly queue: number;
  readonly queueMs: number;
  readonly idleMs: number;
  readonly tasks: number;
}

export const DEFAULT_SETTINGS: PoolSettings = {
  floor: 0,
  ceiling: 8,
  queue: 256,
  queueMs: 30_000,
  idleMs: 60_000,
  tasks: 10_000,
};

const RANGES: Readonly<Record<keyof PoolSettings, readonly [number, number]>> = {
  floor: [0, 1000],
  ceiling: [1, 1000],
  queue: [0, 100_000],
  queueMs: [0, 3_600_000],
  idleMs: [1, 86_400_000],
  tasks: [1, 1_000_000_000],
};

/** @throws RUNTIME_FNCALL_POOL_OPTION, RUNTIME_FNCALL_TASK */
export function poolSettings(options: PoolOptions): PoolSettings {
  const settings: Record<string, number> = {};
  for (const name of Object.keys(RANGES) as (keyof PoolSettings)[]) {
    const value = options[name] ?? DEFAULT_SETTINGS[name];
    const [least, most] = RANGES[name];
    if (!Number.isSafeInteger(value) || value < least || value > most) {
      throw fail('RUNTIME_FNCALL_POOL_OPTION', {
        option: name,
        problem: `${value} is not between ${least} and ${most}`,
      });
    }
    settings[name] = value;
  }
  const made = settings as unknown as PoolSettings;
  if (made.floor > made.ceiling) {
    throw fail('RUNTIME_FNCALL_POOL_OPTION', {
      option: 'floor',
      problem: `${made.floor} is above the ceiling, ${made.ceiling}`,
    });
  }
  checkedTaskLimits(options.defaults, {}, options.most);
  if (options.gpu !== undefined) checkGpuRequest(options.gpu);
  for (const [name, row] of Object.entries(options.table ?? {})) checkRow(name, row);
  return made;
}

function checkRow(name: string, { file, run, compile }: Language): void {
  const problem =
    !/^[\w.+-]{1,100}$/.test(file) || file.startsWith('.')
      ? `its file is ${JSON.stringify(file)}, no plain name`
      : run.length === 0 || compile?.length === 0
        ? 'a command without a program'
        : undefined;
  if (problem !== undefined) throw fail('RUNTIME_FNCALL_POOL_OPTION', { option: `languages.${name}`, problem });
}

/** Pools that nobody named are found by it. */
export function environmentKey(
  { store, base, workspace, toolkits = [] }: PoolEnvironment,
  options: PoolOptions,
): string {
  const facts = [
    store.url,
    ...[base, workspace, ...toolkits].map((image) => image?.manifestDigest ?? ''),
    JSON.stringify(Object.entries(options).sort()),
  ];
  return createHash('sha256').update(JSON.stringify(facts)).digest('hex').slice(0, 12);
}
