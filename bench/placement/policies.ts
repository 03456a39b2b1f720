/** Ways to choose a node, for the same requests on the same reports: placement as it is shipped, parts of it, and what it is held against. */
import {
  type ClusterView,
  chooseNode,
  dominantShare,
  type EdgeId,
  type NodeView,
  type Overflow,
  obstacle,
  type PlacementRequest,
  sum,
} from '#control';
import type { SimulatedEdge } from './simulated-edge.ts';

export interface Policy {
  readonly name: string;
  /** Whether decisions since the last report count. */
  readonly overlay: boolean;
  readonly make: (surroundings: Surroundings) => ChooseEdge;
}

export interface Surroundings {
  readonly random: () => number;
  /** The truth, which only one of them may look at. */
  readonly edges: readonly SimulatedEdge[];
  readonly overflow?: Overflow;
}

export type ChooseEdge = (
  cluster: ClusterView,
  request: PlacementRequest,
  excluded: ReadonlySet<EdgeId>,
) => EdgeId | undefined;

const may = (node: NodeView, request: PlacementRequest, excluded: ReadonlySet<EdgeId>) =>
  !excluded.has(node.edge) && obstacle(node, request) === undefined;

const shipped = ({ random, overflow }: Surroundings): ChooseEdge => {
  return (cluster, request, excluded) => chooseNode(cluster, request, { random, excluded, overflow }).edge;
};

export const POLICIES: readonly Policy[] = [
  { name: 'two choices, decisions laid over', overlay: true, make: shipped },
  { name: 'two choices, reports alone', overlay: false, make: shipped },
  {
    name: 'least loaded of all, reports alone',
    overlay: false,
    make: () => (cluster, request, excluded) => {
      const nodes = cluster.nodes.filter((node) => may(node, request, excluded));
      return leastBy(nodes, ({ report, reserved }) => dominantShare(sum(reserved, request.amounts), report.capacity))
        ?.edge;
    },
  },
  {
    name: 'random',
    overlay: false,
    make:
      ({ random }) =>
      (cluster, request, excluded) =>
        chooseNode(cluster, request, { random, excluded, candidates: 1 }).edge,
  },
  {
    name: 'round robin',
    overlay: false,
    make: () => {
      let next = 0;
      return ({ nodes }, request, excluded) => {
        for (let tries = 0; tries < nodes.length; tries++) {
          const node = nodes[next++ % nodes.length]!;
          if (may(node, request, excluded)) return node.edge;
        }
        return undefined;
      };
    },
  },
  {
    name: 'least loaded of all, knowing everything',
    overlay: false,
    make:
      ({ edges }) =>
      (_cluster, request, excluded) => {
        const open = edges.filter(({ name, state }) => state === 'healthy' && !excluded.has(name));
        return leastBy(open, (edge) => dominantShare(sum(edge.reserved, request.amounts), edge.capacity))?.name;
      },
  },
];

function leastBy<T>(all: readonly T[], of: (one: T) => number): T | undefined {
  let best: T | undefined;
  let least = Number.POSITIVE_INFINITY;
  for (const one of all) {
    const value = of(one);
    if (value >= least) continue;
    least = value;
    best = one;
  }
  return best;
}
