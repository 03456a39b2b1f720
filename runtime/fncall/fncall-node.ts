/**
 * FnCall on one node: its pools, and calls to them. A pool has a name and stays until it is removed; or it is made by the first call that names
 * an image, with the defaults, and goes when nobody has used it for a while.
 */
import { availableParallelism } from 'node:os';
import { isDsecError, messageOf } from '#base';
import { type AgentBinary, findAgent } from '../backend/agent-binary.ts';
import { fail } from '../errors.ts';
import { type RuntimeFolders, runtimeFolders } from '../sandbox/state-folders.ts';
import { imageEnvironment } from './container-plan.ts';
import { checkGpuRequest, type GpuSource, NodeGpus } from './gpu/node-gpus.ts';
import { Pool, type PoolShare, type PoolState } from './pool.ts';
import type { NotBegun, PoolContainer, RawResult } from './pool-container.ts';
import { environmentKey, type PoolEnvironment, type PoolOptions } from './pool-spec.ts';
import { type PreparedTask, prepareTask, resultOf, sandboxError } from './run-task.ts';
import { type FnCallTask, MAX_FETCHED_BYTES, TASK_FOLDER, type TaskResult } from './task.ts';

export interface FnCallOptions {
  readonly folders?: Partial<RuntimeFolders>;
  /** Told what is worth a line in a log. */
  readonly note?: (text: string) => void;
  /** Pools that nobody named, and their containers together (default: 32, and 32 or four for each processor). */
  readonly mostImplicit?: number;
  readonly mostImplicitContainers?: number;
  /** In place of this machine's. */
  readonly gpus?: GpuSource;
}

export interface PoolView extends PoolState {
  /** References of its images. */
  readonly image: string;
  readonly toolkits: readonly string[];
  /** Nobody named it. */
  readonly implicit: boolean;
  readonly options: PoolOptions;
}

/** Of a pool that nobody named. */
const UNUSED_MS = 600_000;
const MAX_FETCHED = 1000;
/** Pools that nobody named, and containers of all of them together: who names images is not to have the whole machine by it. */
const MOST_IMPLICIT = 32;
const MOST_IMPLICIT_CONTAINERS = Math.max(32, 4 * availableParallelism());
/** Of containers that died before the task had begun. */
const TRIES = 3;

export class FnCallNode {
  private readonly folders: RuntimeFolders;
  private readonly note: (text: string) => void;
  private readonly mostImplicit: number;
  private readonly mostContainers: number;
  /** Redefined: what runs and waits in them ends in them. */
  private readonly draining = new Set<Pool>();
  private readonly named = new Map<string, Pool>();
  private readonly implicit = new Map<string, Pool>();
  private readonly imageEnvs = new WeakMap<Pool, Promise<readonly string[]>>();
  private readonly sweep: NodeJS.Timeout;
  private readonly gpus: NodeGpus;

  constructor({ folders, note = () => {}, mostImplicit, mostImplicitContainers, gpus }: FnCallOptions = {}) {
    this.gpus = new NodeGpus(gpus);
    this.gpus.spare = () => {
      for (const pool of [...this.named.values(), ...this.implicit.values()]) pool.yieldGpus();
    };
    this.mostImplicit = mostImplicit ?? MOST_IMPLICIT;
    this.mostContainers = mostImplicitContainers ?? MOST_IMPLICIT_CONTAINERS;
    this.folders = runtimeFolders(folders);
    this.note = note;
    this.sweep = setInterval(() => this.dropUnused(), 30_000);
    this.sweep.unref();
  }

  /** Makes it, or puts it in place of one that is otherwise. @throws RUNTIME_FNCALL_POOL_OPTION, RUNTIME_FNCALL_UNAVAILABLE, RUNTIME_GPU, RUNTIME_GPU_NONE */
  async definePool(name: string, environment: PoolEnvironment, options: PoolOptions = {}): Promise<Pool> {
    if (!/^[a-z0-9][a-z0-9_.-]{0,62}$/.test(name)) {
      throw fail('RUNTIME_FNCALL_POOL_OPTION', {
        option: 'name',
        problem: `${JSON.stringify(name)}: small letters, digits, . _ and -`,
      });
    }
    if (options.gpu !== undefined) {
      checkGpuRequest(options.gpu);
      await this.gpus.check(options.gpu);
    }
    const before = this.named.get(name);
    if (before !== undefined && keyOf(before) === environmentKey(environment, options)) return before;
    const pool = this.make(name, environment, options);
    this.named.set(name, pool);
    if (before !== undefined) this.drain(before);
    return pool;
  }

  private drain(pool: Pool): void {
    this.draining.add(pool);
    pool
      .close(UNUSED_MS)
      .catch((error: unknown) => this.note(messageOf(error)))
      .finally(() => this.draining.delete(pool));
  }

  /** By its name, or by what `pools` calls one that nobody named; with what was so called before and runs still. @throws RUNTIME_FNCALL_NO_POOL */
  async removePool(name: string): Promise<void> {
    const pools = this.named.has(name) ? this.named : this.implicit;
    const pool = pools.get(name);
    const removed = [...(pool === undefined ? [] : [pool]), ...[...this.draining].filter((one) => one.name === name)];
    if (removed.length === 0) throw fail('RUNTIME_FNCALL_NO_POOL', { pool: name });
    pools.delete(name);
    await Promise.all(removed.map((one) => one.close()));
  }

  pools(): PoolView[] {
    const view = (pool: Pool, implicit: boolean): PoolView => {
      const { base, toolkits = [] } = pool.spec.environment;
      return {
        ...pool.state,
        image: base.name,
        toolkits: toolkits.map((one) => one.name),
        implicit,
        options: pool.spec.options,
      };
    };
    const sorted = [...this.named.values()].sort((a, b) => (a.name < b.name ? -1 : 1));
    return [...sorted.map((pool) => view(pool, false)), ...[...this.implicit.values()].map((pool) => view(pool, true))];
  }

  /** @throws RUNTIME_FNCALL_NO_POOL */
  poolNamed(name: string): Pool {
    const pool = this.named.get(name);
    if (pool === undefined) throw fail('RUNTIME_FNCALL_NO_POOL', { pool: name });
    return pool;
  }

  hasPool(name: string): boolean {
    return this.named.has(name);
  }

  /** The pool of an environment that nobody named. @throws RUNTIME_FNCALL_BUSY, as `definePool` */
  poolFor(environment: PoolEnvironment, options: PoolOptions = {}): Pool {
    const key = environmentKey(environment, options);
    const known = this.implicit.get(key);
    if (known !== undefined) {
      known.usedAt = Date.now();
      return known;
    }
    while (this.implicit.size >= this.mostImplicit) {
      const [longest] = this.unused();
      if (longest === undefined) {
        const reason = `${this.implicit.size} pools of images without a name are in use already`;
        throw fail('RUNTIME_FNCALL_BUSY', { pool: key, reason, retryAfter: 5 });
      }
      this.drop(longest);
    }
    const made = this.make(key, environment, options, this.share);
    this.implicit.set(key, made);
    return made;
  }

  private readonly share: PoolShare = {
    hasRoom: () => {
      const sum = [...this.implicit.values()].reduce((all, pool) => all + pool.containers, 0);
      if (sum < this.mostContainers) return true;
      // The place of one that nobody uses is there when it has gone.
      this.unused().find(([, pool]) => pool.spare());
      return false;
    },
    freed: () => {
      for (const pool of this.implicit.values()) pool.grow();
    },
  };

  /** The longest unused first. */
  private unused(): [string, Pool][] {
    return [...this.implicit].filter(([, pool]) => pool.isIdle).sort(([, a], [, b]) => a.usedAt - b.usedAt);
  }

  private drop([key, pool]: [string, Pool]): void {
    this.implicit.delete(key);
    this.drain(pool);
  }

  /** @throws RUNTIME_FNCALL_TASK, RUNTIME_FNCALL_LANGUAGE, RUNTIME_FNCALL_BUSY, RUNTIME_FNCALL_CONTAINER */
  async run(pool: Pool, task: FnCallTask, signal?: AbortSignal): Promise<TaskResult> {
    const prepared = prepareTask(task, pool.spec.options);
    const imageEnv = await this.imageEnv(pool);
    for (let tries = 1; ; tries++) {
      const result = await this.runOnce(pool, prepared, imageEnv, tries < TRIES, signal);
      if (result !== undefined) return result;
    }
  }

  /** Undefined: the container died before the task had begun. */
  private runOnce(
    pool: Pool,
    prepared: PreparedTask,
    imageEnv: readonly string[],
    again: boolean,
    signal: AbortSignal | undefined,
  ): Promise<TaskResult | undefined> {
    return pool.with(async (container, queueMs) => {
      try {
        const raw = await this.runIn(container, prepared, imageEnv, signal);
        if (!('notBegun' in raw)) return resultOf(raw, prepared, pool.name, queueMs);
        if (again) return undefined;
        throw fail('RUNTIME_FNCALL_CONTAINER', { reason: raw.notBegun });
      } catch (error) {
        if (!isDsecError(error, 'RUNTIME_FNCALL_CONTAINER')) throw error;
        return sandboxError(error.message, pool.name, queueMs);
      }
    }, signal);
  }

  private async runIn(
    container: PoolContainer,
    prepared: PreparedTask,
    imageEnv: readonly string[],
    signal: AbortSignal | undefined,
  ): Promise<RawResult | NotBegun> {
    signal?.throwIfAborted();
    const { limits, task, files } = prepared;
    const order = {
      diskBytes: limits.diskBytes,
      steps: prepared.steps(container, imageEnv),
      cwd: TASK_FOLDER,
      fetch: task.fetch ?? [],
      maxFiles: MAX_FETCHED,
      maxBytes: MAX_FETCHED_BYTES,
    };
    // Whoever called has gone, or the container keeps no time: then it ends with all that is in it.
    const end = () => void container.close().catch((error: unknown) => this.note(messageOf(error)));
    const timer = setTimeout(end, prepared.patienceMs);
    signal?.addEventListener('abort', end, { once: true });
    try {
      return await container.run(order, files);
    } finally {
      clearTimeout(timer);
      signal?.removeEventListener('abort', end);
    }
  }

  private imageEnv(pool: Pool): Promise<readonly string[]> {
    const known = this.imageEnvs.get(pool) ?? imageEnvironment(pool.spec.environment);
    this.imageEnvs.set(pool, known);
    known.catch(() => this.imageEnvs.delete(pool));
    return known;
  }

  private make(name: string, environment: PoolEnvironment, options: PoolOptions, share?: PoolShare): Pool {
    const { folders, gpus } = this;
    return new Pool(name, { environment, options, folders, gpus, agent: usableAgent(), pool: name }, this.note, share);
  }

  private dropUnused(): void {
    for (const one of this.unused()) if (Date.now() - one[1].usedAt >= UNUSED_MS) this.drop(one);
  }

  /** Every container of it ends. */
  async close(): Promise<void> {
    clearInterval(this.sweep);
    const all = [...this.named.values(), ...this.implicit.values(), ...this.draining];
    this.named.clear();
    this.implicit.clear();
    await Promise.all(all.map((pool) => pool.close()));
  }
}

function keyOf({ spec }: Pool): string {
  return environmentKey(spec.environment, spec.options);
}

/** @throws RUNTIME_FNCALL_UNAVAILABLE */
function usableAgent(): AgentBinary {
  if (process.geteuid?.() !== 0) throw fail('RUNTIME_FNCALL_UNAVAILABLE', { reason: 'only root can make containers' });
  const agent = findAgent();
  if (agent === undefined)
    throw fail('RUNTIME_FNCALL_UNAVAILABLE', { reason: 'dsec-agent is not built: node scripts/setup.mjs' });
  return agent;
}
