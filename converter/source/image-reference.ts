/**
 * Names of images in registries: `[HOST[:PORT]/]PATH[:TAG][@sha256:HEX]`, as Docker's command line reads them.
 * The first part is a host when it holds a `.` or a `:`, is `localhost`, or has a capital letter; otherwise the host is
 * docker.io, where a path of one part stands below `library/`. With a tag and a digest the digest decides.
 */
import { type Digest, parseDigest } from '#base';
import { fail } from '../errors.ts';
import { quote } from './quote.ts';

export interface ImageReference {
  /** Host and port as they are written: `docker.io`, `localhost:5000`, `[::1]:5000`. Lower case. */
  readonly registry: string;
  /** `library/busybox` */
  readonly repository: string;
  readonly tag: string | undefined;
  readonly digest: Digest | undefined;
}

const PATH_PART = /^[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*$/;
const TAG = /^\w[\w.-]{0,127}$/;
const HOST_NAME = /^[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?(?::\d{1,5})?$/;
const HOST_IPV6 = /^\[[0-9A-Fa-f:.]+\](?::\d{1,5})?$/;
const MAX_PATH = 255;

/** @throws SOURCE_REFERENCE */
export function parseImageReference(text: string): ImageReference {
  const at = text.indexOf('@');
  let rest = text;
  let digest: Digest | undefined;
  if (at >= 0) {
    const algorithm = text.slice(at + 1);
    // What is no digest may be `user:password@host`: it must not be repeated in a message or a log.
    if (!/^[a-z0-9+._-]+:[0-9a-fA-F]{32,}$/.test(algorithm)) {
      throw bad(
        '(not shown)',
        'what follows the @ is not a digest',
        'a digest is sha256: and 64 hex digits; credentials go into --creds',
      );
    }
    digest = parseDigest(algorithm);
    if (!digest) throw bad(quote(text), 'unsupported digest', 'a digest is sha256: and 64 lower-case hex digits');
    rest = text.slice(0, at);
  }

  const [registry, path] = splitHost(rest);
  let repository = path;
  let tag: string | undefined;
  const colon = path.lastIndexOf(':');
  if (colon > path.lastIndexOf('/')) {
    tag = path.slice(colon + 1);
    repository = path.slice(0, colon);
    if (!TAG.test(tag)) {
      throw bad(
        quote(text),
        `${quote(tag)} is not a tag`,
        'a tag has at most 128 letters, digits, "_", "." and "-", and begins with none of the last two',
      );
    }
  }
  if (registry === 'docker.io' && repository !== '' && !repository.includes('/')) repository = `library/${repository}`;
  if (
    repository === '' ||
    repository.length > MAX_PATH ||
    !repository.split('/').every((part) => PATH_PART.test(part))
  ) {
    throw bad(
      quote(text),
      `${quote(repository)} is not a repository`,
      'a repository is lower-case letters and digits in parts separated by "/", with single ".", "_" or "-" inside a part',
    );
  }
  return { registry, repository, tag, digest };
}

/** The whole name: `docker.io/library/busybox:latest`. */
export function formatImageReference(ref: ImageReference): string {
  const tag = ref.tag === undefined ? '' : `:${ref.tag}`;
  const digest = ref.digest === undefined ? '' : `@${ref.digest}`;
  return `${ref.registry}/${ref.repository}${tag}${digest}`;
}

/** The whole name with `:latest` where neither tag nor digest is given, or undefined when `text` is no such name. */
export function normalizedName(text: string): string | undefined {
  try {
    const ref = parseImageReference(text);
    return formatImageReference(ref.tag === undefined && ref.digest === undefined ? { ...ref, tag: 'latest' } : ref);
  } catch {
    return undefined;
  }
}

function splitHost(text: string): [registry: string, path: string] {
  const slash = text.indexOf('/');
  const first = slash < 0 ? '' : text.slice(0, slash);
  const isHost = /[.:]/.test(first) || first === 'localhost' || first !== first.toLowerCase();
  if (first === '' || !isHost) return ['docker.io', text];
  if (!HOST_NAME.test(first) && !HOST_IPV6.test(first)) {
    throw bad(quote(text), `${quote(first)} is not a host`, 'a host is NAME, NAME:PORT, ADDRESS:PORT or [IPV6]:PORT');
  }
  const port = /:(\d+)$/.exec(first.replace(/^\[.*\]/, ''))?.[1];
  if (port !== undefined && (Number(port) < 1 || Number(port) > 65535)) {
    throw bad(quote(text), `${port} is not a port`, 'ports are 1 to 65535');
  }
  const host = first.toLowerCase();
  return [host === 'index.docker.io' || host === 'registry-1.docker.io' ? 'docker.io' : host, text.slice(slash + 1)];
}

function bad(text: string, problem: string, remedy: string) {
  return fail('SOURCE_REFERENCE', { text, problem, remedy });
}
