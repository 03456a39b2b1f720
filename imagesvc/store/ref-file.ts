/** What a ref's file or object holds: a descriptor of the manifest, as one line of JSON. */
import { readFileSync } from 'node:fs';
import { isDigest, systemCode } from '#base';
import { undefinedIfMissing } from './blob-file.ts';
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

/** A hundred bytes that every start reads: four turns through the thread pool would cost ten times as much. Undefined when there is none. */
export function refText(path: string): string | undefined {
  try {
    return readFileSync(path, 'utf8');
  } catch (error) {
    return noText(error);
  }
}

/** A directory in the place of a ref's file is a damaged ref. */
export function noText(error: unknown): string | undefined {
  return systemCode(error) === 'EISDIR' ? '' : undefinedIfMissing(error);
}
