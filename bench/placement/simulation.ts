/**
 * A cluster in virtual time: requests come, edges admit or refuse, sandboxes end, reports arrive 1 to 10 s old, out of order, some
 * never; edges crash and drain. Several instances of placement decide, each with a view of its own. Nothing here reads a clock:
 * the same seed gives the same figures.
 */
import { ClusterView, type NodeReport, type PlacementRequest } from '#control';
import type { Policy } from './policies.ts';
import { exponential, seededRandom } from './seeded-random.ts';
import { type HeldSandbox, SimulatedEdge } from './simulated-edge.ts';

export interface SimulationOptions {
  readonly nodes: number;
  readonly seconds: number;
  /** Requests a second, on average. */
  readonly rate: number;
  readonly seed: number;
  /** Every so often many come at once. */
  readonly burst?: { readonly everySeconds: number; readonly size: number };
  readonly crashes?: boolean;
  /** Nodes elsewhere, besides, that take what the others have no room for: of images that were synced, a share of all. */
  readonly overflow?: { readonly nodes: number; readonly above: number; readonly synced: number };
}

export interface SimulationResult {
  readonly policy: string;
  readonly placed: number;
  /** Edges that were asked and had no room, a request. */
  readonly refusalsPerRequest: number;
  /** After five edges, or none that might. */
  readonly failed: number;
  /** Of the resource that is shortest on each node, once a second: the fullest node over the mean. */
  readonly peakOverMean: readonly { readonly second: number; readonly value: number }[];
  /** The fullest that any node ever was, 0 to 1. */
  readonly fullest: number;
  /** Times that a node held more than it can promise. */
  readonly overCapacity: number;
  /** What went elsewhere: how many, how many of them were not synced, and how full the nodes here were at the least when one did, 0 to 1. */
  readonly elsewhere: { readonly placed: number; readonly notSynced: number; readonly leastUse: number };
}

const TICK_MS = 10;
const INSTANCES = 4;
const GIB = 2 ** 30;
const REPORT_EVERY_MS = 1000;
const REPORT_AGE_MS: readonly [number, number] = [1000, 10_000];
const LOST = 0.02;
/** The watcher calls an edge dead when it has not heard of it for so long. */
const SILENCE_MS = 15_000;
const MEAN_LIFE_MS = 60_000;
const USERS = 40;
const IMAGES = 400;
const ELSEWHERE = 'elsewhere';

export function simulate(policy: Policy, options: SimulationOptions): SimulationResult {
  const { nodes, seconds, rate, seed, burst, overflow } = options;
  const world = seededRandom(seed);
  const luck = seededRandom(seed + 1);
  const edges = Array.from({ length: nodes + (overflow?.nodes ?? 0) }, (_, i) => {
    const capacity = { cpuMilli: 768_000, memoryBytes: 1024 * GIB, diskBytes: 8192 * GIB, gpus: 0 };
    return new SimulatedEdge(`edge-${i}`, capacity, 2400, i < nodes ? [] : [ELSEWHERE]);
  });
  const near = edges.slice(0, nodes);
  const elsewhere = { placed: 0, notSynced: 0, leastUse: 1 };
  const byName = new Map(edges.map((edge) => [edge.name, edge]));
  let now = 0;
  const queue = new TickQueue();
  const at = (ms: number, what: () => void) => queue.add(Math.max(now + TICK_MS, ms), what);

  const instances = Array.from({ length: INSTANCES }, () => {
    const cluster = new ClusterView({ now: () => now });
    const label = overflow && { label: ELSEWHERE, above: overflow.above };
    return { cluster, choose: policy.make({ random: luck, edges, overflow: label }), heard: new Map<string, number>() };
  });
  const deliver = (report: NodeReport, writtenAt: number) => {
    for (const { cluster, heard } of instances) {
      // The watcher passes on the newest only.
      if (writtenAt < (heard.get(report.edge) ?? Number.NEGATIVE_INFINITY)) continue;
      heard.set(report.edge, writtenAt);
      cluster.update(report);
    }
  };
  for (const edge of edges) deliver(edge.report(), 0);

  let placed = 0;
  let failed = 0;
  let asked = 0;
  let overCapacity = 0;
  let fullest = 0;
  const peakOverMean: { second: number; value: number }[] = [];

  const create = () => {
    const image = Math.floor(world() ** 3 * IMAGES);
    const sandbox: HeldSandbox = {
      request: { ...requestOf(world, image), synced: overflow !== undefined && image % 100 < overflow.synced * 100 },
      busy: world() < 0.2 ? world() : world() * 0.2,
      layers: [`base-${image % 20}`, `image-${image}`],
    };
    const life = exponential(world, MEAN_LIFE_MS);
    const { cluster, choose } = instances[Math.floor(world() * INSTANCES)]!;
    const excluded = new Set<string>();
    while (excluded.size < 5) {
      const name = choose(cluster, sandbox.request, excluded);
      if (name === undefined) break;
      asked++;
      const edge = byName.get(name)!;
      const decision = policy.overlay ? cluster.decide(sandbox.request, name) : undefined;
      const answer = edge.admit(sandbox);
      if (typeof answer === 'string') {
        if (decision !== undefined) cluster.withdraw(decision);
        excluded.add(name);
        continue;
      }
      if (decision !== undefined) cluster.admitted(decision, edge.epoch, answer);
      placed++;
      if (edge.labels.has(ELSEWHERE)) {
        elsewhere.placed++;
        if (sandbox.request.synced !== true) elsewhere.notSynced++;
        elsewhere.leastUse = Math.min(elsewhere.leastUse, useOf(near));
      }
      at(now + life, () => edge.end(sandbox));
      return;
    }
    failed++;
  };

  for (const edge of edges) {
    const report = () => {
      if (edge.state !== 'dead' && world() >= LOST) {
        const written = edge.report();
        const writtenAt = now;
        const age = REPORT_AGE_MS[0] + world() * (REPORT_AGE_MS[1] - REPORT_AGE_MS[0]);
        at(now + age, () => deliver(written, writtenAt));
      }
      at(now + REPORT_EVERY_MS, report);
    };
    at(world() * REPORT_EVERY_MS, report);
  }
  const silent = () => {
    for (const { cluster, heard } of instances) {
      for (const [name, when] of heard) {
        const known = cluster.get(name)!.report;
        if (now - when > SILENCE_MS && known.state !== 'dead') cluster.update({ ...known, state: 'dead' });
      }
    }
    at(now + 1000, silent);
  };
  at(1000, silent);
  if (options.crashes !== false) {
    const trouble = () => {
      const edge = edges[Math.floor(world() * nodes)]!;
      if (edge.state === 'healthy') {
        if (world() < 0.5) {
          edge.crash();
          at(now + 30_000, () => edge.restart());
        } else {
          edge.state = 'draining';
          at(now + 30_000, () => {
            if (edge.state === 'draining') edge.state = 'healthy';
          });
        }
      }
      at(now + 5000, trouble);
    };
    at(5000, trouble);
  }
  const sample = () => {
    const shares = near.filter(({ state }) => state === 'healthy').map((edge) => shortest(edge));
    const most = Math.max(...shares);
    const mean = shares.reduce((sum, share) => sum + share, 0) / shares.length;
    fullest = Math.max(fullest, most);
    overCapacity += edges.filter((edge) => shortest(edge) > 1).length;
    peakOverMean.push({ second: now / 1000, value: most / mean });
    at(now + 1000, sample);
  };
  at(1000, sample);

  for (; now < seconds * 1000; now += TICK_MS) {
    queue.run(now);
    const due = (rate * TICK_MS) / 1000;
    let many = Math.floor(due) + (world() < due % 1 ? 1 : 0);
    if (burst !== undefined && now > 0 && now % (burst.everySeconds * 1000) === 0) many += burst.size;
    for (let i = 0; i < many; i++) create();
  }
  return {
    policy: policy.name,
    placed,
    refusalsPerRequest: (asked - placed) / (placed + failed),
    failed,
    peakOverMean,
    fullest,
    overCapacity,
    elsewhere,
  };
}

function requestOf(random: () => number, image: number): PlacementRequest {
  const user = `user-${Math.floor(random() ** 2 * USERS)}`;
  return {
    user,
    job: `${user}/${Math.floor(random() * 5)}`,
    backend: 'container',
    amounts: {
      cpuMilli: 500 * 2 ** Math.floor(random() * 4),
      memoryBytes: (GIB / 2) * 2 ** Math.floor(random() * 5),
      diskBytes: GIB * 2 ** Math.floor(random() * 5),
      gpus: 0,
    },
    labels: [],
    layers: [`base-${image % 20}`, `image-${image}`],
    alone: false,
  };
}

/** Of all that live: the resource that is shortest. */
function useOf(edges: readonly SimulatedEdge[]): number {
  const alive = edges.filter(({ state }) => state === 'healthy');
  if (alive.length === 0) return 1;
  const of = (resource: 'cpuMilli' | 'memoryBytes' | 'diskBytes') =>
    alive.reduce((sum, { reserved }) => sum + reserved[resource], 0) /
    alive.reduce((sum, { capacity }) => sum + capacity[resource], 0);
  return Math.max(of('cpuMilli'), of('memoryBytes'), of('diskBytes'));
}

function shortest({ reserved, capacity }: SimulatedEdge): number {
  return Math.max(
    reserved.cpuMilli / capacity.cpuMilli,
    reserved.memoryBytes / capacity.memoryBytes,
    reserved.diskBytes / capacity.diskBytes,
  );
}

/** What is to happen, by tick. */
class TickQueue {
  private readonly byTick = new Map<number, (() => void)[]>();

  add(ms: number, what: () => void): void {
    const tick = Math.ceil(ms / TICK_MS);
    const list = this.byTick.get(tick);
    if (list === undefined) this.byTick.set(tick, [what]);
    else list.push(what);
  }

  run(now: number): void {
    const tick = now / TICK_MS;
    const list = this.byTick.get(tick);
    if (list === undefined) return;
    this.byTick.delete(tick);
    for (const what of list) what();
  }
}
