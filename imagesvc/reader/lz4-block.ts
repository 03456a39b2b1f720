/**
 * LZ4 block decoder for clusters of which only a part is wanted: it stops after `length` bytes, where decoders that take
 * a whole block fail. That also reads images whose blocks do not tell where the input ends.
 */

/** Exactly `length` bytes decoded from `input[from..]`, or undefined when the input is damaged or too short. */
export function decodeLz4(input: Buffer, from: number, length: number): Buffer | undefined {
  const out = Buffer.allocUnsafe(length);
  const end = input.length;
  let at = from;
  let done = 0;
  while (done < length) {
    if (at >= end) return undefined;
    const token = input[at++]!;
    let literals = token >>> 4;
    if (literals === 15) {
      let more: number;
      do {
        if (at >= end) return undefined;
        more = input[at++]!;
        literals += more;
      } while (more === 255);
    }
    const take = Math.min(literals, length - done);
    if (at + take > end) return undefined;
    if (take > 24) out.set(input.subarray(at, at + take), done);
    else for (let k = 0; k < take; k++) out[done + k] = input[at + k]!;
    done += take;
    at += take;
    if (done === length) break;
    if (at + 2 > end) return undefined;
    const distance = input[at]! | (input[at + 1]! << 8);
    at += 2;
    if (distance === 0 || distance > done) return undefined;
    let match = (token & 15) + 4;
    if (match === 19) {
      let more: number;
      do {
        if (at >= end) return undefined;
        more = input[at++]!;
        match += more;
      } while (more === 255);
    }
    match = Math.min(match, length - done);
    if (distance >= match && match > 24) out.copyWithin(done, done - distance, done - distance + match);
    else if (distance === 1) out.fill(out[done - 1]!, done, done + match);
    else for (let k = 0; k < match; k++) out[done + k] = out[done - distance + k]!;
    done += match;
  }
  return out;
}
