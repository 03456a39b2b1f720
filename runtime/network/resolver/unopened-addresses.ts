/**
 * Addresses that no answer of the DNS opens, whoever gives it. A name on the internet may point at a machine of the deployment, at this one or
 * at a cloud's metadata service (DNS rebinding); what lies there is opened by address, in the policy, or not at all.
 */
import { BlockList } from 'node:net';

const V4 = [
  '0.0.0.0/8',
  '10.0.0.0/8',
  '100.64.0.0/10',
  '127.0.0.0/8',
  '169.254.0.0/16',
  '172.16.0.0/12',
  '192.0.0.0/24',
  '192.168.0.0/16',
  '198.18.0.0/15',
  '224.0.0.0/4',
  '240.0.0.0/4',
  // Metadata services outside of the ranges above: Alibaba Cloud's lies in 100.64.0.0/10, Azure's wire server does not.
  '168.63.129.16/32',
];
/** All that is no global unicast, and what holds an IPv4 address: that would be opened by another name. */
const V6_GLOBAL = '2000::/3';
const V6 = ['2001::/32', '2002::/16', '3fff::/20', '2001:db8::/32'];
/** Opened where the policy says that a name may lie inside. */
const PRIVATE = ['10.0.0.0/8', '172.16.0.0/12', '192.168.0.0/16', '100.64.0.0/10', 'fc00::/7'];
const NEVER = ['100.100.100.200/32', 'fd00:ec2::254/128'];

function listOf(ranges: readonly string[]): BlockList {
  const list = new BlockList();
  for (const range of ranges) {
    const [address, bits] = range.split('/') as [string, string];
    list.addSubnet(address, Number(bits), address.includes(':') ? 'ipv6' : 'ipv4');
  }
  return list;
}

const unopened = listOf([...V4, ...V6]);
const global = listOf([V6_GLOBAL]);
const inside = listOf(PRIVATE);
const never = listOf(NEVER);

/** @param insideToo The name is one that may lie in the deployment's own network. Loopback and metadata stay closed. */
export function mayBeOpened(address: string, insideToo = false): boolean {
  const family = address.includes(':') ? 'ipv6' : 'ipv4';
  if (never.check(address, family)) return false;
  if (insideToo && inside.check(address, family)) return true;
  if (family === 'ipv6' && !global.check(address, family)) return false;
  return !unopened.check(address, family);
}

/** Text of the four or sixteen bytes of an A or AAAA record, or undefined when they are not so many. */
export function addressText(data: Buffer): string | undefined {
  if (data.length === 4) return data.join('.');
  if (data.length !== 16) return undefined;
  const groups = Array.from({ length: 8 }, (_, index) => data.readUInt16BE(index * 2).toString(16));
  return groups.join(':');
}
