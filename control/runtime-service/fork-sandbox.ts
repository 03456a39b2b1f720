/**
 * New sandboxes that begin with the files of one that runs or is paused: its changes become an image (pack_diff, nothing left out), and that
 * image is the base of each. Processes are not copied; the one they come from goes on. Limits, network policy, class, user and environment are the same.
 * Of a full machine it is a copy of its disk, from which each boots; no image is made.
 */
import { createHash, randomBytes, randomUUID } from 'node:crypto';
import { rm } from 'node:fs/promises';
import { type Static, Type } from '@sinclair/typebox';
import { type Image, openDiskImage, openImage } from '#imagesvc';
import { type CreateOptions, FullVmSandbox, type NodeSandbox, type SandboxRecord, unsupported } from '#runtime';
import { packRunning } from '../pack-sandbox.ts';
import { knownStore } from './known-stores.ts';
import type { Sandboxes } from './route.ts';

const Text = Type.String({ maxLength: 4096 });
const TimeMs = Type.Integer({ minimum: 0, maximum: 2 ** 41 });

export const ForkBody = Type.Object(
  {
    count: Type.Optional(Type.Integer({ minimum: 1, maximum: 1000 })),
    /** `NAME:TAG` of the image. */
    snapshot: Type.Optional(Text),
    requestId: Type.Optional(Type.String({ minLength: 1, maxLength: 4096 })),
    ttlMs: Type.Optional(TimeMs),
    /** Of quota, one for each: an edge's. */
    reservations: Type.Optional(Type.Array(Text, { maxItems: 1000 })),
  },
  { additionalProperties: false },
);

export interface ForkedSandboxes {
  /** The image: it stays until it is removed. */
  readonly snapshot: { readonly name: string; readonly digest: string };
  readonly sandboxes: readonly NodeSandbox[];
  readonly notes: readonly string[];
}

/** At once: more would only wait for each other. */
const AT_ONCE = 4;

/** All or none. Asked again with the same request id, the same ones are the answer. @throws as `packRunning` and `SandboxNode.create` */
export async function forkSandbox(
  node: Sandboxes,
  name: string,
  { count = 1, snapshot, requestId, ttlMs, reservations }: Static<typeof ForkBody>,
): Promise<ForkedSandboxes> {
  const parent = node.get(name);
  const { facts } = parent;
  const mark = requestId === undefined ? randomBytes(6).toString('hex') : digestOf(`${facts.id} ${requestId}`);
  if (parent instanceof FullVmSandbox) {
    if (snapshot !== undefined) throw unsupported(facts.backend, 'pack-diff');
    return withDiskOf(parent, mark, async (machineDisk, base, store) => {
      const { base: snapshot } = facts;
      const sandboxes = await createAll(
        node,
        facts,
        { store, base, machineDisk },
        { count, mark, requestId, ttlMs, reservations },
      );
      return { snapshot, sandboxes, notes: ['its disk is a copy; each has booted from it'] };
    });
  }
  const imageName = snapshot ?? `fork-${name}:${mark}`;
  const store = await knownStore(facts.store);
  let notes: readonly string[] = [];
  let image: Image;
  if (requestId !== undefined && snapshot === undefined && (await store.getRef(imageName)) !== undefined) {
    image = await openImage(store, imageName);
  } else {
    const packed = await packRunning(parent, { name: imageName, policy: false });
    ({ image, notes } = packed);
  }
  const sandboxes = await createAll(
    node,
    facts,
    { store, base: image },
    { count, mark, requestId, ttlMs, reservations },
  );
  return { snapshot: { name: image.name, digest: image.manifestDigest }, sandboxes, notes };
}

interface Wanted extends Pick<Static<typeof ForkBody>, 'requestId' | 'ttlMs' | 'reservations'> {
  readonly count: number;
  readonly mark: string;
}

/** All or none. */
async function createAll(
  node: Sandboxes,
  facts: SandboxRecord,
  from: Pick<CreateOptions, 'store' | 'base' | 'machineDisk'>,
  { count, mark, requestId, ttlMs, reservations }: Wanted,
): Promise<NodeSandbox[]> {
  const created: (NodeSandbox | undefined)[] = Array.from({ length: count });
  const known = new Set(node.list().map(({ facts: { id } }) => id));
  const failures: unknown[] = [];
  let next = 0;
  const worker = async () => {
    while (next < count && failures.length === 0) {
      const number = next++;
      try {
        const tag = facts.resident?.tag && { ...facts.resident.tag, reservation: reservations?.[number] };
        const options = { ...sameAs(facts), ...from, tag, ttlMs };
        const own = { name: childName(facts.name, mark, number), requestId: requestId && `fork ${mark} ${number}` };
        created[number] = await node.create({ ...options, ...own });
      } catch (error) {
        failures.push(error);
      }
    }
  };
  await Promise.all(Array.from({ length: AT_ONCE }, worker));
  const sandboxes = created.filter((one) => one !== undefined);
  if (failures.length > 0) {
    const begun = sandboxes.filter(({ facts: { id } }) => !known.has(id));
    // One that cannot be removed is listed, and can be by its name.
    await Promise.allSettled(begun.map((one) => node.remove(one.name, { force: true })));
    throw failures[0];
  }
  return sandboxes;
}

/** A full machine has no changes that could be an image: the copy of its disk is there until all have theirs. */
async function withDiskOf<T>(
  parent: FullVmSandbox,
  mark: string,
  work: (disk: string, base: Image, store: CreateOptions['store']) => Promise<T>,
): Promise<T> {
  const { store: url, base } = parent.facts;
  const store = await knownStore(url);
  const image = await openDiskImage(store, base.digest);
  // Of this call alone: whoever asks again meanwhile has another.
  const copy = parent.besideDisk(`fork-${mark}-${randomUUID()}.qcow2`);
  try {
    await parent.copyDisk(copy);
    return await work(copy, image, store);
  } finally {
    await rm(copy, { force: true });
  }
}

function sameAs(record: SandboxRecord): Omit<CreateOptions, 'store' | 'base'> {
  const { name, backend, limits, network, resident, userns, vm, machine } = record;
  const { defaults, idleMs, idleAction, class: serviceClass } = resident!;
  const { user, cwd } = defaults;
  const env = defaults.env.filter((entry) => entry !== `HOSTNAME=${name}`);
  const policy = network?.mode === 'policy' ? network.policy : undefined;
  if (machine !== undefined) {
    const { firmware, width, height } = machine;
    const own = { backend, machine: { firmware, width, height } };
    return {
      ...limits,
      ...own,
      network: network && { mode: network.mode, policy },
      idleMs,
      idleAction,
      class: serviceClass,
    };
  }
  const lives =
    vm === undefined ? { runtime: backend } : { backend, memory: vm.memory, dockerDiskBytes: vm.dockerDiskBytes };
  const same = { ...lives, userns, network: network && { mode: network.mode, policy } };
  return { ...limits, ...same, env, user, workdir: cwd, idleMs, idleAction, class: serviceClass };
}

/** At most 63 characters, as names are. */
function childName(parent: string, mark: string, number: number): string {
  const end = `-${mark.slice(0, 6)}-${number + 1}`;
  return `${parent.slice(0, 63 - end.length)}${end}`;
}

function digestOf(text: string): string {
  return createHash('sha256').update(text).digest('hex').slice(0, 12);
}
