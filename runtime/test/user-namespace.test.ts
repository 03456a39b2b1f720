/** Sandboxes whose root is nobody outside: ids, owners, ranges and what becomes of them. */
import { execFileSync } from 'node:child_process';
import * as fs from 'node:fs';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import type { Image } from '#imagesvc';
import { processIdentity } from '#linux';
import { findAgent } from '../backend/agent-binary.ts';
import { idExtents, orphanedRanges, takeRange } from '../backend/id-ranges.ts';
import { usernsSupport, usesUserNamespace } from '../backend/user-namespace.ts';
import type { NodeSandbox } from '../node/node-sandbox.ts';
import { reclaimSandboxes } from '../sandbox/sandboxes.ts';
import { processesOf, ResidentSite, say } from './resident-fixture.ts';
import { TEST_IMAGES } from './resident-images.ts';
import { canRun } from './sandbox-fixture.ts';

it('gives each a range of its own, and all of them one for ids that few files have', () => {
  const [own, shared] = idExtents(0x8001_0000);
  expect(own).toEqual({ inside: 0, outside: 0x8001_0000, count: 65_536 });
  expect(shared!.inside).toBe(65_536);
  // The last one below those that mean "none".
  expect(shared!.outside + shared!.count).toBeLessThan(0xffff_fff0);
  expect(shared!.outside).toBeGreaterThan(0xc000_0000);
});

const usable = canRun() && findAgent() !== undefined;

describe.skipIf(!usable)('a sandbox with a user namespace', { timeout: 120_000 }, () => {
  let site: ResidentSite;
  let image: Image;
  let lacks: string | undefined;
  beforeAll(async () => {
    site = await ResidentSite.open();
    lacks = (await usernsSupport(site.site.folders)).lacks;
    if (lacks !== undefined) console.log(`skipped: ${lacks}`);
    image = await site.site.image('owners:1', [
      (folder) => {
        TEST_IMAGES[0]!.fill(folder);
        for (const [name, id] of [
          ['low', 5],
          ['high', 70_000],
          ['beyond', 3_000_000_000],
        ] as const) {
          fs.writeFileSync(join(folder, name), name);
          fs.chownSync(join(folder, name), id, id);
        }
        for (const name of ['stat', 'chown', 'mkfifo', 'hostname']) {
          if (!fs.existsSync(join(folder, 'bin', name))) fs.symlinkSync('busybox', join(folder, 'bin', name));
        }
      },
    ]);
  }, 120_000);
  afterAll(() => site?.remove(), 120_000);

  const upperOf = (sandbox: NodeSandbox) => join(site.site.folders.stateDir, 'sandboxes', sandbox.name, 'upper');
  const ranges = () => {
    const folder = join(site.site.folders.stateDir, 'ids');
    return fs.existsSync(folder) ? fs.readdirSync(folder).map((name) => fs.readlinkSync(join(folder, name))) : [];
  };
  const realUids = (sandbox: NodeSandbox) =>
    processesOf(sandbox).map((pid) =>
      Number(/^Uid:\s+(\d+)/m.exec(fs.readFileSync(`/proc/${pid}/status`, 'latin1'))![1]),
    );

  it.each(['dsec', 'crun'])('is root inside and nobody outside, by %s', async (runtime) => {
    if (lacks !== undefined) return;
    const [one, other] = await Promise.all([
      site.create({ base: image, runtime, name: `one-${runtime}` }),
      site.create({ base: image, runtime, name: `other-${runtime}` }),
    ]);
    const [base, otherBase] = [one.facts.idBase!, other.facts.idBase!];
    expect(base).not.toBe(otherBase);
    expect(base % 65_536).toBe(0);
    expect(base).toBeGreaterThanOrEqual(0x8000_0000);
    const sleeper = await one.exec({ args: ['sleep', '1000'], user: '7' });
    expect(realUids(one).sort()).toEqual([base, base + 7].sort());
    expect(realUids(other)).toEqual([otherBase]);
    expect(await say(one, 'id -u; cd /; stat -c "%n %u %g" low high beyond bin')).toBe(
      '0\nlow 5 5\nhigh 70000 70000\nbeyond 65534 65534\nbin 0 0\n',
    );
    // Nobody's file cannot be had, any other can.
    expect(
      await say(one, 'chown 1 /beyond 2>/dev/null || echo refused; chown 9:70001 /high && chown 6 /low && echo done'),
    ).toBe('refused\ndone\n');
    await one.files.write('/made', Buffer.from('x'), { uid: 3, gid: 4 });
    const upper = (name: string) => fs.statSync(join(upperOf(one), name));
    expect([upper('high').uid, upper('high').gid, upper('low').uid]).toEqual([9, 70_001, 6]);
    expect([upper('made').uid, upper('made').gid]).toEqual([3, 4]);
    await sleeper.killTree();
    expect(ranges().sort()).toEqual([one.name, other.name].sort());
    await Promise.all([one.stop({ timeMs: 0 }), other.stop({ timeMs: 0 })]);
    expect(ranges()).toEqual([]);
  });

  it('has no rights over the machine’s files that it is shown', async () => {
    if (lacks !== undefined) return;
    const sandbox = await site.create({ base: image, name: 'rights' });
    expect(await say(sandbox, 'chmod 600 /dev/null 2>&1; mknod /n c 1 3 2>&1; hostname x 2>&1; true')).toMatch(
      /not permitted[\s\S]*not permitted[\s\S]*not permitted/,
    );
    await sandbox.stop({ timeMs: 0 });
  });

  it('opens its own standard streams again, whoever it is', async () => {
    if (lacks !== undefined) return;
    for (const user of ['0', '1000']) {
      const ran = await site.site.run(image, ['sh', '-c', 'echo a > /dev/stdout; echo b > /dev/stderr'], { user });
      expect([ran.exitCode, ran.stdout.toString(), ran.stderr]).toEqual([0, 'a\n', 'b\n']);
    }
  });

  it('leaves in its upper what any other would', async () => {
    if (lacks !== undefined) return;
    const trees = [];
    for (const userns of ['private', 'host'] as const) {
      const script =
        'cd /; rm low; mkdir -p a/b; echo 1 > a/b/c; ln a/b/c a/d; chmod 4711 a/d; mv high a; chown 1000:1000 a';
      const ran = await site.site.run(image, ['sh', '-c', script], { userns, keep: true, name: `tree-${userns}` });
      expect([ran.exitCode, ran.stderr]).toEqual([0, '']);
      trees.push(
        execFileSync('find', ['.', '-printf', '%p %y %m %U:%G %n %l\\n'], { cwd: ran.upper })
          .toString()
          .split('\n')
          .sort(),
      );
    }
    expect(trees[0]).toEqual(trees[1]);
    expect(trees[0]!.find((line) => line.startsWith('./low'))).toMatch(/^\.\/low c \d+ 0:0 /);
  });

  it('is not had with the machine’s network, or where somebody says so', async () => {
    const { folders } = site.site;
    expect(await usesUserNamespace(folders, undefined, 'host')).toBe(false);
    expect(await usesUserNamespace(folders, 'host')).toBe(false);
    await expect(usesUserNamespace(folders, 'private', 'host')).rejects.toMatchObject({ code: 'RUNTIME_USERNS' });
    expect((await site.create({ base: image, name: 'plain', userns: 'host' })).facts.idBase).toBeUndefined();
  });

  it('gives back the ranges of those who died before they had a record, and no others', async () => {
    const { folders } = site.site;
    const base = takeRange(folders.stateDir, 'never-made');
    expect(orphanedRanges(folders.stateDir, new Set(['plain']))).toEqual([{ name: 'never-made', base }]);
    expect(processIdentity()).toBeDefined();
    await reclaimSandboxes(folders);
    expect(ranges()).not.toContain('never-made');
  });
});
