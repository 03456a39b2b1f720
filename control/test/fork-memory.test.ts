/** Forks with memory, of a sandbox that stands in: what is asked of each, in which order, and what becomes of all when one fails. */
import * as fs from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, beforeAll, beforeEach, expect, it } from 'vitest';
import { openImage, openStore } from '#imagesvc';
import type { CreateOptions, NodeSandbox, SandboxRecord } from '#runtime';
import { forkSandbox } from '../runtime-service/fork-sandbox.ts';
import type { Sandboxes } from '../runtime-service/route.ts';
import { runCommand } from './command-run.ts';

let folder: string;
let facts: SandboxRecord;
beforeAll(async () => {
  folder = fs.mkdtempSync(join(tmpdir(), 'dsec-fork-'));
  const url = join(folder, 'store');
  fs.mkdirSync(join(folder, 'tree/etc'), { recursive: true });
  await runCommand('convert', `dir:${join(folder, 'tree')}`, '--name', 'tree:1', '--store', url);
  const store = await openStore(url);
  const { name, manifestDigest } = await openImage(store, 'tree:1');
  facts = {
    ...{ version: 1, name: 'source', id: 'source-1', state: 'running', keep: true, createdAt: '', backend: 'microvm' },
    ...{ store: store.url, base: { name, digest: manifestDigest }, toolkits: [], mountPoints: [] },
    owner: { pid: process.pid, bootId: '', startTime: '' },
    vm: { driver: 'qemu', cpus: 1, memoryBytes: 1, memory: {} },
    resident: { defaults: { env: [], user: '', cwd: '/' } },
  } as unknown as SandboxRecord;
});
afterAll(() => fs.rmSync(folder, { recursive: true, force: true }));

let done: string[];
/** Whose this step fails. */
let failing: string | undefined;
/** The moment is taken when this is. */
let taken: Promise<void>;
let all: Map<string, NodeSandbox>;
let users: number;
let node: Sandboxes;
beforeEach(() => {
  done = [];
  failing = undefined;
  taken = Promise.resolve();
  all = new Map();
  users = 0;
  const step = async (text: string) => {
    done.push(text);
    if (text === failing) throw new Error(`${text} fails`);
  };
  const standIn = (own: SandboxRecord) => ({
    name: own.name,
    facts: own,
    backend: { name: 'microvm', features: new Set(['fork-memory']) },
    async useAsItIs(work: () => Promise<unknown>) {
      users++;
      return work().finally(() => users--);
    },
    async takeMoment() {
      await taken;
      expect(users).toBeGreaterThan(0);
      return { discard: () => step('discard') };
    },
    markReady: () => step(`ready ${own.name.at(-1)}`),
    goOn: () => step(`go ${own.name.at(-1)}`),
  });
  const add = (own: SandboxRecord) => {
    const made = standIn(own) as unknown as NodeSandbox;
    all.set(own.name, made);
    return made;
  };
  add(facts);
  node = {
    get: (name) => all.get(name)!,
    list: () => [...all.values()],
    create: async ({ name, requestId }: CreateOptions) => {
      await step(`create ${name!.at(-1)}`);
      return add({ ...facts, name: name!, id: name!, resident: { ...facts.resident!, requestId } });
    },
    remove: async (name) => {
      await step(`remove ${name.at(-1)}`);
      all.delete(name);
    },
    stop: () => Promise.reject(new Error('nobody stops one')),
  };
});

it('none goes on before all are on record', async () => {
  const { sandboxes } = await forkSandbox(node, 'source', { count: 3, memory: true });
  expect(sandboxes.map(({ name }) => name.at(-1))).toEqual(['1', '2', '3']);
  const of = (text: string) => ['1', '2', '3'].map((number) => `${text} ${number}`);
  expect(done).toEqual([...of('create'), ...of('ready'), ...of('go'), 'discard']);
  expect(users).toBe(0);
});

it('of those that cannot be put on record none has run, and all are gone', async () => {
  failing = 'ready 2';
  await expect(forkSandbox(node, 'source', { count: 2, memory: true })).rejects.toThrow('ready 2 fails');
  expect(done).toEqual(['create 1', 'create 2', 'ready 1', 'ready 2', 'remove 1', 'remove 2', 'discard']);
  expect([...all.keys()]).toEqual(['source']);
});

it('one request is one fork, asked once or twice; of another number it is refused while that is being made', async () => {
  let go!: () => void;
  taken = new Promise((resolve) => {
    go = resolve;
  });
  const asked = { count: 1, memory: true, requestId: 'once' };
  const forks = [forkSandbox(node, 'source', asked), forkSandbox(node, 'source', asked)];
  const other = forkSandbox(node, 'source', { ...asked, count: 8 });
  await expect(other).rejects.toMatchObject({
    code: 'SANDBOX_BAD_REQUEST',
    message: expect.stringContaining('a fork of 1 that is being made, and 8 are asked for'),
  });
  go();
  const [first, second] = await Promise.all(forks);
  expect(second).toBe(first);
  const again = await forkSandbox(node, 'source', asked);
  expect(again.sandboxes).toEqual(first!.sandboxes);
  expect(done.filter((text) => text.startsWith('create'))).toEqual(['create 1']);
});
