/**
 * A command's output as the runtime service sends it: frames of u32 length, u8 kind, payload, little-endian (control/runtime-service/output-frames.ts).
 * No DOM here: the tests hold it against what that file writes.
 */

/**
 * @typedef {{ kind: 'bytes', stream: 'stdout' | 'stderr', offset: number, bytes: Uint8Array }
 *   | { kind: 'missing', stream: 'stdout' | 'stderr', offset: number, missingBytes: number }
 *   | { kind: 'result', result: { exitCode: number, signal?: string, timedOut?: boolean } }
 *   | { kind: 'error', error: { code: string, message: string, hint?: string } }} OutputNews
 */

const HEADER_BYTES = 5;
const MAX_FRAME_BYTES = 4 << 20;

/** @param {AsyncIterable<Uint8Array>} stream @returns {AsyncGenerator<OutputNews>} @throws when it breaks the protocol */
export async function* parseOutput(stream) {
  let rest = new Uint8Array(0);
  for await (const bytes of stream) {
    rest = joined(rest, bytes);
    let at = 0;
    const view = new DataView(rest.buffer, rest.byteOffset, rest.byteLength);
    while (rest.length - at >= HEADER_BYTES) {
      const length = view.getUint32(at, true);
      if (length > MAX_FRAME_BYTES) throw new Error(`a frame of ${length} bytes`);
      if (rest.length - at < HEADER_BYTES + length) break;
      const start = at + HEADER_BYTES;
      yield newsOf(view.getUint8(at + 4), rest.subarray(start, start + length));
      at = start + length;
    }
    rest = rest.subarray(at);
  }
}

/** @param {Uint8Array} a @param {Uint8Array} b */
function joined(a, b) {
  const all = new Uint8Array(a.length + b.length);
  all.set(a);
  all.set(b, a.length);
  return all;
}

/** @param {number} kind @param {Uint8Array} payload @returns {OutputNews} */
function newsOf(kind, payload) {
  const view = new DataView(payload.buffer, payload.byteOffset, payload.byteLength);
  const number = (/** @type {number} */ at) => Number(view.getBigUint64(at, true));
  const name = (/** @type {number} */ stream) => (stream === 2 ? 'stderr' : 'stdout');
  if (kind === 1 || kind === 2) {
    return { kind: 'bytes', stream: name(kind), offset: number(0), bytes: payload.subarray(8) };
  }
  if (kind === 3) {
    return { kind: 'missing', stream: name(view.getUint8(0)), offset: number(1), missingBytes: number(9) };
  }
  if (kind === 4) return { kind: 'result', result: JSON.parse(new TextDecoder().decode(payload)) };
  if (kind === 5) return { kind: 'error', error: JSON.parse(new TextDecoder().decode(payload)) };
  throw new Error(`a frame of kind ${kind}`);
}
