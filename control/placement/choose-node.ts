/**
 * Where a sandbox goes: of the nodes that may get it, a few at random, and of these the least loaded. On figures that are seconds old this
 * spreads better than the least loaded of all, to which every instance would send everything until the next report.
 *
 * A pure function of what it is given: the simulator (bench/placement/) runs this very code.
 */
import type { ClusterView } from './cluster-view.ts';
import { obstacle } from './eligible.ts';
import { loadFor } from './node-load.ts';
import type { EdgeId } from './node-report.ts';
import type { NodeView } from './node-view.ts';
import type { PlacementRequest } from './placement-request.ts';

export interface ChoiceOptions {
  /** 0 to 1, as Math.random. */
  readonly random: () => number;
  /** How many are looked at: 2 by default. */
  readonly candidates?: number;
  /** They have refused this request. */
  readonly excluded?: ReadonlySet<EdgeId>;
  readonly overflow?: Overflow;
}

/** Nodes elsewhere, such as a cloud's, which take what the others have no room for. */
export interface Overflow {
  /** They have this label, and get nothing otherwise. */
  readonly label: string;
  /** With a larger share than this of the other nodes in use. */
  readonly above: number;
}

export type Choice =
  | { readonly edge: EdgeId; readonly reasons?: undefined }
  /** How many nodes each obstacle kept out. */
  | { readonly edge?: undefined; readonly reasons: ReadonlyMap<string, number> };

/** Picks at random before all nodes are looked through one by one. */
const PICKS_A_CANDIDATE = 4;

export function chooseNode(cluster: ClusterView, request: PlacementRequest, options: ChoiceOptions): Choice {
  const { overflow, candidates = 2, random } = options;
  const place = (nodes: readonly NodeView[]) => leastLoaded(nodes, request, candidates, random, options.excluded);
  if (overflow === undefined) return place(cluster.nodes) ?? { reasons: obstacles(cluster.nodes, request, options) };
  const { label, above } = overflow;
  const { near, far } = cluster.splitBy(label);
  // Whoever asks for them by their label means no others.
  const isAsked = request.labels.includes(label);
  const isFull = far.length > 0 && (isAsked || cluster.use(near, request) > above);
  const away = isFull && request.synced === true;
  const found = away ? (place(far) ?? place(near)) : place(near);
  if (found !== undefined) return found;
  const reasons = obstacles(away ? cluster.nodes : near, request, options);
  if (isFull && !away) reasons.set(`${label}, and its store has not all of the images`, far.length);
  return { reasons };
}

function leastLoaded(
  nodes: readonly NodeView[],
  request: PlacementRequest,
  candidates: number,
  random: () => number,
  excluded: ReadonlySet<EdgeId> | undefined,
): { edge: EdgeId } | undefined {
  const may = (node: NodeView) => excluded?.has(node.edge) !== true && obstacle(node, request) === undefined;
  let chosen = pick(nodes, candidates, random, may);
  if (chosen.length < Math.min(candidates, nodes.length)) {
    const all = nodes.filter(may);
    chosen = all.length <= candidates ? all : pick(all, candidates, random, () => true);
  }
  let best: NodeView | undefined;
  let bestLoad = Number.POSITIVE_INFINITY;
  for (const node of chosen) {
    const load = loadFor(node, request);
    if (load >= bestLoad) continue;
    best = node;
    bestLoad = load;
  }
  return best === undefined ? undefined : { edge: best.edge };
}

/** `count` distinct ones that may, or fewer when luck is out. */
function pick(
  nodes: readonly NodeView[],
  count: number,
  random: () => number,
  may: (node: NodeView) => boolean,
): NodeView[] {
  const picked: NodeView[] = [];
  for (let tries = 0; tries < count * PICKS_A_CANDIDATE && picked.length < count; tries++) {
    const node = nodes[Math.floor(random() * nodes.length)];
    if (node !== undefined && !picked.includes(node) && may(node)) picked.push(node);
  }
  return picked;
}

function obstacles(nodes: readonly NodeView[], request: PlacementRequest, { excluded }: ChoiceOptions) {
  const reasons = new Map<string, number>();
  for (const node of nodes) {
    const reason = excluded?.has(node.edge) === true ? 'refused by the edge' : (obstacle(node, request) ?? 'unknown');
    reasons.set(reason, (reasons.get(reason) ?? 0) + 1);
  }
  return reasons;
}
