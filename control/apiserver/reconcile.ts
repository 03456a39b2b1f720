/**
 * Holds the rosters of all edges against the reservations, again and again, on every instance: what ended by itself, what a crash left half done,
 * what was made for somebody who never learnt of it. The database decides under its locks, so any number of instances may do it at once.
 *
 * A sandbox that counts for no project is removed; but not many at once: a wrong database would otherwise empty the cluster.
 */
import { setTimeout as delay } from 'node:timers/promises';
import { isDsecError, messageOf } from '#base';
import { type Iam, RESOURCES, type ResourceAmounts } from '../iam/iam.ts';
import type { Edges } from './edges.ts';
import { counted } from './limits.ts';
import { isLive, type RosterAnswer, type RosterRow, readRoster } from './roster.ts';

export interface ReconcilerOptions {
  readonly iam: Iam;
  readonly edges: Edges;
  readonly note: (problem: string) => void;
  readonly onRoster?: (edge: string, roster: RosterAnswer) => void;
  /** For all edges once; longer where there are many: 10 s by default. */
  readonly everyMs?: number;
}

const EVERY_MS = 10_000;
/** A roster of some thousand sandboxes is worth this much time. */
const AN_EDGE_MS = 250;
const SWEEP_MS = 60_000;
/** Younger ones may be on their way into the database. */
const YOUNG_MS = 120_000;
const MOST_SHARE = 0.1;
const MOST_FEW = 3;

export class Reconciler {
  private readonly options: ReconcilerOptions;
  private readonly ending = new AbortController();
  private running: Promise<void> | undefined;
  private sweptAt = 0;
  /** Uncounted in the roster before too. */
  private suspects = new Map<string, ReadonlySet<string>>();
  /** Reservations of other amounts than their sandboxes, likewise. */
  private differing = new Map<string, ReadonlySet<string>>();

  constructor(options: ReconcilerOptions) {
    this.options = options;
  }

  start(): void {
    this.running = this.loop().catch(() => {});
  }

  async close(): Promise<void> {
    this.ending.abort();
    await this.running;
  }

  /** One edge, once. @throws EDGE_UNREACHABLE, IAM_DATABASE */
  async edge(edge: string): Promise<void> {
    const { iam, edges, onRoster, note } = this.options;
    const roster = await readRoster(edges, edge, { signal: this.ending.signal });
    onRoster?.(edge, roster);
    const live = roster.sandboxes.filter(isLive);
    const reservations = live.flatMap(({ owner }) => owner?.reservation ?? []);
    const { epoch, writtenAtMs } = roster;
    const counting = await iam.amountsOn(edge);
    const there = new Set(reservations);
    const isShort = [...counting.keys()].some((id) => !there.has(id));
    const released = isShort ? await iam.reconcile(edge, { epoch, writtenAtMs, reservations }) : [];
    if (released.length > 0) note(`${edge}: ${released.length} reservations released: its roster does not hold them`);
    await this.correct(edge, live, counting);
    const uncounted = new Set(reservations.filter((id) => !counting.has(id)));
    const before = this.suspects.get(edge) ?? new Set();
    this.suspects.set(edge, uncounted);
    const old = live.filter(({ name, owner, createdAt }) => {
      const id = owner?.reservation;
      const isOld = createdAt === undefined || Date.parse(createdAt) < writtenAtMs - YOUNG_MS;
      return name !== undefined && id !== undefined && uncounted.has(id) && before.has(id) && isOld;
    });
    if (old.length > Math.max(MOST_FEW, live.length * MOST_SHARE)) {
      note(
        `${edge}: ${old.length} of ${live.length} sandboxes count for no project: is this the right database? They stay`,
      );
      return;
    }
    for (const { name } of old) {
      const path = `/v1/sandboxes/${encodeURIComponent(name ?? '')}?force=true`;
      await edges.ask(edge, { method: 'DELETE', path });
      note(`${name}.${edge}: removed: it counted for no project`);
    }
  }

  /** What a change of limits left counted for too much, or too little, since whoever asked for it died or lost the answer. */
  private async correct(
    edge: string,
    live: readonly RosterRow[],
    counting: ReadonlyMap<string, ResourceAmounts>,
  ): Promise<void> {
    const { iam, note } = this.options;
    const before = this.differing.get(edge) ?? new Set();
    const now = new Set<string>();
    this.differing.set(edge, now);
    for (const { owner, amounts } of live) {
      const id = owner?.reservation;
      const counts = id === undefined ? undefined : counting.get(id);
      if (id === undefined || counts === undefined || amounts === undefined) continue;
      const there = counted(amounts);
      if (RESOURCES.every((resource) => there[resource] === counts[resource])) continue;
      now.add(id);
      // One that is seen for the first time may be under way.
      if (!before.has(id)) continue;
      try {
        // Above the quota too: it is in use.
        await iam.resize(id, there, true);
        note(`${edge}: reservation ${id} counts now as what its sandbox has`);
      } catch (error) {
        if (isDsecError(error, 'IAM_DATABASE')) throw error;
        // The other rows are none the worse for it; the next roster finds it again.
        note(`${edge}: reservation ${id}: ${messageOf(error)}`);
      }
    }
  }

  private async loop(): Promise<void> {
    const { edges, everyMs = EVERY_MS } = this.options;
    const { signal } = this.ending;
    for (;;) {
      const nodes = edges.nodes.filter(({ alive }) => alive);
      const pauseMs = nodes.length === 0 ? everyMs : Math.max(AN_EDGE_MS, everyMs / nodes.length);
      for (const { edge } of nodes) {
        // Several instances shall not all ask at the same moment.
        await delay(pauseMs * (0.5 + Math.random()), undefined, { signal });
        await this.tried(() => this.edge(edge), edge);
      }
      if (nodes.length === 0) await delay(pauseMs, undefined, { signal });
      if (Date.now() - this.sweptAt < SWEEP_MS) continue;
      this.sweptAt = Date.now();
      await this.tried(async () => void (await this.options.iam.sweep()), 'database');
    }
  }

  private async tried(work: () => Promise<void>, what: string): Promise<void> {
    try {
      await work();
    } catch (error) {
      if (this.ending.signal.aborted) return;
      // The watcher says that an edge is away; that need not be said twice.
      if (!isDsecError(error, 'EDGE_UNREACHABLE') && !isDsecError(error, 'EDGE_UNKNOWN'))
        this.options.note(`${what}: ${messageOf(error)}`);
    }
  }
}
