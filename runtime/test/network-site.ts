/** A node in a world of its own (network-world.ts), with a resolver that asks a fake upstream. */
import { once } from 'node:events';
import { connect, createServer, type Server } from 'node:net';
import { openImage } from '#imagesvc';
import { findAgent } from '../backend/agent-binary.ts';
import type { NodeNetwork } from '../network/node-network.ts';
import { parsePolicy } from '../network/policy.ts';
import type { CreateOptions } from '../node/create-sandbox.ts';
import type { NodeSandbox } from '../node/node-sandbox.ts';
import { type NodeOptions, SandboxNode } from '../node/sandbox-node.ts';
import { type FakeAnswer, FakeDns, type FakeQuestion } from './fake-dns.ts';
import { HOST4, MACHINE4, NEIGHBOUR4, NetworkWorld } from './network-world.ts';
import { TEST_IMAGES } from './resident-images.ts';
import { Site } from './sandbox-fixture.ts';

const LEADS: Readonly<Record<string, string>> = {
  'web.test': HOST4,
  'near.test': NEIGHBOUR4,
  'a.good.test': HOST4,
  'bad.good.test': HOST4,
  'good.test': HOST4,
  'machine.good.test': MACHINE4,
  'meta.good.test': '169.254.169.254',
  'pool.good.test': '10.209.0.1',
};

function zone({ name, type }: FakeQuestion): FakeAnswer {
  const value = LEADS[name];
  const soa = { name: 'test', type: 'SOA', value: '60' } as const;
  if (value === undefined) return { rcode: 3, authorities: [soa] };
  return type === 1 ? { answers: [{ name, type: 'A', value, ttl: 60 }] } : { authorities: [soa] };
}

export class NetworkSite {
  readonly world: NetworkWorld;
  readonly site: Site;
  readonly dns: FakeDns;
  readonly imageName = 'debian-like:1';
  node: SandboxNode;
  private count = 0;

  private readonly options: Partial<NodeOptions>;

  private constructor(world: NetworkWorld, site: Site, dns: FakeDns, node: SandboxNode, options: Partial<NodeOptions>) {
    this.options = options;
    this.world = world;
    this.site = site;
    this.dns = dns;
    this.node = node;
  }

  static async open(options: Partial<NodeOptions> = {}): Promise<NetworkSite> {
    const world = await NetworkWorld.open();
    const site = await new Site().open();
    const dns = await FakeDns.open(zone);
    const { name, fill } = TEST_IMAGES.find((one) => one.name === 'debian-like')!;
    await site.image(`${name}:1`, [fill]);
    const opened = new NetworkSite(world, site, dns, undefined as never, options);
    opened.node = await opened.openNode();
    return opened;
  }

  openNode(): Promise<SandboxNode> {
    const network = { upstreams: [this.dns.server] };
    return SandboxNode.open({
      agent: findAgent()!,
      folders: this.site.folders,
      network,
      onNote: console.log,
      ...this.options,
    });
  }

  async create(policy: unknown, options: Partial<CreateOptions> = {}): Promise<NodeSandbox> {
    const { store } = this.site;
    const base = await openImage(store, this.imageName);
    const network = { mode: 'policy', policy: parsePolicy(policy) } as const;
    return this.node.create({ store, base, name: `n${this.count++}`, network, ...options });
  }

  /** What its resolver uses. */
  get network(): NodeNetwork {
    return (this.node as unknown as { network: NodeNetwork }).network;
  }

  async stopAll(): Promise<void> {
    await Promise.all(this.node.list().map((sandbox) => sandbox.stop({ timeMs: 0 })));
  }

  async remove(): Promise<void> {
    await this.stopAll();
    await this.node.close();
    this.dns.close();
    this.world.close();
    await this.site.remove();
  }
}

/** Answers "reached" to everybody. */
export async function listening(host: string): Promise<{ readonly server: Server; readonly port: number }> {
  const server = createServer((socket) => socket.on('error', () => {}).end('reached\n'));
  server.listen({ host, port: 0, ipv6Only: true });
  await once(server, 'listening');
  return { server, port: (server.address() as { port: number }).port };
}

/** From this machine. */
export async function reach(host: string, port: number): Promise<'connected' | 'not'> {
  const socket = connect({ host, port, timeout: 1000 });
  const outcome = await new Promise<'connected' | 'not'>((resolve) => {
    socket.once('connect', () => resolve('connected'));
    for (const event of ['error', 'timeout']) socket.once(event, () => resolve('not'));
  });
  socket.destroy();
  return outcome;
}
