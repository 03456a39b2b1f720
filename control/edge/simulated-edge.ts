/**
 * An edge without containers: the Edge API's create, get, delete, stop, report, roster and drain over real HTTP, with an edge's own ledger and admission. For
 * tests and benchmarks of what stands above edges. Its sandboxes are a few hundred bytes each; they end by their ttl, and are gone when it ends.
 */
import { type Static, Type } from '@sinclair/typebox';
import type { SandboxEnd } from '#runtime';
import { fail } from '../errors.ts';
import type { NodeReport } from '../placement/node-report.ts';
import { createFields } from '../runtime-service/sandbox-routes.ts';
import { createService, type ServiceOptions } from '../service-base/service-app.ts';
import type { AdmissionLimits } from './admission.ts';
import { createStream } from './create-stream.ts';
import type { EdgeHost, Roster, RosterEntry } from './edge-host.ts';
import { edgeRoutes } from './edge-routes.ts';
import { type Held, Ledger } from './ledger.ts';
import type { Pressure } from './pressure.ts';
import { failAsRuntime } from './runtime-failure.ts';
import { amountsOf, LOCAL_OWNER, ownerFields, type Promised } from './sandbox-owner.ts';

export interface SimulatedEdgeOptions {
  readonly edge: string;
  readonly limits: AdmissionLimits;
  readonly labels?: readonly string[];
  /** How long a creation takes, in milliseconds: 0 by default. */
  readonly createMs?: number;
  /** Calm by default. */
  readonly pressure?: () => Pressure;
}

interface Simulated {
  readonly name: string;
  readonly held: Held;
  readonly requestId: string | undefined;
  readonly createdAt: number;
  readonly expiresAt: number | undefined;
  end?: SandboxEnd;
}

const CALM: Pressure = {
  cpuBusy: 0.1,
  memoryTotalBytes: 1,
  memoryAvailableBytes: 0.9,
  diskTotalBytes: 1,
  diskFreeBytes: 0.9,
  waiting: { cpu: 0, memory: 0, io: 0 },
};

export class SimulatedEdge implements EdgeHost {
  readonly edge: string;
  readonly ledger: Ledger;
  private readonly options: SimulatedEdgeOptions;
  private readonly sandboxes = new Map<string, Simulated>();
  private readonly byRequest = new Map<string, Simulated | Promise<Simulated>>();
  private readonly creating = new Set<Held>();
  private named = 0;
  private readonly expiring: NodeJS.Timeout;
  /** When the next of them is to end: until then none is looked at. */
  private nextEnd = Number.POSITIVE_INFINITY;

  constructor(options: SimulatedEdgeOptions) {
    this.options = options;
    this.edge = options.edge;
    this.ledger = new Ledger({ edge: options.edge, labels: options.labels ?? [], limits: options.limits });
    this.expiring = setInterval(() => this.expire(Date.now()), 1000).unref();
  }

  get size(): number {
    return this.sandboxes.size;
  }

  /** @throws EDGE_REFUSED, EDGE_REQUEST_TAKEN, RUNTIME_SANDBOX_GONE, RUNTIME_SANDBOX_EXISTS */
  async create(promised: Promised, asked: { name?: string; requestId?: string; ttlMs?: number }): Promise<Simulated> {
    const { requestId, ttlMs } = asked;
    const known = requestId === undefined ? undefined : await this.byRequest.get(requestId);
    if (known !== undefined) {
      if (known.held.owner.project !== promised.owner.project) throw fail('EDGE_REQUEST_TAKEN', { edge: this.edge });
      if (known.end !== undefined) {
        throw goneAs(known);
      }
      return known;
    }
    const name = asked.name ?? `sandbox-${this.ledger.epoch.slice(0, 6)}${(++this.named).toString(36)}`;
    if (this.sandboxes.has(name)) {
      throw failAsRuntime('RUNTIME_SANDBOX_EXISTS', { name, how: 'is running', remedy: 'remove it' });
    }
    const held = this.ledger.admit(promised, this.options.pressure?.() ?? CALM);
    const make = (): Simulated => {
      const createdAt = Date.now();
      const expiresAt = ttlMs === undefined ? undefined : createdAt + ttlMs;
      const made: Simulated = { name, held, requestId, createdAt, expiresAt };
      this.nextEnd = Math.min(this.nextEnd, expiresAt ?? Number.POSITIVE_INFINITY);
      this.sandboxes.set(name, made);
      if (requestId !== undefined) this.byRequest.set(requestId, made);
      return made;
    };
    const { createMs = 0 } = this.options;
    if (createMs === 0) return make();
    this.creating.add(held);
    const making = new Promise<Simulated>((done) => {
      setTimeout(() => {
        this.creating.delete(held);
        done(make());
      }, createMs);
    });
    if (requestId !== undefined) this.byRequest.set(requestId, making);
    return making;
  }

  /** @throws RUNTIME_SANDBOX_NOT_FOUND */
  get(name: string): Simulated {
    const found = this.sandboxes.get(name);
    if (found === undefined) throw failAsRuntime('RUNTIME_SANDBOX_NOT_FOUND', { name });
    return found;
  }

  stop(name: string): SandboxEnd {
    const found = this.get(name);
    if (found.end === undefined) this.finish(found, 'stopped', 'it was stopped');
    return found.end!;
  }

  remove(name: string): void {
    const found = this.get(name);
    if (found.end === undefined) this.ledger.release(found.held);
    this.sandboxes.delete(name);
    if (found.requestId !== undefined) this.byRequest.delete(found.requestId);
  }

  report(): NodeReport {
    return this.ledger.report(this.options.pressure?.() ?? CALM, new Set());
  }

  roster(): Roster {
    const creating = [...this.creating].map(
      ({ owner, amounts, backend }): RosterEntry => ({ state: 'creating', owner, amounts, backend }),
    );
    const sandboxes = [...creating, ...[...this.sandboxes.values()].map(entryOf)];
    return { edge: this.edge, epoch: this.ledger.epoch, writtenAtMs: Date.now(), sandboxes };
  }

  drain(on: boolean): void {
    this.ledger.draining = on;
  }

  close(): void {
    clearInterval(this.expiring);
  }

  private expire(now: number): void {
    if (now < this.nextEnd) return;
    this.nextEnd = Number.POSITIVE_INFINITY;
    for (const one of this.sandboxes.values()) {
      const { expiresAt } = one;
      if (one.end !== undefined || expiresAt === undefined) continue;
      if (expiresAt > now) this.nextEnd = Math.min(this.nextEnd, expiresAt);
      else this.finish(one, 'expired', `its time was up at ${new Date(expiresAt).toISOString()}`);
    }
  }

  private finish(one: Simulated, reason: SandboxEnd['reason'], detail: string): void {
    one.end = { reason, detail, at: new Date().toISOString() };
    this.ledger.release(one.held);
  }
}

function goneAs({ name, end }: Simulated) {
  return failAsRuntime('RUNTIME_SANDBOX_GONE', { name, reason: end?.detail, ended: end?.reason });
}

function entryOf({ name, held, end, createdAt, expiresAt }: Simulated): RosterEntry {
  const { owner, amounts, backend } = held;
  return {
    name,
    state: end === undefined ? 'running' : 'ended',
    end,
    owner,
    amounts,
    backend,
    createdAt: new Date(createdAt).toISOString(),
    expiresAt: expiresAt === undefined ? undefined : new Date(expiresAt).toISOString(),
  };
}

const CreateBody = Type.Object(
  { ...createFields, store: Type.Optional(createFields.store), ...ownerFields },
  { additionalProperties: false },
);

export interface ServingSimulatedEdge {
  readonly url: string;
  readonly host: SimulatedEdge;
  close(drainMs?: number): Promise<void>;
}

/** @throws SERVICE_*, SERVER_LISTEN */
export async function serveSimulatedEdge(
  options: SimulatedEdgeOptions,
  service: Omit<ServiceOptions, 'name'>,
): Promise<ServingSimulatedEdge> {
  const host = new SimulatedEdge(options);
  const served = createService({ name: 'simulated edge', logLevel: 'silent', ...service });
  const { app } = served;
  const hot = { config: { hot: true } } as const;
  const view = (one: Simulated) =>
    Object.assign(entryOf(one), { id: one.name, edge: host.edge, admission: one.held.admission });
  const nameOf = (params: unknown) => (params as { name: string }).name;
  edgeRoutes(app, host);
  app.get('/v1/sandboxes', async () => host.roster().sandboxes);
  const create = async (body: Static<typeof CreateBody>) => {
    const { owner = LOCAL_OWNER, amounts, backend = 'container', alone = false, ...asked } = body;
    return view(await host.create({ owner, amounts: amounts ?? amountsOf(asked, backend), backend, alone }, asked));
  };
  app.post('/v1/sandboxes', { ...hot, schema: { body: CreateBody } }, async ({ body }, reply) => {
    reply.code(201);
    return create(body as Static<typeof CreateBody>);
  });
  createStream(served, CreateBody, create);
  app.get('/v1/sandboxes/:name', hot, async ({ params }) => {
    const found = host.get(nameOf(params));
    if (found.end !== undefined) {
      throw goneAs(found);
    }
    return view(found);
  });
  app.delete('/v1/sandboxes/:name', hot, async ({ params }) => {
    host.remove(nameOf(params));
    return {};
  });
  app.post('/v1/sandboxes/:name/stop', hot, async ({ params }) => host.stop(nameOf(params)));
  const url = await served.listen();
  return {
    url,
    host,
    async close(drainMs = 0) {
      host.close();
      await served.close(drainMs);
    },
  };
}
