/** The resolver of sandboxes: what it answers, what it opens, whom it believes. */
import { createSocket } from 'node:dgram';
import * as dns from 'node:dns/promises';
import { connect } from 'node:net';
import { describe, expect, it } from 'vitest';
import { upstreamQuery } from '../network/resolver/dns-message.ts';
import { mayBeOpened } from '../network/resolver/unopened-addresses.ts';
import { FakeDns, type FakeQuestion, replyTo } from './fake-dns.ts';

import { A, AAAA, allow, namesOf, resolverSites, zone } from './resolver-site.ts';

describe('the resolver of sandboxes', { timeout: 60_000 }, () => {
  const site = resolverSites();
  const code = (promise: Promise<unknown>) =>
    promise.then(
      () => 'answered',
      (error: { code?: string }) => error.code,
    );

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
});
