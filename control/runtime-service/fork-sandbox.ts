/**
 * New sandboxes that begin with the files of one that runs or is paused: its changes become an image (pack_diff, nothing left out), and that
 * image is the base of each. Processes are not copied; the one they come from goes on. Limits, network policy, class, user and environment are the same.
 * Of a full machine it is a copy of its disk, from which each boots; no image is made.
 *
 * With its memory (`memory`) each is the same machine from that moment on, and what ran in the other one runs in it. No image is made either. What is in them
 * runs when all of them are there, so that of a fork that failed nothing has run.
 */
import { createHash, randomBytes, randomUUID } from 'node:crypto';
import { rm } from 'node:fs/promises';
import { type Static, Type } from '@sinclair/typebox';
import { type Image, openDiskImage, openImage } from '#imagesvc';
import { type CreateOptions, FullVmSandbox, type NodeSandbox, needs, type SandboxRecord, unsupported } from '#runtime';
import { fail } from '../errors.ts';
import { packRunning } from '../pack-sandbox.ts';
import { knownStore } from './known-stores.ts';
import type { Sandboxes } from './route.ts';

const Text = Type.String({ maxLength: 4096 });
const TimeMs = Type.Integer({ minimum: 0, maximum: 2 ** 41 });

export const ForkBody = Type.Object(
  {
    count: Type.Optional(Type.Integer({ minimum: 1, maximum: 1000 })),
    /** What runs in it goes on in each. */
    memory: Type.Optional(Type.Boolean()),
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
  /** The image: it stays until it is removed. Where none is made, the one that the other began with. */
  readonly snapshot: { readonly name: string; readonly digest: string };
  readonly sandboxes: readonly NodeSandbox[];
  readonly notes: readonly string[];
}

/** At once: more would only wait for each other. */
const AT_ONCE = 4;

/** Forks with memory that are being made and have a request id, by their sandbox's id and mark: whoever asks again meanwhile waits for them. */
const underWay = new Map<string, { readonly count: number; readonly forked: Promise<ForkedSandboxes> }>();

/** All or none. Asked again with the same request id, the same ones are the answer. @throws as `packRunning`, `takeMoment` and `SandboxNode.create` */
export async function forkSandbox(
  node: Sandboxes,
  name: string,
  asked: Static<typeof ForkBody>,
): Promise<ForkedSandboxes> {
  const parent = node.get(name);
  return parent.useAsItIs(() => forkNow(node, parent, asked));
}

async function forkNow(
  node: Sandboxes,
  parent: NodeSandbox,
  { count = 1, memory = false, snapshot, requestId, ttlMs, reservations }: Static<typeof ForkBody>,
): Promise<ForkedSandboxes> {
  const { facts, name } = parent;
  const mark = requestId === undefined ? randomBytes(6).toString('hex') : digestOf(`${facts.id} ${requestId}`);
  if (memory) {
    needs(parent.backend, 'fork-memory');
    if (snapshot !== undefined)
      throw fail('SANDBOX_BAD_REQUEST', { problem: 'a snapshot of a fork with memory, which makes no image' });
    const fork = () => forkMemory(node, parent, { count, mark, requestId, ttlMs, reservations });
    return requestId === undefined ? fork() : onceAtATime(`${facts.id} ${mark}`, count, fork);
  }
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

/** @throws SANDBOX_BAD_REQUEST where another number of forks is being made for this request */
async function onceAtATime(key: string, count: number, fork: () => Promise<ForkedSandboxes>): Promise<ForkedSandboxes> {
  const before = underWay.get(key);
  if (before === undefined) {
    const forked = fork().finally(() => underWay.delete(key));
    underWay.set(key, { count, forked });
    return forked;
  }
  if (before.count === count) return before.forked;
  const problem = `the request id is that of a fork of ${before.count} that is being made, and ${count} are asked for`;
  throw fail('SANDBOX_BAD_REQUEST', { problem });
}

async function forkMemory(node: Sandboxes, parent: NodeSandbox, wanted: Wanted): Promise<ForkedSandboxes> {
  const { facts } = parent;
  const made = madeBefore(node, facts, wanted);
  if (made !== undefined) return { snapshot: facts.base, sandboxes: made, notes: [] };
  const store = await knownStore(facts.store);
  const open = (reference: { readonly digest: string }) =>
    facts.machine === undefined ? openImage(store, reference.digest) : openDiskImage(store, reference.digest);
  const images = {
    base: await open(facts.base),
    workspace: facts.workspace && (await open(facts.workspace)),
    toolkits: await Promise.all(facts.toolkits.map(open)),
  };
  const moment = await parent.takeMoment();
  try {
    const sandboxes = await createAll(node, facts, { store, ...images, moment }, wanted);
    return { snapshot: facts.base, sandboxes, notes: [] };
  } finally {
    await moment.discard().catch(() => {});
  }
}

/** Those that this request has made before. @throws SANDBOX_GONE when some of them are not there: their moment has passed */
function madeBefore(
  node: Sandboxes,
  { name }: SandboxRecord,
  { count, mark, requestId }: Wanted,
): NodeSandbox[] | undefined {
  if (requestId === undefined) return undefined;
  const known = new Map(node.list().map((one) => [one.facts.resident?.requestId, one]));
  const made = Array.from({ length: count }, (_, number) => known.get(childRequest(mark, number)));
  if (made.every((one) => one === undefined)) return undefined;
  const missing = made.indexOf(undefined);
  if (missing < 0) return made as NodeSandbox[];
  const reason = 'it was made by this fork before, and is there no more';
  throw fail('SANDBOX_GONE', { id: childName(name, mark, missing), reason });
}

interface Wanted extends Pick<Static<typeof ForkBody>, 'requestId' | 'ttlMs' | 'reservations'> {
  readonly count: number;
  readonly mark: string;
}

/** All or none. */
async function createAll(
  node: Sandboxes,
  facts: SandboxRecord,
  from: Pick<CreateOptions, 'store' | 'base' | 'workspace' | 'toolkits' | 'machineDisk' | 'moment'>,
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
        const own = { name: childName(facts.name, mark, number), requestId: requestId && childRequest(mark, number) };
        created[number] = await node.create({ ...options, ...own });
      } catch (error) {
        failures.push(error);
      }
    }
  };
  await Promise.all(Array.from({ length: AT_ONCE }, worker));
  const sandboxes = created.filter((one) => one !== undefined);
  // None of them runs before all are on record.
  for (const step of ['markReady', 'goOn'] as const) {
    if (failures.length > 0) break;
    const done = await Promise.allSettled(sandboxes.map((one) => one[step]()));
    failures.push(...done.flatMap((one) => (one.status === 'rejected' ? [one.reason] : [])));
  }
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

function childRequest(mark: string, number: number): string {
  return `fork ${mark} ${number}`;
}

/** At most 63 characters, as names are. */
function childName(parent: string, mark: string, number: number): string {
  const end = `-${mark.slice(0, 6)}-${number + 1}`;
  return `${parent.slice(0, 63 - end.length)}${end}`;
}

function digestOf(text: string): string {
  return createHash('sha256').update(text).digest('hex').slice(0, 12);
}
