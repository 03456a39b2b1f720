/**
 * What the machine's packet filter does for all sandboxes together: addresses of the pool become the machine's own on their way out, and what
 * the program at the links has passed is looked at once more. One table of our own, static, set in one transaction; a sandbox that comes or
 * goes changes nothing in it.
 */
import { execFile, execFileSync } from 'node:child_process';
import { readdirSync, readFileSync, writeFileSync } from 'node:fs';
import { promisify } from 'node:util';
import { messageOf } from '#base';
import { fail } from '../errors.ts';
import { LINK_PREFIX, type NetworkPool } from './address-pool.ts';
import { MARK_KNOWN_ONLY } from './egress-program.ts';

/** Of one sandbox, so that none takes the connections of all. */
const MAX_CONNECTIONS = 4096;

export const TABLE = 'dsec';

/** @throws RUNTIME_NETWORK_NO_NFT */
export async function setHostFilter(pool: NetworkPool): Promise<void> {
  await nft(['-f', '-'], rulesOf(pool));
}

/** One that is not there is no error. @throws RUNTIME_NETWORK_NO_NFT */
export async function removeHostFilter(): Promise<void> {
  await nft(['-f', '-'], `add table inet ${TABLE}\ndelete table inet ${TABLE}\n`);
}

function rulesOf({ ipv4, ipv6, gateway4, gateway6 }: NetworkPool): string {
  const from = `iifname "${LINK_PREFIX}*"`;
  const to = `oifname "${LINK_PREFIX}*"`;
  return `
add table inet ${TABLE}
delete table inet ${TABLE}
table inet ${TABLE} {
  set connections4 {
    type ipv4_addr
    size 65536
    flags dynamic
  }
  set connections6 {
    type ipv6_addr
    size 65536
    flags dynamic
  }
  chain leaving {
    type nat hook postrouting priority srcnat; policy accept;
    ip saddr ${ipv4.text} oifname != "${LINK_PREFIX}*" masquerade
    ip6 saddr ${ipv6.text} oifname != "${LINK_PREFIX}*" masquerade
  }
  chain passing {
    type filter hook forward priority filter; policy accept;
    ${from} ${to} drop
    ${from} meta mark ${MARK_KNOWN_ONLY} ct state != { established, related } drop
    ${from} ct state new add @connections4 { ip saddr ct count over ${MAX_CONNECTIONS} } drop
    ${from} ct state new add @connections6 { ip6 saddr ct count over ${MAX_CONNECTIONS} } drop
    ${from} meta mark set 0
    ${to} ct state != { established, related } drop
  }
  chain arriving {
    type filter hook input priority filter; policy accept;
    ${from} ip daddr ${gateway4} udp dport 53 accept
    ${from} ip daddr ${gateway4} tcp dport 53 accept
    ${from} ip6 daddr ${gateway6} udp dport 53 accept
    ${from} ip6 daddr ${gateway6} tcp dport 53 accept
    ${from} drop
    iifname != "lo" iifname != "${LINK_PREFIX}*" ip daddr ${gateway4} drop
    iifname != "lo" iifname != "${LINK_PREFIX}*" ip6 daddr ${gateway6} drop
  }
}
`;
}

const execFileAsync = promisify(execFile);

async function nft(args: readonly string[], input: string): Promise<void> {
  try {
    const running = execFileAsync('nft', args);
    running.child.stdin?.on('error', () => {});
    running.child.stdin?.end(input);
    await running;
  } catch (error) {
    const { stderr } = error as { stderr?: string };
    throw fail('RUNTIME_NETWORK_NO_NFT', { reason: stderr?.trim().split('\n')[0] || messageOf(error) }, error);
  }
}

/** Chains of others that drop what is forwarded, as those of Docker do: sandboxes reach nothing then. */
export function droppingChains(): string[] {
  const listed = JSON.parse(execFileSync('nft', ['-j', 'list', 'chains'], { encoding: 'utf8', stdio: 'pipe' })) as {
    readonly nftables: readonly { readonly chain?: Readonly<Record<string, unknown>> }[];
  };
  return listed.nftables.flatMap(({ chain }) =>
    chain?.hook === 'forward' && chain.policy === 'drop' && chain.table !== TABLE
      ? [`${chain.family} ${chain.table} ${chain.name}`]
      : [],
  );
}

const FORWARD4 = '/proc/sys/net/ipv4/ip_forward';
const FORWARD6 = '/proc/sys/net/ipv6/conf/all/forwarding';

/**
 * The machine passes packets on. For IPv6 that would make it deaf to the routers that tell it its own routes, so links that listen to them
 * are told to go on. @throws as writeFileSync
 */
export function allowForwarding(): void {
  if (readFileSync(FORWARD4, 'utf8').trim() !== '1') writeFileSync(FORWARD4, '1');
  let forwards: string;
  try {
    forwards = readFileSync(FORWARD6, 'utf8').trim();
  } catch {
    // A kernel without IPv6.
    return;
  }
  if (forwards === '1') return;
  for (const link of readdirSync('/proc/sys/net/ipv6/conf')) {
    const path = `/proc/sys/net/ipv6/conf/${link}/accept_ra`;
    if (link !== 'all' && readFileSync(path, 'utf8').trim() === '1') writeFileSync(path, '2');
  }
  writeFileSync(FORWARD6, '1');
}
