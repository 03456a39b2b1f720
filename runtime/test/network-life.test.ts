/** Networks over the deaths of those who made them: the service's, the resolver's, the sandbox's. In the end nothing is left. */
import { type ChildProcess, spawn } from 'node:child_process';
import { once } from 'node:events';
import { afterAll, afterEach, beforeAll, describe, expect, it } from 'vitest';
import { cgroupsOf, membersOf } from '../backend/cgroup-cleanup.ts';
import { parsePolicy } from '../network/policy.ts';
import { listSandboxes } from '../sandbox/sandboxes.ts';
import { type BundledChild, bundledChild } from './bundled-child.ts';
import type { NetworkChildOrder } from './network-child.ts';
import { inNamespaceOf, tcp } from './network-inside.ts';
import { NetworkSite } from './network-site.ts';
import { hasNetworkTools } from './network-tools.ts';
import { HOST4, MACHINE4, NEIGHBOUR4, networkLeft } from './network-world.ts';
import { until } from './resident-fixture.ts';

describe.skipIf(!hasNetworkTools())('networks over deaths', { timeout: 240_000 }, () => {
  let all: NetworkSite;
  let program: BundledChild;
  let count = 0;
  const started: { process: ChildProcess }[] = [];

  beforeAll(async () => {
    all = await NetworkSite.open();
    await all.node.close();
    program = bundledChild(new URL('./network-child.ts', import.meta.url));
  }, 240_000);
  afterEach(async () => {
    for (const one of started.splice(0)) await kill(one);
    await all.stopAll();
    await all.node.close();
    expect(networkLeft()).toEqual([]);
  });
  afterAll(async () => {
    program?.remove();
    await all?.remove();
  }, 120_000);

  function child(order: Partial<NetworkChildOrder>, failpoint?: string): { process: ChildProcess; name: string } {
    const { site, dns, imageName } = all;
    const name = `child${count++}`;
    const whole: NetworkChildOrder = {
      storeUrl: site.store.url,
      image: imageName,
      name,
      folders: site.folders,
      upstreams: [dns.server],
      policy: { rules: [{ allow: HOST4, ports: [80] }, { allow: 'near.test' }] },
      reach: [],
      ...order,
    };
    const env = { ...process.env, ...(failpoint === undefined ? {} : { DSEC_FAILPOINT: failpoint }) };
    const running = spawn(process.execPath, [program.path, JSON.stringify(whole)], {
      stdio: ['ignore', 'pipe', 'inherit'],
      env,
    });
    started.push({ process: running });
    return { process: running, name };
  }

  async function untilReady({ process }: { process: ChildProcess }): Promise<string> {
    let said = '';
    process.stdout!.on('data', (bytes: Buffer) => {
      said += bytes;
    });
    await until(
      'the child is ready',
      () => said.includes('ready') || process.exitCode !== null || process.signalCode !== null,
    );
    return said;
  }

  async function kill({ process }: { process: ChildProcess }): Promise<void> {
    const isOver = process.exitCode !== null || process.signalCode !== null;
    process.kill('SIGKILL');
    if (!isOver) await once(process, 'exit');
  }

  /** A process of the sandbox, with no service to ask. */
  function pidOf(name: string): number {
    const record = listSandboxes(all.site.folders).find((one) => one.name === name)!;
    return cgroupsOf(record.id).flatMap((group) => membersOf(group))[0]!;
  }

  it('without the service what is allowed stays so, and nothing is added; the next one goes on', async () => {
    const one = child({ reach: [['near.test', 80]] });
    expect(await untilReady(one)).toContain(`tcp 80 ${MACHINE4}`);
    await kill(one);
    const pid = pidOf(one.name);
    const connects = (host: string, port: number) =>
      inNamespaceOf(
        pid,
        `import socket\ntry: socket.create_connection(('${host}', ${port}), 10); print('yes')\nexcept OSError as e: print(e.strerror)`,
      ).trim();
    expect(connects(HOST4, 80)).toBe('yes');
    expect(connects(NEIGHBOUR4, 443)).toBe('yes');
    expect(connects(HOST4, 443)).toBe('Connection refused');
    expect(connects(MACHINE4, 80)).toBe('Connection refused');
    // Nobody answers questions.
    const asks = `import socket\ns = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.settimeout(1)\ntry: s.sendto(b'?', ('10.209.0.1', 53)); print(s.recv(10))\nexcept OSError as e: print('nothing')`;
    expect(inNamespaceOf(pid, asks).trim()).toBe('nothing');
    all.node = await all.openNode();
    const sandbox = all.node.get(one.name);
    expect(sandbox.network.counters()).toMatchObject({ openedAddresses: 1 });
    expect(sandbox.network.counters().deniedPackets).toBeGreaterThanOrEqual(2);
    expect(sandbox.network.denied()).toContainEqual(expect.objectContaining({ destination: HOST4, port: 443 }));
    expect(await tcp(sandbox, NEIGHBOUR4, 443)).toBe(`tcp 443 ${MACHINE4}`);
    await sandbox.network.setPolicy(parsePolicy({ rules: [{ allow: 'web.test', ports: [443] }] }));
    expect(await tcp(sandbox, NEIGHBOUR4, 443)).toBe('refused');
    expect(await tcp(sandbox, HOST4, 80)).toBe('refused');
    expect(await tcp(sandbox, 'web.test', 443)).toBe(`tcp 443 ${MACHINE4}`);
  });

  it('an answer ends by itself when there is no service', async () => {
    all.node = await all.openNode();
    const sandbox = await all.create({ rules: [{ allow: 'web.test' }] });
    expect(all.network.open(sandbox.facts.id, 'web.test', [HOST4], 5)).toEqual([HOST4]);
    expect(await tcp(sandbox, HOST4, 80)).toBe(`tcp 80 ${MACHINE4}`);
    const pid = pidOf(sandbox.name);
    await all.node.close();
    const connects = () =>
      inNamespaceOf(
        pid,
        `import socket\ntry: socket.create_connection(('${HOST4}', 80), 10); print('yes')\nexcept OSError as e: print(e.strerror)`,
      ).trim();
    await until('it has expired', () => connects() === 'Connection refused');
    all.node = await all.openNode();
  });

  it('a policy that was set before the service died is the one that holds', async () => {
    const one = child({ next: { rules: [{ allow: NEIGHBOUR4, ports: [80] }] } });
    await untilReady(one);
    await kill(one);
    all.node = await all.openNode();
    const sandbox = all.node.get(one.name);
    expect(sandbox.network.view().policy?.rules).toEqual([{ allow: NEIGHBOUR4, ports: [80] }]);
    expect(await tcp(sandbox, NEIGHBOUR4, 80)).toBe(`tcp 80 ${MACHINE4}`);
    expect(await tcp(sandbox, HOST4, 80)).toBe('refused');
  });

  /** Where it was killed, not one that went past. */
  async function killedAt(place: string, order: Partial<NetworkChildOrder> = {}): Promise<string> {
    const one = child(order, place);
    expect(await untilReady(one)).not.toContain('ready');
    expect(one.process.signalCode).toBe('SIGKILL');
    all.node = await all.openNode();
    return one.name;
  }

  it.each([
    'machine-resolver',
    'machine-filtered',
    'machine-ready',
    'network-table',
    'create-recorded',
    'create-launched',
    'network-begun',
    'network-linked',
    'network-connected',
  ])('killed at %s of a creation: it reaches what it may, or is undone', async (place) => {
    const name = await killedAt(place);
    const sandbox = all.node.list().find((one) => one.name === name);
    if (sandbox === undefined) return;
    expect(await tcp(sandbox, HOST4, 80)).toBe(`tcp 80 ${MACHINE4}`);
    expect(await tcp(sandbox, NEIGHBOUR4, 80)).toBe('refused');
  });

  it.each(['policy-recorded', 'policy-applied'])('killed at %s: the policy on record holds', async (place) => {
    const name = await killedAt(place, { next: { rules: [{ allow: NEIGHBOUR4, ports: [80] }] } });
    const sandbox = all.node.get(name);
    expect(sandbox.network.view().policy?.rules).toEqual([{ allow: NEIGHBOUR4, ports: [80] }]);
    expect(await tcp(sandbox, NEIGHBOUR4, 80)).toBe(`tcp 80 ${MACHINE4}`);
    expect(await tcp(sandbox, HOST4, 80)).toBe('refused');
  });

  it.each(['end-begun', 'network-unlinked', 'network-released', 'end-dismantled'])(
    'killed at %s of an end: nothing is left',
    async (place) => {
      const name = await killedAt(place, { stop: true });
      expect(all.node.list().filter((one) => one.name === name)).toEqual([]);
      // Its number, table and link are free again.
      const next = await all.create({ rules: [{ allow: HOST4, ports: [80] }] });
      expect(await tcp(next, HOST4, 80)).toBe(`tcp 80 ${MACHINE4}`);
    },
  );

  it('leaves nothing of a sandbox that ended without a service', async () => {
    const one = child({});
    await untilReady(one);
    const pid = pidOf(one.name);
    await kill(one);
    process.kill(pid, 'SIGKILL');
    all.node = await all.openNode();
    await until('it has ended', () => all.node.list().length === 0);
  });
});
