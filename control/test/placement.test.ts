/** Placement: who may get a sandbox, who does, and which decisions count until when. */
import { describe, expect, it } from 'vitest';
import { NOTHING } from '../placement/amounts.ts';
import { chooseNode } from '../placement/choose-node.ts';
import { ClusterView } from '../placement/cluster-view.ts';
import { obstacle } from '../placement/eligible.ts';
import type { NodeReport } from '../placement/node-report.ts';
import { NodeView } from '../placement/node-view.ts';
import { type Admission, placeSandbox } from '../placement/place-sandbox.ts';
import type { PlacementRequest } from '../placement/placement-request.ts';

const GIB = 2 ** 30;
const CAPACITY = { cpuMilli: 8000, memoryBytes: 16 * GIB, diskBytes: 100 * GIB, gpus: 1 };
const ASKED = { cpuMilli: 1000, memoryBytes: GIB, diskBytes: GIB, gpus: 0 };

function report(edge: string, changes: Partial<NodeReport> = {}): NodeReport {
  return {
    edge,
    epoch: 'first',
    admitted: 0,
    state: 'healthy',
    backends: new Map([['container', { sandboxes: 0, limit: 10 }]]),
    labels: new Set(),
    capacity: CAPACITY,
    reserved: NOTHING,
    load: { cpu: 0, memory: 0, disk: 0 },
    users: new Map(),
    jobs: new Map(),
    heldBy: undefined,
    layers: new Set(),
    ...changes,
  };
}

function request(changes: Partial<PlacementRequest> = {}): PlacementRequest {
  return { user: 'ann', backend: 'container', amounts: ASKED, labels: [], layers: [], alone: false, ...changes };
}

function clusterOf(...reports: NodeReport[]): ClusterView {
  const cluster = new ClusterView({ now: () => 0 });
  for (const one of reports) cluster.update(one);
  return cluster;
}

/** Sees every node, in order. */
function inTurn(nodes: number): () => number {
  let next = 0;
  return () => (next++ % nodes) / nodes;
}

describe('which node may get a sandbox', () => {
  const big = (amounts: Partial<typeof ASKED>) => request({ amounts: { ...ASKED, ...amounts } });
  it.each<[string, Partial<NodeReport>, PlacementRequest, string | undefined]>([
    ['one with room', {}, request(), undefined],
    ['one that is draining', { state: 'draining' }, request(), 'draining'],
    ['one that is dead', { state: 'dead' }, request(), 'dead'],
    ['one without the backend', {}, request({ backend: 'vm' }), 'no vm'],
    ['one without a label', { labels: new Set(['fast']) }, request({ labels: ['fast', 'eu'] }), 'no label eu'],
    ['one with all labels', { labels: new Set(['fast', 'eu']) }, request({ labels: ['eu'] }), undefined],
    ['one that just has room', { reserved: { ...NOTHING, memoryBytes: 15 * GIB } }, request(), undefined],
    [
      'one short of memory',
      { reserved: { ...NOTHING, memoryBytes: 15 * GIB + 1 } },
      request(),
      'not enough memoryBytes',
    ],
    ['one short of processors', {}, big({ cpuMilli: 8001 }), 'not enough cpuMilli'],
    ['one short of disk', {}, big({ diskBytes: 101 * GIB }), 'not enough diskBytes'],
    ['one short of GPUs', {}, big({ gpus: 2 }), 'not enough gpus'],
    [
      'one short of GPUs of a kind',
      { gpuKinds: new Map([['h100', { cards: 1, free: 0 }]]) },
      request({ amounts: { ...ASKED, gpus: 1 }, gpuKind: 'h100' }),
      'not enough gpus of kind h100',
    ],
    [
      'one that does not say of which kind its GPUs are',
      {},
      request({ amounts: { ...ASKED, gpus: 1 }, gpuKind: 'h100' }),
      undefined,
    ],
    [
      'one that is over-full already, for who needs none of it',
      { reserved: { ...NOTHING, gpus: 3 } },
      request(),
      undefined,
    ],
    [
      'one with as many as it takes',
      { backends: new Map([['container', { sandboxes: 10, limit: 10 }]]) },
      request(),
      'no more container',
    ],
    ['one that another holds', { heldBy: 'bob' }, request(), 'held by another user'],
    ['one that the user holds', { heldBy: 'ann' }, request({ alone: true }), undefined],
    [
      'one with others, for who wants to be alone',
      { users: new Map([['bob', 1]]) },
      request({ alone: true }),
      'has sandboxes of other users',
    ],
    ['one with the user’s own', { users: new Map([['ann', 3]]) }, request({ alone: true }), undefined],
  ])('%s', (_what, changes, asked, expected) => {
    expect(obstacle(new NodeView(report('a', changes)), asked)).toBe(expected);
  });
});

describe('a decision', () => {
  it('counts for the kind of its GPUs', () => {
    const capacity = { ...CAPACITY, gpus: 4 };
    const gpuKinds = new Map([
      ['h100', { cards: 2, free: 2 }],
      ['a100', { cards: 2, free: 1 }],
    ]);
    const cluster = clusterOf(report('a', { capacity, gpuKinds }));
    const node = cluster.get('a')!;
    const wants = (gpuKind: string, gpus: number) => request({ amounts: { ...NOTHING, gpus }, gpuKind });
    expect([node.freeGpus('h100'), node.freeGpus('a100'), node.freeGpus('t4')]).toEqual([2, 1, 0]);
    const decision = cluster.decide(wants('h100', 1), 'a');
    expect([
      obstacle(node, wants('h100', 1)),
      obstacle(node, wants('h100', 2)),
      obstacle(node, wants('a100', 1)),
    ]).toEqual([undefined, 'not enough gpus of kind h100', undefined]);
    cluster.withdraw(decision);
    expect(obstacle(node, wants('h100', 2))).toBeUndefined();
  });

  it('counts at once: for amounts, numbers, users, and who holds the node', () => {
    const cluster = clusterOf(report('a'));
    const node = cluster.get('a')!;
    cluster.decide(request({ alone: true, job: 'run' }), 'a');
    expect(node.reserved).toEqual(ASKED);
    expect([node.sandboxes, node.sandboxesBy('container'), node.ofUser('ann'), node.ofJob('run')]).toEqual([
      1, 1, 1, 1,
    ]);
    expect(obstacle(node, request({ user: 'bob' }))).toBe('held by another user');
  });

  it('counts until a report includes it, by the edge’s number', () => {
    const cluster = clusterOf(report('a'));
    const node = cluster.get('a')!;
    const [first, second] = [cluster.decide(request(), 'a'), cluster.decide(request(), 'a')];
    cluster.admitted(second, 'first', 1);
    cluster.admitted(first, 'first', 2);
    cluster.update(report('a', { admitted: 1, reserved: ASKED }));
    expect(node.reserved.cpuMilli).toBe(2000);
    cluster.update(report('a', { admitted: 2, reserved: { ...ASKED, cpuMilli: 2000 } }));
    expect(node.reserved.cpuMilli).toBe(2000);
    expect(node.unreported).toEqual(NOTHING);
  });

  it('does not count twice when the report was quicker than the answer', () => {
    const cluster = clusterOf(report('a'));
    const decision = cluster.decide(request(), 'a');
    cluster.update(report('a', { admitted: 1, reserved: ASKED }));
    cluster.admitted(decision, 'first', 1);
    expect(cluster.get('a')!.reserved).toEqual(ASKED);
  });

  it('goes when it was refused, and when time is up without an answer', () => {
    let now = 0;
    const cluster = new ClusterView({ now: () => now, decisionMs: 100 });
    cluster.update(report('a'));
    cluster.withdraw(cluster.decide(request(), 'a'));
    expect(cluster.get('a')!.reserved).toEqual(NOTHING);
    cluster.decide(request(), 'a');
    now = 99;
    cluster.update(report('a'));
    expect(cluster.get('a')!.reserved).toEqual(ASKED);
    now = 100;
    cluster.update(report('a'));
    expect(cluster.get('a')!.reserved).toEqual(NOTHING);
  });

  it('of an edge that was started anew goes with its first report', () => {
    const cluster = clusterOf(report('a', { admitted: 7 }));
    cluster.admitted(cluster.decide(request(), 'a'), 'first', 8);
    cluster.update(report('a', { epoch: 'second', admitted: 0 }));
    expect(cluster.get('a')!.reserved).toEqual(NOTHING);
  });

  it('is not undone by a report that comes late', () => {
    const cluster = clusterOf(report('a', { admitted: 5, reserved: ASKED }));
    cluster.update(report('a', { admitted: 4, reserved: NOTHING }));
    expect(cluster.get('a')!.reserved).toEqual(ASKED);
  });
});

describe('the choice', () => {
  const at = (cpu: number) => ({ load: { cpu, memory: 0, disk: 0 } });

  it('is the least loaded of the candidates', () => {
    const cluster = clusterOf(report('a', at(0.9)), report('b', at(0.1)), report('c', at(0.5)));
    expect(chooseNode(cluster, request(), { random: inTurn(3), candidates: 3 }).edge).toBe('b');
    // Of the first two that chance shows: a and b; then a and c.
    expect(chooseNode(cluster, request(), { random: inTurn(3) }).edge).toBe('b');
    expect(chooseNode(cluster, request(), { random: inTurn(3), excluded: new Set(['b']) }).edge).toBe('c');
  });

  it('prefers the node that has the layers, and one where the job is not yet', () => {
    const layers = ['sha256:1', 'sha256:2'];
    const near = clusterOf(report('a'), report('b', { layers: new Set(layers) }));
    expect(chooseNode(near, request({ layers }), { random: inTurn(2) }).edge).toBe('b');
    const one: Partial<NodeReport> = {
      users: new Map([['bob', 1]]),
      backends: new Map([['container', { sandboxes: 1, limit: 10 }]]),
    };
    const spread = clusterOf(report('a', { ...one, jobs: new Map([['run', 1]]) }), report('b', one));
    expect(chooseNode(spread, request({ job: 'run' }), { random: inTurn(2) }).edge).toBe('b');
  });

  it('finds the one node that may, whatever chance shows', () => {
    const nodes = Array.from({ length: 200 }, (_, i) => report(`n${i}`, i === 137 ? {} : { state: 'draining' }));
    expect(chooseNode(clusterOf(...nodes), request(), { random: () => 0 }).edge).toBe('n137');
  });

  it('says why there is none', () => {
    const cluster = clusterOf(report('a', { state: 'dead' }), report('b', { heldBy: 'bob' }), report('c'));
    const choice = chooseNode(cluster, request(), { random: inTurn(3), excluded: new Set(['c']) });
    expect(choice).toEqual({
      reasons: new Map([
        ['dead', 1],
        ['held by another user', 1],
        ['refused by the edge', 1],
      ]),
    });
  });

  it('goes elsewhere only when it is full here, and with layers that are there', () => {
    const full = { reserved: { ...NOTHING, memoryBytes: 13 * GIB } };
    const overflow = { label: 'cloud', above: 0.8 };
    const far = report('far', { labels: new Set(['cloud']) });
    const choose = (near: NodeReport, synced: boolean, more: Partial<PlacementRequest> = {}) =>
      chooseNode(clusterOf(near, far), request({ synced, ...more }), { random: inTurn(1), overflow });
    expect(choose(report('near'), true).edge).toBe('near');
    expect(choose(report('near', full), true).edge).toBe('far');
    expect(choose(report('near', full), false).edge).toBe('near');
    // Places are what is short too; cards are where none is asked for not.
    expect(choose(report('near', { backends: new Map([['container', { sandboxes: 9, limit: 10 }]]) }), true).edge).toBe(
      'far',
    );
    expect(choose(report('near', { reserved: { ...NOTHING, gpus: 1 } }), true).edge).toBe('near');
    // Where the near ones have none of what is asked for, they have no room for it.
    const cards = report('far', { labels: new Set(['cloud', 'gpu:h100']), capacity: { ...far.capacity, gpus: 4 } });
    const wanted = request({ synced: true, labels: ['gpu:h100'], amounts: { ...NOTHING, gpus: 1 } });
    expect(chooseNode(clusterOf(report('near'), cards), wanted, { random: inTurn(1), overflow }).edge).toBe('far');
    // Cards of another kind are no room for it.
    const kinds = (free: number) =>
      report('near', {
        labels: new Set(['gpu:h100', 'gpu:a10']),
        capacity: { ...CAPACITY, gpus: 12 },
        reserved: { ...NOTHING, gpus: 4 - free },
        gpuKinds: new Map([
          ['h100', { cards: 4, free }],
          ['a10', { cards: 8, free: 8 }],
        ]),
      });
    const oneOf = (gpuKind: string, free: number) => {
      const asked = { ...wanted, gpuKind, labels: [`gpu:${gpuKind}`] };
      return chooseNode(clusterOf(kinds(free), cards), asked, { random: inTurn(1), overflow }).edge;
    };
    expect([oneOf('h100', 0), oneOf('h100', 1), oneOf('a10', 0)]).toEqual(['far', 'near', 'near']);
    expect(clusterOf(kinds(1)).use([new NodeView(kinds(1))], { ...wanted, gpuKind: 'h100' })).toBe(0.75);
    expect(clusterOf(kinds(1)).use([new NodeView(kinds(1))], { ...wanted, gpuKind: 't4', labels: [] })).toBe(1);
    // Whoever asks for them means no others.
    expect(choose(report('near'), true, { labels: ['cloud'] }).edge).toBe('far');
    // Not even when nobody else may; and it is said.
    expect(choose(report('near', { state: 'dead' }), true).edge).toBe('far');
    expect([...choose(report('near', { state: 'dead' }), false).reasons!]).toEqual([
      ['dead', 1],
      ['cloud, and its store has not all of the images', 1],
    ]);
  });

  it('comes back when the store elsewhere lacks what was said to be there', async () => {
    const overflow = { label: 'cloud', above: 0.8 };
    const far = Array.from({ length: 9 }, (_, i) => report(`far${i}`, { labels: new Set(['cloud']) }));
    const near = report('near', { reserved: { ...NOTHING, memoryBytes: 14 * GIB } });
    const asked: string[] = [];
    const ask = async (edge: string): Promise<Admission<number>> => {
      asked.push(edge);
      if (edge !== 'near') return { admitted: false, reason: 'there is no such image', notSynced: true };
      return { admitted: true, epoch: 'first', number: 1, value: 7 };
    };
    const placed = await placeSandbox(clusterOf(near, ...far), request({ synced: true }), ask, {
      random: inTurn(9),
      overflow,
    });
    expect(placed).toEqual({ edge: 'near', value: 7 });
    expect(asked).toHaveLength(2);
  });
});

describe('a sandbox that is placed', () => {
  it('goes to the next node when one refuses, and leaves nothing of the refusal', async () => {
    const cluster = clusterOf(report('a'), report('b'), report('c'));
    const asked: string[] = [];
    const ask = async (edge: string): Promise<Admission<string>> => {
      asked.push(edge);
      return asked.length < 3
        ? { admitted: false, reason: 'memory is short' }
        : { admitted: true, epoch: 'first', number: 1, value: 'sandbox' };
    };
    const placed = await placeSandbox(cluster, request(), ask, { random: inTurn(3) });
    expect(placed).toEqual({ edge: asked[2], value: 'sandbox' });
    expect(new Set(asked).size).toBe(3);
    expect(cluster.nodes.map(({ edge, reserved }) => [edge, reserved.cpuMilli])).toEqual(
      ['a', 'b', 'c'].map((edge) => [edge, edge === placed.edge ? 1000 : 0]),
    );
  });

  it('has no room when all refuse, with every reason', async () => {
    const cluster = clusterOf(report('a'), report('b', { state: 'draining' }));
    await expect(
      placeSandbox(cluster, request(), async () => ({ admitted: false, reason: 'PSI of memory is 40' }), {
        random: inTurn(2),
      }),
    ).rejects.toMatchObject({
      code: 'PLACEMENT_NO_ROOM',
      message: expect.stringContaining('a: PSI of memory is 40; 1 node: refused by the edge; 1 node: draining'),
    });
  });

  it('is asked for nowhere else when nobody knows what became of it', async () => {
    const cluster = clusterOf(report('a'), report('b'));
    const asked: string[] = [];
    const lost = placeSandbox(
      cluster,
      request(),
      async (edge) => {
        asked.push(edge);
        throw new Error('the connection broke');
      },
      { random: inTurn(2) },
    );
    await expect(lost).rejects.toThrow('the connection broke');
    expect(asked).toHaveLength(1);
    expect(cluster.get(asked[0]!)!.reserved).toEqual(ASKED);
  });
});

it('views end as they began, whatever was decided, answered, refused, reported and forgotten', () => {
  let state = 1;
  const random = () => {
    state = (Math.imul(state, 1_103_515_245) + 12_345) >>> 0;
    return state / 2 ** 32;
  };
  let now = 0;
  const cluster = new ClusterView({ now: () => now, decisionMs: 500 });
  const truth = new Map(['a', 'b', 'c'].map((edge) => [edge, { admitted: 0, reserved: NOTHING }]));
  const tell = (edge: string) => cluster.update(report(edge, truth.get(edge)!));
  for (const edge of truth.keys()) tell(edge);
  const open: ReturnType<ClusterView['decide']>[] = [];
  for (let i = 0; i < 5000; i++) {
    now++;
    const { edge } = chooseNode(cluster, request(), { random });
    if (edge !== undefined && random() < 0.5) open.push(cluster.decide(request(), edge));
    const next = random() < 0.5 ? open.splice(Math.floor(random() * open.length), 1)[0] : undefined;
    if (next !== undefined) {
      const there = truth.get(next.edge)!;
      if (random() < 0.5) cluster.withdraw(next);
      else if (random() < 0.9) cluster.admitted(next, 'first', ++there.admitted);
    }
    if (random() < 0.2) tell(['a', 'b', 'c'][Math.floor(random() * 3)]!);
  }
  for (const decision of open) cluster.withdraw(decision);
  now += 1000;
  for (const edge of truth.keys()) tell(edge);
  expect(cluster.nodes.map(({ unreported }) => unreported)).toEqual([NOTHING, NOTHING, NOTHING]);
});
