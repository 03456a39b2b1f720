/**
 * Which container of a pool has which graphics processor. `exclusive`: a card or an instance of one belongs to one of them. `shared`: as many
 * as `perGpu` have it together; one that is had exclusively is shared with nobody, and the other way round.
 *
 * - Who waits is looked at in this order: those that calls wait for before those that are made ahead of calls; whose pool has the fewest; who came first.
 * - For each one is meant, of those that it could have: a free one, one that is being left, or the one that will be free soonest as far as can be told. Who
 *   comes later may have any other one. So many small ones do not keep out one that wants a card for itself, and that one keeps nobody from what it cannot use itself.
 * - Whoever holds one asks whether it is wanted (`GpuLease.isWanted`). One that is not in use is when it is meant for a call of another pool. One in use is at the
 *   end of its turn, which begins with its first call, when it would do for a call of a pool that has none, or at least two fewer, and that nothing is being left
 *   for: so one pool's calls without end do not keep out another's, nor does one that is long where others are short.
 */
import { fail } from '../../errors.ts';
import type { Gpu } from './nvidia-smi.ts';

export type GpuMode = 'exclusive' | 'shared';

export interface GpuRequest {
  readonly mode: GpuMode;
  /** Only an instance of that profile. */
  readonly profile?: string;
  readonly memoryMib?: number;
}

/** Who asks. */
export interface GpuHolder {
  /** Containers of one pool have one. */
  readonly owner: object;
  /** Whether a call waits for it now. */
  isUrgent(): boolean;
}

export interface GpuLease {
  readonly gpu: Gpu;
  /** What programs in it see. */
  readonly env: Readonly<Record<string, string>>;
  /** Whether it does something for a call. At first it is in use, for a start; its turn begins when this says so. */
  setInUse(inUse: boolean): void;
  /** Whether it should be given back, for another pool. Not again once `leave` was called. */
  isWanted(): boolean;
  /** It is about to be given back. */
  leave(): void;
  release(): void;
}

export interface GpuSchedulerOptions {
  readonly gpus: readonly Gpu[];
  readonly perGpu?: number;
  readonly waiting?: number;
  readonly waitMs?: number;
  /** So long one that is in use is not wanted, from its first call on. */
  readonly turnMs?: number;
  /** Milliseconds, from anywhere. */
  readonly now?: () => number;
}

interface Waiting extends GpuHolder {
  readonly request: GpuRequest;
  give(lease: GpuLease): void;
}

interface Holding {
  readonly owner: object;
  /** Of its first call. */
  since: number | undefined;
  inUse: boolean;
  leaving: boolean;
}

interface Use {
  readonly gpu: Gpu;
  mode: GpuMode | undefined;
  readonly holdings: Set<Holding>;
}

/** Which one somebody who waits is to have. */
interface Meant {
  readonly waiting: Waiting;
  readonly use: Use;
  /** Whether there is a place, or will be by what is being left already, or has to be made. */
  readonly place: 'free' | 'left' | 'held';
}

const DEFAULTS = { perGpu: 4, waiting: 256, waitMs: 60_000, turnMs: 5_000, now: () => performance.now() };

export class GpuScheduler {
  private readonly options: Required<GpuSchedulerOptions>;
  private uses: Use[];
  /** Not there now, and some task's: one may be away for a moment. */
  private away: Use[] = [];
  private readonly queue: Waiting[] = [];
  /** Until something of what it was made from changes. */
  private planned: readonly Meant[] | undefined;

  constructor(options: GpuSchedulerOptions) {
    this.options = { ...DEFAULTS, ...options };
    this.uses = options.gpus.map(unused);
  }

  get state(): readonly { readonly gpu: Gpu; readonly mode: GpuMode | undefined; readonly tasks: number }[] {
    return this.uses.map(({ gpu, mode, holdings }) => ({ gpu, mode, tasks: holdings.size }));
  }

  /** Cards and instances came or went. What a task has it keeps until its end. */
  update(gpus: readonly Gpu[]): void {
    const known = [...this.away, ...this.uses];
    const before = new Map(known.map((use) => [use.gpu.uuid, use]));
    this.uses = gpus.map((gpu) => before.get(gpu.uuid) ?? unused(gpu));
    this.away = known.filter((use) => use.holdings.size > 0 && !this.uses.includes(use));
    this.serve();
  }

  get isWaitedFor(): boolean {
    return this.queue.length > 0;
  }

  /** What there is not will not be there for who waits. @throws RUNTIME_GPU_NONE */
  refuseImpossible(request: GpuRequest): void {
    if (this.uses.some(({ gpu }) => fits(gpu, request))) return;
    const { profile, memoryMib } = request;
    const size = memoryMib === undefined ? '' : ` with ${memoryMib} MiB`;
    throw fail('RUNTIME_GPU_NONE', {
      wanted:
        profile === undefined ? `graphics processor${size}` : `instance ${profile} of a graphics processor${size}`,
    });
  }

  /** @throws RUNTIME_GPU_NONE, RUNTIME_FNCALL_BUSY, the signal's reason */
  take(
    request: GpuRequest,
    signal?: AbortSignal,
    { owner, isUrgent }: GpuHolder = { owner: {}, isUrgent: () => true },
  ): Promise<GpuLease> {
    try {
      this.refuseImpossible(request);
    } catch (error) {
      return Promise.reject(error);
    }
    const { waiting, waitMs } = this.options;
    const busy = (reason: string) => fail('RUNTIME_FNCALL_BUSY', { pool: 'gpu', reason, retryAfter: 5 });
    if (this.queue.length >= waiting) return Promise.reject(busy(`${this.queue.length} tasks wait for a GPU already`));
    return new Promise((resolve, reject) => {
      const leave = () => {
        clearTimeout(timer);
        signal?.removeEventListener('abort', aborted);
        const at = this.queue.indexOf(one);
        if (at >= 0) this.queue.splice(at, 1);
        this.planned = undefined;
      };
      const refuse = (error: unknown) => {
        leave();
        reject(error);
        // What stood behind it may fit.
        this.serve();
      };
      const aborted = () => refuse(signal?.reason);
      const timer = setTimeout(() => refuse(busy(`no GPU was free for ${waitMs} ms`)), waitMs);
      const one: Waiting = {
        request,
        owner,
        isUrgent,
        give(lease) {
          leave();
          resolve(lease);
        },
      };
      signal?.addEventListener('abort', aborted, { once: true });
      this.queue.push(one);
      if (signal?.aborted === true) aborted();
      else this.serve();
    });
  }

  /** Whoever waits and can have one now gets it. To be called too when somebody who waits has become urgent. */
  serve(): void {
    this.planned = undefined;
    for (;;) {
      const next = this.plan().find(({ place }) => place === 'free');
      if (next === undefined) return;
      next.waiting.give(this.lease(next.use, next.waiting));
    }
  }

  private plan(): readonly Meant[] {
    this.planned ??= this.makePlan();
    return this.planned;
  }

  /** Of those that wait, in their order. Who is missing has to wait for what is meant for others. */
  private makePlan(): Meant[] {
    const plan: Meant[] = [];
    const { perGpu } = this.options;
    const open = new Map(this.uses.map((use) => [use, [] as Waiting[]]));
    for (const waiting of this.inOrder()) {
      if (open.size === 0) break;
      const { request } = waiting;
      const possible = [...open].flatMap(([use, others]): Meant[] => {
        const together = others.length === 0 || request.mode === 'shared';
        return together && fits(use.gpu, request)
          ? [{ waiting, use, place: placeIn(use, others, request, perGpu) }]
          : [];
      });
      const best = possible.sort((a, b) => compare(rankOf(a), rankOf(b)))[0];
      if (best === undefined) continue;
      plan.push(best);
      const all = open.get(best.use)!;
      all.push(waiting);
      // What one has alone, or as many share as may, is for nobody else.
      if (request.mode === 'exclusive' || all.length >= perGpu) open.delete(best.use);
    }
    return plan;
  }

  private inOrder(): Waiting[] {
    const held = countOf(this.holdings.map(({ owner }) => owner));
    const ranked = this.queue.map((waiting) => ({
      waiting,
      rank: [waiting.isUrgent() ? 0 : 1, held(waiting.owner)],
    }));
    return ranked.sort((a, b) => compare(a.rank, b.rank)).map(({ waiting }) => waiting);
  }

  private get holdings(): Holding[] {
    return [...this.uses, ...this.away].flatMap(({ holdings }) => [...holdings]);
  }

  private lease(use: Use, { owner, request }: Waiting): GpuLease {
    const holding: Holding = { owner, since: undefined, inUse: true, leaving: false };
    use.mode = request.mode;
    use.holdings.add(holding);
    this.planned = undefined;
    return {
      gpu: use.gpu,
      env: { CUDA_VISIBLE_DEVICES: use.gpu.uuid, NVIDIA_VISIBLE_DEVICES: use.gpu.uuid },
      setInUse: (inUse) => {
        if (inUse) holding.since ??= this.options.now();
        if (inUse !== holding.inUse) this.planned = undefined;
        holding.inUse = inUse;
      },
      isWanted: () => this.isWanted(use, holding),
      leave: () => {
        holding.leaving = true;
        this.planned = undefined;
      },
      release: () => {
        if (!use.holdings.delete(holding)) return;
        if (use.holdings.size === 0) use.mode = undefined;
        this.serve();
      },
    };
  }

  private isWanted(use: Use, holding: Holding): boolean {
    const { owner, since, inUse, leaving } = holding;
    if (leaving) return false;
    const isTurn = since === undefined || this.options.now() - since < this.options.turnMs;
    if (inUse && isTurn) return false;
    const plan = this.plan();
    // What asks is a call of another pool that nothing is being left for.
    const coming = new Set(plan.filter(({ place }) => place !== 'held').map(({ waiting }) => waiting));
    const asks = (one: Waiting) => one.owner !== owner && !coming.has(one) && one.isUrgent();
    const meant = plan.filter((one) => one.use === use).map(({ waiting }) => waiting);
    if (!inUse) return meant.some(asks);
    // As it will be when what is being left has gone to whom it is meant for.
    const staying = this.holdings.filter((one) => !one.leaving);
    const held = countOf([...staying, ...coming].map((one) => one.owner));
    const isBehind = (other: object) => held(other) === 0 || held(other) + 2 <= held(owner);
    const isLast = [...use.holdings].every((one) => one === holding || one.leaving);
    return this.queue.some((one) => {
      const hasPlace = isLast || (use.mode === 'shared' && one.request.mode === 'shared');
      const isOfUse = meant.includes(one) || (hasPlace && fits(use.gpu, one.request));
      return isOfUse && isBehind(one.owner) && asks(one);
    });
  }
}

function unused(gpu: Gpu): Use {
  return { gpu, mode: undefined, holdings: new Set() };
}

/** How often one is among them. */
function countOf(owners: readonly object[]): (owner: object) => number {
  const counts = new Map<object, number>();
  for (const owner of owners) counts.set(owner, (counts.get(owner) ?? 0) + 1);
  return (owner) => counts.get(owner) ?? 0;
}

/** For one more beside those that it is meant for already. */
function placeIn(use: Use, others: readonly Waiting[], { mode }: GpuRequest, perGpu: number): Meant['place'] {
  const { size } = use.holdings;
  const staying = [...use.holdings].filter(({ leaving }) => !leaving).length;
  const isShared = mode === 'shared' && use.mode === 'shared';
  if (others.length === 0 && (size === 0 || (isShared && size < perGpu))) return 'free';
  return staying === 0 || (isShared && staying + others.length < perGpu) ? 'left' : 'held';
}

/**
 * The lowest first. Of free ones: one that is shared already, so that they fill up one before the next is begun, then the smallest that will do. Of others:
 * what is being left, then the one with the fewest holders that use it, then that stay at all, not of the own pool, then the smallest.
 */
function rankOf({ waiting, use, place }: Meant): number[] {
  const holdings = [...use.holdings];
  const memory = use.gpu.memoryMib ?? 0;
  if (place === 'free') return [0, holdings.length > 0 ? 0 : 1, memory];
  const staying = holdings.filter(({ leaving }) => !leaving);
  const using = staying.filter(({ inUse }) => inUse).length;
  const own = staying.filter(({ owner }) => owner === waiting.owner).length;
  return [place === 'left' ? 1 : 2, using, staying.length, own, memory];
}

function compare(a: readonly number[], b: readonly number[]): number {
  return a.map((value, i) => value - b[i]!).find((difference) => difference !== 0) ?? 0;
}

function fits({ profile, memoryMib }: Gpu, request: GpuRequest): boolean {
  if (request.profile !== undefined && request.profile !== profile) return false;
  return request.memoryMib === undefined || (memoryMib !== undefined && memoryMib >= request.memoryMib);
}
