/**
 * `s3://bucket/prefix?option=value&…`: where an S3 store is and how it is reached. Options that are not in the URL come from the
 * environment variables that other S3 tools read. Secrets never stand in a URL: access keys come from the credentials chain,
 * and `signed-query` (for a CDN that wants a token) is left out of what is shown.
 */
import { messageOf } from '#base';
import { fail } from '../errors.ts';

export interface S3Location {
  /** As it is shown: without secrets. */
  readonly url: string;
  readonly bucket: string;
  /** Begins every key: empty, or ends with `/`. */
  readonly prefix: string;
  /** Of another server than AWS. */
  readonly endpoint: URL | undefined;
  readonly region: string | undefined;
  /** The bucket in the path instead of the host name. */
  readonly pathStyle: boolean;
  readonly profile: string | undefined;
  readonly anonymous: boolean;
  /** PEM file of certificate authorities to trust beside the usual ones. */
  readonly caFile: string | undefined;
  /** Appended to every read, which is then not signed. */
  readonly signedQuery: readonly (readonly [string, string])[] | undefined;
}

const OPTIONS = ['endpoint', 'region', 'path-style', 'profile', 'anonymous', 'ca', 'signed-query'];
const BUCKET = /^[a-zA-Z0-9][a-zA-Z0-9._-]{1,254}$/;
const MAX_PREFIX = 400;

/** @throws STORE_URL */
export function parseS3Url(url: string, env: NodeJS.ProcessEnv = process.env): S3Location {
  const shown = withoutSecrets(url);
  const refuse = (why: string, cause?: unknown) => fail('STORE_URL', { url: shown, why }, cause);
  const match = /^s3:\/\/([^/?#]*)(?:\/([^?#]*))?(?:\?([^#]*))?$/i.exec(url);
  if (match === null) throw refuse('write s3://BUCKET/PREFIX?endpoint=URL');
  const bucket = match[1]!;
  if (bucket.includes('@')) throw refuse('keys do not belong in a URL: use the environment, or a profile');
  if (!BUCKET.test(bucket)) throw refuse(`"${bucket}" is no name of a bucket`);
  const parameters = new URLSearchParams(match[3] ?? '');
  for (const name of parameters.keys()) {
    if (!OPTIONS.includes(name)) throw refuse(`no option "${name}"; there are ${OPTIONS.join(', ')}`);
    if (parameters.getAll(name).length > 1) throw refuse(`"${name}" is given twice`);
  }
  const given = (name: string) => parameters.get(name) || undefined;
  const flag = (name: string): boolean | undefined => {
    const value = parameters.get(name);
    if (value === null) return undefined;
    if (['', '1', 'true'].includes(value)) return true;
    if (['0', 'false'].includes(value)) return false;
    throw refuse(`${name}=${value}: write 1 or 0`);
  };
  const endpointText = given('endpoint') ?? (env.AWS_ENDPOINT_URL_S3 || env.AWS_ENDPOINT_URL || undefined);
  const endpoint = endpointText === undefined ? undefined : parseEndpoint(endpointText, refuse);
  const signedText = given('signed-query');
  return {
    url: shown,
    bucket,
    prefix: parsePrefix(match[2] ?? '', refuse),
    endpoint,
    region: given('region') ?? (env.AWS_REGION || env.AWS_DEFAULT_REGION || undefined),
    // A dot in the name would not fit the certificate of *.s3.REGION.amazonaws.com.
    pathStyle: flag('path-style') ?? (endpoint !== undefined || bucket.includes('.')),
    profile: given('profile'),
    anonymous: flag('anonymous') ?? false,
    caFile: given('ca') ?? (env.AWS_CA_BUNDLE || undefined),
    signedQuery: signedText === undefined ? undefined : [...new URLSearchParams(signedText)],
  };
}

function parsePrefix(text: string, refuse: (why: string, cause?: unknown) => Error): string {
  let prefix: string;
  try {
    prefix = decodeURIComponent(text).replace(/\/+$/, '');
  } catch (error) {
    throw refuse(messageOf(error), error);
  }
  if (prefix === '') return '';
  if (prefix.length > MAX_PREFIX) throw refuse(`the prefix is longer than ${MAX_PREFIX} characters`);
  if (/[\0-\x1f\x7f]/.test(prefix)) throw refuse('the prefix has a control character');
  if (prefix.split('/').some((part) => ['', '.', '..'].includes(part))) {
    throw refuse('the prefix has an empty part, "." or ".."');
  }
  return `${prefix}/`;
}

function parseEndpoint(text: string, refuse: (why: string, cause?: unknown) => Error): URL {
  let endpoint: URL;
  try {
    endpoint = new URL(text);
  } catch (error) {
    throw refuse(`the endpoint "${text}" is no URL: write http://HOST:PORT or https://HOST`, error);
  }
  if (endpoint.protocol !== 'http:' && endpoint.protocol !== 'https:') {
    throw refuse(`the endpoint "${text}" must begin with http:// or https://`);
  }
  if (endpoint.username || endpoint.password || endpoint.search || endpoint.hash) {
    throw refuse('the endpoint must be scheme, host, port and perhaps a path');
  }
  return endpoint;
}

function withoutSecrets(url: string): string {
  return url.replace(/(signed-query=)[^&#]*/i, '$1…').replace(/^(s3:\/\/)[^/?#]*@/i, '$1…@');
}

/** Where requests go: origin, host, and the path in front of every key (with a `/` at both ends). */
export function addressOf(location: S3Location, region: string): { origin: string; host: string; path: string } {
  const { bucket, endpoint, pathStyle } = location;
  const tld = region.startsWith('cn-') ? 'amazonaws.com.cn' : 'amazonaws.com';
  const base = endpoint ?? new URL(`https://s3.${region}.${tld}`);
  const host = pathStyle ? base.host : `${bucket}.${base.host}`;
  const before = base.pathname.replace(/\/*$/, '/');
  return { origin: `${base.protocol}//${host}`, host, path: pathStyle ? `${before}${bucket}/` : before };
}
