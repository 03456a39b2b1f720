/**
 * The graphics processors of this node, for the containers of its pools. A container has its card or instance from its start to its end: the nodes of
 * that one are all that its tasks can open, so what separates two of them is the kernel and not a variable that a task may change. One that
 * waits for tasks while calls of another pool wait for a card makes room.
 */
import type { DeviceNode } from '../../backend/device-rules.ts';
import { fail } from '../../errors.ts';
import { driverLibraries, type GpuLibrary, gpuDevices } from './gpu-devices.ts';
import { type GpuHolder, type GpuLease, type GpuRequest, GpuScheduler } from './gpu-scheduler.ts';
import { type Gpu, listGpus } from './nvidia-smi.ts';

/** What of this machine is asked; tests put something else in its place. */
export interface GpuSource {
  list(): Promise<readonly Gpu[]>;
  devices(gpu: Gpu): readonly DeviceNode[];
  libraries(): readonly GpuLibrary[];
}

export const MACHINE_GPUS: GpuSource = {
  list: () => listGpus(),
  devices: (gpu) => gpuDevices(gpu),
  libraries: () => driverLibraries(),
};

export interface HeldGpu extends GpuLease {
  readonly devices: readonly DeviceNode[];
  readonly libraries: readonly GpuLibrary[];
}

/** nvidia-smi takes up to seconds: it is asked for a container only when that long has passed. */
const LIST_MS = 30_000;

export class NodeGpus {
  private readonly source: GpuSource;
  private readonly scheduler = new GpuScheduler({ gpus: [] });
  private listedAt = Number.NEGATIVE_INFINITY;
  private listing: Promise<void> | undefined;
  /** Asks whoever has containers that nobody uses to give up those whose card is wanted. */
  spare: () => void = () => {};

  constructor(source: GpuSource = MACHINE_GPUS) {
    this.source = source;
  }

  get state(): GpuScheduler['state'] {
    return this.scheduler.state;
  }

  /** @throws RUNTIME_GPU, RUNTIME_GPU_NONE */
  async check(request: GpuRequest): Promise<void> {
    await this.list(true);
    this.scheduler.refuseImpossible(request);
  }

  /** @throws RUNTIME_GPU, RUNTIME_GPU_NONE, RUNTIME_FNCALL_BUSY, the signal's reason */
  async take(request: GpuRequest, holder: GpuHolder, signal?: AbortSignal): Promise<HeldGpu> {
    await this.list(false);
    signal?.throwIfAborted();
    const taken = this.scheduler.take(request, signal, holder);
    this.makeRoom();
    const lease = await taken;
    try {
      return { ...lease, devices: this.source.devices(lease.gpu), libraries: this.source.libraries() };
    } catch (error) {
      lease.release();
      throw error;
    }
  }

  /** A call waits, maybe for one of these. */
  makeRoom(): void {
    if (!this.scheduler.isWaitedFor) return;
    this.scheduler.serve();
    this.spare();
  }

  private async list(again: boolean): Promise<void> {
    if (!again && performance.now() - this.listedAt < LIST_MS) return;
    this.listing ??= this.source
      .list()
      .then((gpus) => {
        this.listedAt = performance.now();
        this.scheduler.update(gpus);
      })
      .finally(() => {
        this.listing = undefined;
      });
    await this.listing;
  }
}

/** @throws RUNTIME_FNCALL_POOL_OPTION */
export function checkGpuRequest({ mode, profile, memoryMib }: GpuRequest): void {
  const problem =
    mode !== 'exclusive' && mode !== 'shared'
      ? `${JSON.stringify(mode)}: exclusive or shared`
      : profile !== undefined && !/^[\w.+-]{1,40}$/.test(profile)
        ? `${JSON.stringify(profile)} is no profile of an instance, such as 1g.10gb`
        : memoryMib !== undefined && !(Number.isSafeInteger(memoryMib) && memoryMib > 0)
          ? `${memoryMib} MiB of memory`
          : undefined;
  if (problem !== undefined) throw fail('RUNTIME_FNCALL_POOL_OPTION', { option: 'gpu', problem });
}
