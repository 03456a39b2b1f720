/**
 * A command's output as the API sends it: frames of u32 length, u8 kind, payload, little-endian. Offsets are those of the stream.
 *
 *     1 stdout, 2 stderr   u64 offset, bytes
 *     3 missing            u8 stream, u64 offset, u64 how many
 *     4 result             JSON: how the command ended; the last frame
 *     5 error              JSON; the last frame
 */
import type { ExecResult } from './command-result.ts';
import { type ErrorFacts, protocolError } from './errors.ts';

export type StreamName = 'stdout' | 'stderr';

/** In order for each stream; without bytes where `missingBytes` of them are lost. */
export interface OutputPart {
  readonly stream: StreamName;
  readonly offset: number;
  readonly bytes?: Buffer;
  readonly missingBytes?: number;
}

export type OutputNews = OutputPart | { readonly result: ExecResult } | { readonly error: ErrorFacts };

const HEADER_BYTES = 5;
const MAX_FRAME_BYTES = 4 << 20;

/** @throws ProtocolError */
export async function* parseFrames(stream: AsyncIterable<Buffer>): AsyncGenerator<OutputNews> {
  let rest: Buffer = Buffer.alloc(0);
  for await (const bytes of stream) {
    rest = rest.length === 0 ? bytes : Buffer.concat([rest, bytes]);
    let at = 0;
    while (rest.length - at >= HEADER_BYTES) {
      const length = rest.readUInt32LE(at);
      if (length > MAX_FRAME_BYTES) throw protocolError(`a frame of ${length} bytes`);
      if (rest.length - at < HEADER_BYTES + length) break;
      yield newsOf(rest.readUInt8(at + 4), rest.subarray(at + HEADER_BYTES, at + HEADER_BYTES + length));
      at += HEADER_BYTES + length;
    }
    rest = rest.subarray(at);
  }
}

function newsOf(kind: number, payload: Buffer): OutputNews {
  try {
    const stream = (kind === 3 ? payload.readUInt8(0) : kind) === 2 ? 'stderr' : 'stdout';
    if (kind === 1 || kind === 2) {
      return { stream, offset: Number(payload.readBigUInt64LE(0)), bytes: payload.subarray(8) };
    }
    if (kind === 3) {
      const [offset, missing] = [payload.readBigUInt64LE(1), payload.readBigUInt64LE(9)];
      return { stream, offset: Number(offset), missingBytes: Number(missing) };
    }
    if (kind === 4) return { result: JSON.parse(payload.toString()) as ExecResult };
    if (kind === 5) return { error: JSON.parse(payload.toString()) as ErrorFacts };
  } catch (error) {
    throw protocolError('a frame that is cut short', error);
  }
  throw protocolError(`a frame of kind ${kind}`);
}
