/**
 * Which container of a pool has which graphics processor. `exclusive`: a card or an instance of one belongs to one of them. `shared`: as many
 * as `perGpu` have it together; one that is had exclusively is shared with nobody, and the other way round. Those that wait are served in the
 * order that they came, so that many small ones do not keep out one that wants a card for itself.
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

export interface GpuLease {
  readonly gpu: Gpu;
  /** What programs in it see. */
  readonly env: Readonly<Record<string, string>>;
  release(): void;
}

export interface GpuSchedulerOptions {
  readonly gpus: readonly Gpu[];
  readonly perGpu?: number;
  readonly waiting?: number;
  readonly waitMs?: number;
}

interface Waiting {
  readonly request: GpuRequest;
  give(lease: GpuLease): void;
}

interface Use {
  readonly gpu: Gpu;
  mode: GpuMode | undefined;
  tasks: number;
}

const DEFAULTS = { perGpu: 4, waiting: 256, waitMs: 60_000 };

export class GpuScheduler {
  private readonly options: Required<GpuSchedulerOptions>;
  private uses: Use[];
  /** Not there now, and some task's: one may be away for a moment. */
  private away: Use[] = [];
  private readonly queue: Waiting[] = [];

  constructor(options: GpuSchedulerOptions) {
    this.options = { ...DEFAULTS, ...options };
    this.uses = options.gpus.map((gpu) => ({ gpu, mode: undefined, tasks: 0 }));
  }

  get state(): readonly { readonly gpu: Gpu; readonly mode: GpuMode | undefined; readonly tasks: number }[] {
    return this.uses.map((use) => ({ ...use }));
  }

  /** Cards and instances came or went. What a task has it keeps until its end. */
  update(gpus: readonly Gpu[]): void {
    const known = [...this.away, ...this.uses];
    const before = new Map(known.map((use) => [use.gpu.uuid, use]));
    this.uses = gpus.map((gpu) => before.get(gpu.uuid) ?? { gpu, mode: undefined, tasks: 0 });
    this.away = known.filter((use) => use.tasks > 0 && !this.uses.includes(use));
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
  take(request: GpuRequest, signal?: AbortSignal): Promise<GpuLease> {
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

  private serve(): void {
    for (let next = this.queue[0]; next !== undefined; next = this.queue[0]) {
      const use = this.best(next.request);
      if (use === undefined) return;
      next.give(this.lease(use, next.request.mode));
    }
  }

  /** The smallest that will do; shared ones fill up one before the next is begun. */
  private best({ mode, ...request }: GpuRequest): Use | undefined {
    const { perGpu } = this.options;
    const free = this.uses.filter(
      ({ gpu, mode: held, tasks }) =>
        fits(gpu, { mode, ...request }) && (tasks === 0 || (mode === 'shared' && held === 'shared' && tasks < perGpu)),
    );
    const rank = ({ gpu, tasks }: Use) => [mode === 'shared' && tasks > 0 ? 0 : 1, gpu.memoryMib ?? 0];
    return free.sort((a, b) => rank(a)[0]! - rank(b)[0]! || rank(a)[1]! - rank(b)[1]!)[0];
  }

  private lease(use: Use, mode: GpuMode): GpuLease {
    use.mode = mode;
    use.tasks++;
    let held = true;
    return {
      gpu: use.gpu,
      env: { CUDA_VISIBLE_DEVICES: use.gpu.uuid, NVIDIA_VISIBLE_DEVICES: use.gpu.uuid },
      release: () => {
        if (!held) return;
        held = false;
        use.tasks--;
        if (use.tasks === 0) use.mode = undefined;
        this.serve();
      },
    };
  }
}

function fits({ profile, memoryMib }: Gpu, request: GpuRequest): boolean {
  if (request.profile !== undefined && request.profile !== profile) return false;
  return request.memoryMib === undefined || (memoryMib !== undefined && memoryMib >= request.memoryMib);
}
