/**
 * What happens in the cluster, as server-sent events: what this instance does itself at once, all else when a roster or the watcher's cluster
 * shows it. A stream begins with what happens after it was opened; whoever needs the whole asks for lists, then listens.
 */
import type { FastifyReply } from 'fastify';
import type { RosterAnswer, RosterRow } from './roster.ts';
import { sandboxId } from './sandbox-id.ts';
import { projectOf } from './sandbox-list.ts';
import { type SandboxView, viewOf } from './sandbox-view.ts';

export type EventType =
  | 'sandbox.created'
  | 'sandbox.changed'
  | 'sandbox.ended'
  | 'sandbox.gone'
  | 'node.up'
  | 'node.down'
  | 'node.draining'
  | 'node.gone';

interface Listener {
  readonly wants: (project: string | undefined) => boolean;
  readonly reply: FastifyReply;
}

interface Seen {
  readonly state: string;
  readonly project: string;
  readonly atMs: number;
}

/** So that whoever reads knows that it still is there; and no proxy between takes it for dead. */
const ALIVE_MS = 15_000;
/** A reader that is so far behind has lost events anyway: it is cut off, and asks for lists again. */
const MOST_BEHIND_BYTES = 4 << 20;
/** A roster may be older than what was done here. */
const FRESH_MS = 5000;

export class Events {
  private readonly listeners = new Set<Listener>();
  private readonly seen = new Map<string, Map<string, Seen>>();
  private readonly beat: NodeJS.Timeout;
  private number = 0;

  constructor() {
    this.beat = setInterval(() => {
      for (const { reply } of this.listeners) reply.raw.write(': alive\n\n');
    }, ALIVE_MS);
    this.beat.unref();
  }

  get readers(): number {
    return this.listeners.size;
  }

  /** Until the reader goes or `close`. `wants` is asked with an event's project; undefined: it is about a node. */
  stream(reply: FastifyReply, requestId: string, wants: Listener['wants']): void {
    reply.hijack();
    reply.raw.writeHead(200, {
      'content-type': 'text/event-stream; charset=utf-8',
      'cache-control': 'no-store',
      'x-accel-buffering': 'no',
      'x-request-id': requestId,
    });
    reply.raw.write(': listening\n\n');
    const listener = { wants, reply };
    this.listeners.add(listener);
    reply.raw.once('close', () => this.listeners.delete(listener));
  }

  node(edge: string, what: 'up' | 'down' | 'draining' | 'gone'): void {
    this.tell(`node.${what}`, { edge }, undefined);
    if (what === 'gone') this.seen.delete(edge);
  }

  created(view: SandboxView): void {
    this.known(view.edge).set(view.name, seenNow('running', view.project ?? 'root'));
    this.tell('sandbox.created', { sandbox: view }, view.project ?? 'root');
  }

  /** What was done here. */
  done(type: 'sandbox.changed' | 'sandbox.ended' | 'sandbox.gone', id: string, project: string): void {
    const dot = id.lastIndexOf('.');
    if (type !== 'sandbox.changed') this.seen.get(id.slice(dot + 1))?.delete(id.slice(0, dot));
    this.tell(type, { sandbox: id }, project);
  }

  /** What a roster shows that was not known. */
  roster(edge: string, { sandboxes, writtenAtMs }: RosterAnswer): void {
    const first = !this.seen.has(edge);
    const known = this.known(edge);
    const names = new Set<string>();
    for (const row of sandboxes) {
      if (row.name === undefined) continue;
      names.add(row.name);
      if (this.isNews(known, row, writtenAtMs) && !first) this.tellRow(edge, row, known.has(row.name));
      if (row.state === 'ended') known.delete(row.name);
      else known.set(row.name, { state: row.state, project: projectOf(row), atMs: known.get(row.name)?.atMs ?? 0 });
    }
    for (const [name, { atMs, project }] of known) {
      if (names.has(name) || atMs > writtenAtMs - FRESH_MS) continue;
      known.delete(name);
      this.tell('sandbox.gone', { sandbox: sandboxId({ name, edge }) }, project);
    }
  }

  close(): void {
    clearInterval(this.beat);
    for (const { reply } of this.listeners) reply.raw.end();
  }

  private isNews(known: ReadonlyMap<string, Seen>, { name, state }: RosterRow, writtenAtMs: number): boolean {
    const before = known.get(name!);
    if (before === undefined) return state !== 'ended';
    return before.state !== state && before.atMs <= writtenAtMs;
  }

  private tellRow(edge: string, row: RosterRow, wasKnown: boolean): void {
    const type = row.state === 'ended' ? 'sandbox.ended' : wasKnown ? 'sandbox.changed' : 'sandbox.created';
    this.tell(type, { sandbox: viewOf(edge, { ...row, name: row.name! }) }, projectOf(row));
  }

  private known(edge: string): Map<string, Seen> {
    const known = this.seen.get(edge) ?? new Map<string, Seen>();
    this.seen.set(edge, known);
    return known;
  }

  private tell(type: EventType, data: object, project: string | undefined): void {
    if (this.listeners.size === 0) return;
    const text = `id: ${++this.number}\nevent: ${type}\ndata: ${JSON.stringify({ type, ...data })}\n\n`;
    for (const { wants, reply } of this.listeners) {
      if (!wants(project)) continue;
      reply.raw.write(text);
      if (reply.raw.writableLength > MOST_BEHIND_BYTES) reply.raw.destroy();
    }
  }
}

function seenNow(state: string, project: string): Seen {
  return { state, project, atMs: Date.now() };
}
