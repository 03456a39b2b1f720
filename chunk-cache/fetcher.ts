/**
 * Gets missing chunks from the source.
 *
 * - One flight a chunk, however many wait for it. A chunk that was asked for ahead and is now waited for becomes urgent.
 * - Neighbouring chunks that wait in the queue leave together, up to 4 MiB in one ranged read; urgent ones with urgent ones only, since
 *   whoever waits for the first byte should not wait for what nobody asked for yet.
 * - A reader whose chunk was already on its way ahead of him waits for that, but not long: after `patienceMs` the chunk is fetched for him
 *   alone as well, and what comes first counts. A prefetch that stalls must not stall who needs it.
 * - At most `maxInFlight` reads at a time. Urgent ones go first, and some places are kept from the others, so that a reader never
 *   waits for a prefetch to end. A read keeps its place until the disk has room in its queue for what came: memory stays bounded.
 * - Each chunk is verified; one with wrong bytes is fetched again alone, twice at most. Then CACHE_CHUNK_MISMATCH for those who wait
 *   for that chunk; the others of its read are delivered.
 * - When all who waited for a read have given up, it is aborted, or never sent.
 */
import { setImmediate as nextTurn } from 'node:timers/promises';
import { type Digest, StopController, type StopSignal } from '#base';
import { arrivalDigestsOf } from './arrival-digests.ts';
import { CHUNK_BYTES, chunkDigest, chunkLength, sha256, sha256Pair } from './chunk.ts';
import { fail } from './errors.ts';
import type { FetchPriority, RangeSource } from './range-source.ts';
import type { Counters } from './stats.ts';

const RUN_CHUNKS = (4 * 1024 * 1024) / CHUNK_BYTES;
/** How often a chunk is asked for before it is given up as wrong. */
const TRIES = 3;
/** Chunks verified in a row before others get a turn: a millisecond or so. */
const VERIFY_AT_ONCE = 4;

/** A blob as the fetcher sees it. */
export interface FetchTarget {
  readonly digest: Digest;
  readonly sizeBytes: number;
  readonly chunkDigests: Buffer;
  /** The fetcher's own. */
  readonly tickets: Map<number, Ticket>;
  /** A verified chunk has come; called before those who wait hear of it. */
  arrived(index: number, chunk: Buffer, priority: FetchPriority): void;
  /** All that a read brought, in runs of neighbours. The promise says when there is room for more. */
  landed(first: number, bytes: Buffer): void;
}

/** One chunk on its way. */
interface Ticket {
  readonly target: FetchTarget;
  readonly index: number;
  priority: FetchPriority;
  waiters: number;
  run: Run | undefined;
  /** It has come, or failed. */
  over: boolean;
  /** Until the chunk is fetched once more, for its reader alone. */
  patience: NodeJS.Timeout | undefined;
  readonly promise: Promise<Buffer>;
  resolve(chunk: Buffer): void;
  reject(error: unknown): void;
}

/** One read under way. */
interface Run {
  readonly tickets: readonly Ticket[];
  readonly priority: FetchPriority;
  readonly stop: StopController;
}

export interface FetcherOptions {
  readonly source: RangeSource;
  readonly maxInFlight: number;
  /** How long a reader waits for a read that was not sent for him. */
  readonly patienceMs: number;
  readonly counters: Counters;
  /** Resolves when what came has room. */
  hasRoom(): Promise<void>;
}

export class Fetcher {
  readonly #options: FetcherOptions;
  readonly #queues: Record<FetchPriority, Set<Ticket>> = { interactive: new Set(), prefetch: new Set() };
  readonly #runs = new Set<Run>();
  readonly #prefetchLimit: number;
  #prefetching = 0;
  #pumping = false;
  #closedWith: Error | undefined;

  constructor(options: FetcherOptions) {
    this.#options = options;
    this.#prefetchLimit = Math.max(1, Math.floor((options.maxInFlight * 3) / 4));
  }

  get inFlight(): number {
    return this.#runs.size;
  }

  get queued(): number {
    return this.#queues.interactive.size + this.#queues.prefetch.size;
  }

  /** The chunk, verified. @throws CACHE_CHUNK_MISMATCH, what the source throws, the signal's reason */
  async fetch(target: FetchTarget, index: number, priority: FetchPriority, signal?: StopSignal): Promise<Buffer> {
    if (this.#closedWith !== undefined) throw this.#closedWith;
    signal?.throwIfAborted();
    const known = target.tickets.get(index);
    const ticket = known ?? this.#newTicket(target, index, priority);
    ticket.waiters++;
    if (priority === 'interactive' && ticket.priority === 'prefetch') this.#hurry(ticket);
    this.#pumpSoon();
    try {
      return await (signal === undefined ? ticket.promise : unlessAborted(ticket.promise, signal));
    } finally {
      ticket.waiters--;
      if (signal?.aborted === true) this.#abandon(ticket);
    }
  }

  /** Ends everything under way with `error`, and refuses what comes. */
  close(error: Error): void {
    this.#closedWith = error;
    for (const queue of Object.values(this.#queues)) {
      for (const ticket of queue) this.#settle(ticket, error);
      queue.clear();
    }
    for (const run of this.#runs) {
      for (const ticket of run.tickets) this.#settle(ticket, error);
      run.stop.abort(error);
    }
  }

  #newTicket(target: FetchTarget, index: number, priority: FetchPriority): Ticket {
    let resolve!: (chunk: Buffer) => void;
    let reject!: (error: unknown) => void;
    const promise = new Promise<Buffer>((yes, no) => {
      resolve = yes;
      reject = no;
    });
    // Those who wait hear of a failure; there may be none.
    promise.catch(() => {});
    const ticket: Ticket = {
      target,
      index,
      priority,
      waiters: 0,
      run: undefined,
      over: false,
      patience: undefined,
      promise,
      resolve,
      reject,
    };
    target.tickets.set(index, ticket);
    this.#queues[priority].add(ticket);
    return ticket;
  }

  #hurry(ticket: Ticket): void {
    ticket.priority = 'interactive';
    if (this.#queues.prefetch.delete(ticket)) this.#queues.interactive.add(ticket);
    else ticket.patience = setTimeout(() => this.#fetchBeside(ticket), this.#options.patienceMs);
  }

  /** Its run goes on; the ticket belongs to whichever ends first. */
  #fetchBeside(ticket: Ticket): void {
    if (ticket.over || ticket.waiters === 0) return;
    if (this.#runs.size < this.#options.maxInFlight) {
      void this.#fly({ tickets: [ticket], priority: 'interactive', stop: new StopController() });
    } else {
      ticket.patience = setTimeout(() => this.#fetchBeside(ticket), this.#options.patienceMs);
    }
  }

  /** Somebody stopped waiting. */
  #abandon(ticket: Ticket): void {
    if (ticket.waiters > 0) return;
    const { run } = ticket;
    if (run === undefined) {
      if (this.#queues[ticket.priority].delete(ticket)) ticket.target.tickets.delete(ticket.index);
      return;
    }
    if (run.tickets.some((one) => one.waiters > 0)) return;
    // From now on nobody joins them: who asks again gets a flight of his own.
    for (const one of run.tickets) if (one.target.tickets.get(one.index) === one) one.target.tickets.delete(one.index);
    run.stop.abort();
  }

  /** Soon, not now: what is asked for in the same turn of the event loop is to leave together. */
  #pumpSoon(): void {
    if (this.#pumping) return;
    this.#pumping = true;
    // Not queueMicrotask, which costs ten times as much.
    void Promise.resolve().then(() => {
      this.#pumping = false;
      this.#pump();
    });
  }

  #pump(): void {
    while (this.#runs.size < this.#options.maxInFlight) {
      const priority = this.#queues.interactive.size > 0 ? 'interactive' : 'prefetch';
      if (priority === 'prefetch' && this.#prefetching >= this.#prefetchLimit) return;
      const [first] = this.#queues[priority];
      if (first === undefined) return;
      void this.#fly(this.#runAround(first));
    }
  }

  /** The queued neighbours of a chunk, with it. */
  #runAround(ticket: Ticket): Run {
    const { target, priority } = ticket;
    const joins = (index: number) => {
      const other = target.tickets.get(index);
      return other !== undefined && other.run === undefined && other.priority === priority;
    };
    let first = ticket.index;
    let end = ticket.index + 1;
    while (end - first < RUN_CHUNKS && joins(end)) end++;
    while (end - first < RUN_CHUNKS && joins(first - 1)) first--;
    const tickets: Ticket[] = [];
    const run: Run = { tickets, priority, stop: new StopController() };
    for (let index = first; index < end; index++) {
      const one = target.tickets.get(index)!;
      this.#queues[priority].delete(one);
      one.run = run;
      tickets.push(one);
    }
    return run;
  }

  async #fly(run: Run): Promise<void> {
    this.#runs.add(run);
    if (run.priority === 'prefetch') this.#prefetching++;
    try {
      await this.#fetchRun(run);
      // Not `await` alone: when there is room, the place is free at once.
      await this.#options.hasRoom();
    } catch (error) {
      this.#options.counters[run.stop.signal.aborted ? 'abortedReads' : 'failedReads']++;
      for (const ticket of run.tickets) this.#settle(ticket, error);
    } finally {
      this.#runs.delete(run);
      if (run.priority === 'prefetch') this.#prefetching--;
      this.#pumpSoon();
    }
  }

  async #fetchRun(run: Run): Promise<void> {
    const { tickets } = run;
    const { target } = tickets[0]!;
    const first = tickets[0]!.index;
    const bytes = await this.#read(run, first, tickets.length);
    // Runs of good chunks within the read go on to the disk together.
    let goodFrom = 0;
    const land = (end: number) => {
      if (end > goodFrom) target.landed(first + goodFrom, bytes.subarray(goodFrom * CHUNK_BYTES, end * CHUNK_BYTES));
      goodFrom = end + 1;
    };
    const bad: { ticket: Ticket; actual: Buffer }[] = [];
    const arrived = arrivalDigestsOf(bytes);
    const digests: (Buffer | undefined)[] = tickets.map((_, k) => arrived && chunkDigest(arrived, k));
    const chunkAt = (k: number) => bytes.subarray(k * CHUNK_BYTES, (k + 1) * CHUNK_BYTES);
    // Two at a time: see linux/sha256.ts.
    const hashFrom = (k: number): Buffer => {
      if (k + 1 === tickets.length || chunkAt(k + 1).length === 0) return sha256(chunkAt(k));
      const [one, next] = sha256Pair(chunkAt(k), chunkAt(k + 1));
      digests[k + 1] = next;
      return one;
    };
    for (const [k, ticket] of tickets.entries()) {
      if (k > 0 && k % VERIFY_AT_ONCE === 0) await nextTurn();
      // Another read has brought it meanwhile.
      if (ticket.over) {
        land(k);
        continue;
      }
      const chunk = chunkAt(k);
      const actual = digests[k] ?? hashFrom(k);
      if (actual.equals(chunkDigest(target.chunkDigests, ticket.index))) {
        this.#deliver(ticket, chunk);
      } else {
        this.#options.counters.mismatches++;
        bad.push({ ticket, actual });
        land(k);
      }
    }
    land(tickets.length);
    for (const { ticket, actual } of bad) await this.#again(run, ticket, actual);
  }

  /** A chunk that came wrong, alone. Its failure is its own. */
  async #again(run: Run, ticket: Ticket, firstActual: Buffer): Promise<void> {
    const { target, index } = ticket;
    if (ticket.over) return;
    const expected = chunkDigest(target.chunkDigests, index);
    let actual = firstActual;
    try {
      for (let tries = 1; tries < TRIES; tries++) {
        const chunk = await this.#read(run, index, 1);
        actual = sha256(chunk);
        if (ticket.over) return;
        if (actual.equals(expected)) {
          this.#deliver(ticket, chunk);
          target.landed(index, chunk);
          return;
        }
        this.#options.counters.mismatches++;
      }
    } catch (error) {
      this.#settle(ticket, error);
      return;
    }
    const start = index * CHUNK_BYTES;
    const end = start + chunkLength(target.sizeBytes, index);
    const [found, wanted] = [actual.toString('hex'), expected.toString('hex')];
    const params = { blob: target.digest, chunk: index, start, end, tries: TRIES, actual: found, expected: wanted };
    this.#settle(ticket, fail('CACHE_CHUNK_MISMATCH', params));
  }

  async #read(run: Run, first: number, count: number): Promise<Buffer> {
    const { target } = run.tickets[0]!;
    const { counters } = this.#options;
    const offset = first * CHUNK_BYTES;
    const length = Math.min(count * CHUNK_BYTES, target.sizeBytes - offset);
    run.stop.signal.throwIfAborted();
    counters[`${run.priority}Reads`]++;
    const bytes = await this.#options.source.readRange(target.digest, offset, length, {
      signal: run.stop.signal,
      priority: run.priority,
      // Of a run that nobody waits for, two chunks at a time are hashed in less processor time.
      hashed: run.priority === 'interactive',
    });
    counters[`${run.priority}Bytes`] += bytes.length;
    // A source that gives less breaks its promise; what is missing is wrong, as a digest will say.
    return bytes.length > length ? bytes.subarray(0, length) : bytes;
  }

  #deliver(ticket: Ticket, chunk: Buffer): void {
    this.#end(ticket);
    ticket.target.arrived(ticket.index, chunk, ticket.priority);
    if (ticket.target.tickets.get(ticket.index) === ticket) ticket.target.tickets.delete(ticket.index);
    ticket.resolve(chunk);
  }

  #end(ticket: Ticket): void {
    ticket.over = true;
    clearTimeout(ticket.patience);
  }

  #settle(ticket: Ticket, error: unknown): void {
    if (ticket.over) return;
    this.#end(ticket);
    if (ticket.target.tickets.get(ticket.index) === ticket) ticket.target.tickets.delete(ticket.index);
    // Those that were delivered have been resolved already.
    ticket.reject(error);
  }
}

async function unlessAborted<T>(promise: Promise<T>, signal: StopSignal): Promise<T> {
  let onAbort!: () => void;
  const aborted = new Promise<never>((_, reject) => {
    onAbort = () => reject(signal.reason);
    signal.addEventListener('abort', onAbort, { once: true });
  });
  try {
    return await Promise.race([promise, aborted]);
  } finally {
    signal.removeEventListener('abort', onAbort);
  }
}
