/**
 * All nodes as this instance of placement sees them. It holds nothing that it could not learn again: one that starts anew asks the
 * watcher, and is blind only to what it decided just before.
 */
import { NOTHING, RESOURCES, share, sum } from './amounts.ts';
import type { EdgeId, NodeReport } from './node-report.ts';
import { type Decision, NodeView } from './node-view.ts';
import type { PlacementRequest } from './placement-request.ts';

export interface ClusterViewOptions {
  /** Milliseconds, as Date.now. */
  readonly now: () => number;
  /** How long a decision counts that no report has confirmed: 60 s by default. */
  readonly decisionMs?: number;
}

export class ClusterView {
  private readonly byEdge = new Map<EdgeId, NodeView>();
  private readonly options: ClusterViewOptions;
  private all: readonly NodeView[] = [];
  private split:
    | { readonly label: string; readonly near: readonly NodeView[]; readonly far: readonly NodeView[] }
    | undefined;

  constructor(options: ClusterViewOptions) {
    this.options = options;
  }

  get nodes(): readonly NodeView[] {
    return this.all;
  }

  get(edge: EdgeId): NodeView | undefined {
    return this.byEdge.get(edge);
  }

  /** A report of one edge; older ones than the one that is known change nothing. */
  update(report: NodeReport): void {
    const known = this.byEdge.get(report.edge);
    this.split = undefined;
    if (known !== undefined) {
      known.update(report);
      known.expire(this.options.now());
      return;
    }
    this.byEdge.set(report.edge, new NodeView(report));
    this.all = [...this.byEdge.values()];
  }

  /** Of an edge that is gone for good. */
  forget(edge: EdgeId): void {
    if (!this.byEdge.delete(edge)) return;
    this.all = [...this.byEdge.values()];
    this.split = undefined;
  }

  /** Counts from now on, until a report does. */
  decide(request: PlacementRequest, edge: EdgeId): Decision {
    const { now, decisionMs = 60_000 } = this.options;
    const decision: Decision = { edge, request, until: now() + decisionMs, admission: undefined };
    this.byEdge.get(edge)?.add(decision);
    return decision;
  }

  /** The edge has admitted it, as its `number`-th since its start. */
  admitted(decision: Decision, epoch: string, number: number): void {
    decision.admission = { epoch, number };
    const node = this.byEdge.get(decision.edge);
    // The report may have been quicker than the answer.
    if (node?.report.epoch === epoch && number <= node.report.admitted) node.drop(decision);
  }

  /** It did not take place. */
  withdraw(decision: Decision): void {
    this.byEdge.get(decision.edge)?.drop(decision);
  }

  /** Nodes without and with a label. */
  splitBy(label: string): { readonly near: readonly NodeView[]; readonly far: readonly NodeView[] } {
    if (this.split?.label !== label) {
      const far = this.all.filter(({ report }) => report.labels.has(label));
      const near = this.all.filter(({ report }) => !report.labels.has(label));
      this.split = { label, near, far };
    }
    return this.split;
  }

  /**
   * Share of what healthy nodes can promise that is promised, of what is shortest of all that is asked for: resources, graphics processors of its kind, and
   * places of its backend. 1 where no node that is healthy has what is asked for.
   */
  use(
    nodes: readonly NodeView[],
    { amounts, backend, labels, gpuKind }: Pick<PlacementRequest, 'amounts' | 'backend' | 'labels' | 'gpuKind'>,
  ): number {
    let used = NOTHING;
    let capacity = NOTHING;
    let sandboxes = 0;
    let limit = 0;
    let cards = 0;
    let freeCards = 0;
    for (const node of nodes) {
      const use = node.report.backends.get(backend);
      if (node.report.state !== 'healthy' || use === undefined) continue;
      if (!labels.every((label) => node.report.labels.has(label))) continue;
      used = sum(used, node.reserved);
      capacity = sum(capacity, node.report.capacity);
      sandboxes += node.sandboxesBy(backend);
      limit += use.limit;
      if (gpuKind === undefined) continue;
      // Where an edge does not say, all may be of that kind.
      const { capacity: has, gpuKinds } = node.report;
      cards += gpuKinds === undefined ? has.gpus : (gpuKinds.get(gpuKind)?.cards ?? 0);
      freeCards += node.freeGpus(gpuKind) ?? has.gpus - node.reserved.gpus;
    }
    if (gpuKind !== undefined && cards === 0) return 1;
    // What none of them has, they have no room for.
    if (limit === 0 || RESOURCES.some((resource) => amounts[resource] > 0 && capacity[resource] === 0)) return 1;
    const shares = RESOURCES.map((resource) => (amounts[resource] > 0 ? share(used[resource], capacity[resource]) : 0));
    return Math.max(sandboxes / limit, share(cards - freeCards, cards), ...shares);
  }
}
