/**
 * An edge without sandboxes: it admits by its own, exact figures, as a real one does, numbers what it admits, and reports. It never
 * holds more than it can promise, whatever it is asked.
 */
import { type Amounts, difference, lacking, NOTHING, type NodeReport, type PlacementRequest, sum } from '#control';

export interface HeldSandbox {
  readonly request: PlacementRequest;
  /** Processor time that it uses in the end, of what it asked for. */
  readonly busy: number;
  readonly layers: readonly string[];
}

export class SimulatedEdge {
  readonly name: string;
  readonly capacity: Amounts;
  readonly limit: number;
  readonly labels: ReadonlySet<string>;
  state: 'healthy' | 'draining' | 'dead' = 'healthy';
  reserved: Amounts = NOTHING;
  refusals = 0;
  private started = 0;
  private admitted = 0;
  private busyMilli = 0;
  private readonly held = new Set<HeldSandbox>();
  private readonly users = new Map<string, number>();
  private readonly jobs = new Map<string, number>();
  private readonly layers = new Set<string>();

  constructor(name: string, capacity: Amounts, limit: number, labels: readonly string[] = []) {
    this.name = name;
    this.capacity = capacity;
    this.limit = limit;
    this.labels = new Set(labels);
  }

  get epoch(): string {
    return String(this.started);
  }

  get count(): number {
    return this.held.size;
  }

  /** Of the processors, 0 to 1 and above. */
  get cpuLoad(): number {
    return this.busyMilli / this.capacity.cpuMilli;
  }

  /** The number of the admission, or why not. */
  admit(sandbox: HeldSandbox): number | string {
    const { request } = sandbox;
    const reason = this.reasonAgainst(request);
    if (reason !== undefined) {
      this.refusals++;
      return reason;
    }
    this.held.add(sandbox);
    this.reserved = sum(this.reserved, request.amounts);
    this.busyMilli += sandbox.busy * request.amounts.cpuMilli;
    add(this.users, request.user, 1);
    if (request.job !== undefined) add(this.jobs, request.job, 1);
    for (const layer of sandbox.layers) this.layers.add(layer);
    return ++this.admitted;
  }

  end(sandbox: HeldSandbox): void {
    if (!this.held.delete(sandbox)) return;
    const { request } = sandbox;
    this.reserved = difference(this.reserved, request.amounts);
    this.busyMilli -= sandbox.busy * request.amounts.cpuMilli;
    add(this.users, request.user, -1);
    if (request.job !== undefined) add(this.jobs, request.job, -1);
  }

  /** All that it held is lost. */
  crash(): void {
    for (const sandbox of [...this.held]) this.end(sandbox);
    this.state = 'dead';
  }

  restart(): void {
    this.started++;
    this.admitted = 0;
    this.state = 'healthy';
  }

  report(): NodeReport {
    return {
      edge: this.name,
      epoch: this.epoch,
      admitted: this.admitted,
      state: this.state,
      backends: new Map([['container', { sandboxes: this.held.size, limit: this.limit }]]),
      labels: this.labels,
      capacity: this.capacity,
      reserved: this.reserved,
      load: {
        cpu: this.cpuLoad,
        memory: this.reserved.memoryBytes / this.capacity.memoryBytes,
        disk: this.reserved.diskBytes / this.capacity.diskBytes,
      },
      users: new Map(this.users),
      jobs: new Map(this.jobs),
      heldBy: [...this.held].find(({ request }) => request.alone)?.request.user,
      layers: new Set(this.layers),
    };
  }

  private reasonAgainst(request: PlacementRequest): string | undefined {
    if (this.state !== 'healthy') return this.state;
    const short = lacking(this.capacity, this.reserved, request.amounts);
    if (short !== undefined) return `not enough ${short}`;
    return this.held.size >= this.limit ? 'no more sandboxes' : undefined;
  }
}

function add(counts: Map<string, number>, key: string, by: number): void {
  const next = (counts.get(key) ?? 0) + by;
  if (next === 0) counts.delete(key);
  else counts.set(key, next);
}
