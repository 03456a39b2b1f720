/** Forks of a virtual machine that has memory: each goes on where that one was, as somebody of its own, and that one goes on too. */
import * as fs from 'node:fs';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { linksNamed } from '../network/sandbox-link.ts';
import type { CreateOptions } from '../node/create-sandbox.ts';
import type { NodeSandbox } from '../node/node-sandbox.ts';
import { sandboxFolders } from '../sandbox/state-folders.ts';
import type { ExecHandle } from '../sandbox-api/exec.ts';
import type { Moment } from '../vm/fork/moment.ts';
import { vmPlaces } from '../vm/vm-places.ts';
import { tcp } from './network-inside.ts';
import { NetworkSite } from './network-site.ts';
import { hasNetworkTools } from './network-tools.ts';
import { HOST4, NEIGHBOUR4 } from './network-world.ts';
import { say, told, until } from './resident-fixture.ts';
import { TEST_IMAGES } from './resident-images.ts';
import { canRunVms, SMALL_VM } from './vm-site.ts';

const BUSYBOX = '/bin/busybox';
const POLICY = { default: 'deny', rules: [{ allow: HOST4, ports: [80] }] };
/** Says a number that it draws for each line that it is told. */
const DRAWS = 'while read x; do cat /proc/sys/kernel/random/uuid; done; echo over';

describe.skipIf(!canRunVms() || !hasNetworkTools())('forks with memory', { timeout: 900_000 }, () => {
  let all: NetworkSite;
  let box: NodeSandbox;
  const forks: NodeSandbox[] = [];
  let options: Partial<CreateOptions> = {
    ...SMALL_VM,
    // As it is by default: layers that are memory of the host, and memory of its own for each, which it gives back.
    memoryBytes: 256 << 20,
    memory: { pmem: true, reporting: true, damon: true },
    dockerDiskBytes: 64 << 20,
  };
  const fork = async (name: string, moment: Moment, more: object = {}) => {
    return all.create(POLICY, { ...options, name, moment, ...more });
  };
  const folderOf = (sandbox: NodeSandbox) => sandboxFolders(all.site.folders, sandbox.name).folder;
  const momentsOf = (sandbox: NodeSandbox) => fs.readdirSync(folderOf(sandbox)).filter((one) => /^moment/.test(one));

  beforeAll(async () => {
    all = await NetworkSite.open();
    const { fill } = TEST_IMAGES.find(({ name }) => name === 'debian-like')!;
    const tools = (folder: string) => {
      fs.mkdirSync(join(folder, 'usr/bin'), { recursive: true });
      fs.copyFileSync(BUSYBOX, join(folder, 'usr/bin/busybox'));
    };
    options = { ...options, base: await all.site.image('tools:1', [fill, tools]) };
    box = await all.create(POLICY, options);
  }, 600_000);
  afterAll(() => all?.remove(), 300_000);

  it('go on where it was: memory, open files, commands with their output so far', async () => {
    await say(box, 'echo on disk > /work-kept; echo in memory > /dev/shm/kept; echo docker > /var/lib/docker/kept');
    const drawing = await box.exec({ args: ['sh', '-c', DRAWS], stdin: true, requestId: 'drawing' });
    const drawnBy = async (one: ExecHandle) => (await told(one, { follow: false })).stdout.length;
    await drawing.write(Buffer.from('one\n'));
    await until('it has drawn', async () => (await drawnBy(drawing)) === 37);
    const session = await box.openShell();
    const ended = await box.exec({ args: ['true'] });
    await ended.wait();
    const moment = await box.takeMoment();
    try {
      const ttlMs = 3_600_000;
      forks.push(...(await Promise.all([fork('left', moment, { ttlMs }), fork('right', moment)])));
      // Until all of them are there nothing in them runs.
      const early = forks[0]!.command(drawing.id);
      await early.write(Buffer.from('two\n'));
      expect(await drawnBy(early)).toBe(37);
      // Whoever would have it go on waits.
      let isPacked = false;
      const packed = forks[0]!.whileStill(async ({ upper }) => {
        isPacked = true;
        return fs.readFileSync(join(upper, 'work-kept'), 'utf8');
      });
      await Promise.all(forks.map((one) => one.markReady()));
      expect([isPacked, await drawnBy(early)]).toEqual([false, 37]);
      await Promise.all(forks.map((one) => one.goOn()));
      expect(await packed).toBe('on disk\n');
    } finally {
      await moment.discard();
    }
    expect(momentsOf(box)).toEqual([]);
    await drawing.write(Buffer.from('two\n'));
    await drawing.closeStdin();
    const drawn = [(await told(drawing)).stdout];
    for (const [number, one] of forks.entries()) {
      expect(await say(one, 'cat /work-kept /dev/shm/kept /var/lib/docker/kept')).toBe('on disk\nin memory\ndocker\n');
      const same = one.command(drawing.id);
      if (number > 0) await same.write(Buffer.from('two\n'));
      await same.closeStdin();
      drawn.push((await told(same)).stdout);
      expect(await same.wait()).toMatchObject({ exitCode: 0 });
      expect(() => one.command(ended.id)).toThrow(expect.objectContaining({ code: 'RUNTIME_EXEC_NOT_FOUND' }));
      expect(() => one.shell(session.id)).toThrow(expect.objectContaining({ code: 'RUNTIME_EXEC_NOT_FOUND' }));
      expect(await one.command(session.id).wait()).toMatchObject({ signal: 'SIGKILL' });
      // Of the other's request this one knows nothing.
      expect((await one.exec({ args: ['true'], requestId: 'drawing' })).id).toBeGreaterThan(session.id);
    }
    expect(await session.run('echo still').then(({ stdout }) => String(stdout))).toBe('still\n');
    await session.close();
    const lines = drawn.map((text) => text.trim().split('\n'));
    expect(lines.map((all) => [all.length, all[0], all[2]])).toEqual(drawn.map(() => [3, lines[0]![0], 'over']));
    expect(new Set(lines.map((all) => all[1])).size).toBe(3);
  });

  it('are each its own: name, numbers drawn, clock, address, and what they write', async () => {
    const drawn = await Promise.all(
      [box, ...forks].map((one) =>
        say(
          one,
          'alias od="busybox od" mktemp="busybox mktemp" hostname="busybox hostname"\nod -An -tx1 -N16 /dev/urandom; od -An -tx1 -N16 /dev/random; mktemp -u; hostname; cat /sys/class/net/eth0/address',
        ),
      ),
    );
    const lines = drawn.map((text) => text.trim().split('\n'));
    expect(lines.map(({ length }) => length)).toEqual([5, 5, 5]);
    for (let at = 0; at < 5; at++) expect(new Set(lines.map((all) => all[at])).size, lines[0]![at]).toBe(3);
    expect(lines.map((all) => all[3])).toEqual([box, ...forks].map(({ name }) => name));
    for (const one of forks) {
      const inside = Number(await say(one, 'busybox date +%s'));
      expect(Math.abs(inside - Date.now() / 1000)).toBeLessThan(60);
      const { ipv4, ipv6 } = one.facts.network as { ipv4: string; ipv6: string };
      const addresses = await say(one, 'busybox ip addr show eth0 | busybox sed -n "s/.*inet6* \\([^/ ]*\\).*/\\1/p"');
      expect(addresses.trim().split('\n').sort()).toEqual([ipv4, ipv6].sort());
      expect(await tcp(one, HOST4, 80)).toContain('tcp 80');
      expect(await tcp(one, NEIGHBOUR4, 80)).toBe('refused');
    }
    expect(await tcp(box, HOST4, 80)).toContain('tcp 80');
    await say(forks[0]!, 'echo of the left > /work-kept; busybox sync');
    expect(await say(box, 'cat /work-kept')).toBe('on disk\n');
    expect(await say(forks[1]!, 'cat /work-kept')).toBe('on disk\n');
  });

  it('are sandboxes like any other: paused, packed, found by the next service, forked once more', async () => {
    const [left, right] = forks as [NodeSandbox, NodeSandbox];
    expect(Date.parse(left.facts.resident!.expiresAt!)).toBeGreaterThan(Date.now());
    await say(left, 'echo kept > /dev/shm/left');
    await left.pause();
    const seen = await right.whileStill(async ({ upper }) => fs.readFileSync(join(upper, 'work-kept'), 'utf8'));
    expect(seen).toBe('on disk\n');
    const running = await right.exec({ args: ['sh', '-c', 'read x; echo got $x'], stdin: true });
    const names = [box.name, left.name, right.name];
    await all.node.close();
    fs.mkdirSync(join(folderOf(box), 'moment-of-one-that-was-killed'));
    all.node = await all.openNode();
    const [source, ...others] = names.map((name) => all.node.get(name)) as [NodeSandbox, ...NodeSandbox[]];
    box = source;
    expect(momentsOf(box)).toEqual([]);
    forks.splice(0, 2, ...others);
    expect(forks[0]!.state).toBe('paused');
    const again = forks[1]!.command(running.id);
    await again.write(Buffer.from('it\n'));
    expect((await told(again)).stdout).toBe('got it\n');
    // Of one that is paused, and stays so.
    const moment = await forks[0]!.takeMoment();
    expect(forks[0]!.state).toBe('paused');
    const third = await fork('third', moment).finally(() => moment.discard());
    await third.goOn();
    expect(await say(third, 'cat /dev/shm/left /work-kept; busybox hostname')).toBe('kept\nof the left\nthird\n');
    await third.destroy();
    expect(await say(forks[0]!, 'cat /dev/shm/left')).toBe('kept\n');
  });

  it('are not made, and harm nobody, when their moment cannot be stored', async () => {
    const busy = await box.exec({ args: ['sh', '-c', DRAWS], stdin: true });
    const places = sandboxFolders(all.site.folders, box.name);
    fs.rmSync(join(places.folder, 'commands-away'), { recursive: true, force: true });
    fs.renameSync(places.commands, `${places.folder}/commands-away`);
    fs.writeFileSync(places.commands, 'no folder');
    try {
      await expect(box.takeMoment()).rejects.toMatchObject({ code: 'ENOTDIR' });
    } finally {
      fs.rmSync(places.commands);
      fs.renameSync(`${places.folder}/commands-away`, places.commands);
    }
    expect(momentsOf(box)).toEqual([]);
    await busy.write(Buffer.from('one\n'));
    await busy.closeStdin();
    expect((await told(busy)).stdout).toMatch(/^[0-9a-f-]{36}\nover\n$/);
    expect(await tcp(box, HOST4, 80)).toContain('tcp 80');
  });

  it('leave nothing', async () => {
    // Others of this machine have theirs.
    const memories = all.node.list().map(({ facts }) => vmPlaces(all.site.folders.runDir, facts.id).memoryFile);
    expect(memories.filter((path) => fs.existsSync(path)).length).toBeGreaterThan(0);
    for (const one of all.node.list()) await one.stop({ timeMs: 0 });
    for (const name of [box.name, 'left', 'right']) await all.node.remove(name);
    expect(linksNamed('dsv')).toEqual([]);
    const { mounts, ...others } = all.site.leftovers();
    // The network's own, which goes with the service.
    expect(mounts.filter((one) => !one.endsWith('/network/bpf'))).toEqual([]);
    expect(others).toMatchObject({ folders: [], cgroups: [] });
    expect(memories.filter((path) => fs.existsSync(path))).toEqual([]);
  });
});
