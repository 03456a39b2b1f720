/**
 * FnCall of one process: the pools that were made by name, which a restart brings back, and those that calls make. Definitions are a file
 * in the state folder; containers are this process's, and end with it.
 */
import { mkdirSync, readFileSync, renameSync, writeFileSync } from 'node:fs';
import { dirname, join } from 'node:path';
import { messageOf, systemCode } from '#base';
import { openImage } from '#imagesvc';
import {
  FnCallNode,
  type FnCallTask,
  type GpuSource,
  MACHINE_GPUS,
  type Pool,
  type PoolEnvironment,
  type PoolView,
  runtimeFolders,
  type TaskResult,
} from '#runtime';
import { fail } from '../errors.ts';
import { knownStore } from '../runtime-service/known-stores.ts';
import { runMadeFrom } from './made-from.ts';
import { type PoolAsked, poolOptions, type RunAsked, taskAsked } from './task-schemas.ts';

/** Which pool a call without one is for. */
export const DEFAULT_POOL = 'default';

export interface FnCallHostOptions {
  /** Of images whose store is not named. */
  readonly storeUrl: string;
  readonly note: (text: string) => void;
  /** `false`: pools are not kept for the next process. */
  readonly remember?: boolean;
  readonly gpusOfTasks?: GpusOfTasks;
  /** In place of this machine's. */
  readonly gpus?: GpuSource;
}

/** All of this machine, or instances of divided cards alone, where whole ones are somebody else's to give, or none. */
export type GpusOfTasks = 'all' | 'instances' | 'none';

function gpuSource({ gpusOfTasks, gpus = MACHINE_GPUS }: FnCallHostOptions): GpuSource {
  if (gpusOfTasks === undefined || gpusOfTasks === 'all') return gpus;
  return {
    list: async () =>
      gpusOfTasks === 'none' ? [] : (await gpus.list()).filter(({ profile }) => profile !== undefined),
    devices: (gpu) => gpus.devices(gpu),
    libraries: () => gpus.libraries(),
  };
}

export class FnCallHost {
  readonly node: FnCallNode;
  private readonly options: FnCallHostOptions;
  private readonly file = join(runtimeFolders().stateDir, 'fncall', 'pools.json');
  private readonly asked = new Map<string, PoolAsked>();

  constructor(options: FnCallHostOptions) {
    this.options = options;
    this.node = new FnCallNode({ note: options.note, gpus: gpuSource(options) });
  }

  /** How many tasks are at work, and how many can be. */
  get use(): { readonly sandboxes: number; readonly limit: number } {
    const pools = this.node.pools();
    const sum = (value: (pool: PoolView) => number) => pools.reduce((all, pool) => all + value(pool), 0);
    return {
      sandboxes: sum(({ busy, waiting }) => busy + waiting),
      limit: Math.max(
        1,
        sum(({ ceiling }) => ceiling),
      ),
    };
  }

  /** Pools of the process before. What cannot be made is noted, and keeps nobody. */
  async restore(): Promise<void> {
    for (const [name, asked] of Object.entries(this.read())) {
      try {
        await this.define(name, asked, false);
      } catch (error) {
        this.options.note(`pool ${name}: ${messageOf(error)}`);
        this.asked.set(name, asked);
      }
    }
  }

  /** @throws RUNTIME_FNCALL_*, STORE_* */
  async define(name: string, asked: PoolAsked, write = true): Promise<PoolView> {
    const environment = await this.environment(asked);
    await this.node.definePool(name, environment, poolOptions(asked));
    this.asked.set(name, asked);
    if (write) this.write();
    return this.view(name);
  }

  /** @throws RUNTIME_FNCALL_NO_POOL */
  async remove(name: string): Promise<void> {
    const known = this.asked.delete(name);
    if (known) this.write();
    if (this.node.hasPool(name) || !known) await this.node.removePool(name);
  }

  view(name: string): PoolView {
    this.node.poolNamed(name);
    return this.node.pools().find((one) => one.name === name && !one.implicit)!;
  }

  /** @throws RUNTIME_FNCALL_*, STORE_*, SANDBOX_BAD_REQUEST */
  async run(body: RunAsked, signal?: AbortSignal): Promise<TaskResult> {
    const [pool, task] = [await this.poolOf(body), taskAsked(body)];
    if (body.from === undefined) return this.runIn(pool, task, signal);
    const { from, store } = body;
    // Where nothing is said it is made where it runs.
    const elsewhere = from.pool !== undefined || from.image !== undefined;
    const place = elsewhere ? await this.poolOf({ ...from, store }) : pool;
    return runMadeFrom(
      taskAsked(from),
      (first) => this.runIn(place, first, signal),
      (made) => this.runIn(pool, { ...task, files: [...(task.files ?? []), ...made] }, signal),
    );
  }

  runIn(pool: Pool, task: FnCallTask, signal?: AbortSignal): Promise<TaskResult> {
    return this.node.run(pool, task, signal);
  }

  /** @throws RUNTIME_FNCALL_NO_POOL, STORE_* */
  async poolOf(body: Pick<RunAsked, 'pool' | 'image' | 'store' | 'workspace' | 'toolkits'>): Promise<Pool> {
    const { pool, image } = body;
    if (image === undefined) return this.node.poolNamed(pool ?? DEFAULT_POOL);
    if (pool !== undefined) throw fail('SANDBOX_BAD_REQUEST', { problem: 'a pool or an image, not both' });
    return this.node.poolFor(await this.environment({ ...body, image }));
  }

  async close(): Promise<void> {
    await this.node.close();
  }

  private async environment(
    asked: Pick<PoolAsked, 'image' | 'store' | 'workspace' | 'toolkits'>,
  ): Promise<PoolEnvironment> {
    const store = await knownStore(asked.store ?? this.options.storeUrl);
    const open = (name: string) => openImage(store, name);
    return {
      store,
      base: await open(asked.image),
      workspace: asked.workspace === undefined ? undefined : await open(asked.workspace),
      toolkits: await Promise.all((asked.toolkits ?? []).map(open)),
    };
  }

  private read(): Record<string, PoolAsked> {
    try {
      return JSON.parse(readFileSync(this.file, 'utf8')) as Record<string, PoolAsked>;
    } catch (error) {
      if (systemCode(error) !== 'ENOENT') this.options.note(`${this.file}: ${messageOf(error)}`);
      return {};
    }
  }

  private write(): void {
    if (this.options.remember === false) return;
    mkdirSync(dirname(this.file), { recursive: true, mode: 0o700 });
    writeFileSync(`${this.file}.tmp`, `${JSON.stringify(Object.fromEntries(this.asked), null, 1)}\n`, { mode: 0o600 });
    renameSync(`${this.file}.tmp`, this.file);
  }
}
