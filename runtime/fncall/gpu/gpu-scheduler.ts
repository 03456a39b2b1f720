/**
 * Which container of a pool has which graphics processor. `exclusive`: a card or an instance of one belongs to one of them. `shared`: as many
 * as `perGpu` have it together; one that is had exclusively is shared with nobody, and the other way round.
 *
 * - Who waits is looked at in this order: those that calls wait for before those that are made ahead of calls; whose pool has the fewest; who came first.
 * - For each one is meant, of those that it could have: a free one, or the one that will be free soonest as far as can be told. Who comes later may have any
 *   other one. So many small ones do not keep out one that wants a card for itself, and that one keeps nobody from what it cannot use itself.
 * - Whoever holds one asks whether it is wanted (`GpuLease.isWanted`). One that is not in use is when a call of another pool waits for it. One
 *   in use is at the end of its turn, when the other pool has none, or is at least two behind: one pool's calls without end do not keep out another's.
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
  /** Whether it does something for a call; at first it does. */
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
  /** So long one that is in use is not wanted. */
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
  readonly since: number;
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
  readonly isFree: boolean;
}

const DEFAULTS = { perGpu: 4, waiting: 256, waitMs: 60_000, turnMs: 5_000, now: () => performance.now() };

export class GpuScheduler {
  private readonly options: Required<GpuSchedulerOptions>;
  private uses: Use[];
  /** Not there now, and some task's: one may be away for a moment. */
  private away: Use[] = [];
  private readonly queue: Waiting[] = [];

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

  /** Whoever waits and can have one now gets it: also when only what is urgent has changed. */
  serve(): void {
    for (;;) {
      const next = this.plan().find(({ isFree }) => isFree);
      if (next === undefined) return;
      next.waiting.give(this.lease(next.use, next.waiting));
    }
  }

  /** Of those that wait, in their order. Who is missing has to wait for what is meant for others. */
  private plan(): Meant[] {
    const plan: Meant[] = [];
    for (const waiting of this.inOrder()) {
      const { request } = waiting;
      const possible = this.uses.flatMap((use): Meant[] => {
        const others = plan.filter((one) => one.use === use);
        const together = [waiting, ...others.map((one) => one.waiting)].every((one) => one.request.mode === 'shared');
        const hasRoom = others.length === 0 || (together && others.length < this.options.perGpu);
        if (!hasRoom || !fits(use.gpu, request)) return [];
        return [{ waiting, use, isFree: others.length === 0 && this.isFree(use, request.mode) }];
      });
      const best = possible.sort((a, b) => compare(rankOf(a), rankOf(b)))[0];
      if (best !== undefined) plan.push(best);
    }
    return plan;
  }

  private inOrder(): Waiting[] {
    const ranked = this.queue.map((waiting) => ({
      waiting,
      rank: [waiting.isUrgent() ? 0 : 1, this.heldBy(waiting.owner)],
    }));
    return ranked.sort((a, b) => compare(a.rank, b.rank)).map(({ waiting }) => waiting);
  }

  private heldBy(owner: object): number {
    const held = [...this.uses, ...this.away].map(({ holdings }) => [...holdings].filter((one) => one.owner === owner));
    return held.flat().length;
  }

  private isFree({ mode: held, holdings }: Use, mode: GpuMode): boolean {
    if (holdings.size === 0) return true;
    return mode === 'shared' && held === 'shared' && holdings.size < this.options.perGpu;
  }

  private lease(use: Use, { owner, request }: Waiting): GpuLease {
    const holding: Holding = { owner, since: this.options.now(), inUse: true, leaving: false };
    use.mode = request.mode;
    use.holdings.add(holding);
    return {
      gpu: use.gpu,
      env: { CUDA_VISIBLE_DEVICES: use.gpu.uuid, NVIDIA_VISIBLE_DEVICES: use.gpu.uuid },
      setInUse: (inUse) => {
        holding.inUse = inUse;
      },
      isWanted: () => this.isWanted(use, holding),
      leave: () => {
        holding.leaving = true;
      },
      release: () => {
        if (!use.holdings.delete(holding)) return;
        if (use.holdings.size === 0) use.mode = undefined;
        this.serve();
      },
    };
  }

  private isWanted(use: Use, holding: Holding): boolean {
    if (holding.leaving) return false;
    const meant = this.plan().filter((one) => one.use === use && !one.isFree);
    const others = meant.map(({ waiting }) => waiting).filter((one) => one.owner !== holding.owner && one.isUrgent());
    const alone = use.mode === 'exclusive' || others.some(({ request }) => request.mode === 'exclusive');
    const leaving = [...use.holdings].filter((one) => one.leaving).length;
    // One place for each that shares it, all of them for one that has it alone.
    if (others.length === 0 || (!alone && leaving >= others.length)) return false;
    if (!holding.inUse) return true;
    const own = this.heldBy(holding.owner);
    const isBehind = others.some(({ owner }) => this.heldBy(owner) === 0 || this.heldBy(owner) + 2 <= own);
    return isBehind && this.options.now() - holding.since >= this.options.turnMs;
  }
}

function unused(gpu: Gpu): Use {
  return { gpu, mode: undefined, holdings: new Set() };
}

/**
 * The lowest first. Of free ones: one that is shared already, so that they fill up one before the next is begun, then the smallest that will do. Of others: the
 * one with the fewest holders that use it, then that stay at all, not of the own pool, then the smallest.
 */
function rankOf({ waiting, use, isFree }: Meant): number[] {
  const holdings = [...use.holdings];
  const staying = holdings.filter(({ leaving }) => !leaving);
  const using = staying.filter(({ inUse }) => inUse).length;
  const own = staying.filter(({ owner }) => owner === waiting.owner).length;
  const memory = use.gpu.memoryMib ?? 0;
  return isFree ? [0, holdings.length > 0 ? 0 : 1, memory] : [1, using, staying.length, own, memory];
}

function compare(a: readonly number[], b: readonly number[]): number {
  return a.map((value, i) => value - b[i]!).find((difference) => difference !== 0) ?? 0;
}

function fits({ profile, memoryMib }: Gpu, request: GpuRequest): boolean {
  if (request.profile !== undefined && request.profile !== profile) return false;
  return request.memoryMib === undefined || (memoryMib !== undefined && memoryMib >= request.memoryMib);
}
