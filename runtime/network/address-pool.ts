/**
 * Which addresses this node's sandboxes have. Each gets a number; addresses, the name of its link and the links' hardware addresses follow
 * from it, so that the record needs to keep no more. Numbers go round: an address is free for as long as possible before it is another's.
 */
import { fail } from '../errors.ts';
import { type AddressRange, addressText, parseRange } from './address.ts';

/** $DSEC_NETWORK_IPV4 and $DSEC_NETWORK_IPV6: where the deployment uses these for something else. */
const DEFAULT_IPV4 = '10.209.0.0/16';
const DEFAULT_IPV6 = 'fd64:5ec0:d209::/64';

/** What all links of sandboxes are called; the packet filter goes by it. */
export const LINK_PREFIX = 'dsv';

export interface NetworkPool {
  readonly ipv4: AddressRange;
  readonly ipv6: AddressRange;
  /** This machine's end of every link, and where the resolver listens. */
  readonly gateway4: string;
  readonly gateway6: string;
  readonly size: number;
}

export interface SandboxAddresses {
  readonly number: number;
  readonly ipv4: string;
  readonly ipv6: string;
  readonly link: string;
  readonly mac: Buffer;
  readonly gatewayMac: Buffer;
}

/** @throws RUNTIME_NETWORK_POOL */
export function networkPool(env: NodeJS.ProcessEnv = process.env): NetworkPool {
  const ipv4 = poolRange(env.DSEC_NETWORK_IPV4 || DEFAULT_IPV4, 96 + 8, 96 + 24);
  const ipv6 = poolRange(env.DSEC_NETWORK_IPV6 || DEFAULT_IPV6, 8, 96);
  return {
    ipv4,
    ipv6,
    gateway4: at(ipv4, 1),
    gateway6: at(ipv6, 1),
    // The first is the network's, the second ours; the last would be a broadcast address.
    size: Math.min(2 ** (128 - ipv4.bits) - 3, 0xffff - 1),
  };
}

function poolRange(text: string, least: number, most: number): AddressRange {
  const range = parseRange(text);
  if (range === undefined || range.bits < least || range.bits > most) {
    const problem = least >= 96 ? 'an IPv4 range of /8 to /24' : 'an IPv6 range of /8 to /96';
    throw fail('RUNTIME_NETWORK_POOL', { range: text, problem: `it is not ${problem}` });
  }
  return range;
}

/** Of number 0 up to the pool's size. */
export function sandboxAddresses(pool: NetworkPool, number: number): SandboxAddresses {
  const mac = (first: number) => Buffer.from([first, 0xd5, 0xec, 0, number >> 8, number & 0xff]);
  return {
    number,
    ipv4: at(pool.ipv4, number + 2),
    ipv6: at(pool.ipv6, number + 2),
    link: `${LINK_PREFIX}${number}`,
    mac: mac(0x02),
    gatewayMac: mac(0x06),
  };
}

/** Of all its addresses, as four bytes. */
export function networkMask4({ ipv4 }: NetworkPool): Buffer {
  const mask = Buffer.alloc(4);
  mask.writeUInt32BE((0xffffffff << (128 - ipv4.bits)) >>> 0, 0);
  return mask;
}

function at(range: AddressRange, offset: number): string {
  const bytes = Buffer.from(range.bytes);
  bytes.writeUInt32BE(bytes.readUInt32BE(12) + offset, 12);
  return addressText(bytes);
}

/** The next number after `last` that none of `used` has. @throws RUNTIME_NETWORK_FULL */
export function freeNumber(pool: NetworkPool, used: ReadonlySet<number>, last: number): number {
  for (let step = 1; step <= pool.size; step++) {
    const number = (last + step) % pool.size;
    if (!used.has(number)) return number;
  }
  throw fail('RUNTIME_NETWORK_FULL', { range: pool.ipv4.text });
}
