/**
 * What the watcher knows of each edge, from the answers to its polls. Nothing is kept anywhere: a watcher that starts anew has asked every
 * edge within one round.
 *
 * - An answer to an earlier poll than the newest one answered says nothing new and is dropped: answers may come late and out of order.
 * - An edge is dead when no poll was answered for `silenceMs`, many polls long, so that lost ones do not make it so; never later than that.
 * - A dead edge has to answer `answersToLive` polls in a row before it gets sandboxes again: one that comes and goes stays out.
 */
import type { EdgeId, NodeReport } from '../placement/node-report.ts';

export interface EdgeWatchOptions {
  readonly silenceMs: number;
  readonly answersToLive: number;
}

interface Watched {
  report: NodeReport | undefined;
  /** When the newest answered poll was sent. */
  askedAt: number;
  /** When an answer came last. */
  heardAt: number;
  /** Since it was found dead, or first seen; enough of them and it lives. */
  answers: number;
  dead: boolean;
}

export class EdgeWatch {
  private readonly options: EdgeWatchOptions;
  private readonly edges = new Map<EdgeId, Watched>();

  constructor(options: EdgeWatchOptions) {
    this.options = options;
  }

  /** From now on this edge is watched; it counts as dead until it answers. */
  add(edge: EdgeId, now: number): void {
    if (this.edges.has(edge)) return;
    // The first answer of an edge that nobody knows anything bad of is enough.
    const answers = this.options.answersToLive - 1;
    this.edges.set(edge, { report: undefined, askedAt: Number.NEGATIVE_INFINITY, heardAt: now, answers, dead: true });
  }

  remove(edge: EdgeId): void {
    this.edges.delete(edge);
  }

  /** The answer to a poll that was sent at `askedAt`. Whether it says anything new. */
  heard(edge: EdgeId, report: NodeReport, askedAt: number, now: number): boolean {
    const watched = this.edges.get(edge);
    if (watched === undefined || askedAt <= watched.askedAt) return false;
    this.lookAt(watched, now);
    watched.askedAt = askedAt;
    watched.heardAt = now;
    watched.report = report;
    watched.answers++;
    if (watched.answers >= this.options.answersToLive) watched.dead = false;
    return true;
  }

  /** A poll that got no answer, or no good one. */
  missed(edge: EdgeId, now: number): void {
    const watched = this.edges.get(edge);
    if (watched === undefined) return;
    if (watched.dead && watched.report !== undefined) watched.answers = 0;
    this.lookAt(watched, now);
  }

  /** The last report of every edge that ever gave one, with `dead` for those that are. */
  reports(now: number): NodeReport[] {
    const all: NodeReport[] = [];
    for (const watched of this.edges.values()) {
      this.lookAt(watched, now);
      const { report, dead } = watched;
      if (report !== undefined) all.push(dead ? { ...report, state: 'dead' } : report);
    }
    return all;
  }

  /** Of every edge that is watched. `heardAt`: when its last answer came. */
  status(
    now: number,
  ): { readonly edge: EdgeId; readonly dead: boolean; readonly heard: boolean; readonly heardAt?: number }[] {
    return [...this.edges].map(([edge, watched]) => {
      this.lookAt(watched, now);
      const heard = watched.report !== undefined;
      return { edge, dead: watched.dead, heard, heardAt: heard ? watched.heardAt : undefined };
    });
  }

  private lookAt(watched: Watched, now: number): void {
    if (watched.dead || now - watched.heardAt < this.options.silenceMs) return;
    watched.dead = true;
    watched.answers = 0;
  }
}
