/**
 * What an edge has promised, to whom, and the numbers of its admissions. What is being created counts from the moment that it is admitted, so that
 * a burst cannot take more than there is. Every figure is kept as it changes: a report of thousands of sandboxes costs no more than one of ten.
 */
import { randomBytes } from 'node:crypto';
import { fail } from '../errors.ts';
import { type Amounts, difference, NOTHING, RESOURCES, sum } from '../placement/amounts.ts';
import type { BackendName, NodeReport } from '../placement/node-report.ts';
import { type AdmissionLimits, type Holding, refusal } from './admission.ts';
import type { Pressure } from './pressure.ts';
import type { Promised } from './sandbox-owner.ts';

export interface AdmissionNumber {
  readonly epoch: string;
  readonly number: number;
}

export interface Held extends Promised {
  readonly admission: AdmissionNumber;
}

export interface LedgerOptions {
  readonly edge: string;
  readonly labels: readonly string[];
  readonly limits: AdmissionLimits;
}

export class Ledger {
  readonly options: LedgerOptions;
  /** Another one after each start. */
  readonly epoch = randomBytes(8).toString('hex');
  draining = false;
  private admitted = 0;
  private reserved: Amounts = NOTHING;
  private readonly backends = new Map<string, number>();
  private readonly users = new Map<string, number>();
  private readonly jobs = new Map<string, number>();
  /** Users who are to be alone here: there can be only one, but for what was here before. */
  private readonly alone = new Map<string, number>();

  constructor(options: LedgerOptions) {
    this.options = options;
  }

  /** @throws EDGE_REFUSED */
  admit(promised: Promised, pressure: Pressure): Held {
    const { owner, backend, amounts, alone } = promised;
    const { edge, limits } = this.options;
    const reason = refusal({ user: owner.user, backend, amounts, alone }, this.holding, pressure, limits);
    if (reason !== undefined) throw fail('EDGE_REFUSED', { edge, reason });
    return this.add(promised, ++this.admitted);
  }

  /** One that is here already, whatever is promised besides. */
  keep(promised: Promised): Held {
    return this.add(promised, 0);
  }

  /** Other amounts for one that is here. @throws EDGE_REFUSED where more is asked for than there is */
  resize(held: Held, amounts: Amounts): Held {
    const { edge, limits } = this.options;
    const others = difference(this.reserved, held.amounts);
    const more = RESOURCES.filter((resource) => amounts[resource] > held.amounts[resource]);
    const short = more.find((resource) => others[resource] + amounts[resource] > limits.capacity[resource]);
    if (short !== undefined)
      throw fail('EDGE_REFUSED', { edge, reason: `the node has promised what it has of ${short}` });
    this.reserved = sum(others, amounts);
    return { ...held, amounts };
  }

  release({ owner, backend, amounts, alone }: Held): void {
    this.reserved = difference(this.reserved, amounts);
    count(this.backends, backend, -1);
    count(this.users, owner.user, -1);
    if (owner.job !== undefined) count(this.jobs, owner.job, -1);
    if (alone) count(this.alone, owner.user, -1);
  }

  report(pressure: Pressure, layers: ReadonlySet<string>): NodeReport {
    const { edge, labels, limits } = this.options;
    const backends = [...limits.sandboxes].map(
      ([backend, limit]) => [backend as BackendName, { sandboxes: this.backends.get(backend) ?? 0, limit }] as const,
    );
    return {
      edge,
      epoch: this.epoch,
      admitted: this.admitted,
      state: this.draining ? 'draining' : 'healthy',
      backends: new Map(backends),
      labels: new Set(labels),
      capacity: limits.capacity,
      reserved: this.reserved,
      load: loadOf(pressure),
      users: this.users,
      jobs: this.jobs,
      heldBy: this.holding.heldBy,
      layers,
    };
  }

  private get holding(): Holding {
    const { reserved, backends: sandboxes, users, draining } = this;
    const [heldBy] = this.alone.keys();
    return { reserved, sandboxes, users, heldBy, draining };
  }

  private add(promised: Promised, number: number): Held {
    const { owner, backend, amounts, alone, gpuKind } = promised;
    this.reserved = sum(this.reserved, amounts);
    count(this.backends, backend, 1);
    count(this.users, owner.user, 1);
    if (owner.job !== undefined) count(this.jobs, owner.job, 1);
    if (alone) count(this.alone, owner.user, 1);
    return { owner, amounts, backend, alone, gpuKind, admission: { epoch: this.epoch, number } };
  }
}

function count(map: Map<string, number>, key: string, by: number): void {
  const value = (map.get(key) ?? 0) + by;
  if (value > 0) map.set(key, value);
  else map.delete(key);
}

function loadOf(pressure: Pressure): NodeReport['load'] {
  const used = (free: number, total: number) => (total > 0 ? 1 - free / total : 0);
  return {
    cpu: Math.max(0, pressure.cpuBusy),
    memory: used(pressure.memoryAvailableBytes, pressure.memoryTotalBytes),
    disk: used(pressure.diskFreeBytes, pressure.diskTotalBytes),
  };
}
