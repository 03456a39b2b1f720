/** What an edge is willing to promise: what the machine has, times how far it may be promised more than once, unless its owner says otherwise. */
import { readFileSync, statfsSync } from 'node:fs';
import { availableParallelism, totalmem } from 'node:os';
import { messageOf } from '#base';
import { parseSize } from '../cli/size.ts';
import { fail } from '../errors.ts';
import type { AdmissionLimits } from './admission.ts';
import { BackendsHere } from './backends-here.ts';

/** Sandboxes idle most of the time: their processor time is promised so many times over. Memory and disk are not. */
export const CPU_OVERCOMMIT = 8;
const DEFAULT_SANDBOXES = 2000;
const RESERVE = 0.05;

export interface CapacityOptions {
  /** `cpus=16,memory=64GiB,disk=500GiB,gpus=0,sandboxes=1000`, each of them optional. */
  readonly capacity?: string;
  /** `memory=0.1,disk=0.1`: shares that stay free. */
  readonly reserve?: string;
  /** `cpu=1,memory=0.5,io=0.95`: shares of the last ten seconds in which something waited; 1: never refuse for it. */
  readonly pressure?: string;
  readonly stateDir: string;
  /** Graphics processors that are there. */
  readonly cards?: number;
}

/** @throws EDGE_CAPACITY, CLI_SIZE */
export function admissionLimits({
  capacity = '',
  reserve = '',
  pressure = '',
  stateDir,
  cards = 0,
}: CapacityOptions): AdmissionLimits {
  const given = pairs('--capacity', capacity, ['cpus', 'memory', 'disk', 'gpus', 'sandboxes']);
  const kept = pairs('--reserve', reserve, ['memory', 'disk']);
  const waits = pairs('--pressure', pressure, ['cpu', 'memory', 'io']);
  const number = (name: string, text: string | undefined, most: number, otherwise: number) => {
    if (text === undefined) return otherwise;
    const value = /^\d+(?:\.\d+)?$/.test(text) ? Number(text) : Number.NaN;
    if (!(value <= most)) throw fail('EDGE_CAPACITY', { text: `${name}=${text}`, problem: `a number up to ${most}` });
    return value;
  };
  const size = (name: string, otherwise: () => number) => {
    const text = given.get(name);
    return text === undefined ? otherwise() : parseSize(`--capacity ${name}`, text);
  };
  const share = (from: Map<string, string>, name: string, otherwise: number) =>
    number(name, from.get(name), 1, otherwise);
  const sandboxes = Math.floor(number('sandboxes', given.get('sandboxes'), 1e6, DEFAULT_SANDBOXES));
  const backends = new BackendsHere({ stateDir, sandboxes });
  return {
    capacity: {
      cpuMilli: Math.round(1000 * number('cpus', given.get('cpus'), 1e6, availableParallelism() * CPU_OVERCOMMIT)),
      memoryBytes: size('memory', () => machineMemory()),
      diskBytes: size('disk', () => diskOf(stateDir)),
      gpus: Math.floor(number('gpus', given.get('gpus'), cards, cards)),
    },
    get sandboxes() {
      return backends.limits;
    },
    memoryReserve: share(kept, 'memory', RESERVE),
    diskReserve: share(kept, 'disk', RESERVE),
    // Busy processors make sandboxes slow; waiting for memory means that soon they are ended.
    mostWaiting: { cpu: share(waits, 'cpu', 1), memory: share(waits, 'memory', 0.5), io: share(waits, 'io', 0.95) },
  };
}

function pairs(option: string, text: string, known: readonly string[]): Map<string, string> {
  const found = new Map<string, string>();
  for (const pair of text.split(',').filter((part) => part.trim() !== '')) {
    const [name = '', value = ''] = pair.trim().split('=');
    if (!known.includes(name) || value === '') {
      throw fail('EDGE_CAPACITY', { text: `${pair} (${option})`, problem: `it is ${known.join('=, ')}=` });
    }
    found.set(name, value);
  }
  return found;
}

/** Of the machine, or of the control group that this process may use. */
function machineMemory(): number {
  for (const path of ['/sys/fs/cgroup/memory.max', '/sys/fs/cgroup/memory/memory.limit_in_bytes']) {
    try {
      const limit = Number(readFileSync(path, 'latin1'));
      if (limit > 0 && limit < totalmem()) return limit;
    } catch {
      // Of the other version, or without a limit.
    }
  }
  return totalmem();
}

function diskOf(folder: string): number {
  try {
    const { blocks, bsize } = statfsSync(folder);
    return blocks * bsize;
  } catch (error) {
    throw fail('EDGE_CAPACITY', { text: 'disk', problem: messageOf(error) }, error);
  }
}
