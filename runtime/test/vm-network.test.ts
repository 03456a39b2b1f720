/** A virtual machine's network: the same policy, the same resolver and the same notes as a container's, over a tap; its layers are memory of the host here. */
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { parsePolicy } from '../network/policy.ts';
import { linksNamed } from '../network/sandbox-link.ts';
import type { NodeSandbox } from '../node/node-sandbox.ts';
import { tcp } from './network-inside.ts';
import { NetworkSite } from './network-site.ts';
import { hasNetworkTools } from './network-tools.ts';
import { HOST4, NEIGHBOUR4 } from './network-world.ts';
import { say } from './resident-fixture.ts';
import { canRunVms, SMALL_VM } from './vm-site.ts';

describe.skipIf(!canRunVms() || !hasNetworkTools())('a virtual machine with a policy', { timeout: 600_000 }, () => {
  let all: NetworkSite;
  let box: NodeSandbox;
  beforeAll(async () => {
    all = await NetworkSite.open();
    const policy = {
      default: 'deny',
      rules: [
        { allow: HOST4, ports: [80] },
        { allow: 'web.test', ports: [443] },
      ],
    };
    box = await all.create(policy, {
      ...SMALL_VM,
      memoryBytes: 256 << 20,
      memory: { pmem: true, reporting: true, damon: true },
    });
  }, 600_000);
  afterAll(() => all?.remove(), 300_000);

  it('reads its layers in place', async () => {
    expect(await say(box, 'while read line; do echo "$line"; done < /proc/mounts')).toContain('overlay / overlay');
    expect(box.facts.vm?.memory).toEqual({ pmem: true, reporting: true, damon: true });
  });

  it('reaches what it may, by name too, and nothing else', async () => {
    expect(await tcp(box, HOST4, 80)).toContain('tcp 80');
    expect(await tcp(box, 'web.test', 443)).toContain('tcp 443');
    expect(await tcp(box, NEIGHBOUR4, 80)).toBe('refused');
    expect(await tcp(box, HOST4, 22)).toBe('refused');
    expect(await tcp(box, 'other.test', 80)).toBe('no name');
    const denied = box.network.denied();
    expect(denied.some(({ destination, port }) => destination === NEIGHBOUR4 && port === 80)).toBe(true);
  });

  it('has another policy at once, and its link over a service that is started again', async () => {
    await box.network.setPolicy(parsePolicy({ default: 'deny', rules: [{ allow: NEIGHBOUR4, ports: [80] }] }));
    expect(await tcp(box, NEIGHBOUR4, 80)).toContain('tcp 80');
    expect(await tcp(box, HOST4, 80)).toBe('refused');
    await all.node.close();
    all.node = await all.openNode();
    box = all.node.get(box.name);
    expect(await tcp(box, NEIGHBOUR4, 80)).toContain('tcp 80');
    expect(await tcp(box, HOST4, 80)).toBe('refused');
  });

  it('leaves no link', async () => {
    await box.stop({ timeMs: 0 });
    expect(linksNamed('dsv')).toEqual([]);
  });
});
