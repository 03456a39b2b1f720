/**
 * Create, exec, stop, again and again, while things go wrong: steps that throw, first processes that are killed. Whatever becomes of each
 * sandbox, nothing grows: no descriptors, mounts, namespaces, control groups or folders, and no memory to speak of.
 * $DSEC_FAULT_RUNS: how many; 1,000 is what is promised.
 */
import { readdirSync, readFileSync, readlinkSync } from 'node:fs';
import { setTimeout as delay } from 'node:timers/promises';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { InjectedFault, injectFaults, isDsecError } from '#base';
import { findAgent } from '../backend/agent-binary.ts';
import { cgroupRows } from '../backend/cgroup-hierarchies.ts';
import { CGROUP_PARENT } from '../backend/sandbox-group.ts';
import type { NodeSandbox } from '../node/node-sandbox.ts';
import { processesOf, ResidentSite, until } from './resident-fixture.ts';
import { canRun, NOTHING } from './sandbox-fixture.ts';

const RUNS = Number(process.env.DSEC_FAULT_RUNS || 80);
/** Of the steps; a run has some twenty of them. And of the sandboxes whose agent is killed. */
const RATE = 0.01;
const AT_ONCE = 4;
const MIB = 2 ** 20;

const agent = findAgent();
if (agent === undefined) console.log('skipped: dsec-agent is not built');

describe.skipIf(agent === undefined || !canRun())('sandboxes of which some go wrong', () => {
  let all: ResidentSite;
  const random = randomFrom(7);
  beforeAll(async () => {
    all = await ResidentSite.open();
  }, 120_000);
  afterAll(async () => {
    injectFaults(undefined);
    await all.remove();
  }, 120_000);

  it(
    `leave nothing behind: ${RUNS} of them`,
    async () => {
      const stays = await all.create({ name: 'stays' });
      await work(20);
      const before = await held();
      let faults = 0;
      injectFaults(() => random() < RATE && ++faults > 0);
      const ends = await work(RUNS);
      injectFaults(undefined);
      // Something did go wrong, and most did not.
      expect(faults).toBeGreaterThan(0);
      expect(ends.good).toBeGreaterThan(RUNS / 2);
      expect(stays.state).toBe('running');
      const { memory: memoryBefore, ...countsBefore } = before;
      // A file that is being read at this very moment is no leak: it is gone a moment later.
      let { memory, ...counts } = await held();
      const grown = () =>
        Object.entries(counts).filter(([what, count]) => count > countsBefore[what as keyof typeof counts]);
      for (let tries = 0; grown().length > 0 && tries < 30; tries++) {
        await delay(1000);
        ({ memory, ...counts } = await held());
      }
      expect(grown()).toEqual([]);
      // Of Node's heap, collected, and of the keeper.
      expect(memory.heap - memoryBefore.heap).toBeLessThan(16 * MIB);
      expect(memory.keeper - memoryBefore.keeper).toBeLessThan(2 * MIB);
      await all.node.remove('stays', { force: true });
      expect(all.site.leftovers()).toEqual(NOTHING);
    },
    600_000 + RUNS * 2_000,
  );

  async function work(runs: number): Promise<{ good: number; bad: number }> {
    let left = runs;
    const ends = { good: 0, bad: 0 };
    const worker = async () => {
      while (left > 0) {
        const name = `f${left--}`;
        try {
          await once(name);
          ends.good++;
        } catch (error) {
          if (!(error instanceof InjectedFault) && !isDsecError(error)) throw error;
          ends.bad++;
        }
        // Whatever it was: it can be taken away, now or when the node has tried again.
        await until(`${name} goes`, () => all.node.remove(name, { force: true }).then(() => true, isGone));
      }
    };
    await Promise.all(Array.from({ length: AT_ONCE }, worker));
    return ends;
  }

  async function once(name: string): Promise<void> {
    const sandbox = await all.create({ name });
    if (random() < RATE) kill(sandbox);
    const command = await sandbox.exec({ args: ['true'] });
    expect((await command.wait()).exitCode).toBe(0);
    if (random() < 0.5) await sandbox.stop({ timeMs: 0 });
  }

  /** Its first process, which is its agent. */
  function kill(sandbox: NodeSandbox): void {
    const [pid] = processesOf(sandbox).sort((a, b) => a - b);
    if (pid !== undefined) process.kill(pid, 'SIGKILL');
  }

  /** When all that is being undone is undone. */
  async function held() {
    await until('one sandbox is left', () => {
      const { mounts, folders } = all.site.leftovers();
      return folders.length === 1 && mounts.filter((path) => path.endsWith('/root')).length === 1;
    });
    const keeper = keeperPid();
    await until('nothing runs in any other', () => childrenOf(keeper).length === 1);
    const groups = cgroupRows().flatMap(({ mountPoint }) => named(`${mountPoint}/${CGROUP_PARENT}`));
    globalThis.gc?.();
    return {
      descriptors: named('/proc/self/fd').length,
      keeperDescriptors: named(`/proc/${keeper}/fd`).length,
      mounts: all.site.leftovers().mounts.length,
      groups: groups.filter((name) => /^(?:f\d+|stays)-/.test(name)).length,
      namespaces: namespacesOf([process.pid, keeper, ...childrenOf(keeper)]),
      locks: named(`${all.site.folders.stateDir}/sandboxes/.locks`).length,
      memory: { heap: process.memoryUsage().heapUsed, keeper: residentBytes(keeper) },
    };
  }

  function keeperPid(): number {
    const found = childrenOf(process.pid).find((pid) => read(`/proc/${pid}/comm`).trim() === 'dsec-keeper');
    if (found === undefined) throw new Error('the keeper is no child of this process');
    return found;
  }
});

function isGone(error: unknown): boolean {
  return isDsecError(error, 'RUNTIME_SANDBOX_NOT_FOUND');
}

/** Those that the kernel still has, of these processes. */
function namespacesOf(pids: readonly number[]): number {
  const links = pids.flatMap((pid) => named(`/proc/${pid}/ns`).map((name) => readlinkSync(`/proc/${pid}/ns/${name}`)));
  return new Set(links).size;
}

function childrenOf(pid: number): number[] {
  return named(`/proc/${pid}/task`).flatMap((thread) =>
    read(`/proc/${pid}/task/${thread}/children`).split(' ').filter(Boolean).map(Number),
  );
}

function residentBytes(pid: number): number {
  return Number(/^VmRSS:\s+(\d+) kB$/m.exec(read(`/proc/${pid}/status`))?.[1]) * 1024;
}

function named(folder: string): string[] {
  try {
    return readdirSync(folder);
  } catch {
    return [];
  }
}

function read(path: string): string {
  try {
    return readFileSync(path, 'latin1');
  } catch {
    return '';
  }
}

/** The same ones each time: a run that fails can be run again. */
function randomFrom(seed: number): () => number {
  let state = seed;
  return () => {
    state = (Math.imul(state, 1_664_525) + 1_013_904_223) >>> 0;
    return state / 2 ** 32;
  };
}
