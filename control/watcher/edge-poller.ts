/**
 * Asks every edge for its report, again and again, each by itself: one that is slow or gone delays nobody else. A poll that got no answer in time is given up,
 * and what comes of it later is dropped; the next one is sent when its turn has come, whatever became of the one before.
 */
import type { EdgeId } from '../placement/node-report.ts';
import { reportFromJson } from '../placement/report-json.ts';
import { PeerClient, type PeerOptions } from '../service-base/peer-client.ts';
import type { EdgeWatch } from './edge-watch.ts';

export interface EdgePollerOptions {
  readonly watch: EdgeWatch;
  readonly peer: Omit<PeerOptions, 'url'>;
  readonly everyMs: number;
  /** A poll without an answer by then counts as lost. */
  readonly answerMs: number;
  readonly onNote: (text: string) => void;
  /** Milliseconds, of a clock that nobody sets. */
  readonly now: () => number;
}

interface Polled {
  readonly url: string;
  readonly client: PeerClient;
  readonly stop: AbortController;
  timer: NodeJS.Timeout | undefined;
  /** Configured, or told so by the edge itself; the latter is forgotten when it has been silent for long. */
  fixed: boolean;
  polls: number;
  failures: number;
  trouble: string | undefined;
}

export class EdgePoller {
  private readonly options: EdgePollerOptions;
  private readonly polled = new Map<EdgeId, Polled>();
  private readonly now: () => number;

  constructor(options: EdgePollerOptions) {
    this.options = options;
    this.now = options.now;
  }

  /** @returns whether it is a new one, or has a new address */
  add(edge: EdgeId, url: string, fixed: boolean): boolean {
    const known = this.polled.get(edge);
    if (known?.url === url) {
      known.fixed ||= fixed;
      return false;
    }
    // Where it is, is what is written down.
    if (known?.fixed === true && !fixed) return false;
    const { watch, peer, everyMs, answerMs } = this.options;
    // As many as can be without an answer at the same time: one that is late holds up none of those after it.
    const client = new PeerClient({ connections: Math.ceil(answerMs / everyMs) + 1, ...peer, url });
    if (known !== undefined) this.end(known);
    const polled: Polled = {
      url,
      client,
      fixed,
      stop: new AbortController(),
      timer: undefined,
      polls: 0,
      failures: 0,
      trouble: undefined,
    };
    this.polled.set(edge, polled);
    watch.add(edge, this.now());
    // Spread over the time between two polls, so that a thousand edges are not asked at once.
    const delayMs = known === undefined ? 0 : Math.random() * this.options.everyMs;
    polled.timer = setTimeout(() => this.poll(edge, polled), delayMs).unref();
    return true;
  }

  remove(edge: EdgeId): void {
    const polled = this.polled.get(edge);
    if (polled === undefined) return;
    this.polled.delete(edge);
    this.options.watch.remove(edge);
    this.end(polled);
  }

  urlOf(edge: EdgeId): string | undefined {
    return this.polled.get(edge)?.url;
  }

  get edges(): readonly { readonly edge: EdgeId; readonly url: string; readonly fixed: boolean }[] {
    return [...this.polled].map(([edge, { url, fixed }]) => ({ edge, url, fixed }));
  }

  counts(): { readonly polls: number; readonly failures: number } {
    let polls = 0;
    let failures = 0;
    for (const one of this.polled.values()) {
      polls += one.polls;
      failures += one.failures;
    }
    return { polls, failures };
  }

  close(): void {
    for (const polled of this.polled.values()) this.end(polled);
    this.polled.clear();
  }

  private end({ stop, timer, client }: Polled): void {
    stop.abort();
    clearTimeout(timer);
    client.close().catch(() => {});
  }

  private poll(edge: EdgeId, polled: Polled): void {
    polled.timer = setTimeout(() => this.poll(edge, polled), this.options.everyMs).unref();
    this.ask(edge, polled);
  }

  private async ask(edge: EdgeId, polled: Polled): Promise<void> {
    const { watch, answerMs, onNote } = this.options;
    const askedAt = this.now();
    polled.polls++;
    const signal = AbortSignal.any([polled.stop.signal, AbortSignal.timeout(answerMs)]);
    try {
      const answer = await polled.client.json({ method: 'GET', path: '/v1/report', signal, timeoutMs: 0 });
      const report = reportFromJson(answer);
      if (polled.stop.signal.aborted) return;
      if (report.edge !== edge) throw new Error(`it says that it is ${report.edge}`);
      watch.heard(edge, report, askedAt, this.now());
      if (polled.trouble !== undefined) onNote(`edge ${edge} answers`);
      polled.trouble = undefined;
    } catch (error) {
      if (polled.stop.signal.aborted) return;
      polled.failures++;
      watch.missed(edge, this.now());
      const trouble = (error as Error).message;
      if (trouble !== polled.trouble) onNote(`edge ${edge} at ${polled.url}: ${trouble}`);
      polled.trouble = trouble;
    }
  }
}
