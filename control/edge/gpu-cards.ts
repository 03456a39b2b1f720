/**
 * The graphics processors of a node that sandboxes may have, each whole and one sandbox's: which are there, and which are taken. A sandbox gets the device
 * nodes of its cards; what it was given is in its record, so that an edge that starts anew knows it.
 *
 * Of cards that are divided (MIG) the instances may be such too, where tasks (FnCall) do not have them.
 */
import { existsSync, statSync } from 'node:fs';
import { basename } from 'node:path';
import { splitDevice } from '#linux';
import { cardMinor, type DeviceNode, type Gpu, type GpuPlaces, gpuDevices, listGpus } from '#runtime';
import { fail } from '../errors.ts';
import type { GpuUse } from '../placement/node-report.ts';

export interface GpuCard {
  /** Tells it from the others, also after a start: its UUID, or its first device. */
  readonly id: string;
  /** `h100`, of an instance `h100-1g-10gb`: what is asked for by `gpuKind`. */
  readonly kind: string;
  readonly devices: readonly DeviceNode[];
  /** What programs know it by. */
  readonly uuid?: string;
}

/** Label of the nodes that have a kind. */
export function gpuLabel(kind: string): string {
  return `gpu:${kind}`;
}

export const GPU_KIND = '^[a-z0-9][a-z0-9-]{0,63}$';
/** Of the driver, for whoever has any card. */
const COMMON = ['/dev/nvidiactl', '/dev/nvidia-uvm', '/dev/nvidia-uvm-tools'];

/** `KIND=/dev/a,/dev/b` for each; without any, what nvidia-smi lists, `instances` too. @throws EDGE_GPU, RUNTIME_GPU */
export async function gpuCards(described: readonly string[] = [], instances = false): Promise<readonly GpuCard[]> {
  if (described.length > 0) {
    const cards = described.map(describedCard);
    const twice = cards.find(({ id }, at) => cards.findIndex((card) => card.id === id) !== at);
    if (twice !== undefined) {
      throw fail('EDGE_GPU', {
        text: twice.id,
        problem: 'two cards begin with it; name first the node that is one card’s',
      });
    }
    return cards;
  }
  const gpus = await listGpus();
  return [...cardsOf(gpus), ...(instances ? instancesOf(gpus) : [])];
}

/** Whole cards alone. @throws EDGE_GPU */
export function cardsOf(gpus: readonly Gpu[]): readonly GpuCard[] {
  return gpus
    .filter(({ profile }) => profile === undefined)
    .map((gpu) => {
      const { uuid, name } = gpu;
      const paths = [`/dev/nvidia${cardMinor(gpu)}`, ...COMMON.filter((path) => existsSync(path))];
      return { id: uuid, uuid, kind: kindOf(name), devices: paths.map((path) => deviceNode(path, name)) };
    });
}

/** Instances of divided cards alone. @throws EDGE_GPU, RUNTIME_GPU */
export function instancesOf(gpus: readonly Gpu[], places?: GpuPlaces): readonly GpuCard[] {
  return gpus.flatMap((gpu) => {
    const { uuid, name, profile } = gpu;
    if (profile === undefined) return [];
    const devices = gpuDevices(gpu, places);
    const closed = devices.find(({ mode }) => (mode & 0o004) === 0);
    if (closed !== undefined) throw fail('EDGE_GPU', { text: uuid, problem: `not everybody may open ${closed.path}` });
    return [{ id: uuid, uuid, kind: kindOf(`${name} ${profile}`), devices }];
  });
}

/** `NVIDIA H100 80GB HBM3` is `h100-80gb-hbm3`. */
export function kindOf(name: string): string {
  const words = name.toLowerCase().match(/[a-z0-9]+/g) ?? ['gpu'];
  return (words[0] === 'nvidia' && words.length > 1 ? words.slice(1) : words).join('-').slice(0, 64);
}

function describedCard(text: string): GpuCard {
  const [, kind = '', list = ''] = /^([^=]*)=(.*)$/.exec(text) ?? [];
  const paths = list.split(',').filter((path) => path !== '');
  if (!new RegExp(GPU_KIND).test(kind) || paths.length === 0) {
    throw fail('EDGE_GPU', { text, problem: 'it is KIND=/dev/NODE[,/dev/NODE...]' });
  }
  return { id: paths[0]!, kind, devices: paths.map((path) => deviceNode(path, text)) };
}

function deviceNode(path: string, text: string): DeviceNode {
  if (path !== `/dev/${basename(path)}`) throw fail('EDGE_GPU', { text, problem: `${path} is not right below /dev` });
  const status = statSync(path, { throwIfNoEntry: false });
  if (!status?.isCharacterDevice()) throw fail('EDGE_GPU', { text, problem: `${path} is no character device` });
  // In a user namespace nobody is root outside.
  if ((status.mode & 0o006) !== 0o006)
    throw fail('EDGE_GPU', { text, problem: `not everybody may open ${path}: chmod 666` });
  return { path, ...splitDevice(status.rdev), mode: 0o666 };
}

export class GpuCards {
  private readonly cards: readonly GpuCard[];
  /** As often as it was given: what is in a record counts, whatever it says. */
  private readonly taken = new Map<string, number>();

  constructor(cards: readonly GpuCard[] = []) {
    this.cards = cards;
  }

  /** By kind. */
  get kinds(): ReadonlyMap<string, GpuUse> {
    const kinds = new Map<string, GpuUse>();
    for (const { id, kind } of this.cards) {
      const { cards, free } = kinds.get(kind) ?? { cards: 0, free: 0 };
      kinds.set(kind, { cards: cards + 1, free: free + (this.taken.has(id) ? 0 : 1) });
    }
    return kinds;
  }

  /** @throws EDGE_REFUSED */
  take(count: number, kind: string | undefined, edge: string): readonly GpuCard[] {
    if (count === 0) return [];
    const free = this.cards.filter((card) => !this.taken.has(card.id) && (kind === undefined || card.kind === kind));
    if (free.length < count) {
      const wanted = kind === undefined ? 'gpus' : `gpus of kind ${kind}`;
      throw fail('EDGE_REFUSED', { edge, reason: `the node has ${free.length} free ${wanted}, of ${count}` });
    }
    const given = free.slice(0, count);
    this.keep(given.map(({ id }) => id));
    return given;
  }

  /** Of a sandbox that is there already. */
  keep(ids: readonly string[]): void {
    for (const id of ids) this.taken.set(id, (this.taken.get(id) ?? 0) + 1);
  }

  release(ids: readonly string[]): void {
    for (const id of ids) {
      const left = (this.taken.get(id) ?? 1) - 1;
      if (left > 0) this.taken.set(id, left);
      else this.taken.delete(id);
    }
  }
}

const VISIBLE = ['NVIDIA_VISIBLE_DEVICES', 'CUDA_VISIBLE_DEVICES'];

/** Of the sandbox: which cards its programs see. What a fork's parent was told is left out. */
export function gpuEnv(env: readonly string[] = [], cards: readonly GpuCard[]): readonly string[] {
  const kept = env.filter((entry) => !VISIBLE.some((name) => entry.startsWith(`${name}=`)));
  const uuids = cards.flatMap(({ uuid }) => uuid ?? []);
  return uuids.length === 0 ? kept : [...kept, ...VISIBLE.map((name) => `${name}=${uuids.join(',')}`)];
}
