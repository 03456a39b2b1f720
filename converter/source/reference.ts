/**
 * What a user writes to name a source, after skopeo: a scheme, a colon, and what the scheme wants.
 *
 *     oci:DIR[:NAME]   oci-archive:FILE[:NAME]   docker-archive:FILE[:REF|@N]   docker://REF   tar:FILE   dir:PATH
 *
 * In `oci:`, `oci-archive:` and `docker-archive:` the path ends at the first colon, so it cannot hold one itself: the
 * rest may be a whole name with colons of its own (`oci:DIR:docker.io/library/busybox:latest`). `tar:` and `dir:` take
 * all that follows as the path.
 */
import { existsSync } from 'node:fs';
import { fail } from '../errors.ts';
import { formatImageReference, type ImageReference, normalizedName, parseImageReference } from './image-reference.ts';
import { quote } from './quote.ts';

export type SourceReference =
  | { readonly kind: 'oci'; readonly path: string; readonly name: string | undefined }
  | { readonly kind: 'oci-archive'; readonly path: string; readonly name: string | undefined }
  | {
      readonly kind: 'docker-archive';
      readonly path: string;
      readonly name: string | undefined;
      /** Position in manifest.json, from `@N`. */
      readonly position: number | undefined;
    }
  | { readonly kind: 'docker'; readonly image: ImageReference }
  | { readonly kind: 'tar'; readonly path: string }
  | { readonly kind: 'dir'; readonly path: string };

const KNOWN = ['oci:', 'oci-archive:', 'docker-archive:', 'docker://', 'tar:', 'dir:'];

/** Known to skopeo, not to us. */
const FOREIGN = ['containers-storage:', 'docker-daemon:', 'ostree:', 'sif:', 'tarball:', 'atomic:'];

/** @throws SOURCE_SCHEME, SOURCE_REFERENCE */
export function parseSourceReference(text: string): SourceReference {
  const colon = text.indexOf(':');
  const scheme = text.slice(0, Math.max(colon, 0));
  const rest = text.slice(colon + 1);
  switch (scheme) {
    case 'oci':
    case 'oci-archive': {
      const [path, name] = pathAndName(text, scheme, rest);
      return { kind: scheme, path, name };
    }
    case 'docker-archive':
      return dockerArchive(text, rest);
    case 'docker': {
      if (!rest.startsWith('//')) {
        throw bad(text, 'two slashes must follow "docker:"', `write docker://${rest.replace(/^\/+/, '')}`);
      }
      return { kind: 'docker', image: parseImageReference(rest.slice(2)) };
    }
    case 'tar':
    case 'dir':
      return { kind: scheme, path: checkedPath(text, rest) };
    default:
      throw unknownScheme(text);
  }
}

/** The reference as it may be shown: it never holds credentials, since none can be written in one. */
export function describeSource(ref: SourceReference): string {
  switch (ref.kind) {
    case 'docker':
      return `docker://${formatImageReference(ref.image)}`;
    case 'tar':
    case 'dir':
      return `${ref.kind}:${ref.path}`;
    case 'docker-archive':
      if (ref.position !== undefined) return `docker-archive:${ref.path}:@${ref.position}`;
      return `docker-archive:${ref.path}${ref.name === undefined ? '' : `:${ref.name}`}`;
    default:
      return `${ref.kind}:${ref.path}${ref.name === undefined ? '' : `:${ref.name}`}`;
  }
}

function pathAndName(text: string, scheme: string, rest: string): [path: string, name: string | undefined] {
  const colon = rest.indexOf(':');
  const path = checkedPath(text, colon < 0 ? rest : rest.slice(0, colon));
  if (colon < 0) return [path, undefined];
  const name = rest.slice(colon + 1);
  // A path with a colon in it would be cut in two without a word: C:\images\x, or /backup/12:30/x.
  if (/^[A-Za-z]$/.test(path) && /^[\\/]/.test(name)) throw colonInPath(text, scheme);
  if (!existsSync(path) && laterSplitExists(rest, colon)) throw colonInPath(text, scheme);
  if (name === '') throw bad(text, 'nothing follows the last colon', `leave the colon away, or name an image after it`);
  return [path, name];
}

function laterSplitExists(rest: string, firstColon: number): boolean {
  for (let at = rest.indexOf(':', firstColon + 1); at >= 0; at = rest.indexOf(':', at + 1)) {
    if (existsSync(rest.slice(0, at))) return true;
  }
  return existsSync(rest);
}

function colonInPath(text: string, scheme: string) {
  return bad(
    text,
    'the path holds a colon',
    `in ${scheme}: the path ends at the first colon; use a path without one, for example a relative path or a symlink to it`,
  );
}

function dockerArchive(text: string, rest: string): SourceReference {
  const [path, name] = pathAndName(text, 'docker-archive', rest);
  if (name === undefined) return { kind: 'docker-archive', path, name: undefined, position: undefined };
  if (name.startsWith('@')) {
    if (!/^@\d{1,6}$/.test(name))
      throw bad(text, `${quote(name)} is not a position`, '@0 is the first image of the archive');
    return { kind: 'docker-archive', path, name: undefined, position: Number(name.slice(1)) };
  }
  const image = parseImageReference(name);
  if (image.digest !== undefined) {
    throw bad(text, 'images in an archive have no digests', 'name the image by its tag');
  }
  return { kind: 'docker-archive', path, name, position: undefined };
}

function checkedPath(text: string, path: string): string {
  if (path === '') throw bad(text, 'the path is missing', 'write it after the colon');
  if (path.includes('\0')) throw bad(text, 'the path holds a NUL byte', 'no path can hold one');
  return path;
}

function unknownScheme(text: string) {
  const known = KNOWN.join(', ');
  const foreign = FOREIGN.find((prefix) => text.startsWith(prefix));
  if (foreign !== undefined) {
    return fail('SOURCE_SCHEME', {
      text: quote(text),
      problem: `${foreign} is not read here`,
      known,
      remedy: `copy it first: skopeo copy ${text} oci:DIR:latest, then use oci:DIR:latest`,
    });
  }
  if (text.includes('@') && !/@sha256:[0-9a-f]{64}$/.test(text)) {
    // May hold a password before the @.
    return fail('SOURCE_SCHEME', {
      text: '(not shown)',
      problem: 'no known scheme',
      known,
      remedy: `begin with one of ${known}`,
    });
  }
  return fail('SOURCE_SCHEME', { text: quote(text), problem: 'no known scheme', known, remedy: suggestion(text) });
}

function suggestion(text: string): string {
  if (/^[./~]/.test(text) || (!text.includes(':') && existsSync(text))) {
    return `for a path write oci:${text} (image layout), tar:${text} (one layer) or dir:${text} (a folder)`;
  }
  const bare = text.replace(/^https?:\/\//, '');
  if (normalizedName(bare) !== undefined) return `for an image in a registry write docker://${bare}`;
  return `begin with one of ${KNOWN.join(', ')}`;
}

function bad(text: string, problem: string, remedy: string) {
  return fail('SOURCE_REFERENCE', { text: quote(text), problem, remedy });
}
