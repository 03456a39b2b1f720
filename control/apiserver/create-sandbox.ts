/**
 * From a request to a sandbox: choose an edge -> reserve, and note that it is asked -> ask it -> note that it is placed. Each step is on record before
 * its effect, so whoever dies in between leaves a reservation that the edge's roster settles (reconcile.ts), never a sandbox that counts for nobody.
 *
 * The edge is given the reservation's id as request id: asked again it answers with the same sandbox, whoever asks. Where an edge does not say
 * whether it made the sandbox, no other edge is asked, since there would be two.
 */
import { setTimeout as delay } from 'node:timers/promises';
import { isDsecError, messageOf } from '#base';
import { unsupported } from '#runtime';
import { gpuLabel } from '../edge/gpu-cards.ts';
import { unsaidIn } from '../edge/sandbox-owner.ts';
import { fail } from '../errors.ts';
import type { Iam, Identity, Reservation } from '../iam/iam.ts';
import type { Amounts } from '../placement/amounts.ts';
import type { NodeView } from '../placement/node-view.ts';
import { type Admission, placeSandbox } from '../placement/place-sandbox.ts';
import type { PlacementRequest } from '../placement/placement-request.ts';
import { backendOf } from '../runtime-service/backend-view.ts';
import type { Access } from './access.ts';
import type { EdgeCreates } from './edge-creates.ts';
import { type Edges, gone, isUnknownOutcome, NOT_THERE, unreachable } from './edges.ts';
import { allowHostShared } from './host-shared.ts';
import type { FoundImages, ImageLayers } from './image-layers.ts';
import { isOverflow, LACKING, type OverflowNodes } from './overflow.ts';
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

export const CREATE_STEPS = ['layers', 'reserve', 'asking', 'edge', 'placed'] as const;
export type CreateStep = (typeof CREATE_STEPS)[number];

export interface MakerOptions {
  readonly iam: Iam;
  readonly access: Access;
  readonly edges: Edges;
  readonly creates: EdgeCreates;
  readonly layers: ImageLayers;
  readonly storeUrl: string;
  readonly overflow?: OverflowNodes;
  readonly defaults: CreateDefaults;
  readonly work: WorkInHand;
  readonly note: (problem: string) => void;
  /** Seconds that a step took. */
  readonly observe?: (step: CreateStep, seconds: number) => void;
  readonly onCreated?: (view: SandboxView, reservation: string) => void;
  readonly random?: () => number;
}

export interface Caller {
  readonly identity: Identity;
  /** Of the HTTP request. */
  readonly requestId: string;
  /** Nobody waits for the answer any more. */
  readonly isGone: boolean;
  /** Aborted then. Made when it is asked for. */
  readonly gone: AbortSignal;
  /** Waits for its turn however long: a batch bounds itself. */
  readonly patient?: boolean;
}

/** An edge that died is there again in a few seconds, or not soon. */
const SETTLE_MS = 15_000;
const SETTLE_LATER_MS = 5 * 60_000;
const SETTLE_EVERY_MS = 3000;
const AGAIN_MS = 300;
const OTHERS_MS = 20_000;
/** It says that it did nothing. */
const REFUSED: ReadonlySet<string> = new Set(['EDGE_REFUSED', 'SERVICE_DRAINING', 'SERVICE_NOT_READY']);

/** There is no node for it. */
const UNPLACED: ReadonlySet<string> = new Set(['PLACEMENT_NO_ROOM', 'PLACEMENT_NO_BACKEND', 'PLACEMENT_NO_GPU']);

/** What is asked for, looked up. */
interface Order {
  readonly caller: Caller;
  readonly asked: CreateAsked;
  readonly project: string;
  readonly amounts: Amounts;
  readonly placement: PlacementRequest;
  readonly manifests: FoundImages['manifests'];
}

interface Making extends Order {
  readonly reservation: Reservation;
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

  /** @throws IAM_DENIED, IAM_QUOTA, IAM_NOT_FOUND, API_BUSY, API_STORE, PLACEMENT_NO_*, CREATE_UNSETTLED, CATALOG_*, what the edge throws */
  async create(caller: Caller, asked: CreateAsked): Promise<SandboxView> {
    const { access, work, storeUrl } = this.options;
    const project = asked.project ?? caller.identity.project;
    if (asked.backend === 'fncall') throw unsupported(asked.backend, 'resident');
    if (asked.store !== undefined && asked.store !== storeUrl) throw fail('API_STORE', { store: asked.store });
    await access.allowed(caller.identity, 'sandbox.create', project, caller.requestId);
    await allowHostShared(access, caller, asked, project);
    const whoWaits = asked.requestId === undefined ? caller : undefined;
    const make = () => work.run(() => this.reserveAndPlace(caller, asked, project), whoWaits, caller.patient);
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
    const { layers, defaults } = this.options;
    const {
      image,
      workspace,
      toolkits = [],
      requestId,
      backend = 'container',
      labels = [],
      alone = false,
      job,
    } = asked;
    const user = caller.identity.principal;
    const images =
      workspace === undefined && toolkits.length === 0 ? [image] : [image, workspace ?? [], toolkits].flat(2);
    const from = performance.now();
    const { layers: found, synced, manifests } = await layers.of(images, backendOf({ backend }));
    this.observe('layers', from);
    const amounts = amountsOf(asked, defaults);
    const { gpuKind } = asked;
    const wanted = gpuKind === undefined ? labels : [...labels, gpuLabel(gpuKind)];
    refuseGpusOf(asked, amounts);
    const placement = { user, job, backend, amounts, labels: wanted, gpuKind, layers: found, synced, alone };
    const order: Order = { caller, asked, project, amounts, placement, manifests };
    try {
      return await this.placeFirst(order);
    } catch (error) {
      // Somebody else was quicker with the same request id: his is the answer.
      if (!isDsecError(error, 'IAM_RESERVATION_GONE') || requestId === undefined) throw error;
      const now = await this.reserve(order);
      if (now.state !== 'pending') return this.there(now);
      if (!now.existing) await this.options.iam.release(now.id);
      throw error;
    }
  }

  /**
   * What no node has, whatever it does now: to wait helps nobody. While nodes may be unknown still, it does.
   * @throws PLACEMENT_NO_BACKEND, PLACEMENT_NO_GPU
   */
  private refuseWhatNoneHas({ backend, amounts: { gpus }, gpuKind, labels }: PlacementRequest): void {
    const { isSettling, view } = this.options.edges;
    if (isSettling) return;
    const { nodes } = view;
    const hasGpus = ({ report: { capacity, gpuKinds, labels: theirs } }: NodeView) =>
      capacity.gpus >= gpus &&
      (gpuKind === undefined || gpuKinds === undefined || (gpuKinds.get(gpuKind)?.cards ?? 0) >= gpus) &&
      labels.every((label) => theirs.has(label));
    if (gpus > 0 && !nodes.some(hasGpus)) {
      const kind = gpuKind === undefined ? '' : ` of kind ${gpuKind}`;
      throw fail('PLACEMENT_NO_GPU', { wanted: `${gpus} gpu${gpus === 1 ? '' : 's'}${kind}` });
    }
    if (nodes.length > 0 && !nodes.some(({ report }) => report.backends.has(backend))) {
      throw fail('PLACEMENT_NO_BACKEND', { backend });
    }
  }

  private async reserve({ asked, project, amounts, placement }: Order, edge?: string): Promise<Reservation> {
    const { cpuMilli, memoryBytes, diskBytes } = amounts;
    const from = performance.now();
    const { user } = placement;
    const { requestId } = asked;
    const reserved = { sandboxes: 1, cpuMilli, memoryBytes, diskBytes };
    const reservation = await this.options.iam.reserve({ project, user, requestId, amounts: reserved, edge });
    this.observe('reserve', from);
    return reservation;
  }

  /** The edge is chosen before anything is reserved: it is on record with the reservation, at the price of one. */
  private async placeFirst(order: Order): Promise<SandboxView> {
    let making: Making | undefined;
    let found: Reservation | undefined;
    const ask = async (edge: string): Promise<Admission<EdgeSandbox>> => {
      if (making !== undefined) return this.askNext(making, edge);
      try {
        const reservation = await this.reserve(order, edge);
        if (!reservation.existing) making = makingOf(order, reservation);
        else found = reservation;
      } catch (stop) {
        return { admitted: false, stop };
      }
      if (making === undefined) return { admitted: false, stop: undefined };
      return this.ask(making, edge, true);
    };
    try {
      this.refuseWhatNoneHas(order.placement);
      return await this.placeBy(order, ask, () => making as unknown as Making);
    } catch (error) {
      if (found === undefined && making === undefined && isDsecError(error) && UNPLACED.has(error.code)) {
        found = await this.madeBefore(order);
      }
      if (found !== undefined) return this.again(order, found);
      if (making !== undefined) await this.failed(making, error);
      throw error;
    }
  }

  private async placeBy(
    { placement }: Order,
    ask: (edge: string) => Promise<Admission<EdgeSandbox>>,
    making: () => Making,
  ): Promise<SandboxView> {
    const { edges, overflow, random = Math.random } = this.options;
    const { edge, value } = await placeSandbox(edges.view, placement, ask, { random, overflow });
    return this.placed(making(), edge, value);
  }

  /** Where there is room for nothing, what was made before is there all the same. */
  private async madeBefore(order: Order): Promise<Reservation | undefined> {
    if (order.asked.requestId === undefined) return undefined;
    const reservation = await this.reserve(order);
    if (reservation.existing) return reservation;
    await this.options.iam.release(reservation.id);
    return undefined;
  }

  /** Somebody has asked with the same request id before. */
  private async again(order: Order, found: Reservation): Promise<SandboxView> {
    let reservation = found;
    // Whoever reserved it is about to choose an edge: two would make two.
    for (let waited = 0; isBegun(reservation) && waited < OTHERS_MS; waited += AGAIN_MS) {
      await delay(AGAIN_MS);
      reservation = await this.reserve(order);
    }
    if (reservation.state !== 'pending') return this.there(reservation);
    const making = makingOf(order, reservation);
    try {
      const { edge } = reservation;
      if (edge !== undefined) {
        const answer = await this.askAgain(making, edge);
        if (answer.admitted) return await this.placed(making, edge, answer.value);
      }
      return await this.placeBy(
        order,
        (next) => this.askNext(making, next),
        () => making,
      );
    } catch (error) {
      await this.failed(making, error);
      throw error;
    }
  }

  private async failed(making: Making, error: unknown): Promise<void> {
    if (isDsecError(error, 'CREATE_UNSETTLED')) this.settle(making, String(error.params.edge));
    else if (!isDsecError(error, 'IAM_RESERVATION_GONE')) await this.options.iam.release(making.reservation.id);
  }

  /** What was made for the same request id before. */
  private async there({ edge, sandbox: name, state, id: reservation }: Reservation): Promise<SandboxView> {
    if (edge === undefined || name === undefined) throw fail('CREATE_UNSETTLED', { edge: 'an edge' });
    const id = `${name}.${edge}`;
    let told: EdgeSandbox | undefined;
    try {
      const path = `/v1/sandboxes/${encodeURIComponent(name)}`;
      told = await this.options.edges.ask<EdgeSandbox>(edge, { method: 'GET', path });
    } catch (error) {
      const problem = gone(id, error);
      // Its edge may be away, or have removed it; that it has ended is known here.
      const knows = isDsecError(problem, 'SANDBOX_GONE') && problem.params.reason !== NOT_THERE;
      if (state === 'placed' || knows) throw problem;
    }
    // Another one may have the name by now.
    if (state === 'placed' && told?.owner?.reservation === reservation) return viewOf(edge, told);
    throw fail('SANDBOX_GONE', { id, reason: 'it has ended; it was made for this request id' });
  }

  private async askNext(making: Making, edge: string): Promise<Admission<EdgeSandbox>> {
    try {
      const from = performance.now();
      await this.options.iam.asking(making.reservation.id, edge);
      this.observe('asking', from);
    } catch (stop) {
      return { admitted: false, stop };
    }
    return this.ask(making, edge, true);
  }

  private async askAgain(making: Making, edge: string): Promise<Admission<EdgeSandbox>> {
    await this.options.iam.asking(making.reservation.id, edge);
    return this.ask(making, edge, false);
  }

  private bodyOf({ asked, project, placement, amounts, reservation, manifests }: Making, isElsewhere: boolean): object {
    const { user, job, backend, alone } = placement;
    const owner = { project, user, job, reservation: reservation.id };
    const { storeUrl, overflow } = this.options;
    const store = isElsewhere ? overflow!.storeUrl : storeUrl;
    const others = { project: undefined, labels: undefined, job: undefined, gpus: undefined };
    // Assigned, as viewOf does it.
    const body = Object.assign({}, asked, others, {
      backend,
      store,
      requestId: reservation.id,
      owner,
      amounts,
      alone,
    });
    if (!isElsewhere) return body;
    const [image, ...more] = manifests;
    const workspace = asked.workspace === undefined ? undefined : more.shift();
    return Object.assign(body, { image, workspace, toolkits: more });
  }

  /** `fresh`: it was not asked for this before, so one that is not reached has not made it. */
  private async ask(making: Making, edge: string, fresh: boolean): Promise<Admission<EdgeSandbox>> {
    const { creates, edges, layers, overflow } = this.options;
    const isElsewhere = isOverflow(edges.view, edge, overflow);
    const body = this.bodyOf(making, isElsewhere);
    let unsettled = !fresh;
    for (const until = Date.now() + SETTLE_MS; ; ) {
      try {
        const from = performance.now();
        const value = await creates.create(edge, body, making.caller.requestId);
        this.observe('edge', from);
        const { epoch = '', number = 0 } = value.admission ?? {};
        return { admitted: true, epoch, number, value };
      } catch (error) {
        if (isDsecError(error) && REFUSED.has(error.code)) {
          // One that is about to end has not looked whether it has it.
          if (!unsettled || error.code === 'EDGE_REFUSED') return { admitted: false, reason: error.message };
        } else if (isDsecError(error, 'SERVICE_UNREACHABLE') || isDsecError(error, 'EDGE_UNKNOWN')) {
          if (!unsettled) return { admitted: false, reason: messageOf(unreachable(edge, error)) };
        } else if (isElsewhere && isDsecError(error) && LACKING.has(error.code)) {
          layers.distrust(making.manifests);
          return { admitted: false, reason: error.message, notSynced: true };
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
    const { principal, tokenId } = identity;
    try {
      const from = performance.now();
      await Promise.all([
        iam.placed(reservation.id, edge, told.name),
        access.audit({
          principal,
          tokenId,
          action: 'sandbox.create',
          project,
          target: view.id,
          outcome: 'done',
          requestId,
          detail: { image: asked.image },
        }),
      ]);
      this.observe('placed', from);
    } catch (error) {
      // It counts for nobody now.
      await this.remove(edge, told.name);
      throw error;
    }
    if (caller.isGone && asked.requestId === undefined) {
      // Nobody knows of it.
      await this.remove(edge, told.name);
      throw caller.gone.reason;
    }
    onCreated?.(view, reservation.id);
    return view;
  }

  /** One that counts for nobody. What fails is noted. */
  async remove(edge: string, name: string): Promise<void> {
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

  private observe(step: CreateStep, fromMs: number): void {
    this.options.observe?.(step, (performance.now() - fromMs) / 1000);
  }
}

/** @throws SANDBOX_BAD_REQUEST */
function refuseGpusOf({ backend = 'container', runtime = 'dsec' }: CreateAsked, { gpus }: Amounts): void {
  if (gpus === 0 || (backend === 'container' && runtime === 'dsec')) return;
  throw fail('SANDBOX_BAD_REQUEST', { problem: 'gpus: containers have them, by our own launcher' });
}

/** Field by field: a spread costs more than all that is done with it. */
function makingOf({ caller, asked, project, amounts, placement, manifests }: Order, reservation: Reservation): Making {
  return { caller, asked, project, amounts, placement, manifests, reservation };
}

function isBegun({ existing, state, edge }: Reservation): boolean {
  return existing && state === 'pending' && edge === undefined;
}

/** What a sandbox counts as: its limits, else the defaults, or of a virtual machine the size that it has then. */
export function amountsOf(
  asked: Pick<CreateAsked, 'cpus' | 'memoryBytes' | 'diskBytes' | 'backend' | 'gpus' | 'gpuKind'>,
  defaults: CreateDefaults,
): Amounts {
  const unsaid = unsaidIn(backendOf(asked), defaults);
  const { cpus, memoryBytes = unsaid.memoryBytes, diskBytes = unsaid.diskBytes } = asked;
  const cpuMilli = cpus === undefined ? unsaid.cpuMilli : Math.ceil(cpus * 1000);
  // Whoever names a kind wants one.
  const gpus = asked.gpus ?? (asked.gpuKind === undefined ? 0 : 1);
  return { cpuMilli, memoryBytes, diskBytes, gpus };
}
