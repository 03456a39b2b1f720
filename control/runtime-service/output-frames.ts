/**
 * A command's output on its way to a client: frames of u32 length, u8 kind, payload, little-endian. Offsets are those of the stream.
 *
 *     1 stdout, 2 stderr   u64 offset, bytes
 *     3 missing            u8 stream, u64 offset, u64 how many
 *     4 result             JSON: how the command ended; the last frame
 *     5 error              JSON: code, message, hint, exit; the last frame
 */
import type { ExecResult, OutputPart } from '#runtime';
import { fail } from '../errors.ts';

const HEADER_BYTES = 5;
const MAX_FRAME_BYTES = 4 << 20;

export interface RemoteError {
  readonly code: string;
  readonly message: string;
  readonly hint?: string;
  readonly exit?: number;
  /** Of a sandbox that is gone, where it is known. */
  readonly reason?: string;
}

export type OutputNews =
  | { readonly part: OutputPart }
  | { readonly result: ExecResult }
  | { readonly error: RemoteError };

function frame(kind: number, payload: Buffer): Buffer {
  const header = Buffer.alloc(HEADER_BYTES);
  header.writeUInt32LE(payload.length, 0);
  header.writeUInt8(kind, 4);
  return Buffer.concat([header, payload]);
}

export const outputFrame = {
  part(part: OutputPart): Buffer {
    const stream = part.stream === 'stdout' ? 1 : 2;
    const offset = Buffer.alloc(8);
    offset.writeBigUInt64LE(BigInt(part.offset));
    if (part.bytes !== undefined) return frame(stream, Buffer.concat([offset, part.bytes]));
    const count = Buffer.alloc(8);
    count.writeBigUInt64LE(BigInt(part.missingBytes));
    return frame(3, Buffer.concat([Buffer.from([stream]), offset, count]));
  },
  result: (result: ExecResult): Buffer => frame(4, Buffer.from(JSON.stringify(result))),
  error: (error: RemoteError): Buffer => frame(5, Buffer.from(JSON.stringify(error))),
};

/** @throws SANDBOX_PROTOCOL */
export async function* parseOutput(stream: AsyncIterable<Buffer>): AsyncGenerator<OutputNews> {
  let rest: Buffer = Buffer.alloc(0);
  for await (const bytes of stream) {
    rest = rest.length === 0 ? bytes : Buffer.concat([rest, bytes]);
    let at = 0;
    while (rest.length - at >= HEADER_BYTES) {
      const length = rest.readUInt32LE(at);
      if (length > MAX_FRAME_BYTES) throw fail('SANDBOX_PROTOCOL', { problem: `a frame of ${length} bytes` });
      if (rest.length - at < HEADER_BYTES + length) break;
      const kind = rest.readUInt8(at + 4);
      yield newsOf(kind, rest.subarray(at + HEADER_BYTES, at + HEADER_BYTES + length));
      at += HEADER_BYTES + length;
    }
    rest = rest.subarray(at);
  }
}

function newsOf(kind: number, payload: Buffer): OutputNews {
  try {
    const stream = (kind === 3 ? payload.readUInt8(0) : kind) === 2 ? 'stderr' : 'stdout';
    if (kind === 1 || kind === 2) {
      return { part: { stream, offset: Number(payload.readBigUInt64LE(0)), bytes: payload.subarray(8) } };
    }
    if (kind === 3) {
      const [offset, missing] = [payload.readBigUInt64LE(1), payload.readBigUInt64LE(9)];
      return { part: { stream, offset: Number(offset), missingBytes: Number(missing) } };
    }
    if (kind === 4) return { result: JSON.parse(payload.toString()) as ExecResult };
    if (kind === 5) return { error: JSON.parse(payload.toString()) as RemoteError };
  } catch (error) {
    throw fail('SANDBOX_PROTOCOL', { problem: 'a frame that is cut short' }, error);
  }
  throw fail('SANDBOX_PROTOCOL', { problem: `a frame of kind ${kind}` });
}
