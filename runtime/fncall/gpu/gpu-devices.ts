/**
 * What a container needs to use a graphics processor of this machine: the nodes of its driver, and the driver's own libraries, which belong to the
 * kernel's part of it and therefore cannot come from an image. Which node is whose is said in /proc/driver/nvidia: by the card's minor number,
 * which is not its index; an instance (MIG) has two nodes besides, one for its share of the card and one for its share of the processors.
 */
import { execFileSync } from 'node:child_process';
import { existsSync, readdirSync, readFileSync, realpathSync, statSync } from 'node:fs';
import { basename, join } from 'node:path';
import { splitDevice } from '#linux';
import type { DeviceNode } from '../../backend/device-rules.ts';
import { fail } from '../../errors.ts';
import type { Gpu } from './nvidia-smi.ts';

export interface GpuPlaces {
  readonly proc?: string;
  readonly dev?: string;
}

/** @throws RUNTIME_GPU */
export function gpuDevices(gpu: Gpu, { proc = '/proc/driver/nvidia', dev = '/dev' }: GpuPlaces = {}): DeviceNode[] {
  const minor = cardMinor(gpu, proc);
  const wanted = [`${dev}/nvidiactl`, `${dev}/nvidia-uvm`, `${dev}/nvidia${minor}`];
  if (gpu.instance !== undefined) {
    const { gpuInstance, computeInstance } = gpu.instance;
    const mig = join(proc, 'capabilities', `gpu${minor}`, 'mig', `gi${gpuInstance}`);
    for (const file of [join(mig, 'access'), join(mig, `ci${computeInstance}`, 'access')]) {
      wanted.push(`${dev}/nvidia-caps/nvidia-cap${capability(file)}`);
    }
  } else if (gpu.profile !== undefined) {
    throw fail('RUNTIME_GPU', { reason: `${gpu.uuid}: nvidia-smi -q -x does not say which instance it is` });
  }
  const tools = `${dev}/nvidia-uvm-tools`;
  return [...wanted, ...(existsSync(tools) ? [tools] : [])].map(deviceNode);
}

/** N of its node, /dev/nvidiaN. */
export function cardMinor({ uuid, cardUuid = uuid, index }: Gpu, proc = '/proc/driver/nvidia'): number {
  const folder = join(proc, 'gpus');
  for (const name of existsSync(folder) ? readdirSync(folder) : []) {
    const text = readFileSync(join(folder, name, 'information'), 'utf8');
    const minor = /^Device Minor:\s*(\d+)/m.exec(text)?.[1];
    if (minor !== undefined && text.includes(cardUuid)) return Number(minor);
  }
  return index;
}

function capability(file: string): number {
  try {
    const number = /^DeviceFileMinor:\s*(\d+)/m.exec(readFileSync(file, 'utf8'))?.[1];
    if (number !== undefined) return Number(number);
  } catch (error) {
    throw fail('RUNTIME_GPU', { reason: `${file} cannot be read` }, error);
  }
  throw fail('RUNTIME_GPU', { reason: `${file} names no device` });
}

function deviceNode(path: string): DeviceNode {
  try {
    const { rdev, mode } = statSync(path);
    return { path, ...splitDevice(rdev), mode: mode & 0o777 };
  } catch (error) {
    throw fail('RUNTIME_GPU', { reason: `${path} is missing: the driver is not loaded whole` }, error);
  }
}

export interface GpuLibrary {
  readonly source: string;
  /** In the container. */
  readonly target: string;
}

/** Where images made for these cards look already. */
export const GPU_LIBRARIES = '/usr/local/nvidia/lib64';

const OF_DRIVER =
  /^\s*(lib(?:cuda|cudadebugger|nvidia-[\w-]+)\.so[\w.]*) \(libc6,(?:x86-64|AArch64)[^)]*\) => (\/\S+)$/gm;

/** By the dynamic linker's own list of this machine. */
export function driverLibraries(list = linkerList()): GpuLibrary[] {
  const found = new Map<string, GpuLibrary>();
  for (const [, name, path] of list.matchAll(OF_DRIVER)) {
    const target = join(GPU_LIBRARIES, basename(name!));
    if (!found.has(target) && existsSync(path!)) found.set(target, { source: realpathSync(path!), target });
  }
  return [...found.values()];
}

function linkerList(): string {
  for (const program of ['/sbin/ldconfig', 'ldconfig']) {
    try {
      return execFileSync(program, ['-p'], { encoding: 'utf8', stdio: ['ignore', 'pipe', 'ignore'] });
    } catch {
      // The next one; without a list there are none, and an image may have its own.
    }
  }
  return '';
}
