/**
 * Packets between host and guest, over the virtio port of a machine: what carries frames over a connection that may be cut anywhere. The other end is
 * runtime/agent/src/guest/link.rs; docs/agent-protocol.md has the format. Whatever a guest sends is searched for packets whose checksums hold.
 */
import { crc32 } from 'node:zlib';
import { fail } from '../../errors.ts';

export const PACKET = { hello: 1, welcome: 2, frames: 3, taken: 4 } as const;

export interface Packet {
  readonly kind: number;
  readonly session: bigint;
  readonly number: number;
  readonly taken: number;
  readonly payload: Buffer;
}

const MAGIC = Buffer.from('DSv1');
export const PACKET_HEADER = 44;
/** Of a packet to the guest. What leads in a connection is as much in zeros, so that a packet that was cut is over. */
export const MOST_TO_GUEST = 64 << 10;
/** Of one from it: a frame of its agent, wrapped. */
const MOST_FROM_GUEST = (1 << 20) + 64;
/** Of packets whose header holds and whose payload does not, on one connection: a cut makes one of them, and each costs a sum over all that it claims. */
const MOST_DAMAGED = 8;

export function packetBytes({ kind, session, number, taken, payload }: Packet): Buffer {
  const header = Buffer.alloc(PACKET_HEADER);
  MAGIC.copy(header);
  header.writeUInt8(kind, 4);
  header.writeBigUInt64LE(session, 8);
  header.writeBigUInt64LE(BigInt(number), 16);
  header.writeBigUInt64LE(BigInt(taken), 24);
  header.writeUInt32LE(payload.length, 32);
  header.writeUInt32LE(crc32(payload), 36);
  header.writeUInt32LE(crc32(header.subarray(0, 40)), 40);
  return Buffer.concat([header, payload]);
}

export class PacketParser {
  private parts: Buffer[] = [];
  private length = 0;
  /** Nothing can be told before so much is there. */
  private wanted = PACKET_HEADER;
  private damaged = 0;

  /** @throws RUNTIME_AGENT_PROTOCOL */
  push(bytes: Buffer): Packet[] {
    this.parts.push(bytes);
    this.length += bytes.length;
    if (this.length < this.wanted) return [];
    const input = this.parts.length === 1 ? bytes : Buffer.concat(this.parts);
    const packets: Packet[] = [];
    let at = 0;
    this.wanted = PACKET_HEADER;
    for (;;) {
      const found = input.indexOf(MAGIC, at);
      if (found < 0) {
        // The last bytes may be the beginning of it.
        at = Math.max(at, input.length - MAGIC.length + 1);
        break;
      }
      at = found;
      const left = input.subarray(at);
      if (left.length < PACKET_HEADER) break;
      const length = lengthOf(left);
      if (length === undefined) {
        at++;
        continue;
      }
      if (left.length < PACKET_HEADER + length) {
        this.wanted = PACKET_HEADER + length;
        break;
      }
      const payload = left.subarray(PACKET_HEADER, PACKET_HEADER + length);
      if (left.readUInt32LE(36) !== crc32(payload)) {
        if (++this.damaged > MOST_DAMAGED)
          throw fail('RUNTIME_AGENT_PROTOCOL', { problem: 'packets that are damaged' });
        at++;
        continue;
      }
      packets.push({
        kind: left.readUInt8(4),
        session: left.readBigUInt64LE(8),
        number: Number(left.readBigUInt64LE(16)),
        taken: Number(left.readBigUInt64LE(24)),
        payload,
      });
      at += PACKET_HEADER + length;
    }
    const rest = input.subarray(at);
    this.parts = rest.length === 0 ? [] : [rest];
    this.length = rest.length;
    return packets;
  }
}

/** Of the payload; undefined: it is no header. */
function lengthOf(bytes: Buffer): number | undefined {
  if (bytes.readUInt32LE(40) !== crc32(bytes.subarray(0, 40))) return undefined;
  const length = bytes.readUInt32LE(32);
  return length > MOST_FROM_GUEST ? undefined : length;
}
