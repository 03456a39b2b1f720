/**
 * One pool: containers of one environment, as many as there is demand for between floor and ceiling, and the calls that wait for one.
 *
 * - A call gets a container that is ready, or waits; while calls wait and the ceiling is not reached, more are started, as many as wait.
 * - Calls are served in the order that they came. One that finds the queue full, or waits too long, is refused with how long to stay away.
 * - A container has one task at a time. What is not ready again afterwards (a trace was found, it died, it has done its number) is replaced.
 * - What dies while it is ready, or keeps the next one waiting too long, is given up too.
 * - A pool may share what it has room for with others (`PoolShare`): then it starts one only where there is some.
 * - A container that cannot be started is not tried in a circle: those that wait are told why, unless another one serves them.
 */
import { setTimeout as delay } from 'node:timers/promises';
import { isDsecError, messageOf } from '#base';
import { fail } from '../errors.ts';
import type { GpuHolder } from './gpu/gpu-scheduler.ts';
import { type PoolContainer, startContainer, within } from './pool-container.ts';
import { type ContainerSpec, type PoolSettings, poolSettings } from './pool-spec.ts';

export interface PoolState {
  readonly name: string;
  readonly ready: number;
  readonly busy: number;
  readonly starting: number;
  readonly waiting: number;
  readonly floor: number;
  readonly ceiling: number;
  /** Since the pool was made. */
  readonly tasks: number;
  readonly refused: number;
  /** Containers that were given up, since something was wrong with them. */
  readonly replaced: number;
  /** What went wrong last. */
  readonly problem: string | undefined;
}

/** What pools have together. */
export interface PoolShare {
  /** Whether one more container may be started. */
  hasRoom(): boolean;
  /** One has gone, or can be spared. */
  freed(): void;
}

/** A call that waits for a container. */
interface Waiting {
  readonly since: number;
  readonly timer: NodeJS.Timeout;
  give(container: PoolContainer): void;
  refuse(error: unknown): void;
}

/** To end what a task left, and to make the next one's place. */
const CLEAN_MS = 60_000;
/** After one that could not be started. */
const START_PAUSE_MS = 1000;
/** Started at once, at most: each mounts and makes groups. */
const STARTING_AT_ONCE = 4;

export class Pool {
  readonly name: string;
  readonly spec: ContainerSpec;
  readonly settings: PoolSettings;
  private readonly ready: { readonly container: PoolContainer; readonly since: number }[] = [];
  private readonly busy = new Set<PoolContainer>();
  private readonly queue: Waiting[] = [];
  private readonly ending = new Set<Promise<void>>();
  /** By who waits for a graphics processor for it; the earliest first. */
  private readonly starts = new Map<GpuHolder, Promise<void>>();
  private readonly note: (text: string) => void;
  private readonly sweep: NodeJS.Timeout;
  private readonly cleaning = new Set<PoolContainer>();
  private readonly share: PoolShare | undefined;
  private readonly begin: typeof startContainer;
  private readonly stop = new AbortController();
  private draining = false;
  private pausedUntil = 0;
  private closed = false;
  private problem: string | undefined;
  private tasks = 0;
  private refused = 0;
  private replaced = 0;
  /** Of the last calls, smoothed: how long one keeps its container. */
  private callMs = 100;
  usedAt = Date.now();

  /** `begin` makes its containers, whatever they are. @throws RUNTIME_FNCALL_POOL_OPTION */
  constructor(
    name: string,
    spec: ContainerSpec,
    note: (text: string) => void,
    share?: PoolShare,
    begin: typeof startContainer = startContainer,
  ) {
    this.name = name;
    this.spec = spec;
    this.settings = poolSettings(spec.options);
    this.note = note;
    this.share = share;
    this.begin = begin;
    this.sweep = setInterval(() => this.shrink(), Math.min(this.settings.idleMs, 5_000));
    this.sweep.unref();
    this.grow();
  }

  get state(): PoolState {
    const { name, problem, tasks, refused, replaced } = this;
    return {
      name,
      ready: this.ready.length,
      // Those that are looked through after a task, too.
      busy: this.busy.size + this.cleaning.size,
      starting: this.starts.size,
      waiting: this.queue.length,
      floor: this.settings.floor,
      ceiling: this.settings.ceiling,
      tasks,
      refused,
      replaced,
      problem,
    };
  }

  get isIdle(): boolean {
    return this.busy.size === 0 && this.queue.length === 0 && this.starts.size === 0;
  }

  /** With those that are about to be there, or to go. */
  get containers(): number {
    return this.alive + this.ending.size;
  }

  /** Gives up one that nobody uses. False: there is none. */
  spare(): boolean {
    const one = this.ready.shift();
    if (one !== undefined) this.giveUp(one.container);
    return one !== undefined;
  }

  /** Gives up those that nobody uses and whose graphics processor calls of another pool wait for. */
  yieldGpus(): void {
    for (const one of [...this.ready]) {
      if (!one.container.isGpuWanted) continue;
      this.ready.splice(this.ready.indexOf(one), 1);
      this.giveUp(one.container);
    }
  }

  /** Until the floor is there; for tests and whoever wants to begin warm. */
  async warm(): Promise<void> {
    while (!this.closed && this.ready.length + this.busy.size + this.cleaning.size < this.settings.floor) {
      if (this.starts.size === 0) {
        if (this.problem !== undefined) throw fail('RUNTIME_FNCALL_CONTAINER', { reason: this.problem });
        this.grow();
      }
      await Promise.race([...this.starts.values(), delay(START_PAUSE_MS)]);
    }
  }

  /** Runs `work` with a container that nobody else has. @throws RUNTIME_FNCALL_BUSY, RUNTIME_FNCALL_CONTAINER, what `work` throws */
  async with<T>(work: (container: PoolContainer, queueMs: number) => Promise<T>, signal?: AbortSignal): Promise<T> {
    const calledAt = performance.now();
    this.usedAt = Date.now();
    const container = await this.take(signal);
    const takenAt = performance.now();
    this.tasks++;
    try {
      return await work(container, takenAt - calledAt);
    } finally {
      this.callMs = 0.9 * this.callMs + 0.1 * (performance.now() - takenAt);
      this.busy.delete(container);
      this.usedAt = Date.now();
      this.giveBack(container);
    }
  }

  private async take(signal: AbortSignal | undefined): Promise<PoolContainer> {
    signal?.throwIfAborted();
    if (this.closed) throw fail('RUNTIME_FNCALL_NO_POOL', { pool: this.name });
    // The one that was used last: its pages are warm, and the others may go when there is little to do.
    const found = this.ready.pop();
    if (found !== undefined) {
      // At once: who calls in the same moment must not count it as room.
      this.busy.add(found.container);
      found.container.setInUse(true);
      return found.container;
    }
    const { queue, queueMs } = this.settings;
    // Those that a start is under way for are no queue yet.
    if (this.queue.length >= queue + this.room()) {
      throw this.busyError(`${this.queue.length} calls wait already`);
    }
    return new Promise((resolve, reject) => {
      const leave = () => {
        clearTimeout(waiting.timer);
        signal?.removeEventListener('abort', aborted);
        const at = this.queue.indexOf(waiting);
        if (at >= 0) this.queue.splice(at, 1);
      };
      const aborted = () => waiting.refuse(signal?.reason);
      const waiting: Waiting = {
        since: performance.now(),
        timer: setTimeout(() => waiting.refuse(this.busyError(`no container was free for ${queueMs} ms`)), queueMs),
        give: (container) => {
          leave();
          this.busy.add(container);
          resolve(container);
        },
        refuse(error) {
          leave();
          reject(error);
        },
      };
      signal?.addEventListener('abort', aborted, { once: true });
      this.queue.push(waiting);
      if (signal?.aborted === true) return aborted();
      this.grow();
      // A start may wait for a graphics processor that another pool has for nothing.
      this.spec.gpus?.makeRoom();
    });
  }

  private busyError(reason: string) {
    this.refused++;
    const ahead = (this.queue.length + 1) * (this.callMs / 1000 / this.settings.ceiling);
    return fail('RUNTIME_FNCALL_BUSY', {
      pool: this.name,
      reason,
      retryAfter: Math.min(60, Math.max(1, Math.ceil(ahead))),
    });
  }

  private get alive(): number {
    return this.ready.length + this.busy.size + this.cleaning.size + this.starts.size;
  }

  /** How many more there may be, with those that are starting. */
  private room(): number {
    return Math.max(0, this.settings.ceiling - this.ready.length - this.busy.size - this.cleaning.size);
  }

  private giveBack(container: PoolContainer): void {
    if (this.closed || container.tasks >= this.settings.tasks) {
      this.giveUp(container);
      return;
    }
    this.cleaning.add(container);
    within(container.ready(), CLEAN_MS, `it was not ready ${CLEAN_MS / 1000} s after a task`).then(
      () => {
        this.cleaning.delete(container);
        if (this.closed) this.giveUp(container);
        else this.offer(container);
      },
      (error: unknown) => {
        this.cleaning.delete(container);
        if (this.closed) return this.giveUp(container);
        this.replaced++;
        this.note(`pool ${this.name}: ${container.name} is replaced: ${messageOf(error)}`);
        this.giveUp(container);
      },
    );
  }

  private offer(container: PoolContainer): void {
    if (container.isLost) {
      this.giveUp(container);
      return;
    }
    container.onLost = () => this.lostReady(container);
    const isAwaited = this.queue.length > 0;
    container.setInUse(isAwaited);
    // What was started for calls first serves one: pools that take a card from each other at each start would serve none.
    const isFirst = isAwaited && container.tasks === 0;
    if (!isFirst && container.isGpuWanted) {
      this.giveUp(container);
      return;
    }
    const next = this.queue.shift();
    if (next !== undefined) next.give(container);
    else if (this.draining) this.giveUp(container);
    else {
      this.ready.push({ container, since: Date.now() });
      // Another pool may have waited for its place.
      this.share?.freed();
    }
  }

  /** While somebody has it, that one tells. */
  private lostReady(container: PoolContainer): void {
    const at = this.ready.findIndex((one) => one.container === container);
    if (at < 0) return;
    this.ready.splice(at, 1);
    this.replaced++;
    this.note(`pool ${this.name}: ${container.name} is replaced: it ended while it waited`);
    this.giveUp(container);
  }

  private giveUp(container: PoolContainer): void {
    const end = container
      .close()
      .catch((error: unknown) => this.note(`pool ${this.name}: ${container.name}: ${messageOf(error)}`))
      .finally(() => {
        this.ending.delete(end);
        this.grow();
        this.share?.freed();
      });
    this.ending.add(end);
  }

  /** Starts what is wanted and allowed. */
  grow(): void {
    const { ceiling } = this.settings;
    const floor = this.draining ? 0 : this.settings.floor;
    if (this.closed) return;
    if (Date.now() < this.pausedUntil) return;
    const wanted = Math.min(
      ceiling,
      Math.max(floor, this.alive - this.starts.size - this.ready.length + this.queue.length),
    );
    while (this.alive < wanted && this.containers < ceiling && this.starts.size < STARTING_AT_ONCE) {
      if (this.share?.hasRoom() === false) return;
      this.start();
    }
  }

  private start(): void {
    // As many as calls wait are for them, the others ahead of calls.
    const isUrgent = () => [...this.starts.keys()].indexOf(holder) < this.queue.length;
    const holder: GpuHolder = { owner: this, isUrgent };
    // Not before it is among the starts.
    const start = Promise.resolve()
      .then(() => this.begin(this.spec, holder, this.stop.signal))
      .then(
        (container) => {
          this.problem = undefined;
          if (this.closed) this.giveUp(container);
          else this.offer(container);
        },
        (error: unknown) => this.couldNotStart(error),
      )
      .finally(() => {
        this.starts.delete(holder);
        this.grow();
        // What was started ahead of calls may be for one now.
        this.spec.gpus?.makeRoom();
        this.share?.freed();
      });
    this.starts.set(holder, start);
  }

  private couldNotStart(error: unknown): void {
    if (this.closed) return;
    this.problem = messageOf(error);
    this.note(`pool ${this.name}: ${this.problem}`);
    this.pausedUntil = Date.now() + START_PAUSE_MS;
    setTimeout(() => this.grow(), START_PAUSE_MS + 1).unref();
    if (this.alive > 1) return;
    // Nobody else will serve them.
    const told = isDsecError(error) ? error : fail('RUNTIME_FNCALL_CONTAINER', { reason: this.problem }, error);
    for (const one of [...this.queue]) one.refuse(told);
  }

  private shrink(): void {
    const before = Date.now() - this.settings.idleMs;
    // The longest unused is the first.
    while (this.ready[0] !== undefined && this.ready[0].since <= before && this.alive > this.settings.floor) {
      this.giveUp(this.ready.shift()!.container);
    }
  }

  /** What runs and waits is waited for, up to `drainMs`; then those that wait are refused, and what runs ends. */
  async close(drainMs = 0): Promise<void> {
    const deadline = Date.now() + drainMs;
    if (drainMs > 0) {
      this.draining = true;
      while (this.spare());
      while (!this.closed && !this.isIdle && Date.now() < deadline) await delay(20);
    }
    this.closed = true;
    this.stop.abort(fail('RUNTIME_FNCALL_NO_POOL', { pool: this.name }));
    clearInterval(this.sweep);
    for (const one of [...this.queue]) one.refuse(fail('RUNTIME_FNCALL_NO_POOL', { pool: this.name }));
    for (const { container } of this.ready.splice(0)) this.giveUp(container);
    for (const container of [...this.busy, ...this.cleaning]) this.giveUp(container);
    await Promise.all(this.starts.values());
    while (this.ending.size > 0 || this.cleaning.size > 0) await Promise.race([...this.ending, delay(20)]);
  }
}
