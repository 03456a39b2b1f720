/** A denied packet, as the program in the kernel tells of it. */
import { addressText } from './address.ts';
import { EVENT, REASONS, type Reason } from './egress-program.ts';

export interface DeniedPacket {
  /** In ns of the monotonic clock. */
  readonly at: bigint;
  /** Number of the sandbox, and of its link. */
  readonly sandbox: number;
  readonly link: number;
  readonly source: string;
  readonly destination: string;
  readonly destinationBytes: Buffer;
  readonly sourcePort: number;
  /** Of ICMP: the type. */
  readonly port: number;
  /** Number of the IP protocol. */
  readonly protocol: number;
  readonly etherType: number;
  readonly reason: Reason;
  readonly packetBytes: number;
}

export function parseEvent(bytes: Buffer): DeniedPacket {
  const destination = bytes.subarray(EVENT.destination, EVENT.destination + 16);
  return {
    at: bytes.readBigUInt64LE(EVENT.time),
    sandbox: bytes.readUInt32LE(EVENT.sandbox),
    link: bytes.readUInt32LE(EVENT.link),
    source: addressText(bytes.subarray(EVENT.source, EVENT.source + 16)),
    destination: addressText(destination),
    destinationBytes: Buffer.from(destination),
    sourcePort: bytes.readUInt16LE(EVENT.sourcePort),
    port: bytes.readUInt16LE(EVENT.port),
    protocol: bytes[EVENT.protocol]!,
    etherType: bytes.readUInt16LE(EVENT.etherType),
    reason: REASONS[bytes[EVENT.reason]!] ?? 'no rule',
    packetBytes: bytes.readUInt32LE(EVENT.packetBytes),
  };
}
