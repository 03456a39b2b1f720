/** A resolver for the tests of it, between a client that is not ours (that of Node) and an upstream that lies. */
import { createSocket } from 'node:dgram';
import * as dns from 'node:dns/promises';
import { once } from 'node:events';
import { afterEach } from 'vitest';
import type { OpenedAddresses, SandboxNames } from '../network/opened-addresses.ts';
import { effectivePolicy, parsePolicy } from '../network/policy.ts';
import { Resolver } from '../network/resolver/resolver.ts';
import { ANSWER_LIMITS, type AnswerLimits, type DeniedName } from '../network/resolver/sandbox-answers.ts';
import type { UpstreamServer } from '../network/resolver/upstream-servers.ts';
import { type FakeAnswer, FakeDns, type FakeQuestion } from './fake-dns.ts';

export function namesOf(policy: unknown): SandboxNames {
  const { default: preset, names } = effectivePolicy(parsePolicy(policy), {});
  return { default: preset, rules: names };
}

export const allow = (...patterns: string[]) => namesOf({ rules: patterns.map((pattern) => ({ allow: pattern })) });
export const A = 1;
export const AAAA = 28;

/** The zone of most tests. */
export function zone({ name, type }: FakeQuestion): FakeAnswer {
  const soa = { name: 'test', type: 'SOA', value: '60' } as const;
  if (name === 'nothing.test' || name.endsWith('.missing.test')) return { rcode: 3, authorities: [soa] };
  if (type === AAAA && name === 'www.test') return { answers: [{ name, type: 'AAAA', value: '2a00::7' }] };
  if (type !== A) return { authorities: [soa] };
  return { answers: [{ name, type: 'A', value: '93.184.216.34', ttl: 120 }] };
}

export class Site {
  readonly opened: { name: string; addresses: readonly string[]; seconds: number }[] = [];
  readonly denied: DeniedName[] = [];
  names: SandboxNames | undefined;
  /** Of what is asked to be opened. */
  closed = new Set<string>();
  upstream!: FakeDns;
  resolver!: Resolver;
  client!: dns.Resolver;

  /** `udpMs`: how long an upstream is waited for; `before`: asked before the one that answers. */
  async open(
    names: SandboxNames,
    answer: FakeDns['answer'] = zone,
    limits: Partial<AnswerLimits> = {},
    { udpMs = 20_000, before = [] }: { readonly udpMs?: number; readonly before?: readonly UpstreamServer[] } = {},
  ): Promise<this> {
    this.names = names;
    this.upstream = await FakeDns.open(answer);
    const opened: OpenedAddresses = {
      sandboxAt: (address) => (address === '127.0.0.1' ? 'box' : undefined),
      namesOf: () => this.names,
      open: (_sandbox, name, addresses, seconds) => {
        this.opened.push({ name, addresses, seconds });
        return addresses.filter((address) => !this.closed.has(address));
      },
    };
    this.resolver = await Resolver.open({
      opened,
      denied: (denied) => this.denied.push(denied),
      addresses: [{ address: '127.0.0.1', port: 0 }],
      upstreams: [...before, this.upstream.server],
      limits: { ...ANSWER_LIMITS, ...limits },
      askLimits: { udpMs, tcpMs: 20_000, forgeries: 3 },
    });
    this.client = new dns.Resolver({ timeout: 50_000, tries: 1 });
    this.client.setServers([`127.0.0.1:${this.port}`]);
    return this;
  }

  get port(): number {
    return this.resolver.addresses[0]!.port;
  }

  get reasons(): string[] {
    return this.denied.map(({ name, type, reason }) => `${reason} ${name} ${type}`);
  }

  /** Over UDP, without a client's own ideas. */
  async raw(message: Buffer, from = '127.0.0.1'): Promise<Buffer> {
    const socket = createSocket('udp4');
    try {
      socket.bind(0, from);
      await once(socket, 'listening');
      const answer = once(socket, 'message');
      socket.send(message, this.port, '127.0.0.1');
      return (await answer)[0] as Buffer;
    } finally {
      socket.close();
    }
  }

  close(): void {
    this.resolver.close();
    this.upstream.close();
  }
}

/** Sites of a group of tests, closed after each. */
export function resolverSites(): (...parts: Parameters<Site['open']>) => Promise<Site> {
  const sites: Site[] = [];
  afterEach(() => {
    for (const one of sites.splice(0)) one.close();
  });
  return async (...parts) => {
    const made = await new Site().open(...parts);
    sites.push(made);
    return made;
  };
}
