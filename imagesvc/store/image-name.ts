/**
 * Names of images, by OCI's grammar (distribution-spec, "Pulling manifests"): `repository[:tag]`, where a repository is
 * lowercase words joined by `.`, `_`, `__` or dashes, in parts parted by slashes. Such a name is safe as a path, and no
 * part of it can begin with `_`: the stores rely on both.
 */
import { fail } from '../errors.ts';

export interface ImageName {
  readonly repository: string;
  readonly tag: string;
  /** `repository:tag`, the tag always there. */
  readonly full: string;
}

const REPOSITORY = /^[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*(?:\/[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*)*$/;
const TAG = /^[a-zA-Z0-9_][a-zA-Z0-9._-]{0,127}$/;
/** A folder's name may have 255 bytes; OCI gives a repository 255 in all. */
const MAX_REPOSITORY = 255;

export const DEFAULT_TAG = 'latest';

/** @throws STORE_NAME, which says what part of `text` breaks which rule */
export function parseImageName(text: string): ImageName {
  const colon = text.lastIndexOf(':');
  const repository = colon < 0 ? text : text.slice(0, colon);
  const tag = colon < 0 ? DEFAULT_TAG : text.slice(colon + 1);
  if (repository === 'sha256') throw fail('STORE_NAME', { name: text, why: '"sha256:" begins a digest' });
  if (repository.length > MAX_REPOSITORY)
    throw fail('STORE_NAME', { name: text, why: 'the repository is longer than 255 characters' });
  // Length first: the expression's cost is bounded by it.
  if (!REPOSITORY.test(repository)) {
    throw fail('STORE_NAME', {
      name: text,
      why: `the repository "${repository}" must be lowercase letters and digits, joined by ".", "_", "__" or "-", in parts parted by "/"`,
    });
  }
  if (!TAG.test(tag)) {
    throw fail('STORE_NAME', {
      name: text,
      why: `the tag "${tag}" must be 1 to 128 of A-Z a-z 0-9 "_" "." "-", and not begin with "." or "-"`,
    });
  }
  return { repository, tag, full: `${repository}:${tag}` };
}

export function isImageName(text: string): boolean {
  try {
    parseImageName(text);
    return true;
  } catch {
    return false;
  }
}

const RECORD_PART = /^[a-z0-9.-]+$/;

/** Kinds and keys of records: path-safe, and not `.` or `..`. @throws STORE_RECORD_KEY */
export function isRecordKey(part: string): boolean {
  return RECORD_PART.test(part) && !/^\.+$/.test(part) && part.length <= 200;
}

export function checkRecordKey(kind: string, key: string): void {
  for (const part of [kind, key]) {
    if (!isRecordKey(part)) throw fail('STORE_RECORD_KEY', { part: part.slice(0, 80) });
  }
}
