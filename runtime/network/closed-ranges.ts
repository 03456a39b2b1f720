/**
 * What no policy opens: this machine as any sandbox would see it, other sandboxes, services of clouds that hand out keys to whoever asks from
 * the machine, and addresses that stand for others. The machine's own addresses are found by the program in the kernel, packet by packet.
 */
import { type AddressRange, parseRange } from './address.ts';
import type { NetworkPool } from './address-pool.ts';

const CLOSED = [
  '0.0.0.0/8',
  '127.0.0.0/8',
  // Link-local: metadata services of AWS, Azure, GCP, OpenStack and others.
  '169.254.0.0/16',
  // Alibaba Cloud's, Oracle's, Azure's wire server.
  '100.100.100.200',
  '192.0.0.192',
  '168.63.129.16',
  '224.0.0.0/4',
  '240.0.0.0/4',
  '::/96',
  'fe80::/10',
  // AWS.
  'fd00:ec2::254',
  // GCP.
  'fd20:ce::254',
  'ff00::/8',
  // What a NAT64 gateway makes 127.0.0.0/8 and 169.254.0.0/16 of.
  '64:ff9b::7f00:0/104',
  '64:ff9b::a9fe:0/112',
];

export function closedRanges(pool: NetworkPool): AddressRange[] {
  return [...CLOSED.map((text) => parseRange(text)!), pool.ipv4, pool.ipv6];
}
