/** The conformance suite over the table of backends: what one has works by the same calls as everywhere, what it lacks is refused by its name. */
import { execFileSync } from 'node:child_process';
import * as fs from 'node:fs';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { type Image, openDiskImage } from '#imagesvc';
import { findAgent } from '../backend/agent-binary.ts';
import type { Pool } from '../fncall/pool.ts';
import { FnCallNode } from '../index.ts';
import type { CreateOptions } from '../node/create-sandbox.ts';
import type { NodeSandbox } from '../node/node-sandbox.ts';
import { SandboxNode } from '../node/sandbox-node.ts';
import { BACKEND_TABLE, BACKENDS, type Backend, featuresOf } from '../sandbox-api/backend-table.ts';
import { CAPABILITIES, type Capability, isUnsupported, unsupported } from '../sandbox-api/capabilities.ts';
import { fullVmProblem } from '../vm/vm-support.ts';
import { COMMAND_CASES } from './conformance-commands.ts';
import { PROBES, runIn, runTask, type Subject, wishes } from './conformance-probes.ts';
import { NetworkWorld } from './network-world.ts';
import { TEST_IMAGES } from './resident-images.ts';
import { canRun, Site } from './sandbox-fixture.ts';
import { canRunVms } from './vm-site.ts';

const agent = findAgent();
const here = agent !== undefined && canRun();
const hasMicrovm = here && canRunVms();
const hasVm = here && fullVmProblem() === undefined;
if (here && !hasVm) console.log(`backend vm is not tested: ${fullVmProblem()}`);
const THERE = BACKENDS.filter((backend) => (backend !== 'microvm' || hasMicrovm) && (backend !== 'vm' || hasVm));

/** Rows without a call: `tasks` is FnCall itself, `fork` is whoever packs and creates (control/test has it). */
const WITHOUT_CALL: readonly Capability[] = ['tasks', 'fork'];

it('the table has a row for each capability, and every row is asked for', () => {
  expect(Object.keys(BACKEND_TABLE).sort()).toEqual([...CAPABILITIES].sort());
  const asked = [...Object.keys(PROBES), ...Object.keys(wishes({} as Image)), ...WITHOUT_CALL];
  expect([...new Set(asked)].sort()).toEqual([...CAPABILITIES].sort());
});

describe.skipIf(!here)('backends', { timeout: 300_000 }, () => {
  const busybox = TEST_IMAGES[0]!;
  let site: Site;
  let node: SandboxNode;
  let tasks: FnCallNode;
  let pool: Pool;
  let toolkit: Image;
  const subjects = new Map<Backend, Subject>();

  let world: NetworkWorld | undefined;

  beforeAll(async () => {
    // Networks are the machine's, and another test may have one.
    world = await NetworkWorld.open();
    site = await new Site().open();
    node = await SandboxNode.open({ agent: agent!, folders: site.folders });
    tasks = new FnCallNode({ folders: site.folders });
    const base = await site.image('busybox:1', [busybox.fill]);
    const fillToolkit = (folder: string) => {
      fs.mkdirSync(join(folder, 'toolkit'));
      fs.writeFileSync(join(folder, 'toolkit/here'), 'of the toolkit\n');
    };
    toolkit = await site.image('toolkit:1', [fillToolkit], {}, { kind: 'toolkit' });
    pool = tasks.poolFor({ store: site.store, base, toolkits: [toolkit] }, { ceiling: 1, queueMs: 120_000 });
    let disk: Image | undefined;
    if (hasVm) {
      const { stateDir, runDir, cacheDir } = site.folders;
      const places = {
        DSEC_STORE: join(site.root, 'store'),
        DSEC_STATE: stateDir,
        DSEC_RUN: runDir,
        DSEC_CACHE: cacheDir,
      };
      const script = join(import.meta.dirname, '../../scripts/echo-image.mjs');
      const env = { ...process.env, ...places };
      execFileSync(process.execPath, [script, '--image', 'echo:1'], { env, stdio: 'pipe' });
      disk = await openDiskImage(site.store, 'echo:1');
    }
    for (const backend of THERE) subjects.set(backend, subjectOf(backend, backend === 'vm' ? disk! : base));
  }, 300_000);
  afterAll(async () => {
    await Promise.all(node.list().map((sandbox) => sandbox.destroy()));
    await tasks.close();
    await node.close();
    world?.close();
    await site.remove();
  }, 300_000);

  /** All that the backend has, at once; limits that a machine may not be able to hold are asked for by themselves. */
  function everything(backend: Backend): Partial<CreateOptions> {
    const has = featuresOf(backend);
    const all = Object.entries(wishes(toolkit)) as [Capability, Partial<CreateOptions>][];
    const once = all.filter(([one]) => has.has(one) && !['io-limit', 'disk-limit', 'host-network'].includes(one));
    const small = backend === 'microvm' ? { memory: { pmem: false, reporting: false, damon: false } } : {};
    return Object.assign({}, small, ...once.map(([, wish]) => wish));
  }

  function subjectOf(backend: Backend, base: Image): Subject {
    const create = (options: Partial<CreateOptions>) =>
      node.create({ backend, store: site.store, base, ...options } as CreateOptions);
    let made: Promise<NodeSandbox> | undefined;
    const sandbox = () => {
      made ??= create({ name: `one-${backend}`, ...everything(backend) });
      return made;
    };
    return {
      backend,
      create,
      sandbox,
      run: async (spec) => (backend === 'fncall' ? runTask(tasks, pool, spec) : runIn(await sandbox(), spec)),
    };
  }

  const rows = THERE.flatMap((backend) => CAPABILITIES.map((capability) => ({ backend, capability })));

  it.each(rows.filter(({ capability }) => PROBES[capability] !== undefined))(
    '$backend: $capability',
    async ({ backend, capability }) => {
      const probing = PROBES[capability]!(subjects.get(backend)!);
      const support = BACKEND_TABLE[capability][backend];
      if (support === true || (support === 'task' && capability !== 'usage')) return void (await probing);
      const error = await probing.catch((thrown: unknown) => thrown);
      expectRefused(error, backend, capability);
    },
  );

  const made = rows.filter(({ backend, capability }) => {
    const isWish = wishes({} as Image)[capability] !== undefined;
    return isWish && !(backend === 'fncall' && BACKEND_TABLE[capability].fncall !== false);
  });
  it.each(made)(
    '$backend is created with $capability, or refuses it before anything is done',
    async ({ backend, capability }) => {
      const subject = subjects.get(backend)!;
      const wish = wishes(toolkit)[capability]!;
      if (featuresOf(backend).has(capability)) {
        const sandbox = await subject.sandbox();
        const { limits, resident, network } = sandbox.facts;
        if (capability.endsWith('-limit') && !['io-limit', 'disk-limit'].includes(capability))
          expect(limits).toMatchObject(wish);
        if (capability === 'classes') expect(resident?.class).toBe('be');
        if (capability === 'network-policy') expect(network?.mode).toBe('policy');
        return;
      }
      const error = await subject.create({ ...wish, name: 'never' }).catch((thrown: unknown) => thrown);
      expectRefused(error, backend, capability);
      expect(() => node.get('never')).toThrow(expect.objectContaining({ code: 'RUNTIME_SANDBOX_NOT_FOUND' }));
    },
  );

  function expectRefused(error: unknown, backend: Backend, capability: Capability): void {
    expect(isUnsupported(error), `${backend} ${capability}: ${String(error)}`).toBe(true);
    const { params } = error as { params: { backend: string; capability: string } };
    // A container is named by what runs it.
    expect(backend === 'container' ? ['container', 'dsec'] : [backend]).toContain(params.backend);
    // Of fncall there is no sandbox that could be asked, and that is what is said; without commands there is no environment of theirs.
    const said: readonly string[] = backend === 'fncall' ? [capability, 'resident'] : [capability];
    const also = capability === 'environment' || capability === 'composition' ? ['exec'] : [];
    expect([...said, ...also]).toContain(params.capability);
  }

  it.each(COMMAND_CASES)('fncall, as a task: $name', async (spec) => {
    const { env, cwd, user, stdin } = spec;
    const running = subjects.get('fncall')!.run({ args: spec.args(busybox), env, cwd, user, stdin });
    // All tasks are of one user, and begin in one folder.
    if (user !== undefined) {
      await expect(running).rejects.toEqual(unsupported('fncall', 'environment'));
      return;
    }
    if (spec.error !== undefined) {
      await expect(running).rejects.toMatchObject({ code: spec.error });
      return;
    }
    const { exitCode, stdout, stderr } = await running;
    expect(exitCode).toBe(spec.exitCode ?? 0);
    if (spec.stderr !== undefined) expect(String(stderr)).toBe(spec.stderr);
    if (spec.name === 'is root by default') expect(String(stdout)).toBe('1000\n');
    else if (Buffer.isBuffer(spec.stdout)) expect(stdout.equals(spec.stdout)).toBe(true);
    else if (typeof spec.stdout === 'string') expect(String(stdout)).toBe(spec.stdout);
    else if (spec.stdout !== undefined) expect(String(stdout)).toMatch(spec.stdout);
  });
});
