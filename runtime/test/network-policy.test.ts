/** Policies, from what people write to the table that the kernel looks up. */
import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { describe, expect, it } from 'vitest';
import { addressBytes, addressText, parseRange } from '../network/address.ts';
import { freeNumber, networkPool, sandboxAddresses } from '../network/address-pool.ts';
import { closedRanges } from '../network/closed-ranges.ts';
import { DeniedLog } from '../network/denied-log.ts';
import { decideName } from '../network/name-decision.ts';
import { effectivePolicy, expandServices, parsePolicy } from '../network/policy.ts';
import { compileRows, entriesAround, MAX_ENTRIES, parseRowValue, type Row, rowValue } from '../network/rule-table.ts';
import { SandboxPolicy } from '../network/sandbox-policy.ts';
import { BUILT_IN_SERVICES, readServiceTable } from '../network/service-table.ts';

describe('addresses', () => {
  it.each([
    ['10.1.2.3', '10.1.2.3'],
    ['2001:db8:0:0:0:0:0:1', '2001:db8::1'],
    ['::ffff:10.0.0.1', '10.0.0.1'],
    ['::', '::'],
    ['::1', '::1'],
    ['1::', '1::'],
    ['1:0:0:2:0:0:0:3', '1:0:0:2::3'],
    ['64:ff9b::192.0.2.1', '64:ff9b::c000:201'],
  ])('%s', (text, shown) => {
    expect(addressText(addressBytes(text)!)).toBe(shown);
  });

  it('refuses what is none', () => {
    for (const text of [
      '',
      '10.0.0',
      '10.0.0.256',
      'fe80::1%eth0',
      'example.org',
      '10.0.0.1/8',
      '10.0.0.0/33',
      '::/129',
      '::1/x',
      '1.2.3.4/8/8',
    ]) {
      expect([text, parseRange(text)]).toEqual([text, undefined]);
    }
    expect(parseRange('10.0.0.0/8')).toMatchObject({ bits: 104, text: '10.0.0.0/8' });
    expect(parseRange('0.0.0.0/0')).toMatchObject({ bits: 96 });
  });

  it('gives each sandbox its own, and none twice in a row', () => {
    const pool = networkPool({ DSEC_NETWORK_IPV4: '192.168.7.0/24', DSEC_NETWORK_IPV6: 'fd00:1::/64' });
    expect(pool).toMatchObject({ gateway4: '192.168.7.1', gateway6: 'fd00:1::1', size: 253 });
    expect(sandboxAddresses(pool, 252)).toMatchObject({ ipv4: '192.168.7.254', ipv6: 'fd00:1::fe', link: 'dsv252' });
    const used = new Set<number>();
    let last = -1;
    for (let count = 0; count < pool.size; count++) {
      last = freeNumber(pool, used, last);
      used.add(last);
    }
    expect(used.size).toBe(253);
    expect(() => freeNumber(pool, used, last)).toThrow(expect.objectContaining({ code: 'RUNTIME_NETWORK_FULL' }));
    used.delete(3);
    expect(freeNumber(pool, used, last)).toBe(3);
    expect(() => networkPool({ DSEC_NETWORK_IPV4: '10.0.0.0/30' })).toThrow(
      expect.objectContaining({ code: 'RUNTIME_NETWORK_POOL' }),
    );
  });
});

describe('policies', () => {
  it.each([
    [null, 'no JSON object'],
    [[], 'no JSON object'],
    [{ rule: [] }, '"rule" is not known'],
    [{ default: 'open' }, '"deny" or "allow"'],
    [{ rules: {} }, 'a list'],
    [{ rules: [7] }, 'no object'],
    [{ rules: [{}] }, 'one of "allow" and "deny"'],
    [{ rules: [{ allow: 'a.org', deny: 'b.org' }] }, 'one of "allow" and "deny"'],
    [{ rules: [{ allow: 5 }] }, 'one of "allow" and "deny"'],
    [{ rules: [{ allow: 'a.org', port: 5 }] }, '"port" is not known'],
    [{ rules: [{ allow: 'a.org', ports: 5 }] }, 'a list'],
    [{ rules: [{ allow: 'a.org', ports: [0] }] }, 'ports are 1 to 65535'],
    [{ rules: [{ allow: 'a.org', ports: ['9-8'] }] }, 'ports are'],
    [{ rules: [{ allow: 'a.org', ports: ['80x'] }] }, 'ports are'],
    [{ rules: [{ allow: 'a.org', protocol: 'sctp' }] }, '"protocol" is one of'],
    [{ rules: [{ allow: '10.0.0.0/8', protocol: 'icmp', ports: [1] }] }, 'no ports'],
    [{ rules: [{ allow: '10.0.0.1/8' }] }, 'no address'],
    [{ rules: [{ allow: '10.0.0.300' }] }, 'no address'],
    [{ rules: [{ allow: 'a.*.org' }] }, 'no address'],
    [{ rules: [{ allow: '*' }] }, 'no address'],
    [{ rules: [{ allow: '10.0.0.0/8', inside: true }] }, 'about names'],
    [{ rules: [{ deny: 'a.org', ports: [80] }] }, 'denied as a whole'],
    [{ services: { pypi: 'yes' } }, 'true (open) or false'],
    [{ rules: Array(1001).fill({ allow: '10.0.0.1' }) }, 'at most 1000'],
  ])('refuses %j', (value, problem) => {
    expect(() => parsePolicy(value)).toThrow(
      expect.objectContaining({ code: 'RUNTIME_NETWORK_POLICY', message: expect.stringContaining(problem) }),
    );
  });

  it('looks services up in the table', () => {
    const policy = parsePolicy({ services: { pypi: true, npm: false } });
    const { rules } = expandServices(policy, BUILT_IN_SERVICES);
    expect(rules).toContainEqual({ allow: 'pypi.org', ports: [443], inside: false });
    expect(rules).toContainEqual({ deny: 'registry.npmjs.org' });
    for (const name of ['nonsense', 'toString', '__proto__']) {
      const asked = parsePolicy(JSON.parse(`{"services": {"${name}": true}}`));
      expect(() => expandServices(asked, BUILT_IN_SERVICES)).toThrow(
        expect.objectContaining({ code: 'RUNTIME_NETWORK_POLICY' }),
      );
    }
    for (const [name, { targets, ports }] of Object.entries(BUILT_IN_SERVICES)) {
      expect([
        name,
        effectivePolicy(parsePolicy({ rules: targets.map((allow) => ({ allow, ports })) })).names.length,
      ]).toEqual([name, targets.length]);
    }
  });

  it('reads a table of the deployment, and says what is wrong with it', () => {
    const folder = mkdtempSync(join(tmpdir(), 'services-'));
    const path = join(folder, 'services.json');
    try {
      writeFileSync(path, '{"pypi": {"targets": ["mirror.corp", "10.1.0.0/16"], "ports": [8443], "inside": true}}');
      const table = readServiceTable(path);
      expect(Object.keys(table)).toContain('npm');
      expect(expandServices(parsePolicy({ services: { pypi: true } }), table).rules).toEqual([
        { allow: 'mirror.corp', ports: [8443], inside: true },
        { allow: '10.1.0.0/16', ports: [8443] },
      ]);
      for (const text of [
        '{',
        '[]',
        '{"a": {}}',
        '{"a": {"targets": ["!"]}}',
        '{"a": {"targets": ["a.b"], "port": 1}}',
      ]) {
        writeFileSync(path, text);
        expect(() => readServiceTable(path)).toThrow(expect.objectContaining({ code: 'RUNTIME_NETWORK_SERVICES' }));
      }
    } finally {
      rmSync(folder, { recursive: true });
    }
  });

  it('decides names by their most specific pattern', () => {
    const { names } = effectivePolicy(
      parsePolicy({
        rules: [
          { allow: '*.org' },
          { deny: '*.bad.org' },
          { allow: 'good.bad.org' },
          { deny: 'b.org' },
          { allow: 'b.org' },
        ],
      }),
    );
    const action = (name: string) => decideName(names, name).action;
    expect(
      ['a.org', 'org', 'x.bad.org', 'bad.org', 'good.bad.org', 'x.good.bad.org', 'b.org', 'com'].map(action),
    ).toEqual(['allow', undefined, 'deny', 'allow', 'allow', 'deny', 'deny', undefined]);
  });
});

/** As the program in the kernel does it. */
function judge(rows: readonly Row[], address: string, protocol: number, port: number, now = 0n): boolean {
  const entries = parseRowValue(rowValue(entriesAround(rows, addressBytes(address)!)));
  const first = entries.find(
    (one) =>
      (one.protocol === 255 || one.protocol === protocol) &&
      one.from <= port &&
      port <= one.to &&
      (one.expires === undefined || one.expires > now),
  );
  return first !== undefined && !first.denies;
}

const [ICMP, TCP, UDP, ICMP6] = [1, 6, 17, 58];

describe('tables of rules', () => {
  const rowsOf = (policy: unknown) => compileRows(effectivePolicy(parsePolicy(policy)));

  it('lets the smallest range decide that says something', () => {
    const rows = rowsOf({
      rules: [
        { allow: '10.0.0.0/8', ports: [80, 443] },
        { deny: '10.1.0.0/16' },
        { allow: '10.1.2.0/24', ports: [22], protocol: 'tcp' },
        { allow: '10.1.2.3', protocol: 'icmp' },
        { deny: '10.2.0.0/16', ports: [443] },
        { allow: '10.2.0.0/16', ports: ['400-500'] },
      ],
    });
    const cases = [
      ['10.9.9.9', TCP, 80, true],
      ['10.9.9.9', UDP, 443, true],
      ['10.9.9.9', TCP, 81, false],
      ['10.9.9.9', ICMP, 8, false],
      ['10.1.9.9', TCP, 80, false],
      ['10.1.2.9', TCP, 22, true],
      ['10.1.2.9', UDP, 22, false],
      ['10.1.2.9', TCP, 80, false],
      ['10.1.2.3', ICMP, 8, true],
      ['10.1.2.3', TCP, 22, true],
      ['10.2.0.1', TCP, 443, false],
      ['10.2.0.1', TCP, 444, true],
      ['10.2.0.1', TCP, 80, true],
      ['11.0.0.1', TCP, 80, false],
      ['::ffff:10.9.9.9', TCP, 80, true],
    ] as const;
    for (const [address, protocol, port, allowed] of cases) {
      expect([address, protocol, port, judge(rows, address, protocol, port)]).toEqual([
        address,
        protocol,
        port,
        allowed,
      ]);
    }
  });

  it('denies all without rules, and nothing else with default allow', () => {
    expect(rowsOf({})).toEqual([]);
    const rows = rowsOf({
      default: 'allow',
      rules: [{ deny: '2001:db8::/32' }, { allow: '2001:db8::7', protocol: 'icmp' }],
    });
    expect(judge(rows, '93.184.216.34', 132, 0)).toBe(true);
    expect(judge(rows, '2001:db8::1', TCP, 80)).toBe(false);
    expect(judge(rows, '2001:db8::7', ICMP6, 128)).toBe(true);
    expect(judge(rows, '2001:db8::7', TCP, 80)).toBe(false);
  });

  it('refuses more port ranges than fit', () => {
    const ports = Array.from({ length: MAX_ENTRIES }, (_, index) => 2 * index + 1);
    const allow = (more: number[]) =>
      rowsOf({ rules: [{ allow: '10.0.0.0/8', ports: [...ports, ...more], protocol: 'tcp' }] });
    expect(allow([])[0]?.entries.length).toBe(MAX_ENTRIES);
    expect(() => allow([9999])).toThrow(expect.objectContaining({ code: 'RUNTIME_NETWORK_POLICY' }));
  });

  it('agrees with a plain reading of the rules, whatever they are', () => {
    let seed = 7;
    const random = (below: number) => {
      seed = (Math.imul(seed, 1103515245) + 12345) >>> 0;
      return (seed >>> 8) % below;
    };
    for (let round = 0; round < 200; round++) {
      const rules = Array.from({ length: 1 + random(6) }, () => {
        const bits = [8, 16, 24, 32][random(4)]!;
        const parts = [10, random(2), random(2), random(2)].map((part, index) => (index * 8 < bits ? part : 0));
        const from = 1 + random(3);
        return {
          [random(3) === 0 ? 'deny' : 'allow']: `${parts.join('.')}/${bits}`,
          ...(random(2) === 0 ? {} : { ports: [`${from}-${from + random(3)}`] }),
          protocol: (['any', 'tcp', 'udp'] as const)[random(3)]!,
        };
      });
      const policy = parsePolicy({ default: random(4) === 0 ? 'allow' : 'deny', rules });
      const effective = effectivePolicy(policy);
      const rows = compileRows(effective);
      for (let probe = 0; probe < 40; probe++) {
        const address = `10.${random(2)}.${random(2)}.${random(2)}`;
        const [protocol, port] = [[TCP, UDP][random(2)]!, 1 + random(6)];
        const bytes = addressBytes(address)!;
        const saying = effective.addresses.filter(
          (rule) =>
            entriesAround([{ range: rule.range, entries: [{ protocol: 255, from: 0, to: 0, denies: false }] }], bytes)
              .length > 0 &&
            (rule.protocol === 'any' || (rule.protocol === 'tcp') === (protocol === TCP)) &&
            rule.ports.some(([from, to]) => from <= port && port <= to),
        );
        const smallest = Math.max(-1, ...saying.map(({ range }) => range.bits));
        const deciding = saying.filter(({ range }) => range.bits === smallest);
        const allowed =
          deciding.length === 0 ? policy.default === 'allow' : deciding.every(({ action }) => action === 'allow');
        expect([rules, address, protocol, port, judge(rows, address, protocol, port)]).toEqual([
          rules,
          address,
          protocol,
          port,
          allowed,
        ]);
      }
    }
  });
});

describe('opened addresses', () => {
  const closed = closedRanges(networkPool({}));
  const policyOf = (policy: unknown) => new SandboxPolicy(parsePolicy(policy), closed);

  it('open for the ports of the name, until they expire', () => {
    const policy = policyOf({
      rules: [{ allow: 'a.org', ports: [443] }, { allow: '*.b.org' }, { deny: '93.184.0.0/16', ports: [22] }],
    });
    expect(policy.open('a.org', '93.184.216.34', 100n)?.row).toBeDefined();
    expect(judge(policy.table(), '93.184.216.34', TCP, 443, 50n)).toBe(true);
    expect(judge(policy.table(), '93.184.216.34', TCP, 443, 150n)).toBe(false);
    expect(judge(policy.table(), '93.184.216.34', TCP, 80, 50n)).toBe(false);
    policy.open('x.b.org', '93.184.216.34', 200n);
    expect(judge(policy.table(), '93.184.216.34', TCP, 80, 150n)).toBe(true);
    // By address it is denied, so no name opens it.
    expect(judge(policy.table(), '93.184.216.34', TCP, 22, 150n)).toBe(false);
    expect(policy.open('c.org', '93.184.216.34', 100n)).toBeUndefined();
  });

  it('never what is closed', () => {
    const policy = policyOf({ default: 'allow', rules: [{ allow: '*.b.org', inside: true }, { deny: '1.2.3.0/24' }] });
    for (const address of [
      '127.0.0.1',
      '169.254.169.254',
      '10.209.0.9',
      'fd00:ec2::254',
      '::1',
      'fe80::1',
      '224.0.0.1',
      '1.2.3.4',
      'nonsense',
    ]) {
      expect([address, policy.open('x.b.org', address, 100n)]).toEqual([address, undefined]);
    }
    expect(policy.open('elsewhere.org', '8.8.8.8', 100n)).toEqual({});
  });

  it('are carried over by name, and by pattern from a table', () => {
    const before = policyOf({ rules: [{ allow: '*.a.org', ports: [443] }, { allow: 'b.org' }] });
    before.open('x.a.org', '8.8.8.8', 1000n);
    before.open('b.org', '9.9.9.9', 1000n);
    const next = policyOf({ rules: [{ allow: 'x.a.org', ports: [80] }] });
    next.takeOver(before);
    expect(judge(next.table(), '8.8.8.8', TCP, 80)).toBe(true);
    expect(judge(next.table(), '8.8.8.8', TCP, 443)).toBe(false);
    expect(judge(next.table(), '9.9.9.9', TCP, 80)).toBe(false);
    const rows = before
      .table()
      .map(({ range, entries }) => ({ address: range.bytes, entries: parseRowValue(rowValue(entries)) }));
    const restarted = policyOf({ rules: [{ allow: '*.a.org', ports: [80] }] });
    restarted.takeOverRows(rows);
    expect(judge(restarted.table(), '8.8.8.8', TCP, 80)).toBe(true);
    expect(judge(restarted.table(), '9.9.9.9', TCP, 80)).toBe(false);
  });

  it('are bounded: those that expired longest go first', () => {
    const policy = policyOf({ rules: [{ allow: 'a.org' }] });
    const gone: number[] = [];
    for (let index = 0; index < 5000; index++) {
      policy.open('a.org', `20.0.${index >> 8}.${index & 255}`, BigInt(index));
      gone.push(...policy.surplus().map(({ bytes }) => bytes.readUInt16BE(14)));
    }
    expect(policy.openedCount).toBeLessThanOrEqual(4096);
    expect(Math.max(...gone)).toBeLessThan(1500);
    expect(new Set(gone).size).toBe(5000 - policy.openedCount);
  });
});

describe('the log', () => {
  it('counts what is the same, and keeps the latest within its size', () => {
    const folder = mkdtempSync(join(tmpdir(), 'denied-'));
    try {
      const log = new DeniedLog(join(folder, 'denied.jsonl'));
      const attempt = {
        time: 'now',
        kind: 'packet',
        destination: '1.2.3.4',
        port: 80,
        protocol: 'tcp',
        reason: 'no rule',
        count: 1,
      } as const;
      log.append([attempt, attempt, { ...attempt, port: 81 }]);
      expect(log.read()).toEqual([
        { ...attempt, count: 2 },
        { ...attempt, port: 81 },
      ]);
      for (let round = 0; round < 60; round++) {
        log.append(
          Array.from({ length: 500 }, (_, index) => ({ ...attempt, port: index, destination: `${round} `.repeat(10) })),
        );
      }
      const kept = log.read(10_000);
      expect(kept.length).toBe(10_000);
      expect(kept.at(-1)?.port).toBe(499);
    } finally {
      rmSync(folder, { recursive: true });
    }
  });
});
