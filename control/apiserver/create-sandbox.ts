/**
 * From a request to a sandbox: reserve -> choose an edge -> note that it is asked -> ask it -> note that it is placed. Each step is on record before
 * its effect, so whoever dies in between leaves a reservation that the edge's roster settles (reconcile.ts), never a sandbox that counts for nobody.
 *
 * The edge is given the reservation's id as request id: asked again it answers with the same sandbox, whoever asks. Where an edge does not say
 * whether it made the sandbox, no other edge is asked, since there would be two.
 */
import { setTimeout as delay } from 'node:timers/promises';
import { isDsecError, messageOf } from '#base';
import { fail } from '../errors.ts';
import type { Iam, Identity, Reservation } from '../iam/iam.ts';
import type { Amounts } from '../placement/amounts.ts';
import { type Admission, placeSandbox } from '../placement/place-sandbox.ts';
import type { PlacementRequest } from '../placement/placement-request.ts';
import { type Access, whose } from './access.ts';
import { type Edges, gone, isUnknownOutcome, unreachable } from './edges.ts';
import type { ImageLayers } from './image-layers.ts';
import type { CreateAsked } from './request-schemas.ts';
import { readRoster } from './roster.ts';
import { type EdgeSandbox, type SandboxView, viewOf } from './sandbox-view.ts';
import type { WorkInHand } from './work-in-hand.ts';

export interface CreateDefaults {
  /** What counts where nothing is said: it is no limit. */
  readonly cpuMilli: number;
  readonly memoryBytes: number;
  readonly diskBytes: number;
}

export interface MakerOptions {
  readonly iam: Iam;
  readonly access: Access;
  readonly edges: Edges;
  readonly layers: ImageLayers;
  readonly storeUrl: string;
  readonly defaults: CreateDefaults;
  readonly work: WorkInHand;
  readonly note: (problem: string) => void;
  /** Seconds that a step took. */
  readonly observe?: (step: 'layers' | 'reserve' | 'asking' | 'edge' | 'placed', seconds: number) => void;
  readonly onCreated?: (view: SandboxView, reservation: string) => void;
  readonly random?: () => number;
}

export interface Caller {
  readonly identity: Identity;
  /** Of the HTTP request. */
  readonly requestId: string;
  /** Aborted when nobody waits for the answer any more. */
  readonly gone: AbortSignal;
  /** Waits for its turn however long: a batch bounds itself. */
  readonly patient?: boolean;
}

/** An edge that died is there again in a few seconds, or not soon. */
const SETTLE_MS = 15_000;
const SETTLE_LATER_MS = 5 * 60_000;
const SETTLE_EVERY_MS = 3000;
const AGAIN_MS = 300;
const EDGE_MS = 120_000;
const OTHERS_MS = 20_000;
/** It says that it did nothing. */
const REFUSED: ReadonlySet<string> = new Set(['EDGE_REFUSED', 'SERVICE_DRAINING', 'SERVICE_NOT_READY']);

interface Making {
  readonly caller: Caller;
  readonly asked: CreateAsked;
  readonly project: string;
  readonly reservation: Reservation;
  readonly placement: PlacementRequest;
  readonly body: object;
}

export class SandboxMaker {
  private readonly options: MakerOptions;
  /** Asked for by request id: whoever asks the same meanwhile gets the same answer. */
  private readonly flights = new Map<string, Promise<SandboxView>>();
  private readonly settling = new Set<Promise<void>>();
  private closed = false;

  constructor(options: MakerOptions) {
    this.options = options;
  }

  /** @throws IAM_DENIED, IAM_QUOTA, IAM_NOT_FOUND, API_BUSY, API_STORE, PLACEMENT_NO_ROOM, CREATE_UNSETTLED, CATALOG_*, what the edge throws */
  async create(caller: Caller, asked: CreateAsked): Promise<SandboxView> {
    const { access, work, storeUrl } = this.options;
    const project = asked.project ?? caller.identity.project;
    if (asked.store !== undefined && asked.store !== storeUrl) throw fail('API_STORE', { store: asked.store });
    await access.allowed(caller.identity, 'sandbox.create', project, caller.requestId);
    const signal = asked.requestId === undefined ? caller.gone : undefined;
    const make = () => work.run(() => this.reserveAndPlace(caller, asked, project), signal, caller.patient);
    if (asked.requestId === undefined) return make();
    const key = `${project}\n${asked.requestId}`;
    const flying = this.flights.get(key);
    if (flying !== undefined) return flying;
    // Its first asker may go: others may wait for it too.
    const flight = make().finally(() => this.flights.delete(key));
    this.flights.set(key, flight);
    return flight;
  }

  async close(): Promise<void> {
    this.closed = true;
    await Promise.all(this.settling);
  }

  private async reserveAndPlace(caller: Caller, asked: CreateAsked, project: string): Promise<SandboxView> {
    const { layers, defaults, storeUrl } = this.options;
    const { workspace, toolkits = [], requestId, backend = 'container', labels = [], alone = false, job } = asked;
    const user = caller.identity.principal;
    const images = [asked.image, ...(workspace === undefined ? [] : [workspace]), ...toolkits];
    const found = await this.timed('layers', () => layers.of(images));
    const amounts = amountsOf(asked, defaults);
    const reserve = () =>
      this.timed('reserve', () =>
        this.options.iam.reserve({ project, user, requestId, amounts: { sandboxes: 1, ...ofQuota(amounts) } }),
      );
    let reservation = await reserve();
    // Whoever reserved it is about to choose an edge: two would make two.
    for (let waited = 0; isBegun(reservation) && waited < OTHERS_MS; waited += AGAIN_MS) {
      await delay(AGAIN_MS);
      reservation = await reserve();
    }
    const {
      project: _project,
      labels: _labels,
      alone: _alone,
      job: _job,
      requestId: _id,
      store: _store,
      ...rest
    } = asked;
    const owner = { project, user, job, reservation: reservation.id };
    const body = { ...rest, backend, store: storeUrl, requestId: reservation.id, owner, amounts, alone };
    const placement = { user, job, backend, amounts, labels, layers: found, alone };
    const making: Making = { caller, asked, project, reservation, placement, body };
    if (reservation.state === 'placed') return this.there(making);
    try {
      return await this.place(making);
    } catch (error) {
      // Somebody else was quicker with the same request id: his is the answer.
      if (!isDsecError(error, 'IAM_RESERVATION_GONE') || requestId === undefined) throw error;
      const now = await reserve();
      if (now.state === 'placed') return this.there({ ...making, reservation: now });
      if (!now.existing) await this.options.iam.release(now.id);
      throw error;
    }
  }

  /** What was made for the same request id before. */
  private async there({ reservation }: Making): Promise<SandboxView> {
    const { edge, sandbox: name } = reservation;
    if (edge === undefined || name === undefined) throw fail('CREATE_UNSETTLED', { edge: 'an edge' });
    try {
      const path = `/v1/sandboxes/${encodeURIComponent(name)}`;
      return viewOf(edge, await this.options.edges.ask<EdgeSandbox>(edge, { method: 'GET', path }));
    } catch (error) {
      throw gone(`${name}.${edge}`, error);
    }
  }

  private async place(making: Making): Promise<SandboxView> {
    const { iam, edges, random = Math.random } = this.options;
    const { reservation, placement } = making;
    const { id, edge: before } = reservation;
    try {
      if (before !== undefined) {
        const answer = await this.ask(making, before, false);
        if (answer.admitted) return await this.placed(making, before, answer.value);
      }
      const ask = (edge: string) => this.ask(making, edge, true);
      const { edge, value } = await placeSandbox(edges.view, placement, ask, { random });
      return await this.placed(making, edge, value);
    } catch (error) {
      if (isDsecError(error, 'CREATE_UNSETTLED')) this.settle(making, String(error.params.edge));
      else if (!isDsecError(error, 'IAM_RESERVATION_GONE')) await iam.release(id);
      throw error;
    }
  }

  /** `fresh`: it was not asked for this before, so one that is not reached has not made it. */
  private async ask(making: Making, edge: string, fresh: boolean): Promise<Admission<EdgeSandbox>> {
    const { iam } = this.options;
    await this.timed('asking', () => iam.asking(making.reservation.id, edge));
    const request = {
      method: 'POST',
      path: '/v1/sandboxes',
      body: making.body,
      headers: { 'x-request-id': making.caller.requestId },
      timeoutMs: EDGE_MS,
    } as const;
    let unsettled = !fresh;
    for (const until = Date.now() + SETTLE_MS; ; ) {
      try {
        const value = await this.timed('edge', () => this.options.edges.client(edge).json<EdgeSandbox>(request));
        const { epoch = '', number = 0 } = value.admission ?? {};
        return { admitted: true, epoch, number, value };
      } catch (error) {
        if (isDsecError(error) && REFUSED.has(error.code)) {
          // One that is about to end has not looked whether it has it.
          if (!unsettled || error.code === 'EDGE_REFUSED') return { admitted: false, reason: error.message };
        } else if (isDsecError(error, 'SERVICE_UNREACHABLE') || isDsecError(error, 'EDGE_UNKNOWN')) {
          if (!unsettled) return { admitted: false, reason: messageOf(unreachable(edge, error)) };
        } else if (isUnknownOutcome(error)) unsettled = true;
        else throw error;
        if (Date.now() > until || this.closed) throw fail('CREATE_UNSETTLED', { edge }, error);
      }
      await delay(AGAIN_MS);
    }
  }

  private async placed(making: Making, edge: string, told: EdgeSandbox): Promise<SandboxView> {
    const { iam, access, onCreated } = this.options;
    const { caller, asked, project, reservation } = making;
    const view = viewOf(edge, told);
    const { identity, requestId } = caller;
    const entry = { ...whose(identity), action: 'sandbox.create', project, target: view.id, requestId };
    try {
      await this.timed('placed', () =>
        Promise.all([
          iam.placed(reservation.id, edge, told.name),
          access.audit({ ...entry, outcome: 'done', detail: { image: asked.image } }),
        ]),
      );
    } catch (error) {
      // It counts for nobody now.
      await this.remove(edge, told.name);
      throw error;
    }
    if (caller.gone.aborted && asked.requestId === undefined) {
      // Nobody knows of it.
      await this.remove(edge, told.name);
      throw caller.gone.reason;
    }
    onCreated?.(view, reservation.id);
    return view;
  }

  private async remove(edge: string, name: string): Promise<void> {
    try {
      const path = `/v1/sandboxes/${encodeURIComponent(name)}?force=true`;
      await this.options.edges.ask(edge, { method: 'DELETE', path });
    } catch (error) {
      if (!isDsecError(gone(name, error), 'SANDBOX_GONE')) this.options.note(`${name}.${edge}: ${messageOf(error)}`);
    }
  }

  /** Whoever cannot ask again, for want of a request id, shall not leave a sandbox that he does not know of. */
  private settle(making: Making, edge: string): void {
    if (making.asked.requestId !== undefined) return;
    const work = this.settled(making, edge).catch((error: unknown) => this.options.note(messageOf(error)));
    this.settling.add(work);
    void work.finally(() => this.settling.delete(work));
  }

  private async settled({ reservation, caller }: Making, edge: string): Promise<void> {
    const { edges, iam, note } = this.options;
    for (const until = Date.now() + SETTLE_LATER_MS; Date.now() < until; ) {
      for (let waited = 0; waited < SETTLE_EVERY_MS; waited += AGAIN_MS) {
        if (this.closed) return;
        await delay(AGAIN_MS);
      }
      const roster = await readRoster(edges, edge).catch(() => undefined);
      const found = roster?.sandboxes.find(({ owner }) => owner?.reservation === reservation.id);
      if (found?.name === undefined) continue;
      await this.remove(edge, found.name);
      await iam.release(reservation.id);
      note(`${found.name}.${edge}: removed: whoever asked for it in request ${caller.requestId} did not learn of it`);
      return;
    }
  }

  private async timed<T>(
    step: Parameters<NonNullable<MakerOptions['observe']>>[0],
    work: () => Promise<T>,
  ): Promise<T> {
    const { observe } = this.options;
    if (observe === undefined) return work();
    const from = performance.now();
    try {
      return await work();
    } finally {
      observe(step, (performance.now() - from) / 1000);
    }
  }
}

function isBegun({ existing, state, edge }: Reservation): boolean {
  return existing && state === 'pending' && edge === undefined;
}

/** What a sandbox counts as: its limits, else the defaults. */
export function amountsOf(
  asked: Pick<CreateAsked, 'cpus' | 'memoryBytes' | 'diskBytes'>,
  defaults: CreateDefaults,
): Amounts {
  const { cpus, memoryBytes = defaults.memoryBytes, diskBytes = defaults.diskBytes } = asked;
  const cpuMilli = cpus === undefined ? defaults.cpuMilli : Math.ceil(cpus * 1000);
  return { cpuMilli, memoryBytes, diskBytes, gpus: 0 };
}

function ofQuota({ cpuMilli, memoryBytes, diskBytes }: Amounts) {
  return { cpuMilli, memoryBytes, diskBytes };
}
