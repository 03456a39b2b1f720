/** The conformance suite: every case of conformance-commands.ts and conformance-sandbox.ts on every image and every backend that can run it. */
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { isDsecError } from '#base';
import type { Image } from '#imagesvc';
import { findAgent } from '../backend/agent-binary.ts';
import type { NodeSandbox } from '../node/node-sandbox.ts';
import { SandboxNode } from '../node/sandbox-node.ts';
import { isUnsupported } from '../sandbox-api/capabilities.ts';
import { COMMAND_CASES, type CommandCase } from './conformance-commands.ts';
import { SANDBOX_CASES } from './conformance-sandbox.ts';
import { TEST_IMAGES, type TestImage } from './resident-images.ts';
import { canRun, Site } from './sandbox-fixture.ts';
import { canRunVms, SMALL_VM } from './vm-site.ts';

interface Outcome {
  readonly exitCode: number;
  readonly stdout: Buffer;
  readonly stderr: Buffer;
}

const agent = findAgent();
if (agent === undefined) console.log('skipped: dsec-agent is not built');
/** What sandboxes that stay live in. A virtual machine takes seconds where it is emulated: two images, then. */
const KINDS: readonly { readonly kind: string; readonly images: readonly TestImage[]; readonly options: object }[] = [
  { kind: 'dsec', images: TEST_IMAGES, options: { runtime: 'dsec' } },
  { kind: 'crun', images: TEST_IMAGES, options: { runtime: 'crun' } },
  ...(canRunVms() ? [{ kind: 'microvm', images: TEST_IMAGES.slice(0, 2), options: SMALL_VM }] : []),
];
const WAYS = [...KINDS.map(({ kind }) => `${kind}, sandbox that stays`), 'dsec, run', 'crun, run'];
const imagesOf = (way: string) =>
  KINDS.find(({ kind }) => stays(way) && kind === runtimeOf(way))?.images ?? TEST_IMAGES;
const stays = (way: string) => way.endsWith('that stays');
const runtimeOf = (way: string) => way.split(',')[0]!;

describe.skipIf(agent === undefined || !canRun())('a command', { timeout: 120_000 }, () => {
  let site: Site;
  let node: SandboxNode;
  const images = new Map<string, Image>();
  const sandboxes = new Map<string, NodeSandbox>();
  beforeAll(async () => {
    site = await new Site().open();
    node = await SandboxNode.open({ agent: agent!, folders: site.folders });
    for (const { name, fill } of TEST_IMAGES) {
      const image = await site.image(`${name}:1`, [fill]);
      images.set(name, image);
      for (const { kind, options } of KINDS.filter((one) => one.images.some((used) => used.name === name))) {
        const asked = { ...options, store: site.store, base: image, name: `${name}-${kind}` };
        sandboxes.set(`${kind} ${name}`, await node.create(asked));
      }
    }
  }, 600_000);
  afterAll(async () => {
    await Promise.all([...sandboxes.values()].map((sandbox) => sandbox.stop({ timeMs: 0 })));
    await node.close();
    await site.remove();
  }, 300_000);

  async function stay(image: TestImage, spec: CommandCase, runtime: string): Promise<Outcome> {
    const { env, cwd, user, stdin } = spec;
    const command = await sandboxes
      .get(`${runtime} ${image.name}`)!
      .exec({ args: spec.args(image), env, cwd, user, stdin: stdin !== undefined });
    const written = stdin === undefined ? undefined : command.write(stdin).then(() => command.closeStdin());
    const streams: Record<'stdout' | 'stderr', Buffer[]> = { stdout: [], stderr: [] };
    for await (const part of command.output()) streams[part.stream].push(part.bytes!);
    await written;
    const { exitCode } = await command.wait();
    return { exitCode, stdout: Buffer.concat(streams.stdout), stderr: Buffer.concat(streams.stderr) };
  }

  async function once(image: TestImage, spec: CommandCase, runtime: string): Promise<Outcome> {
    const { env, cwd, user, stdin } = spec;
    const options = { runtime, env, workdir: cwd, user, stdin };
    const { exitCode, stdout, stderr } = await site.run(images.get(image.name)!, spec.args(image), options);
    return { exitCode, stdout, stderr: Buffer.from(stderr) };
  }

  const rows = WAYS.flatMap((way) =>
    imagesOf(way).flatMap((image) =>
      COMMAND_CASES.filter(({ shell }) => shell !== true || image.hasShell).map((spec) => ({
        way,
        image,
        spec,
        title: spec.name,
      })),
    ),
  )
    // One image is enough for those that launch a sandbox for each: what differs is the launch.
    .filter(({ way, image }) => stays(way) || image.name === 'busybox');

  it.each(rows)('$way, $image.name: $title', async ({ way, image, spec }) => {
    const outcome = (stays(way) ? stay : once)(image, spec, runtimeOf(way));
    if (spec.error !== undefined) {
      const error = await outcome.catch((thrown: unknown) => thrown);
      expect(isDsecError(error) && error.code).toBe(spec.error);
      return;
    }
    const { exitCode, stdout, stderr } = await outcome;
    expect({ exitCode, stderr: spec.stderr === undefined ? '' : String(stderr) }).toEqual({
      exitCode: spec.exitCode ?? 0,
      stderr: spec.stderr ?? '',
    });
    if (Buffer.isBuffer(spec.stdout)) expect(stdout.equals(spec.stdout)).toBe(true);
    else if (typeof spec.stdout === 'string') expect(String(stdout)).toBe(spec.stdout);
    else if (spec.stdout !== undefined) expect(String(stdout)).toMatch(spec.stdout);
  });

  const lasting = KINDS.flatMap(({ kind, images: used }) =>
    used.flatMap((image) =>
      SANDBOX_CASES.filter(({ shell }) => shell !== true || image.hasShell).map((one) => ({
        kind,
        image,
        one,
        title: one.name,
      })),
    ),
  );
  it.each(lasting)('$kind, $image.name: $title', async ({ kind, image, one }) => {
    const sandbox = sandboxes.get(`${kind} ${image.name}`)!;
    expect(one.needs.filter((needed) => !sandbox.backend.features.has(needed))).toEqual([]);
    await one.run(sandbox, image);
  });

  const staying = KINDS.flatMap(({ kind, images: used }) =>
    used.map(({ name, tool }) => ({ runtime: kind, name, tool })),
  );
  it.each(staying)(
    '$runtime, $name: finds a paused sandbox as it was, and resumes it',
    async ({ runtime, name, tool }) => {
      const sandbox = sandboxes.get(`${runtime} ${name}`)!;
      if (!sandbox.backend.features.has('pause')) {
        expect(isUnsupported(await sandbox.pause().catch((thrown: unknown) => thrown))).toBe(true);
        return;
      }
      const waiting = await sandbox.exec({ args: tool('cat'), stdin: true });
      await sandbox.files.write('/tmp/before', Buffer.from('before'));
      for (let i = 0; i < 2; i++) await sandbox.pause();
      expect(sandbox.state).toBe('paused');
      const found = await sandbox.exec({ args: tool('cat', '/tmp/before') });
      expect(await found.wait()).toMatchObject({ exitCode: 0, stdoutBytes: 6 });
      expect(sandbox.state).toBe('running');
      await waiting.write(Buffer.from('input'));
      await waiting.closeStdin();
      expect(await waiting.wait()).toMatchObject({ exitCode: 0, stdoutBytes: 5 });
      for (let i = 0; i < 2; i++) await sandbox.resume();
    },
  );

  it('is refused by name where a backend has no sandboxes that stay', async () => {
    const image = images.get('busybox')!;
    const error: unknown = await node
      .create({ store: site.store, base: image, runtime: 'zones' })
      .catch((thrown: unknown) => thrown);
    expect(isUnsupported(error) && error.params).toMatchObject({ backend: 'zones', capability: 'resident' });
  });
});
