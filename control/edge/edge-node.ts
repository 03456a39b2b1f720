/**
 * The sandboxes of a node as its edge has them: the runtime's, with whose they are, what is promised to them, and whether one more may come. All
 * of that is in their records; an edge that starts anew reads it there.
 *
 * Those that were made on the machine itself (`dsec sandbox create`) are not asked for their admission, but they count.
 */
import { availableParallelism } from 'node:os';
import { InTurn, isDsecError, messageOf, Slots } from '#base';
import {
  type AllLimits,
  type CreateOptions,
  type DeviceNode,
  type LimitChanges,
  listSandboxes,
  type NodeSandbox,
  type SandboxEnd,
  type SandboxNode,
  type SandboxRecord,
} from '#runtime';
import { fail } from '../errors.ts';
import { type Amounts, larger } from '../placement/amounts.ts';
import { layerKey } from '../placement/layer-key.ts';
import type { NodeReport } from '../placement/node-report.ts';
import { backendOf, backendView } from '../runtime-service/backend-view.ts';
import type { Sandboxes } from '../runtime-service/route.ts';
import type { EdgeHost, Roster, RosterEntry } from './edge-host.ts';
import { type GpuCard, GpuCards, gpuEnv } from './gpu-cards.ts';
import type { AdmissionNumber, Held, Ledger } from './ledger.ts';
import type { Pressure, PressureGauge } from './pressure.ts';
import { failAsRuntime } from './runtime-failure.ts';
import {
  admissionIn,
  amountsAfter,
  amountsOf,
  cardsIn,
  type Promised,
  promisedIn,
  promisedOf,
  promisedTag,
  reservationIn,
  type SandboxOwner,
} from './sandbox-owner.ts';

export interface EdgeNodeOptions {
  readonly node: SandboxNode;
  readonly ledger: Ledger;
  readonly gauge: Pick<PressureGauge, 'measure'>;
  /** Graphics processors: none by default. */
  readonly cards?: GpuCards;
  /** An ended one is removed after so long. */
  readonly keepEndedMs: number;
  readonly noteDraining: (on: boolean) => void;
  readonly onNote: (text: string) => void;
  /** Where it runs tasks too (FnCall): how many are at work, and how many can be. */
  readonly tasks?: () => { readonly sandboxes: number; readonly limit: number };
  /** Called from time to time: what is kept of sandboxes that went before `beforeMs` can go. */
  readonly onSweep?: (beforeMs: number) => void;
}

interface Entry {
  held: Held;
  readonly requestId: string | undefined;
  readonly cards: readonly GpuCard[];
  /** Once it is there. */
  sandbox?: NodeSandbox;
}

interface Ended {
  readonly entry: RosterEntry;
  readonly requestId: string | undefined;
}

/** A measurement is good for so long: a burst of creations is one measurement. */
const PRESSURE_MS = 250;
/** They are in each report, which each API server hears each second. */
const MOST_LAYERS = 1024;

export class EdgeNode implements Sandboxes, EdgeHost {
  readonly edge: string;
  private readonly options: EdgeNodeOptions;
  private readonly entries = new Map<string, Entry>();
  /** By the number of their admission. */
  private readonly creating = new Map<number, Entry>();
  /** By request id; those of sandboxes that run or are being created. */
  private readonly byRequest = new Map<string, { readonly entry: Entry; readonly made: Promise<NodeSandbox> }>();
  /** More at once would only wait for each other. */
  private readonly creations = new Slots(Math.max(8, 4 * availableParallelism()));
  private readonly ended = new Map<string, Ended>();
  /** Request id to name, of those. */
  private readonly endedRequests = new Map<string, string>();
  /** Keys of layers (by their metadata) that sandboxes here were made of, the last ones. */
  private readonly layers = new Set<string>();
  private readonly updates = new InTurn<NodeSandbox>();
  private readonly cards: GpuCards;
  private pressure: { readonly value: Pressure; readonly at: number } | undefined;
  private sweeping: NodeJS.Timeout | undefined;
  private closing = false;

  constructor(options: EdgeNodeOptions) {
    this.options = options;
    this.edge = options.ledger.options.edge;
    this.cards = options.cards ?? new GpuCards();
    this.noteKept();
    this.adoptUnknown();
    this.sweepLater();
  }

  /** As the runtime's, for a fork: `options.tag` is its parent's. @throws EDGE_REFUSED, EDGE_REQUEST_TAKEN, as the runtime's */
  async create(options: CreateOptions): Promise<NodeSandbox> {
    const parent = promisedIn(options.tag) ?? promisedOf({ limits: options, backend: options.backend });
    const promised = { ...parent, owner: { ...parent.owner, reservation: reservationIn(options.tag) } };
    return (await this.createHeld(promised, options.requestId, async () => options)).sandbox;
  }

  /** `prepare` is called once it is admitted. */
  async createHeld(
    promised: Promised,
    requestId: string | undefined,
    prepare: () => Promise<CreateOptions>,
  ): Promise<{ readonly sandbox: NodeSandbox; readonly held: Held }> {
    const known = requestId === undefined ? undefined : this.byRequest.get(requestId);
    if (known !== undefined) {
      this.refuseOtherProject(known.entry.held.owner, promised);
      return { sandbox: await known.made, held: known.entry.held };
    }
    if (requestId !== undefined) this.refuseEnded(requestId, promised);
    const held = this.options.ledger.admit(promised, this.measured());
    let cards: readonly GpuCard[];
    try {
      cards = this.cards.take(promised.amounts.gpus, promised.gpuKind, this.edge);
    } catch (error) {
      this.options.ledger.release(held);
      throw error;
    }
    const entry: Entry = { held, requestId, cards };
    const made = this.make(entry, promised, prepare);
    if (requestId !== undefined) this.byRequest.set(requestId, { entry, made });
    const sandbox = await made;
    return { sandbox, held: (this.entries.get(sandbox.name) ?? entry).held };
  }

  get(name: string): NodeSandbox {
    return this.options.node.get(name);
  }

  list(): NodeSandbox[] {
    return this.options.node.list();
  }

  stop(name: string, options?: { readonly timeMs?: number }) {
    return this.options.node.stop(name, options);
  }

  async remove(name: string, options?: { readonly force?: boolean }): Promise<void> {
    await this.options.node.remove(name, options);
    this.noteGone(name);
  }

  /**
   * What it counts as changes with its limits: of what `changes` names as `amounts` says, else as the limits do. What grows is promised before it
   * has it, as a creation is, what shrinks is given back afterwards; one change of a sandbox at a time.
   * @throws EDGE_REFUSED, as the sandbox's `update`; then all is as it was
   */
  update(sandbox: NodeSandbox, changes: LimitChanges, amounts?: Amounts): Promise<AllLimits> {
    return this.updates.run(sandbox, async () => {
      const { ledger } = this.options;
      const entry = this.entries.get(sandbox.name);
      if (entry?.sandbox !== sandbox) return sandbox.update(changes);
      const before = entry.held.amounts;
      const { facts } = sandbox;
      const next = amountsAfter(
        before,
        changes,
        amounts ?? amountsOf({ ...facts.limits, ...changes }, backendOf(facts)),
      );
      entry.held = ledger.resize(entry.held, larger(before, next));
      let now = before;
      try {
        const limits = await sandbox.update(changes);
        now = next;
        const { tag } = sandbox.facts.resident ?? {};
        if (promisedIn(tag) !== undefined) sandbox.retag({ ...tag, amounts: next });
        return limits;
      } finally {
        // Else it has ended meanwhile, and given back what it had then. What is given back is not refused.
        if (this.entries.get(sandbox.name) === entry) entry.held = ledger.resize(entry.held, now);
      }
    });
  }

  heldBy(name: string): Held | undefined {
    return this.entries.get(name)?.held;
  }

  /** Whether there is anything of that name, ended or not. */
  has(name: string): boolean {
    return this.entries.has(name) || this.ended.has(name);
  }

  report(): NodeReport {
    this.adoptUnknown();
    const report = { ...this.options.ledger.report(this.measured(), this.layers), gpuKinds: this.cards.kinds };
    const tasks = this.options.tasks?.();
    return tasks === undefined ? report : { ...report, backends: new Map([...report.backends, ['fncall', tasks]]) };
  }

  roster(): Roster {
    this.adoptUnknown();
    const sandboxes: RosterEntry[] = [];
    for (const { held, sandbox } of this.entries.values()) {
      if (sandbox === undefined) continue;
      const { facts, end, state } = sandbox;
      // What is left of one that has ended is being undone.
      sandboxes.push({ ...rosterEntry(facts, held, end), state });
    }
    for (const { held } of this.creating.values()) {
      const { owner, amounts, backend } = held;
      sandboxes.push({ state: 'creating', owner, amounts, backend });
    }
    for (const { entry } of this.ended.values()) sandboxes.push(entry);
    return { edge: this.edge, epoch: this.options.ledger.epoch, writtenAtMs: Date.now(), sandboxes };
  }

  drain(on: boolean): void {
    this.options.noteDraining(on);
    this.options.ledger.draining = on;
  }

  close(): void {
    this.closing = true;
    clearTimeout(this.sweeping);
  }

  counts(): Readonly<Record<RosterEntry['state'], number>> {
    const counts = { creating: this.creating.size, running: 0, paused: 0, ended: this.ended.size };
    for (const { sandbox } of this.entries.values()) if (sandbox !== undefined) counts[sandbox.state]++;
    return counts;
  }

  private async make(entry: Entry, promised: Promised, prepare: () => Promise<CreateOptions>): Promise<NodeSandbox> {
    const { ledger, node } = this.options;
    const { admission } = entry.held;
    this.creating.set(admission.number, entry);
    let sandbox: NodeSandbox;
    try {
      const options = await prepare();
      const { cards, requestId } = entry;
      const tag = promisedTag(promised, admission, idsOf(cards));
      const devices = devicesOf(cards);
      const env = cards.length === 0 && promised.amounts.gpus === 0 ? options.env : gpuEnv(options.env, cards);
      sandbox = await this.creations.run(() => node.create({ ...options, env, devices, requestId, tag }));
      this.noteLayers(options);
    } catch (error) {
      this.creating.delete(admission.number);
      if (entry.requestId !== undefined) this.byRequest.delete(entry.requestId);
      ledger.release(entry.held);
      this.cards.release(idsOf(entry.cards));
      throw error;
    }
    this.creating.delete(admission.number);
    if (this.isOf(admission, sandbox)) this.follow(entry, sandbox);
    else {
      // Somebody made it on the machine itself, with this very request id: it has what it was given there.
      if (entry.requestId !== undefined) this.byRequest.delete(entry.requestId);
      ledger.release(entry.held);
      this.cards.release(idsOf(entry.cards));
      this.adoptUnknown();
      this.refuseOtherProject(promisedOf(sandbox.facts).owner, promised);
    }
    return sandbox;
  }

  private isOf(admission: AdmissionNumber, { facts }: NodeSandbox): boolean {
    const { epoch, number } = admissionIn(facts.resident?.tag) ?? {};
    return epoch === admission.epoch && number === admission.number;
  }

  /** From here on it counts until it has ended. */
  private follow(entry: Entry, sandbox: NodeSandbox): void {
    entry.sandbox = sandbox;
    // One that had its name was removed on the machine itself.
    this.noteGone(sandbox.name);
    this.entries.set(sandbox.name, entry);
    sandbox.ended.then((end) => {
      this.options.ledger.release(entry.held);
      this.cards.release(cardsIn(sandbox.facts.resident?.tag));
      if (this.entries.get(sandbox.name) === entry) this.entries.delete(sandbox.name);
      if (entry.requestId !== undefined) this.byRequest.delete(entry.requestId);
      this.noteEnded(sandbox.facts, entry.held, end);
    });
  }

  /** Those that the runtime has and that were not made here. */
  private adoptUnknown(): void {
    for (const sandbox of this.options.node.list()) {
      if (this.entries.has(sandbox.name) || sandbox.end !== undefined) continue;
      const { requestId } = sandbox.facts.resident ?? {};
      // It is there, but whoever makes it has not been told yet.
      const { epoch, number } = admissionIn(sandbox.facts.resident?.tag) ?? {};
      if (epoch === this.options.ledger.epoch && number !== undefined && this.creating.has(number)) continue;
      const entry: Entry = { held: this.options.ledger.keep(promisedOf(sandbox.facts)), requestId, cards: [] };
      this.cards.keep(cardsIn(sandbox.facts.resident?.tag));
      this.follow(entry, sandbox);
      if (requestId !== undefined) this.byRequest.set(requestId, { entry, made: Promise.resolve(sandbox) });
    }
  }

  /** Request ids are known to no other project, but may be guessed. */
  private refuseOtherProject(known: SandboxOwner, promised: Promised): void {
    if (known.project !== promised.owner.project) throw fail('EDGE_REQUEST_TAKEN', { edge: this.edge });
  }

  private refuseEnded(requestId: string, promised: Promised): void {
    const name = this.endedRequests.get(requestId);
    const entry = name === undefined ? undefined : this.ended.get(name)?.entry;
    if (name === undefined || entry === undefined) return;
    this.refuseOtherProject(entry.owner, promised);
    const { detail: reason = 'nobody knows why', reason: ended } = entry.end ?? {};
    throw failAsRuntime('RUNTIME_SANDBOX_GONE', { name, reason, ended });
  }

  private measured(): Pressure {
    const now = Date.now();
    if (this.pressure === undefined || now - this.pressure.at >= PRESSURE_MS || now < this.pressure.at) {
      this.pressure = { value: this.options.gauge.measure(), at: now };
    }
    return this.pressure.value;
  }

  private noteLayers({ base, workspace, toolkits = [] }: CreateOptions): void {
    for (const image of [base, ...(workspace === undefined ? [] : [workspace]), ...toolkits]) {
      for (const { meta } of image.layers) {
        const key = layerKey(meta.digest);
        this.layers.delete(key);
        this.layers.add(key);
      }
    }
    for (const oldest of this.layers) {
      if (this.layers.size <= MOST_LAYERS) break;
      this.layers.delete(oldest);
    }
  }

  /** Those on disk that ended while no edge ran. */
  private noteKept(): void {
    for (const record of listSandboxes()) {
      const { name, state, end } = record;
      if (state === 'kept' && end !== undefined && !this.has(name)) this.noteEnded(record, promisedOf(record), end);
    }
  }

  /** One that was made on the machine itself stays there until somebody removes it, and is no business of the cluster's. */
  private noteEnded(facts: SandboxRecord, promised: Promised, end: SandboxEnd): void {
    const { name, resident } = facts;
    if (promisedIn(resident?.tag) === undefined) return;
    this.ended.set(name, { entry: rosterEntry(facts, promised, end), requestId: resident?.requestId });
    if (resident?.requestId !== undefined) this.endedRequests.set(resident.requestId, name);
  }

  private noteGone(name: string): void {
    const requestId = this.ended.get(name)?.requestId;
    if (requestId !== undefined && this.endedRequests.get(requestId) === name) this.endedRequests.delete(requestId);
    this.ended.delete(name);
  }

  private sweepLater(first = true): void {
    const { keepEndedMs } = this.options;
    const everyMs = Math.min(Math.max(keepEndedMs / 4, 100), 60_000);
    this.sweeping = setTimeout(async () => {
      // Those that the keeper's death has ended are known only after the runtime has found them.
      if (first) this.noteKept();
      const beforeMs = Date.now() - keepEndedMs;
      await this.sweep(beforeMs);
      this.options.onSweep?.(beforeMs);
      if (!this.closing) this.sweepLater(false);
    }, everyMs).unref();
  }

  /** Of what ended before, nothing stays. */
  private async sweep(beforeMs: number): Promise<void> {
    for (const [name, { entry }] of [...this.ended]) {
      if (this.closing) return;
      if (Date.parse(entry.end?.at ?? '') > beforeMs) continue;
      try {
        // Another one may have its name by now.
        if (this.entries.has(name)) this.noteGone(name);
        else await this.remove(name);
      } catch (error) {
        if (isDsecError(error, 'RUNTIME_SANDBOX_NOT_FOUND')) this.noteGone(name);
        else this.options.onNote(`${name} has ended, and could not be removed: ${messageOf(error)}`);
      }
    }
  }
}

function idsOf(cards: readonly GpuCard[]): readonly string[] {
  return cards.map(({ id }) => id);
}

/** Each once: some are of the driver, for whoever has any card. */
function devicesOf(cards: readonly GpuCard[]): readonly DeviceNode[] | undefined {
  if (cards.length === 0) return undefined;
  return [...new Map(cards.flatMap(({ devices }) => devices).map((node) => [node.path, node])).values()];
}

function rosterEntry(facts: SandboxRecord, promised: Promised, end: SandboxEnd | undefined): RosterEntry {
  const { owner, amounts, backend } = promised;
  const { name, createdAt, resident } = facts;
  const state = end === undefined ? 'running' : 'ended';
  const { runtime } = backendView(facts);
  const expiresAt = resident?.expiresAt;
  return { name, state, end, owner, amounts, backend, runtime, base: facts.base, createdAt, expiresAt };
}
