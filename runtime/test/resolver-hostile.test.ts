/** The resolver of sandboxes before strangers, malformed messages and connections that say nothing. */
import { once } from 'node:events';
import { connect } from 'node:net';
import { describe, expect, it } from 'vitest';
import type { OpenedAddresses } from '../network/opened-addresses.ts';
import { parseQuery, parseUpstreamAnswer, upstreamQuery } from '../network/resolver/dns-message.ts';
import { readName, wireName } from '../network/resolver/dns-name.ts';
import { Resolver } from '../network/resolver/resolver.ts';
import { configuredServers, upstreamServer } from '../network/resolver/upstream-servers.ts';
import { nameBytes, replyTo } from './fake-dns.ts';

import { A, allow, resolverSites } from './resolver-site.ts';

describe('the resolver of sandboxes', { timeout: 60_000 }, () => {
  const site = resolverSites();

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
