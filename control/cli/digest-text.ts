/** Digests in tables: enough digits to tell them apart and to type them. */
import { type Digest, hexOf } from '#base';

export function shortDigest(digest: Digest): string {
  return hexOf(digest).slice(0, 12);
}
