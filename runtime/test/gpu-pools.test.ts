/** Pools that want one graphics processor: their own code and the scheduler's, with a clock of the test's, and containers that are no more than a card each. */
import { afterEach, describe, expect, it } from 'vitest';
import { type GpuHolder, type GpuLease, type GpuRequest, GpuScheduler } from '../fncall/gpu/gpu-scheduler.ts';
import type { NodeGpus } from '../fncall/gpu/node-gpus.ts';
import type { Gpu } from '../fncall/gpu/nvidia-smi.ts';
import { Pool } from '../fncall/pool.ts';
import type { PoolContainer } from '../fncall/pool-container.ts';
import type { ContainerSpec, PoolOptions } from '../fncall/pool-spec.ts';

const REQUEST: GpuRequest = { mode: 'exclusive' };
const TURN = 5_000;
const START = 6_000;
const card = (index: number): Gpu => ({
  uuid: `GPU-${index}`,
  name: 'card',
  index,
  profile: undefined,
  memoryMib: undefined,
});

class Site {
  time = 0;
  readonly scheduler: GpuScheduler;
  /** Which pool started a container, and which gave one up, in order. */
  readonly told: string[] = [];
  readonly pools: Pool[] = [];

  constructor(cards: number) {
    const gpus = Array.from({ length: cards }, (_, index) => card(index));
    this.scheduler = new GpuScheduler({ gpus, turnMs: TURN, waitMs: 600_000, now: () => this.time });
  }

  pool(name: string, options: PoolOptions): Pool {
    const gpus = { makeRoom: () => this.makeRoom() } as NodeGpus;
    const spec = { options: { queueMs: 600_000, ...options }, gpus } as ContainerSpec;
    const begin = async (_: ContainerSpec, holder: GpuHolder, signal: AbortSignal) => {
      const taken = this.scheduler.take(REQUEST, signal, holder);
      this.makeRoom();
      const lease = await taken;
      this.time += START;
      this.told.push(`${name} started`);
      return this.container(name, lease);
    };
    const made = new Pool(name, spec, () => {}, undefined, begin);
    this.pools.push(made);
    return made;
  }

  private makeRoom(): void {
    this.scheduler.serve();
    for (const pool of this.pools) pool.yieldGpus();
  }

  private container(name: string, lease: GpuLease): PoolContainer {
    const container = {
      name,
      tasks: 0,
      isLost: false,
      onLost() {},
      get isGpuWanted() {
        return lease.isWanted();
      },
      setInUse: (inUse: boolean) => lease.setInUse(inUse),
      ready: async () => {},
      close: async () => {
        lease.leave();
        this.told.push(`${name} given up`);
        await new Promise((resolve) => setImmediate(resolve));
        lease.release();
      },
    };
    return container as unknown as PoolContainer;
  }

  /** One that takes `ms` of the clock. */
  async call(pool: Pool, ms: number): Promise<void> {
    await pool.with(async (container) => {
      container.tasks++;
      this.time += ms;
    });
  }
}

describe('pools with graphics processors', () => {
  let site: Site;
  afterEach(async () => {
    await Promise.all(site.pools.map((pool) => pool.close()));
    expect(site.scheduler.state.every(({ tasks }) => tasks === 0)).toBe(true);
  });

  it('serve a call each by turns, though a start takes longer than a turn', async () => {
    site = new Site(1);
    const [a, b] = [site.pool('a', { ceiling: 1 }), site.pool('b', { ceiling: 1 })];
    await Promise.all([a, a, b, b].map((pool) => site.call(pool, TURN)));
    expect(site.told).toEqual([
      'a started',
      'a given up',
      'b started',
      'b given up',
      'a started',
      'a given up',
      'b started',
    ]);
    expect([a, b].map(({ state }) => [state.tasks, state.refused])).toEqual([
      [2, 0],
      [2, 0],
    ]);
  });

  it('have one container of others make room for one call, however many are started ahead of calls', async () => {
    site = new Site(3);
    const warm = site.pool('warm', { floor: 3, ceiling: 3 });
    await warm.warm();
    expect(warm.state.ready).toBe(3);
    const other = site.pool('other', { floor: 3, ceiling: 3 });
    await new Promise((resolve) => setImmediate(resolve));
    expect([other.state.starting, warm.state.ready]).toEqual([3, 3]);
    await site.call(other, 1);
    expect(site.told).toEqual(['warm started', 'warm started', 'warm started', 'warm given up', 'other started']);
    expect([warm.state.ready, other.state.starting]).toEqual([2, 2]);
  });
});
