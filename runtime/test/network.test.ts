/** Networks with a policy, from inside real sandboxes: what is allowed works, exactly; the rest does not, and is on record. */
import { afterAll, afterEach, beforeAll, describe, expect, it } from 'vitest';
import { parsePolicy } from '../network/policy.ts';
import type { ExecHandle } from '../sandbox-api/exec.ts';
import { inNamespace, RAW_PACKETS, tcp, udp } from './network-inside.ts';
import { listening, NetworkSite, reach } from './network-site.ts';
import { hasNetworkTools } from './network-tools.ts';
import { HOST4, HOST6, MACHINE4, MACHINE6, NEIGHBOUR4, NEIGHBOUR6 } from './network-world.ts';
import { say, told, until } from './resident-fixture.ts';

/** Seconds, for an answer that comes. */
const LONG = 30;

describe.skipIf(!hasNetworkTools())('network policies', () => {
  let all: NetworkSite;

  beforeAll(async () => {
    all = await NetworkSite.open();
  });
  afterEach(() => all.stopAll());
  afterAll(() => all?.remove());

  it('allows exactly what the rules say', async () => {
    const sandbox = await all.create({
      rules: [
        { allow: HOST4, ports: [80] },
        { allow: `${HOST6}/128`, ports: ['440-443'], protocol: 'udp' },
      ],
    });
    expect(await tcp(sandbox, HOST4, 80)).toBe(`tcp 80 ${MACHINE4}`);
    expect(await tcp(sandbox, HOST4, 443)).toBe('refused');
    expect(await tcp(sandbox, NEIGHBOUR4, 80)).toBe('refused');
    expect(await tcp(sandbox, HOST6, 80)).toBe('refused');
    expect(await udp(sandbox, HOST6, 443, LONG)).toBe(`udp 443 ${MACHINE6}`);
    expect(await udp(sandbox, HOST6, 22)).toBe('');
    expect(await udp(sandbox, NEIGHBOUR6, 443)).toBe('');
    expect(await udp(sandbox, HOST4, 443)).toBe('');
    const { allowedPackets, deniedPackets } = sandbox.network.counters();
    expect(allowedPackets).toBeGreaterThan(5);
    expect(deniedPackets).toBeGreaterThanOrEqual(6);
  });

  it('says what was tried, and by which program', async () => {
    const sandbox = await all.create({ rules: [{ allow: HOST4, ports: [80] }] });
    await tcp(sandbox, HOST4, 443);
    await udp(sandbox, HOST6, 443);
    const denied = sandbox.network.denied();
    const { ipv4, ipv6 } = sandbox.network.view();
    expect(denied).toContainEqual(
      expect.objectContaining({
        kind: 'packet',
        destination: HOST4,
        port: 443,
        protocol: 'tcp',
        source: ipv4,
        reason: 'no rule',
        program: 'bash',
      }),
    );
    expect(denied).toContainEqual(
      expect.objectContaining({
        destination: HOST6,
        port: 443,
        protocol: 'udp',
        source: ipv6,
        program: 'bash',
        uid: expect.any(Number),
      }),
    );
  });

  it('denies all without rules, and keeps nothing from going on inside', async () => {
    const sandbox = await all.create({});
    expect(await tcp(sandbox, HOST4, 80)).toBe('refused');
    expect(await tcp(sandbox, HOST6, 80)).toBe('refused');
    expect(
      await say(sandbox, 'exec 3<>/dev/udp/127.0.0.1/9 && echo up', {
        args: ['bash', '-c', 'exec 3<>/dev/udp/127.0.0.1/9 && echo up'],
      }),
    ).toBe('up\n');
  });

  it('opens names for their ports, and not what lies beside them', async () => {
    const sandbox = await all.create({
      rules: [{ allow: '*.good.test', ports: [443] }, { allow: 'web.test', ports: [80] }, { deny: 'bad.good.test' }],
    });
    // Nobody has asked yet.
    expect(await tcp(sandbox, HOST4, 443)).toBe('refused');
    expect(await tcp(sandbox, 'a.good.test', 443)).toBe(`tcp 443 ${MACHINE4}`);
    expect(await tcp(sandbox, HOST4, 443)).toBe(`tcp 443 ${MACHINE4}`);
    expect(await tcp(sandbox, HOST4, 80)).toBe('refused');
    expect(await tcp(sandbox, NEIGHBOUR4, 443)).toBe('refused');
    expect(await tcp(sandbox, 'web.test', 80)).toBe(`tcp 80 ${MACHINE4}`);
    expect(await tcp(sandbox, HOST4, 443)).toBe(`tcp 443 ${MACHINE4}`);
    expect(await tcp(sandbox, 'bad.good.test', 443)).toBe('no name');
    expect(await tcp(sandbox, 'good.test', 443)).toBe('no name');
    // Names that lead to what is closed: this machine, a metadata service, another sandbox.
    for (const name of ['machine.good.test', 'meta.good.test', 'pool.good.test']) {
      expect(await tcp(sandbox, name, 443)).not.toMatch(/^tcp/);
    }
    const denied = sandbox.network.denied();
    expect(denied).toContainEqual(
      expect.objectContaining({ kind: 'name', destination: 'bad.good.test', reason: 'name', program: 'bash' }),
    );
    expect(denied).toContainEqual(
      expect.objectContaining({ kind: 'packet', destination: HOST4, port: 80, name: expect.stringContaining('.test') }),
    );
  });

  it('closes an answer when its time is over, and lets connections go on', async () => {
    const sandbox = await all.create({ rules: [{ allow: 'web.test', ports: [80] }] });
    const network = all.network;
    expect(network.open(sandbox.facts.id, 'web.test', [HOST4], 3)).toEqual([HOST4]);
    const script = `exec 3<>/dev/tcp/${HOST4}/80 || exit; echo open; read; echo late >&3; read -t 30 line <&3; echo "$line"`;
    const command = await sandbox.exec({ args: ['bash', '-c', script], stdin: true });
    await until('it has connected', async () => (await firstOf(command)).includes('open'));
    await until('it expires', async () => (await tcp(sandbox, HOST4, 80)) === 'refused');
    await command.write(Buffer.from('\n'));
    expect((await told(command)).stdout).toBe('open\nlate\n');
    // What belongs to no connection does not pass as one.
    expect(await udp(sandbox, HOST4, 80)).toBe('');
  });

  it('changes while it runs: what is not allowed any more ends at once, the rest is never interrupted', async () => {
    const sandbox = await all.create({ rules: [{ allow: HOST4 }] });
    const script = `exec 3<>/dev/tcp/${HOST4}/80 || exit; while read -t 60 word; do echo $word >&3; read -t 3 line <&3 && echo "$line" || echo cut; done`;
    const command = await sandbox.exec({ args: ['bash', '-c', script], stdin: true });
    const say1 = async (word: string) => {
      const before = (await firstOf(command)).length;
      await command.write(Buffer.from(`${word}\n`));
      await until(`an answer to ${word}`, async () => (await firstOf(command)).length > before);
      return (await firstOf(command)).slice(before).trim();
    };
    expect(await say1('one')).toBe('one');
    for (let round = 0; round < 20; round++) {
      await sandbox.network.setPolicy(parsePolicy({ rules: [{ allow: HOST4 }, { deny: `10.0.${round}.0/24` }] }));
      expect(await say1(`round${round}`)).toBe(`round${round}`);
    }
    await sandbox.network.setPolicy(parsePolicy({ rules: [{ allow: NEIGHBOUR4 }] }));
    expect(await say1('two')).toBe('cut');
    expect(await tcp(sandbox, HOST4, 80)).toBe('refused');
    expect(await tcp(sandbox, NEIGHBOUR4, 80)).toBe(`tcp 80 ${MACHINE4}`);
    expect(sandbox.network.view().policy?.rules).toEqual([{ allow: NEIGHBOUR4 }]);
    await expect(sandbox.network.setPolicy({ ...parsePolicy({}), services: { nonsense: true } })).rejects.toMatchObject(
      { code: 'RUNTIME_NETWORK_POLICY' },
    );
    expect(await tcp(sandbox, NEIGHBOUR4, 80)).toBe(`tcp 80 ${MACHINE4}`);
  });

  it('carries opened addresses into a policy that has their names, and no others', async () => {
    const sandbox = await all.create({ rules: [{ allow: 'web.test' }, { allow: 'near.test' }] });
    expect(await tcp(sandbox, 'web.test', 80)).toBe(`tcp 80 ${MACHINE4}`);
    expect(await tcp(sandbox, 'near.test', 80)).toBe(`tcp 80 ${MACHINE4}`);
    await sandbox.network.setPolicy(parsePolicy({ rules: [{ allow: 'web.test', ports: [80] }] }));
    expect(await tcp(sandbox, HOST4, 80)).toBe(`tcp 80 ${MACHINE4}`);
    expect(await tcp(sandbox, HOST4, 443)).toBe('refused');
    expect(await tcp(sandbox, NEIGHBOUR4, 80)).toBe('refused');
  });

  it('keeps this machine, metadata services and other sandboxes closed, whatever is allowed', async () => {
    const everything = {
      default: 'allow',
      rules: [
        { allow: '169.254.0.0/16' },
        { allow: '10.209.0.0/16' },
        { allow: MACHINE4 },
        { allow: 'fd64:5ec0:d209::/64' },
      ],
    };
    const [sandbox, other] = [await all.create(everything), await all.create(everything)];
    const servers = await Promise.all(['0.0.0.0', '::'].map((host) => listening(host)));
    await other.exec({ args: ['bash', '-c', 'sleep 60'] });
    expect(await tcp(sandbox, HOST4, 8080)).toBe(`tcp 8080 ${MACHINE4}`);
    expect(await tcp(sandbox, HOST6, 8080)).toBe(`tcp 8080 ${MACHINE6}`);
    const { ipv4, ipv6 } = other.network.view();
    const gateway = '10.209.0.1';
    const port = servers[0]!.port;
    for (const address of [
      MACHINE4,
      gateway,
      '169.254.169.254',
      ipv4!,
      '0.0.0.1',
      '100.100.100.200',
      '::ffff:93.184.216.1',
    ]) {
      expect([address, await tcp(sandbox, address, port)]).toEqual([address, expect.not.stringContaining('reached')]);
    }
    for (const address of [MACHINE6, 'fd64:5ec0:d209::1', ipv6!, 'fd00:ec2::254', 'fe80::1']) {
      expect([address, await tcp(sandbox, address, servers[1]!.port)]).toEqual([
        address,
        expect.not.stringContaining('reached'),
      ]);
    }
    const reasons = new Set(sandbox.network.denied().map(({ reason }) => reason));
    expect(reasons).toContain('closed');
    expect(reasons).toContain('this machine');
    for (const { server } of servers) server.close();
    // Nor from there, in reply to what this machine begins.
    await expect(reach(ipv4!, 22)).resolves.not.toBe('connected');
  });

  it('serves many at once, each its own', async () => {
    const sandboxes = await Promise.all(
      Array.from({ length: 6 }, (_, index) =>
        all.create({ rules: [{ allow: HOST4, ports: [index % 2 === 0 ? 80 : 443] }] }),
      ),
    );
    expect(new Set(sandboxes.map((one) => one.network.view().ipv4)).size).toBe(6);
    for (const [index, sandbox] of sandboxes.entries()) {
      expect(await tcp(sandbox, HOST4, 80)).toBe(index % 2 === 0 ? `tcp 80 ${MACHINE4}` : 'refused');
    }
  });

  it('drops a flood of questions at the link, and answers others, and later the one that flooded', async () => {
    const policy = { rules: [{ allow: 'web.test', ports: [80] }] };
    const [flooder, other] = [await all.create(policy), await all.create(policy)];
    const reached = `tcp 80 ${MACHINE4}`;
    const flood = `
import socket, time
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
begun = time.time()
for i in range(20000):
    try: s.sendto(b'\\0' * 12, ('10.209.0.1', 53))
    except OSError: pass
print(time.time() - begun)`;
    await until('it was too much', () => {
      const before = flooder.network.counters();
      const seconds = Number(inNamespace(flooder, flood));
      const after = flooder.network.counters();
      // However slow this machine is.
      expect(after.allowedPackets - before.allowedPackets).toBeLessThan(2_100 + 1_100 * (seconds + 1));
      return after.deniedPackets > before.deniedPackets;
    });
    expect(await tcp(other, 'web.test', 80)).toBe(reached);
    expect(flooder.network.denied().map(({ reason }) => reason)).toContain('too many questions');
    await until('it is answered again', async () => (await tcp(flooder, 'web.test', 80)) === reached);
  });

  it('drops nothing of what is allowed, however much of it there is', async () => {
    const sandbox = await all.create({ rules: [{ allow: HOST4, ports: [443] }] });
    const before = sandbox.network.counters();
    inNamespace(
      sandbox,
      `
import socket
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for i in range(20000):
    try: s.sendto(b'x' * 100, ('${HOST4}', 443))
    except OSError: pass`,
    );
    const after = sandbox.network.counters();
    // Answers that come when its socket has gone are answered by its kernel, with ICMP.
    expect(sandbox.network.denied().filter(({ protocol }) => protocol !== 'icmp')).toEqual([]);
    expect(after.allowedPackets - before.allowedPackets).toBeGreaterThan(10_000);
  });

  it('believes no packet of root inside', async () => {
    const sandbox = await all.create({ rules: [{ allow: HOST4 }] });
    const { ipv4 } = sandbox.network.view();
    const sent = (program: string) => inNamespace(sandbox, `${RAW_PACKETS}\n${program}`);
    const before = sandbox.network.counters();
    // An allowed one, made by hand, passes; and then each with one thing wrong.
    sent(`send(ip('${ipv4}', '${HOST4}', 17, udp(1234, 443)))`);
    await until('it passed', () => sandbox.network.counters().allowedPackets > before.allowedPackets);
    const passed = sandbox.network.counters().allowedPackets;
    sent(`
send(ip('10.209.0.77', '${HOST4}', 17, udp(1234, 443)))
send(ip('${HOST4}', '${HOST4}', 17, udp(1234, 443)))
send(ip('${ipv4}', '${HOST4}', 17, udp(1234, 443), flags=0x2000))
send(ip('${ipv4}', '${HOST4}', 17, udp(1234, 443), flags=0x0010))
send(ip('${ipv4}', '${HOST4}', 17, udp(1234, 443), options=b'\\x83\\x07\\x04' + socket.inet_aton('${NEIGHBOUR4}') + b'\\x00'))
send(ip('${ipv4}', '${HOST4}', 6, b'\\0' * 8))
send(ip('${ipv4}', '${HOST4}', 17, udp(1234, 443)), kind=0x88a8)
send(b'\\x81\\x00\\x00\\x05\\x08\\x00'[2:] + ip('${ipv4}', '${HOST4}', 17, udp(1234, 443)), kind=0x8100)
send(b'\\0' * 46, kind=0x88cc)
send(ip('${ipv4}', '${HOST4}', 17, udp(1234, 443))[:16])
`);
    const reasons = () => new Set(sandbox.network.denied().map(({ reason }) => reason));
    await until('all are told of', () =>
      ['spoofed source', 'fragment', 'ip options', 'too short', 'not ip'].every((reason) => reasons().has(reason)),
    );
    expect(sandbox.network.counters().allowedPackets).toBe(passed);
  });
});

/** Its standard output so far. */
async function firstOf(command: ExecHandle): Promise<string> {
  return (await told(command, { follow: false })).stdout;
}
