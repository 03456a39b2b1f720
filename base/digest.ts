/** Content digests as OCI writes them: `sha256:<64 lowercase hex>`. */
import { createHash } from 'node:crypto';

/** `sha256:<hex>`, checked by `parseDigest` or made by this module. */
export type Digest = string & { readonly __digest: unique symbol };

const SHAPE = /^sha256:[0-9a-f]{64}$/;

export function isDigest(text: unknown): text is Digest {
  return typeof text === 'string' && SHAPE.test(text);
}

/** The digest in `text`, or undefined when it is not a well-formed sha256 digest. */
export function parseDigest(text: unknown): Digest | undefined {
  return isDigest(text) ? text : undefined;
}

export function digestOf(bytes: Uint8Array | string): Digest {
  return `sha256:${createHash('sha256').update(bytes).digest('hex')}` as Digest;
}

/** The 64 hex digits alone. */
export function hexOf(digest: Digest): string {
  return digest.slice('sha256:'.length);
}

export function digestFromHex(hex: string): Digest {
  return `sha256:${hex}` as Digest;
}
