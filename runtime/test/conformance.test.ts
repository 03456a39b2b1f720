/** The conformance suite: every case of conformance-commands.ts on every image and every backend that can run it. */
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { isDsecError } from '#base';
import type { Image } from '#imagesvc';
import { findAgent } from '../backend/agent-binary.ts';
import type { ResidentSandbox } from '../node/resident-sandbox.ts';
import { SandboxNode } from '../node/sandbox-node.ts';
import { isUnsupported } from '../sandbox-api/capabilities.ts';
import { COMMAND_CASES, type CommandCase } from './conformance-commands.ts';
import { TEST_IMAGES, type TestImage } from './resident-images.ts';
import { canRun, Site } from './sandbox-fixture.ts';

interface Outcome {
  readonly exitCode: number;
  readonly stdout: Buffer;
  readonly stderr: Buffer;
}

const agent = findAgent();
if (agent === undefined) console.log('skipped: dsec-agent is not built');
const WAYS = ['dsec, sandbox that stays', 'dsec, run', 'crun, run'] as const;

describe.skipIf(agent === undefined || !canRun())('a command', { timeout: 120_000 }, () => {
  let site: Site;
  let node: SandboxNode;
  const images = new Map<string, Image>();
  const sandboxes = new Map<string, ResidentSandbox>();
  beforeAll(async () => {
    site = await new Site().open();
    node = await SandboxNode.open({ agent: agent!, folders: site.folders });
    for (const { name, fill } of TEST_IMAGES) {
      const image = await site.image(`${name}:1`, [fill]);
      images.set(name, image);
      sandboxes.set(name, await node.create({ store: site.store, base: image, name }));
    }
  }, 120_000);
  afterAll(async () => {
    await Promise.all([...sandboxes.values()].map((sandbox) => sandbox.stop({ timeMs: 0 })));
    node.close();
    await site.remove();
  }, 120_000);

  async function stay(image: TestImage, spec: CommandCase): Promise<Outcome> {
    const { env, cwd, user, stdin } = spec;
    const command = await sandboxes
      .get(image.name)!
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
    TEST_IMAGES.flatMap((image) =>
      COMMAND_CASES.filter(({ shell }) => shell !== true || image.hasShell).map((spec) => ({
        way,
        image,
        spec,
        title: spec.name,
      })),
    ),
  )
    // One image is enough for those that launch a sandbox for each: what differs is the launch.
    .filter(({ way, image }) => way === WAYS[0] || image.name === 'busybox');

  it.each(rows)('$way, $image.name: $title', async ({ way, image, spec }) => {
    const outcome = way === WAYS[0] ? stay(image, spec) : once(image, spec, way === WAYS[1] ? 'dsec' : 'crun');
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

  it('is refused by name where a backend has no sandboxes that stay', async () => {
    const image = images.get('busybox')!;
    const error: unknown = await node
      .create({ store: site.store, base: image, runtime: 'crun' })
      .catch((thrown: unknown) => thrown);
    expect(isUnsupported(error) && error.params).toMatchObject({ backend: 'crun', capability: 'resident' });
  });
});
