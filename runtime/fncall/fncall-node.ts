/**
 * FnCall on one node: its pools, and calls to them. A pool has a name and stays until it is removed; or it is made by the first call that names
 * an image, with the defaults, and goes when nobody has used it for a while.
 */
import { isDsecError, messageOf } from '#base';
import { type AgentBinary, findAgent } from '../backend/agent-binary.ts';
import { fail } from '../errors.ts';
import { type RuntimeFolders, runtimeFolders } from '../sandbox/state-folders.ts';
import { imageEnvironment, TASK_FOLDER } from './container-plan.ts';
import { Pool, type PoolState } from './pool.ts';
import type { PoolContainer, RawResult } from './pool-container.ts';
import { environmentKey, type PoolEnvironment, type PoolOptions } from './pool-spec.ts';
import { type PreparedTask, prepareTask, resultOf, sandboxError } from './run-task.ts';
import { type FnCallTask, MAX_FILE_BYTES, type TaskResult } from './task.ts';

export interface FnCallOptions {
  readonly folders?: Partial<RuntimeFolders>;
  /** Told what is worth a line in a log. */
  readonly note?: (text: string) => void;
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

export class FnCallNode {
  private readonly folders: RuntimeFolders;
  private readonly note: (text: string) => void;
  private readonly named = new Map<string, Pool>();
  private readonly implicit = new Map<string, Pool>();
  private readonly imageEnvs = new WeakMap<Pool, Promise<readonly string[]>>();
  private readonly sweep: NodeJS.Timeout;

  constructor({ folders, note = () => {} }: FnCallOptions = {}) {
    this.folders = runtimeFolders(folders);
    this.note = note;
    this.sweep = setInterval(() => this.dropUnused(), 30_000);
    this.sweep.unref();
  }

  /** Makes it, or puts it in place of one that is otherwise. @throws RUNTIME_FNCALL_POOL_OPTION, RUNTIME_FNCALL_UNAVAILABLE */
  async definePool(name: string, environment: PoolEnvironment, options: PoolOptions = {}): Promise<Pool> {
    if (!/^[a-z0-9][a-z0-9_.-]{0,62}$/.test(name)) {
      throw fail('RUNTIME_FNCALL_POOL_OPTION', {
        option: 'name',
        problem: `${JSON.stringify(name)}: small letters, digits, . _ and -`,
      });
    }
    const before = this.named.get(name);
    if (before !== undefined && keyOf(before) === environmentKey(environment, options)) return before;
    const pool = this.make(name, environment, options);
    this.named.set(name, pool);
    // What runs in it ends in it.
    before?.close(UNUSED_MS).catch((error: unknown) => this.note(messageOf(error)));
    return pool;
  }

  /** @throws RUNTIME_FNCALL_NO_POOL */
  async removePool(name: string): Promise<void> {
    const pool = this.poolNamed(name);
    this.named.delete(name);
    await pool.close();
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

  /** The pool of an environment that nobody named. @throws as `definePool` */
  poolFor(environment: PoolEnvironment, options: PoolOptions = {}): Pool {
    const key = environmentKey(environment, options);
    const found = this.implicit.get(key) ?? this.make(key, environment, options);
    this.implicit.set(key, found);
    return found;
  }

  /** @throws RUNTIME_FNCALL_TASK, RUNTIME_FNCALL_LANGUAGE, RUNTIME_FNCALL_BUSY, RUNTIME_FNCALL_CONTAINER */
  async run(pool: Pool, task: FnCallTask, signal?: AbortSignal): Promise<TaskResult> {
    const prepared = prepareTask(task, pool.spec.options);
    const imageEnv = await this.imageEnv(pool);
    return pool.with(async (container, queueMs) => {
      try {
        const raw = await this.runIn(container, prepared, imageEnv, signal);
        return resultOf(raw, prepared, pool.name, queueMs);
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
  ): Promise<RawResult> {
    const { limits, task, files } = prepared;
    const order = {
      diskBytes: limits.diskBytes,
      steps: prepared.steps(container, imageEnv),
      cwd: TASK_FOLDER,
      fetch: task.fetch ?? [],
      maxFiles: MAX_FETCHED,
      maxBytes: MAX_FILE_BYTES,
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

  private make(name: string, environment: PoolEnvironment, options: PoolOptions): Pool {
    return new Pool(name, { environment, options, folders: this.folders, agent: usableAgent() }, this.note);
  }

  private dropUnused(): void {
    for (const [key, pool] of this.implicit) {
      if (!pool.isIdle || Date.now() - pool.usedAt < UNUSED_MS) continue;
      this.implicit.delete(key);
      pool.close().catch((error: unknown) => this.note(messageOf(error)));
    }
  }

  /** Every container of it ends. */
  async close(): Promise<void> {
    clearInterval(this.sweep);
    const all = [...this.named.values(), ...this.implicit.values()];
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
