/**
 * Bytes on their way from one place to another, checked against the descriptor that names them. The last piece is held
 * back until all is known to be right, so that whoever receives the end of the stream has received the right bytes.
 */
import { createHash } from 'node:crypto';
import { type Digest, digestFromHex } from '#base';
import type { Descriptor } from '../store/blob-store.ts';

export type Mismatch = (why: string, actual: Digest | undefined) => Error;

/** @throws what `mismatch` makes, when the stream is longer or shorter than the blob, or has another digest */
export async function* verified(
  stream: AsyncIterable<Buffer>,
  blob: Descriptor,
  mismatch: Mismatch,
  onBytes: (doneBytes: number) => void = () => {},
): AsyncGenerator<Buffer, void, undefined> {
  const hash = createHash('sha256');
  let doneBytes = 0;
  let held: Buffer | undefined;
  for await (const piece of stream) {
    doneBytes += piece.length;
    if (doneBytes > blob.size) throw mismatch(`it is longer than ${blob.size} bytes`, undefined);
    hash.update(piece);
    if (held !== undefined) yield held;
    held = piece;
    onBytes(doneBytes);
  }
  if (doneBytes !== blob.size) throw mismatch(`${doneBytes} bytes came, not ${blob.size}`, undefined);
  const actual = digestFromHex(hash.digest('hex'));
  if (actual !== blob.digest) throw mismatch(`its bytes have digest ${actual}`, actual);
  if (held !== undefined) yield held;
}
