/** A state folder without room for one more sandbox, wherever its start gets to: what to do is said, and nothing of it stays. */
import { execFileSync } from 'node:child_process';
import * as fs from 'node:fs';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { isDsecError } from '#base';
import { findAgent } from '../backend/agent-binary.ts';
import type { CreateOptions } from '../node/create-sandbox.ts';
import { SandboxNode } from '../node/sandbox-node.ts';
import { busybox, canRun, NOTHING, Site } from './sandbox-fixture.ts';

/** All that a sandbox's start makes there. */
const MOST = 64;
const agent = findAgent();
if (agent === undefined) console.log('skipped: dsec-agent is not built');

describe.skipIf(agent === undefined || !canRun())('with the state folder full', () => {
  let site: Site;
  let node: SandboxNode;
  let image: Awaited<ReturnType<Site['image']>>;
  let stateDir: string;
  let fillers: string;
  beforeAll(async () => {
    site = await new Site().open();
    image = await site.image('bb:1', [busybox], { Env: ['PATH=/bin'] });
    stateDir = join(site.root, 'small');
    fillers = join(stateDir, 'fillers');
    fs.mkdirSync(stateDir);
    const options = `size=1m,nr_inodes=${MOST * 2},mode=700`;
    execFileSync('mount', ['-t', 'tmpfs', '-o', options, 'dsec-test', stateDir]);
    node = await SandboxNode.open({ agent: agent!, folders: { ...site.folders, stateDir } });
  });
  afterAll(async () => {
    await node?.close();
    execFileSync('umount', ['-l', stateDir]);
    await site.remove();
  });

  const leave = (pages: number, files: number) => {
    fs.rmSync(fillers, { recursive: true, force: true });
    fs.mkdirSync(fillers);
    const { bavail, bsize, ffree } = fs.statfsSync(stateDir);
    fs.writeFileSync(join(fillers, 'pages'), Buffer.alloc((bavail - pages) * bsize));
    for (let i = 1; i < ffree - files; i++) fs.writeFileSync(join(fillers, `${i}`), '');
  };
  const left = () => {
    const own = (folder: string) => (fs.existsSync(folder) ? fs.readdirSync(folder) : []);
    return [
      ...own(join(stateDir, 'sandboxes')).filter((name) => name !== '.locks'),
      ...own(join(stateDir, 'sandboxes/.locks')),
      ...own(join(stateDir, 'ids')),
    ];
  };
  const errorOf = (started: Promise<unknown>) =>
    started.then(
      () => undefined,
      (error: unknown) => error,
    );

  /** With more and more room, until it starts. How often it did not. */
  async function refusals(room: (step: number) => readonly [number, number], start: () => Promise<unknown>) {
    for (let step = 0; step < MOST; step++) {
      leave(...room(step));
      const error = await errorOf(start());
      if (error === undefined) return step;
      if (!isDsecError(error)) throw error;
      expect(error, `with ${room(step)}`).toMatchObject({
        http: 507,
        hint: expect.stringContaining('free some space'),
      });
      expect(`${error.message} ${error.hint}`).toContain(stateDir);
      expect(left()).toEqual([]);
      expect(site.leftovers()).toEqual({ ...NOTHING, mounts: [stateDir] });
    }
    throw new Error('it never started');
  }
  const create = (options: Partial<CreateOptions>) => async () => {
    await node.create({ store: site.store, base: image, name: 'full', ...options });
    await node.remove('full', { force: true });
  };
  const run = () => site.run(image, ['true'], { name: 'full', folders: { ...site.folders, stateDir }, keep: false });

  const files = (step: number) => [64, step] as const;
  const pages = (step: number) => [step, MOST] as const;
  it.each([
    ['create, of files', files, () => create({})],
    ['create, of space', pages, () => create({})],
    ['create without a user namespace, of files', files, () => create({ userns: 'host' })],
    ['run, of files', files, () => run],
    ['run, of space', pages, () => run],
  ] as const)('%s: says what to do, and leaves nothing', async (_what, room, start) => {
    expect(await refusals(room, start())).toBeGreaterThan(0);
    expect(left()).toEqual([]);
  });
});
