/**
 * One node as this instance of placement sees it: the last report, and above it the decisions that it made since and that the report
 * does not count yet. Without those, everything that comes between two reports would go to whichever node looked best in the first.
 *
 * A decision leaves when a report counts it (the edge numbers what it admits, and a report says how far it had come), when the edge
 * refused it, or after a time, in case the edge never answered. When the edge was started anew, its report has all that it kept.
 */
import { type Amounts, difference, NOTHING, sum } from './amounts.ts';
import type { BackendName, EdgeId, NodeReport } from './node-report.ts';
import type { PlacementRequest } from './placement-request.ts';

export interface Decision {
  readonly edge: EdgeId;
  readonly request: PlacementRequest;
  /** When to forget it, answered or not. */
  readonly until: number;
  /** As the edge numbered it, once it has answered. */
  admission: { readonly epoch: string; readonly number: number } | undefined;
}

export class NodeView {
  report: NodeReport;
  private readonly decisions = new Set<Decision>();
  private extra: Amounts = NOTHING;
  /** Of the decisions: counted as they come and go, since each choice asks for them. */
  private readonly users = new Map<string, number>();
  private readonly jobs = new Map<string, number>();
  private readonly backends = new Map<string, number>();
  private readonly gpuKinds = new Map<string, number>();

  constructor(report: NodeReport) {
    this.report = report;
  }

  get edge(): EdgeId {
    return this.report.edge;
  }

  /** Promised, as far as is known here. */
  get reserved(): Amounts {
    return this.decisions.size === 0 ? this.report.reserved : sum(this.report.reserved, this.extra);
  }

  /** Of decisions that no report counts yet. */
  get unreported(): Amounts {
    return this.extra;
  }

  get sandboxes(): number {
    let all = this.decisions.size;
    for (const { sandboxes } of this.report.backends.values()) all += sandboxes;
    return all;
  }

  sandboxesBy(backend: BackendName): number {
    return (this.report.backends.get(backend)?.sandboxes ?? 0) + (this.backends.get(backend) ?? 0);
  }

  ofUser(user: string): number {
    return (this.report.users.get(user) ?? 0) + (this.users.get(user) ?? 0);
  }

  ofJob(job: string): number {
    return (this.report.jobs.get(job) ?? 0) + (this.jobs.get(job) ?? 0);
  }

  /** Graphics processors of that kind that nobody has, as far as is known here; undefined where the edge does not say. */
  freeGpus(kind: string): number | undefined {
    const { gpuKinds } = this.report;
    return gpuKinds === undefined ? undefined : (gpuKinds.get(kind)?.free ?? 0) - (this.gpuKinds.get(kind) ?? 0);
  }

  /** Who alone may come. */
  get heldBy(): string | undefined {
    if (this.report.heldBy !== undefined) return this.report.heldBy;
    for (const { request } of this.decisions) if (request.alone) return request.user;
    return undefined;
  }

  /** Whether anybody else has sandboxes here. */
  hasOthersThan(user: string): boolean {
    for (const [one, count] of this.report.users) if (one !== user && count > 0) return true;
    return this.decisions.size > (this.users.get(user) ?? 0);
  }

  add(decision: Decision): void {
    this.decisions.add(decision);
    this.countUp(decision, 1);
    this.extra = sum(this.extra, decision.request.amounts);
  }

  drop(decision: Decision): void {
    if (!this.decisions.delete(decision)) return;
    this.countUp(decision, -1);
    this.extra = this.decisions.size === 0 ? NOTHING : difference(this.extra, decision.request.amounts);
  }

  /** Takes a report that is newer than the one it has, and leaves out what that counts. */
  update(report: NodeReport): void {
    if (report.epoch === this.report.epoch && report.admitted < this.report.admitted) return;
    this.report = report;
    for (const decision of this.decisions) {
      const { admission } = decision;
      if (admission === undefined) continue;
      if (admission.epoch !== report.epoch || admission.number <= report.admitted) this.drop(decision);
    }
  }

  expire(now: number): void {
    for (const decision of this.decisions) {
      if (decision.until > now) continue;
      this.drop(decision);
    }
  }

  private countUp({ request: { user, job, backend, amounts, gpuKind } }: Decision, by: number): void {
    count(this.users, user, by);
    if (job !== undefined) count(this.jobs, job, by);
    count(this.backends, backend, by);
    if (gpuKind !== undefined) count(this.gpuKinds, gpuKind, by * amounts.gpus);
  }
}

function count(map: Map<string, number>, key: string, by: number): void {
  const value = (map.get(key) ?? 0) + by;
  if (value > 0) map.set(key, value);
  else map.delete(key);
}
