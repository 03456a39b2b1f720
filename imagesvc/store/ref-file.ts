/** What a ref's file or object holds: a descriptor of the manifest, as one line of JSON. */
import { isDigest } from '#base';
import type { Descriptor } from './blob-store.ts';

/** The descriptor in a ref's file, or undefined when it is damaged. */
export function parseDescriptor(text: string): Descriptor | undefined {
  try {
    const { mediaType, digest, size } = JSON.parse(text) as Partial<Descriptor>;
    if (typeof mediaType !== 'string' || !isDigest(digest) || !Number.isSafeInteger(size)) return undefined;
    return { mediaType, digest, size: size as number };
  } catch {
    return undefined;
  }
}
