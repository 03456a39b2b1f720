/** What the program at a link answers by itself to a guest that has to ask: a real DHCP client at the other end, and whoever asks for what is not its business. */
import { type ChildProcess, execFileSync, spawn, spawnSync } from 'node:child_process';
import * as fs from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { networkMask4, networkPool, sandboxAddresses } from '../network/address-pool.ts';
import { PacketFilter, removePacketFilter } from '../network/packet-filter.ts';
import { guardLink, sandboxLink } from '../network/sandbox-link.ts';
import { canRun } from './sandbox-fixture.ts';

const has = (tool: string) => spawnSync('sh', ['-c', `command -v ${tool}`]).status === 0;
const tools = canRun() && ['ip', 'nsenter', 'unshare'].every(has);

describe.skipIf(!tools)('a link whose guest asks', { timeout: 120_000 }, () => {
  const pool = networkPool({});
  const NUMBER = 4660;
  const mine = sandboxAddresses(pool, NUMBER);
  const [outer, inner] = [`dsg${process.pid % 100_000}`, 'eth0'];
  let folder: string;
  let guest: ChildProcess;
  let filter: PacketFilter;
  let link: number;
  const inside = (...line: string[]) =>
    spawnSync('nsenter', [`--net=/proc/${guest.pid}/ns/net`, ...line], { encoding: 'utf8', timeout: 60_000 });

  beforeAll(() => {
    folder = fs.mkdtempSync(join(tmpdir(), 'dsec-answers-'));
    guest = spawn('unshare', ['-n', 'sleep', '600'], { stdio: 'ignore' });
    const other = () => fs.readlinkSync(`/proc/${guest.pid}/ns/net`);
    while (other() === fs.readlinkSync('/proc/self/ns/net'));
    execFileSync('ip', ['link', 'add', outer, 'type', 'veth', 'peer', 'name', inner, 'netns', String(guest.pid)]);
    filter = PacketFilter.open(join(folder, 'bpf'));
    link = sandboxLink(outer)!;
    guardLink(link, filter.program);
    execFileSync('ip', ['link', 'set', outer, 'up']);
    inside('ip', 'link', 'set', 'lo', 'up');
    inside('ip', 'link', 'set', inner, 'up');
    fs.writeFileSync(
      join(folder, 'script'),
      '#!/bin/sh\n[ $1 = bound ] && echo "$ip $subnet $router $dns $mtu $lease $serverid"\nexit 0\n',
      { mode: 0o755 },
    );
  });
  afterAll(() => {
    spawnSync('ip', ['link', 'del', outer]);
    guest?.kill('SIGKILL');
    filter?.close();
    removePacketFilter(join(folder, 'bpf'));
    fs.rmSync(folder, { recursive: true, force: true });
  });

  const ask = (...more: string[]) =>
    inside(
      'busybox',
      'udhcpc',
      '-i',
      inner,
      '-s',
      join(folder, 'script'),
      '-n',
      '-q',
      '-f',
      '-t',
      '5',
      '-T',
      '2',
      ...more,
    );
  const arp = (address: string) => inside('busybox', 'arping', '-I', inner, '-f', '-c', '2', '-w', '4', address).stdout;

  it('is not answered where nobody said that it asks', () => {
    const { ipv4, ipv6 } = mine;
    filter.addLink(link, { number: NUMBER, ipv4, ipv6, gateway4: pool.gateway4, gateway6: pool.gateway6 });
    expect(ask('-t', '1', '-T', '1').stdout).not.toContain(ipv4);
    // An address that is not its own.
    expect(filter.denied().every(({ reason }) => reason === 'spoofed source')).toBe(true);
    filter.removeLink(link);
  });

  it('tells it its address, for ever, whatever it wishes', () => {
    const { ipv4, ipv6 } = mine;
    const { gateway4, gateway6 } = pool;
    filter.addLink(link, { number: NUMBER, ipv4, ipv6, gateway4, gateway6, mask4: networkMask4(pool) });
    const said = `${ipv4} 255.255.0.0 ${gateway4} ${gateway4} 1500 4294967295 ${gateway4}\n`;
    expect(ask().stdout).toContain(said);
    expect(ask('-r', '10.209.0.77', '-x', 'hostname:mine').stdout).toContain(said);
  });

  it('tells it who has the gateway, and nobody else', () => {
    inside('ip', 'addr', 'add', `${mine.ipv4}/16`, 'dev', inner);
    const mac = [...mine.gatewayMac].map((byte) => byte.toString(16).padStart(2, '0')).join(':');
    expect(arp(pool.gateway4).toLowerCase()).toContain(`[${mac}]`);
    expect(arp('10.209.0.77')).toContain('Received 0');
  });

  it('denies nothing of it, and counts nothing', () => {
    expect(filter.denied()).toEqual([]);
    expect(filter.counters(link)).toMatchObject({ deniedPackets: 0 });
  });
});
