/** The resolver of sandboxes between a client that is not ours (that of Node) and an upstream that lies. */
import { createSocket } from 'node:dgram';
import * as dns from 'node:dns/promises';
import { once } from 'node:events';
import { connect } from 'node:net';
import { afterEach, describe, expect, it } from 'vitest';
import type { OpenedAddresses, SandboxNames } from '../network/opened-addresses.ts';
import { effectivePolicy, parsePolicy } from '../network/policy.ts';
import { parseQuery, parseUpstreamAnswer, upstreamQuery } from '../network/resolver/dns-message.ts';
import { readName, wireName } from '../network/resolver/dns-name.ts';
import { Resolver } from '../network/resolver/resolver.ts';
import { ANSWER_LIMITS, type AnswerLimits, type DeniedName } from '../network/resolver/sandbox-answers.ts';
import { mayBeOpened } from '../network/resolver/unopened-addresses.ts';
import { configuredServers, type UpstreamServer, upstreamServer } from '../network/resolver/upstream-servers.ts';
import { type FakeAnswer, FakeDns, type FakeQuestion, nameBytes, replyTo } from './fake-dns.ts';

function namesOf(policy: unknown): SandboxNames {
  const { default: preset, names } = effectivePolicy(parsePolicy(policy), {});
  return { default: preset, rules: names };
}

const allow = (...patterns: string[]) => namesOf({ rules: patterns.map((pattern) => ({ allow: pattern })) });
const A = 1;
const AAAA = 28;

/** The zone of most tests. */
function zone({ name, type }: FakeQuestion): FakeAnswer {
  const soa = { name: 'test', type: 'SOA', value: '60' } as const;
  if (name === 'nothing.test' || name.endsWith('.missing.test')) return { rcode: 3, authorities: [soa] };
  if (type === AAAA && name === 'www.test') return { answers: [{ name, type: 'AAAA', value: '2a00::7' }] };
  if (type !== A) return { authorities: [soa] };
  return { answers: [{ name, type: 'A', value: '93.184.216.34', ttl: 120 }] };
}

class Site {
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

describe('the resolver of sandboxes', { timeout: 60_000 }, () => {
  const sites: Site[] = [];
  const site = async (...parts: Parameters<Site['open']>) => {
    const made = await new Site().open(...parts);
    sites.push(made);
    return made;
  };
  const code = (promise: Promise<unknown>) =>
    promise.then(
      () => 'answered',
      (error: { code?: string }) => error.code,
    );
  afterEach(() => {
    for (const one of sites.splice(0)) one.close();
  });

  it('answers names that are allowed, opens their addresses before, and knows the answer the next time', async () => {
    const box = await site(allow('www.test', '*.wild.test'));
    expect(await box.client.resolve4('www.test', { ttl: true })).toEqual([{ address: '93.184.216.34', ttl: 120 }]);
    expect(await box.client.resolve6('www.test')).toEqual(['2a00::7']);
    expect(await box.client.resolve4('WWW.Test')).toEqual(['93.184.216.34']);
    expect(await box.client.resolve4('a.b.wild.test')).toEqual(['93.184.216.34']);
    expect(box.opened).toEqual([
      { name: 'www.test', addresses: ['93.184.216.34'], seconds: 130 },
      { name: 'www.test', addresses: ['2a00:0:0:0:0:0:0:7'], seconds: 310 },
      { name: 'www.test', addresses: ['93.184.216.34'], seconds: expect.any(Number) as number },
      { name: 'a.b.wild.test', addresses: ['93.184.216.34'], seconds: 130 },
    ]);
    expect(box.upstream.asked.map(({ name, type }) => [name, type])).toEqual([
      ['www.test', A],
      ['www.test', AAAA],
      ['a.b.wild.test', A],
    ]);
    expect(box.denied).toEqual([]);
  });

  it('refuses all other names, and none of them leaves', async () => {
    const box = await site(allow('www.test', '*.wild.test'));
    for (const name of ['test', 'wwww.test', 'www.test.evil', 'wild.test', 'evilwild.test', 'c2VjcmV0.evil.test']) {
      expect([name, await code(box.client.resolve4(name))]).toEqual([name, 'EREFUSED']);
    }
    expect(await code(box.client.resolveTxt('www.test'))).toBe('EREFUSED');
    expect(await code(box.client.resolveMx('www.test'))).toBe('EREFUSED');
    expect(await code(box.client.resolveAny('www.test'))).toBe('EREFUSED');
    expect(await code(box.client.resolvePtr('34.216.184.93.in-addr.arpa'))).toBe('EREFUSED');
    expect(box.upstream.asked).toEqual([]);
    expect(box.opened).toEqual([]);
    expect(box.reasons).toEqual([
      'name test A',
      'name wwww.test A',
      'name www.test.evil A',
      'name wild.test A',
      'name evilwild.test A',
      'name c2vjcmv0.evil.test A',
      'type www.test TXT',
      'type www.test MX',
      'type www.test ANY',
      'name 34.216.184.93.in-addr.arpa PTR',
    ]);
    expect(box.denied[0]).toMatchObject({ sandbox: 'box', from: { address: '127.0.0.1' } });
  });

  it('takes a rule that denies before one that allows more, and with a default of allow only those', async () => {
    const rules = [{ allow: '*.wild.test' }, { deny: 'bad.wild.test' }, { deny: '*.worse.wild.test' }];
    const box = await site(namesOf({ rules }));
    expect(await code(box.client.resolve4('good.wild.test'))).toBe('answered');
    expect(await code(box.client.resolve4('bad.wild.test'))).toBe('EREFUSED');
    expect(await code(box.client.resolve4('x.worse.wild.test'))).toBe('EREFUSED');
    const open = await site(namesOf({ default: 'allow', rules: [{ deny: '*.evil.test' }] }), ({ name, type }) =>
      type === 16 ? { answers: [{ name, type: 'TXT', value: 'text' }] } : zone({ name, type } as FakeQuestion),
    );
    expect(await code(open.client.resolve4('anything.test'))).toBe('answered');
    expect(await code(open.client.resolve4('x.evil.test'))).toBe('EREFUSED');
    expect(await open.client.resolveTxt('anything.test')).toEqual([['text']]);
    expect(await code(open.client.resolveTxt('x.evil.test'))).toBe('EREFUSED');
    expect(await code(open.client.resolveAny('anything.test'))).toBe('EREFUSED');
  });

  it('says what does not exist, and what has no address', async () => {
    const box = await site(allow('*.test', '*.missing.test'));
    expect(await code(box.client.resolve4('nothing.test'))).toBe('ENOTFOUND');
    expect(await code(box.client.resolve4('nothing.test'))).toBe('ENOTFOUND');
    expect(await code(box.client.resolve6('x.test'))).toBe('ENODATA');
    expect(box.upstream.asked.length).toBe(2);
    expect(box.denied).toEqual([]);
  });

  it('follows CNAMEs itself, however they come, by the name that was asked', async () => {
    const box = await site(
      allow('alias.test', 'far.test', 'loop.test', 'dangling.test', 'evil.test'),
      ({ name, type }) => {
        if (type !== A) return {};
        const far = /^far(\d)?\.(test|other)$/.exec(name);
        if (far !== null && name !== 'far9.other') {
          return { answers: [{ name, type: 'CNAME', value: `far${Number(far[1] ?? 0) + 1}.other`, ttl: 40 }] };
        }
        if (name === 'loop.test') return { answers: [{ name, type: 'CNAME', value: 'pool.other' }] };
        if (name === 'pool.other') return { answers: [{ name, type: 'CNAME', value: 'loop.test' }] };
        if (name === 'dangling.test') return { answers: [{ name, type: 'CNAME', value: 'no.other' }], rcode: 3 };
        if (name === 'alias.test') {
          return {
            answers: [
              { name: 'stranger.other', type: 'A', value: '9.9.9.9' },
              { name: 'b.other', type: 'A', value: '198.51.101.7', ttl: 50 },
              { name: 'a.other', type: 'CNAME', value: 'b.other', ttl: 3000 },
              { name, type: 'CNAME', value: 'a.other', ttl: 4000 },
            ],
          };
        }
        if (name === 'evil.test') {
          return { answers: [{ name: 'www.test', type: 'A', value: '198.51.101.9' }] };
        }
        return { answers: [{ name, type: 'A', value: '198.51.101.8' }] };
      },
    );
    expect(await box.client.resolve4('alias.test', { ttl: true })).toEqual([{ address: '198.51.101.7', ttl: 50 }]);
    expect(await box.client.resolve4('far.test', { ttl: true })).toEqual([{ address: '198.51.101.8', ttl: 40 }]);
    expect(await code(box.client.resolve4('loop.test'))).toBe('ESERVFAIL');
    expect(await code(box.client.resolve4('dangling.test'))).toBe('ENOTFOUND');
    // Answers about something else are none.
    expect(await code(box.client.resolve4('evil.test'))).toBe('ENODATA');
    expect(await code(box.client.resolve4('a.other'))).toBe('EREFUSED');
    expect(box.opened.map(({ name, addresses }) => [name, addresses])).toEqual([
      ['alias.test', ['198.51.101.7']],
      ['far.test', ['198.51.101.8']],
    ]);
  });

  it('opens no address inside, whoever names it', async () => {
    const values = [
      '127.0.0.1',
      '169.254.169.254',
      '10.1.2.3',
      '192.168.1.1',
      '0.0.0.0',
      '93.184.216.34',
      '93.184.216.35',
    ];
    const box = await site(
      namesOf({ rules: [{ allow: 'mixed.test' }, { allow: 'only.test' }, { allow: 'mirror.test', inside: true }] }),
      ({ name }) => ({
        answers: (name === 'only.test' ? values.slice(0, 5) : values).map(
          (value) => ({ name, type: 'A', value }) as const,
        ),
      }),
    );
    box.closed.add('93.184.216.35');
    expect(await box.client.resolve4('mixed.test')).toEqual(['93.184.216.34']);
    expect(await code(box.client.resolve4('only.test'))).toBe('EREFUSED');
    expect((await box.client.resolve4('mirror.test')).sort()).toEqual(['10.1.2.3', '192.168.1.1', '93.184.216.34']);
    expect(box.reasons).toEqual(['address only.test A']);
    expect(
      ['::1', '::ffff:10.0.0.1', 'fe80::1', 'fd00:ec2::254', '64:ff9b::a00:1', '2002:a00:1::1', '2001:db8::1'].filter(
        (one) => mayBeOpened(one),
      ),
    ).toEqual([]);
    expect(
      ['fd00:ec2::254', '169.254.169.254', '100.100.100.200', '127.0.0.53', '::1'].filter((one) =>
        mayBeOpened(one, true),
      ),
    ).toEqual([]);
    expect(['2a00::1', '8.8.8.8', '172.32.0.1', '100.128.0.1'].map((one) => mayBeOpened(one))).toEqual([
      true,
      true,
      true,
      true,
    ]);
  });

  it('bounds how long an address is open, and never says that it is longer', async () => {
    const ttls: Record<string, number> = {
      'zero.test': 0,
      'short.test': 5,
      'long.test': 1_000_000,
      'negative.test': 0x80000001,
    };
    const box = await site(allow('*.test'), ({ name }) => ({
      answers: [{ name, type: 'A', value: '93.184.216.34', ttl: ttls[name] }],
    }));
    const said: number[] = [];
    for (const name of Object.keys(ttls)) said.push((await box.client.resolve4(name, { ttl: true }))[0]!.ttl);
    expect(said).toEqual([0, 5, 3590, 0]);
    expect(box.opened.map(({ seconds }) => seconds)).toEqual([60, 60, 3600, 60]);
  });

  it('says what is long over TCP, and asks so itself', async () => {
    const many = Array.from({ length: 60 }, (_, n) => `93.184.217.${n}`);
    const box = await site(allow('many.test'), ({ name, tcp }) =>
      tcp ? { answers: many.map((value) => ({ name, type: 'A', value }) as const) } : { truncated: true },
    );
    const query = upstreamQuery(7, 'many.test', A);
    const plain = Buffer.from(query.subarray(0, query.length - 11));
    plain.writeUInt16BE(0, 10);
    const cut = await box.raw(plain);
    expect([cut.readUInt16BE(2) & 0x0200, cut.readUInt16BE(6), cut.length]).toEqual([0x0200, 0, plain.length]);
    expect((await box.raw(query)).readUInt16BE(6)).toBe(60);
    expect((await box.client.resolve4('many.test')).sort()).toEqual([...many].sort());
    expect(box.upstream.asked.map(({ tcp }) => tcp)).toEqual([false, true]);
    // Several on one connection, byte by byte, and its end before the answers.
    const socket = connect(box.port, '127.0.0.1');
    const head = Buffer.from([0, plain.length]);
    const both = Buffer.concat([head, plain, head, plain]);
    for (let at = 0; at < both.length; at += 7) socket.write(both.subarray(at, at + 7));
    socket.end();
    const parts: Buffer[] = [];
    for await (const bytes of socket) parts.push(bytes as Buffer);
    const all = Buffer.concat(parts);
    expect([all.readUInt16BE(0) * 2 + 4, all.readUInt16BE(8)]).toEqual([all.length, 60]);
  });

  it('believes no answer that somebody else could have made', async () => {
    const real = { answers: [{ name: 'www.test', type: 'A', value: '93.184.216.34' }] } as const;
    const evil = { answers: [{ name: 'www.test', type: 'A', value: '93.184.6.6' }] } as const;
    const changed = (query: Buffer, change: (copy: Buffer) => void) => {
      const copy = Buffer.from(query);
      change(copy);
      return replyTo(copy, evil);
    };
    const lowered = (copy: Buffer) => {
      for (let at = 13; at < 25; at++) {
        const letter = copy[at]!;
        if (letter >= 65 && letter <= 90) copy[at] = letter + 32;
        else if (letter >= 97 && letter <= 122) copy[at] = letter - 32;
      }
    };
    const box = await site(allow('*.test', 'www.test'), async ({ tcp, from, query }) => {
      if (tcp) return real;
      // From elsewhere, with all the rest right.
      const other = createSocket('udp4');
      await new Promise<void>((sent) => other.send(replyTo(query, evil), from!.port, from!.address, () => sent()));
      other.close();
      return {
        raw: (asked) => [
          changed(asked, (copy) => copy.writeUInt16BE(asked.readUInt16BE(0) ^ 1, 0)),
          changed(asked, lowered),
          replyTo(asked, real),
        ],
      };
    });
    expect(await box.client.resolve4('www.test')).toEqual(['93.184.216.34']);
    // One that guesses on and on has it moved to where guessing is no use.
    box.upstream.answer = ({ tcp }) =>
      tcp
        ? { answers: [{ name: 'two.test', type: 'A', value: '93.184.216.35' }] }
        : {
            raw: (asked) =>
              Array.from({ length: 50 }, (_, n) =>
                changed(asked, (copy) => copy.writeUInt16BE((asked.readUInt16BE(0) + n + 1) & 0xffff, 0)),
              ),
          };
    expect(await box.client.resolve4('two.test')).toEqual(['93.184.216.35']);
    expect(box.upstream.asked.map(({ tcp }) => tcp)).toEqual([false, false, true]);
  });

  it('has each question another port, id and spelling', async () => {
    const box = await site(allow('*.test'));
    await Promise.all(Array.from({ length: 100 }, (_, n) => box.client.resolve4(`name-number-${n}.test`)));
    const { asked } = box.upstream;
    const different = (of: (one: (typeof asked)[number]) => unknown) => new Set(asked.map(of)).size;
    expect(asked.length).toBe(100);
    expect(different(({ port }) => port)).toBeGreaterThan(90);
    expect(different(({ id }) => id)).toBeGreaterThan(90);
    expect(different(({ spelled }) => spelled.replace(/\d/g, ''))).toBeGreaterThan(50);
  });

  it('asks once what many ask at the same time, and another upstream when one is dead', async () => {
    const box = await site(allow('*.test'), async (question) => {
      await new Promise((go) => setTimeout(go, 50));
      return zone(question);
    });
    await Promise.all(Array.from({ length: 50 }, () => box.client.resolve4('same.test')));
    expect(box.upstream.asked.length).toBe(1);
    const unused = await FakeDns.open(zone);
    unused.close();
    const second = await site(allow('www.test'), zone, {}, { before: [unused.server] });
    expect(await second.client.resolve4('www.test')).toEqual(['93.184.216.34']);
  });

  it('opens nothing when no upstream answers', async () => {
    const box = await site(allow('*.test'), () => ({ silent: true }), {}, { udpMs: 100 });
    expect(await code(box.client.resolve4('dead.test'))).toBe('ESERVFAIL');
    box.upstream.answer = () => ({ rcode: 2 });
    expect(await code(box.client.resolve4('failing.test'))).toBe('ESERVFAIL');
    expect(box.opened).toEqual([]);
  });

  it('lets no tunnel through: neither long nor many names below a wildcard, nor a flood', async () => {
    const box = await site(allow('*.wild.test', 'www.test'), zone, { newPerSecond: 0.001, newBurst: 3 });
    const long = `${'a'.repeat(60)}.${'b'.repeat(60)}.wild.test`;
    expect(await code(box.client.resolve4(long))).toBe('EREFUSED');
    const got: (string | undefined)[] = [];
    for (let n = 0; n < 5; n++) got.push(await code(box.client.resolve4(`n${n}.wild.test`)));
    expect(got).toEqual(['answered', 'answered', 'answered', 'EREFUSED', 'EREFUSED']);
    // What is known, and what is named exactly, goes on.
    expect(await code(box.client.resolve4('n1.wild.test'))).toBe('answered');
    expect(await code(box.client.resolve4('www.test'))).toBe('answered');
    expect(box.reasons.map((one) => one.split(' ')[0])).toEqual(['length', 'rate', 'rate']);
    const slow = await site(allow('www.test'), zone, { perSecond: 0.001, burst: 2 });
    const answers = await Promise.race([
      Promise.all([1, 2, 3].map((id) => slow.raw(upstreamQuery(id, 'www.test', A)))).then(() => 'all'),
      new Promise((go) => setTimeout(() => go('some'), 500)),
    ]);
    expect([answers, slow.reasons]).toEqual(['some', ['rate www.test A']]);
  });

  it('changes its mind at once when the policy does, also about what is under way', async () => {
    let release = () => {};
    const box = await site(allow('www.test', 'slow.test'), async (question) => {
      if (question.name === 'slow.test') await new Promise<void>((go) => (release = go));
      return zone(question);
    });
    await box.client.resolve4('www.test');
    const waits = code(box.client.resolve4('slow.test'));
    while (box.upstream.asked.length < 2) await new Promise((go) => setTimeout(go, 5));
    box.names = allow('other.test');
    release();
    expect(await waits).toBe('ESERVFAIL');
    expect(await code(box.client.resolve4('www.test'))).toBe('EREFUSED');
    expect(box.opened.length).toBe(1);
    // Gone: no answer at all, as for strangers.
    box.names = undefined;
    const silent = new dns.Resolver({ timeout: 200, tries: 1 });
    silent.setServers([`127.0.0.1:${box.port}`]);
    expect(await code(silent.resolve4('other.test'))).toBe('ETIMEOUT');
  });

  it('answers no stranger', async () => {
    const box = await site(allow('www.test'));
    const stranger = await Promise.race([
      box.raw(upstreamQuery(1, 'www.test', A), '127.0.0.2'),
      new Promise((go) => setTimeout(() => go('silence'), 300)),
    ]);
    expect([stranger, box.upstream.asked]).toEqual(['silence', []]);
  });

  it('bears malformed questions', async () => {
    const box = await site(allow('www.test'));
    const good = upstreamQuery(99, 'www.test', A);
    const header = (flags: number, ...counts: number[]) => {
      const bytes = Buffer.alloc(12);
      for (const [at, value] of [99, flags, ...counts].entries()) bytes.writeUInt16BE(value, at * 2);
      return bytes;
    };
    const tail = Buffer.from([0, 1, 0, 1]);
    const cases: [string, Buffer, number][] = [
      ['a pointer to itself', Buffer.concat([header(0x100, 1, 0, 0, 0), Buffer.from([0xc0, 12]), tail]), 1],
      ['a label without its bytes', Buffer.concat([header(0x100, 1, 0, 0, 0), Buffer.from([63, 97])]), 1],
      ['no question', header(0x100, 0, 0, 0, 0), 1],
      ['two questions', header(0x100, 2, 0, 0, 0), 1],
      ['an answer in it', header(0x100, 1, 1, 0, 0), 1],
      ['an update', header(0x2800, 1, 0, 0, 0), 4],
      [
        'a dot in a label',
        Buffer.concat([header(0x100, 1, 0, 0, 0), Buffer.from([8, ...Buffer.from('www.test'), 0]), tail]),
        5,
      ],
      [
        'a NUL byte',
        Buffer.concat([
          header(0x100, 1, 0, 0, 0),
          Buffer.from([4, 119, 119, 119, 0, 4, ...Buffer.from('test'), 0]),
          tail,
        ]),
        5,
      ],
      ['the root', Buffer.concat([header(0x100, 1, 0, 0, 0), Buffer.from([0]), tail]), 5],
      ['class CHAOS', Buffer.concat([header(0x100, 1, 0, 0, 0), nameBytes('www.test'), Buffer.from([0, 1, 0, 3])]), 5],
    ];
    for (const [what, bytes, rcode] of cases) {
      expect([what, (await box.raw(bytes)).readUInt16BE(2) & 15]).toEqual([what, rcode]);
    }
    const version = Buffer.from(good);
    version.writeUInt8(1, good.length - 5);
    const bad = await box.raw(version);
    expect([bad.readUInt16BE(2) & 15, bad.readUInt8(bad.length - 6)]).toEqual([0, 1]);
    expect(box.upstream.asked).toEqual([]);
    expect((await box.raw(good)).readUInt16BE(6)).toBe(1);
  });

  it('reads whatever comes without an exception, and says nothing that cannot be', () => {
    let state = 5;
    const next = () => {
      state ^= state << 13;
      state ^= state >>> 17;
      state ^= state << 5;
      return state >>> 0;
    };
    const query = upstreamQuery(1, 'www.test', A);
    const answer = replyTo(query, {
      answers: [
        { name: 'www.test', type: 'CNAME', value: 'a.other' },
        { name: 'a.other', type: 'A', value: '1.2.3.4' },
        { name: 'a.other', type: 'MX', value: 'mail.other' },
      ],
      authorities: [{ name: 'other', type: 'SOA', value: '5' }],
    });
    for (let round = 0; round < 20_000; round++) {
      const source = round % 2 === 0 ? query : answer;
      const bytes = Buffer.from(source.subarray(0, round % 3 === 0 ? next() % source.length : source.length));
      for (let n = 0; n < 1 + (next() % 4); n++) if (bytes.length > 0) bytes[next() % bytes.length] = next() & 255;
      parseQuery(bytes);
      const found = parseUpstreamAnswer(query, bytes, true);
      for (const { owner } of found?.records ?? []) expect(owner).toMatch(/^[a-z0-9_.-]+$/);
    }
    expect(parseUpstreamAnswer(query, answer, true)!.records.map(({ owner, target }) => [owner, target])).toEqual([
      ['www.test', 'a.other'],
      ['a.other', undefined],
      ['a.other', undefined],
    ]);
    // 128 pointers, each to the one before: read once, and no further than a name may be long.
    const chain = Buffer.concat([
      Buffer.from([1, 97, 0]),
      ...Array.from({ length: 200 }, (_, n) =>
        Buffer.from([1, 97, 0xc0 | ((n === 0 ? 0 : 3 + (n - 1) * 4) >> 8), (n === 0 ? 0 : 3 + (n - 1) * 4) & 255]),
      ),
    ]);
    expect(readName(chain, 3 + 4 * 100)?.text?.length).toBe(203);
    expect(readName(chain, 3 + 4 * 199)).toBeUndefined();
    expect(readName(wireName('a'.repeat(63)), 0)?.text).toBe('a'.repeat(63));
  });

  it('cannot be held up by connections that say nothing', async () => {
    const box = await site(allow('www.test'));
    const idle = await Promise.all(
      Array.from({ length: 40 }, async () => {
        const socket = connect(box.port, '127.0.0.1');
        socket.on('error', () => {});
        await once(socket, 'connect');
        return socket;
      }),
    );
    expect(await box.client.resolve4('www.test')).toEqual(['93.184.216.34']);
    for (const socket of idle) socket.destroy();
    const big = connect(box.port, '127.0.0.1');
    big.on('error', () => {});
    big.write(Buffer.from([0xff, 0xff, 1, 2, 3]));
    await once(big, 'close');
    await expect(
      Resolver.open({
        opened: {} as OpenedAddresses,
        denied: () => {},
        addresses: [{ address: '127.0.0.1', port: box.port }],
      }),
    ).rejects.toMatchObject({ code: 'EADDRINUSE' });
  });

  it('knows how servers are written', () => {
    expect(configuredServers(' 1.2.3.4, [fd00::53]:5353 ')).toEqual([
      { address: '1.2.3.4', port: 53 },
      { address: 'fd00::53', port: 5353 },
    ]);
    expect([configuredServers(''), configuredServers(undefined)]).toEqual([undefined, undefined]);
    expect(() => configuredServers('1.2.3.4 ns.example.org')).toThrow(/"ns.example.org" is no address/);
    expect(['1.2.3.4', '1.2.3.4:5353', 'fd00::53', '[fd00::53]:5353', '[fd00::53]'].map(upstreamServer)).toEqual([
      { address: '1.2.3.4', port: 53 },
      { address: '1.2.3.4', port: 5353 },
      { address: 'fd00::53', port: 53 },
      { address: 'fd00::53', port: 5353 },
      { address: 'fd00::53', port: 53 },
    ]);
    expect(['', 'name', '1.2.3', '1.2.3.4:0', '1.2.3.4:99999', '[1.2.3.4', '::1]:53'].map(upstreamServer)).toEqual(
      Array(7).fill(undefined),
    );
  });
});
