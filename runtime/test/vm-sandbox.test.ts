/** A sandbox in a virtual machine: what is asked of it, a service that is started again under it, how it ends, and that nothing of it stays. */
import { randomBytes } from 'node:crypto';
import { once } from 'node:events';
import * as fs from 'node:fs';
import { connect } from 'node:net';
import { setTimeout as delay } from 'node:timers/promises';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { mountsAt } from '#linux';
import { cgroupsOf } from '../backend/cgroup-cleanup.ts';
import { withKeptSandbox } from '../index.ts';
import type { NodeSandbox } from '../node/node-sandbox.ts';
import { sandboxFolders } from '../sandbox/state-folders.ts';
import { PACKET, packetBytes } from '../vm/guest/packets.ts';
import { readMachineRecord } from '../vm/qemu/machine-process.ts';
import { hasSnapshot, snapshotFolder } from '../vm/vm-pausing.ts';
import { vmPlaces } from '../vm/vm-places.ts';
import { say, told, until } from './resident-fixture.ts';
import { canRunVms, createVm, ResidentSite } from './vm-site.ts';

/** Of a session that there is none of. */
const packet = packetBytes({ kind: PACKET.frames, session: 77n, number: 1, taken: 0, payload: Buffer.alloc(200, 1) });

describe.skipIf(!canRunVms())('a sandbox in a virtual machine', { timeout: 600_000 }, () => {
  let all: ResidentSite;
  let box: NodeSandbox;
  beforeAll(async () => {
    all = await ResidentSite.open();
    box = await createVm(all, { env: ['GIVEN=1'], workdir: '/work/deep', pids: 100, dockerDiskBytes: 64 << 20 });
  }, 600_000);
  afterAll(() => all?.remove(), 300_000);

  it('runs commands as a container does', async () => {
    expect(box.state).toBe('running');
    expect(await say(box, 'id -u; pwd; echo $GIVEN; hostname; cat /etc/passwd | wc -l')).toBe(
      `0\n/work/deep\n1\n${box.name}\n2\n`,
    );
    const piped = await box.exec({ args: ['cat'], stdin: true });
    const input = Buffer.alloc(300_000, 'input ');
    const written = piped.write(input).then(() => piped.closeStdin());
    expect((await told(piped)).stdout).toBe(input.toString());
    await written;
    expect(await piped.wait()).toMatchObject({ exitCode: 0, stdoutBytes: 300_000 });
    await expect(box.exec({ args: ['no-such-program'] })).rejects.toMatchObject({ code: 'RUNTIME_COMMAND_NOT_FOUND' });
  });

  it('has a root that nothing of its machine can be seen in', async () => {
    expect(await say(box, 'ls /; cat /proc/1/comm; ps | wc -l')).not.toMatch(/layers|modules|upper/);
    expect(await say(box, 'cat /proc/self/cgroup')).toMatch(/^0::\/c\d+$/m);
  });

  it('ends commands at their time-out with all that they started', async () => {
    const command = await box.exec({ args: ['sh', '-c', 'setsid sleep 999 & sleep 999'], timeoutMs: 300 });
    expect(await command.wait()).toMatchObject({ timedOut: true, exitCode: 137 });
    await until('nothing of it runs', async () => (await say(box, 'ps | grep -c "[s]leep 999"')) === '0\n');
  });

  it('has files, ports and watches', async () => {
    await box.files.write('/tmp/a', Buffer.from('hello'));
    expect(String(await box.files.read('/tmp/a'))).toBe('hello');
    const big = Buffer.alloc(3 << 20, 7);
    await box.files.write('/tmp/big', big);
    expect((await box.files.read('/tmp/big')).equals(big)).toBe(true);
    const watch = await box.watch('/tmp');
    const events = watch[Symbol.asyncIterator]();
    await say(box, 'echo x > /tmp/new');
    expect((await events.next()).value).toMatchObject({ event: 'made' });
    watch.close();
    await expect(box.connect(81)).rejects.toMatchObject({ code: 'RUNTIME_PORT_CLOSED' });
  });

  it('tells what it uses, and keeps limits that are changed', async () => {
    const used = await box.usage();
    expect(used.cpuUsec).toBeGreaterThan(0);
    expect(used.limits).toMatchObject({ pids: 100, cpus: 1, memoryBytes: 192 << 20 });
    expect(await box.update({ pids: 40, cpus: 0.9 })).toMatchObject({ pids: 40, cpus: 0.9 });
    const bomb = await box.exec({ args: ['sh', '-c', 'f() { sleep 600 & f; }; f'] });
    await until('it is full', async () => (await box.usage()).pids >= 40);
    await bomb.killTree();
    await expect(box.update({ memoryBytes: 256 << 20 })).rejects.toMatchObject({ code: 'RUNTIME_LIMIT_REFUSED' });
  });

  it('goes on when the service is started again, with its commands and its disk', async () => {
    const script = 'i=0; while [ $i -lt 3000 ]; do echo line $i; i=$((i+1)); done; read x; echo done $x';
    const command = await box.exec({ args: ['sh', '-c', script], stdin: true });
    await until('it writes', async () => (await told(command, { follow: false })).stdout.length > 1000);
    await all.node.close();
    // What comes between is no protocol of ours.
    const { agentSocket } = vmPlaces(all.site.folders.runDir, box.facts.id);
    for (const junk of [randomBytes(100_000), Buffer.from('DSv1'.repeat(5_000)), packet.subarray(0, 60), packet]) {
      const socket = connect(agentSocket);
      socket.on('error', () => {});
      socket.resume();
      await once(socket, 'connect');
      socket.end(junk);
      await Promise.race([once(socket, 'close'), delay(300)]);
      socket.destroy();
    }
    await all.restart();
    box = all.node.get(box.name);
    const again = box.command(command.id);
    await again.write(Buffer.from('now\n'));
    const out = (await told(again)).stdout;
    expect(out.endsWith('line 2999\ndone now\n')).toBe(true);
    expect(out.split('\n').length).toBe(3002);
    expect(await say(box, 'cat /tmp/a; echo more > /tmp/b; sync; cat /tmp/b')).toBe('hellomore\n');
  });

  it('is paused on disk without a process, and goes on as it was', async () => {
    const places = vmPlaces(all.site.folders.runDir, box.facts.id);
    const waiting = await box.exec({ args: ['sh', '-c', 'read x; echo got $x'], stdin: true });
    await say(box, 'echo kept > /dev/shm/kept');
    await box.pause();
    expect(box.state).toBe('paused');
    expect(fs.existsSync(places.memoryFile)).toBe(false);
    expect(await say(box, 'cat /dev/shm/kept')).toBe('kept\n');
    expect(box.state).toBe('running');
    await waiting.write(Buffer.from('it\n'));
    expect((await told(waiting)).stdout).toBe('got it\n');
  });

  it('is paused again by whoever looks at its changes, also when both are asked at once', async () => {
    await box.pause();
    const [seen] = await Promise.all([
      box.whileStill(async ({ upper }) => fs.existsSync(`${upper}/tmp/b`)),
      box.pause(),
      box.whileStill(async () => {}),
    ]);
    expect(seen).toBe(true);
    expect(box.state).toBe('paused');
  });

  it('says so when it cannot be resumed, and is paused as before', async () => {
    const state = `${snapshotFolder(sandboxFolders(all.site.folders, box.name).folder)}/state`;
    await box.pause();
    fs.renameSync(state, `${state}.away`);
    await expect(box.exec({ args: ['true'] })).rejects.toThrow();
    await expect(box.files.stat('/tmp')).rejects.toThrow();
    expect(box.state).toBe('paused');
    fs.renameSync(`${state}.away`, state);
    expect(await say(box, 'cat /tmp/b')).toBe('more\n');
    expect(hasSnapshot(sandboxFolders(all.site.folders, box.name).folder)).toBe(false);
  });

  it('shows what it changed as it was at one moment, and goes on meanwhile', async () => {
    await say(
      box,
      'echo changed > /work/changed; rm /etc/group; dd if=/dev/urandom of=/var/lib/docker/layer bs=1M count=2 2>/dev/null',
    );
    const places = sandboxFolders(all.site.folders, box.name);
    const seen = await box.whileStill(async ({ upper }) => {
      expect(await say(box, 'echo later > /work/later; cat /work/later')).toBe('later\n');
      return {
        changed: fs.readFileSync(`${upper}/work/changed`, 'utf8'),
        later: fs.existsSync(`${upper}/work/later`),
        whiteout: fs.lstatSync(`${upper}/etc/group`).isCharacterDevice(),
        names: fs.readdirSync(upper),
        docker: fs.existsSync(`${upper}/var/lib/docker/layer`),
      };
    });
    expect(seen).toMatchObject({ changed: 'changed\n', later: false, whiteout: true, docker: false });
    expect(seen.names).not.toContain('proc');
    expect(mountsAt(places.disk)).toEqual([]);
    expect(fs.existsSync(places.diskImage)).toBe(false);
  });

  it('ends when it is asked to, and nothing of it stays', async () => {
    const { id } = box.facts;
    const places = vmPlaces(all.site.folders.runDir, id);
    const pid = readMachineRecord(places.folder)?.spec.id;
    expect(pid).toBeDefined();
    expect(await box.stop()).toMatchObject({ reason: 'stopped' });
    expect(fs.existsSync(places.folder)).toBe(false);
    expect(fs.existsSync(places.memoryFile)).toBe(false);
    expect(cgroupsOf(id)).toEqual([]);
    const kept = await withKeptSandbox(
      box.name,
      async ({ upper }) => fs.readFileSync(`${upper}/work/later`, 'utf8'),
      all.site.folders,
    );
    expect(kept).toBe('later\n');
    await all.node.remove(box.name);
    expect(fs.existsSync(sandboxFolders(all.site.folders, box.name).folder)).toBe(false);
    expect(all.site.leftovers()).toMatchObject({ mounts: [], folders: [] });
  });

  it('ends at once while it is being paused', async () => {
    const other = await createVm(all);
    const pausing = other.pause().catch(() => {});
    await until('its memory is being written', async () =>
      fs.existsSync(`${snapshotFolder(sandboxFolders(all.site.folders, other.name).folder)}.part`),
    );
    expect(await other.stop({ timeMs: 0 })).toMatchObject({ reason: 'stopped' });
    await pausing;
    await all.node.remove(other.name);
    expect(all.site.leftovers()).toMatchObject({ mounts: [], folders: [] });
  });
});
