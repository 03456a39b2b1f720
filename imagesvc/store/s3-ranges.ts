/**
 * Reads from an S3 bucket: the hot path. Ranged GETs over undici's kept connections, signed by s3-signer.ts; also HEAD, listings and
 * small objects, so that a command that only reads never loads the SDK.
 *
 * One call is one request (two after expired credentials): retries, hedging and limits are decorators around it. What comes back
 * is exactly what was asked for or an error, whatever the server does: a 200 instead of a 206 is cut to the range, a range
 * that is not the one asked for is refused, and every request ends within a deadline that grows with its size.
 */
import type { Dispatcher } from 'undici';
import { type DsecError, StopController, type StopSignal } from '#base';
import { ArrivalDigests, type RangeOptions as SourceOptions } from '#chunk-cache';
import { loadHttpAgents } from '#converter';
import { fail } from '../errors.ts';
import { exchange, type HttpResponse as Response } from './http-exchange.ts';
import type { S3Access } from './s3-access.ts';
import { type Answer, type Asked, connectionFailure, isExpired, refusal } from './s3-refusal.ts';
import { encodePath, encodeQuery, S3Signer } from './s3-signer.ts';
import { addressOf } from './s3-url.ts';

export interface S3Object {
  readonly key: string;
  readonly sizeBytes: number;
  /** The server's clock, often in whole seconds. */
  readonly modifiedMs: number;
}

export interface S3Page {
  readonly objects: readonly S3Object[];
  /** The server's clock when it answered. */
  readonly serverNowMs: number;
}

const CONNECTIONS = 64;
const CONNECT_TIMEOUT_MS = 10_000;
/** Without a byte for this long, a connection is given up. */
const IDLE_MS = 20_000;
/** A request takes at most this, and a second for each SLOWEST_BYTES that it brings. */
const DEADLINE_MS = 40_000;
const SLOWEST_BYTES = 64 * 1024;
const MAX_DEADLINE_MS = 600_000;
/** A server that ignores ranges is read up to the range this far; beyond, it is of no use. */
const MAX_SKIPPED_BYTES = 64 * 1024 * 1024;
const MAX_ERROR_BYTES = 64 * 1024;
const MAX_LIST_BYTES = 16 * 1024 * 1024;
/** A rest as short as this is read, since giving it up would end the connection. */
const MAX_DRAIN_BYTES = 16 * 1024;

interface Request {
  readonly method: 'GET' | 'HEAD';
  /** Whole key; undefined for the bucket itself. */
  readonly key?: string;
  readonly query?: readonly (readonly [string, string])[];
  readonly headers?: Readonly<Record<string, string>>;
  readonly action: string;
  readonly expectedBytes?: number;
  readonly signal?: StopSignal;
  readonly hashed?: boolean;
}

export type RangeOptions = Pick<SourceOptions, 'signal' | 'hashed'>;

/** One set of connections for each set of authorities, for the whole process. */
const agents = new Map<string, Promise<Dispatcher>>();

export class S3Ranges {
  readonly #access: S3Access;
  #signer: S3Signer | undefined;
  #address: { origin: string; host: string; path: string } | undefined;

  constructor(access: S3Access) {
    this.#access = access;
  }

  /**
   * Exactly `length` (at least 1) bytes of an object; undefined when there is no such object.
   * Its size instead, when it ends before. @throws STORE_REMOTE, STORE_REMOTE_ANSWER, STORE_REMOTE_ACCESS, ...
   */
  async range(
    key: string,
    offset: number,
    length: number,
    { signal, hashed }: RangeOptions = {},
  ): Promise<Buffer | { sizeBytes: number } | undefined> {
    const action = `read of ${key}, bytes ${offset} to ${offset + length - 1}`;
    const headers = { range: `bytes=${offset}-${offset + length - 1}` };
    const request: Request = { method: 'GET', key, headers, action, expectedBytes: length, signal, hashed };
    return this.#exchange(request, async (response) => {
      if (response.status === 206) {
        const total = this.#contentRange(response, request, offset, length);
        if (total < offset + length) return { sizeBytes: total };
        return this.#collect(response, request, 0, length, true);
      }
      if (response.status === 200) {
        const size = contentLength(response);
        if (size !== undefined && size < offset + length) return { sizeBytes: size };
        if (offset > MAX_SKIPPED_BYTES) throw fail('STORE_NO_RANGES', { store: this.#store, action });
        return this.#collect(response, request, offset, length, false);
      }
      if (response.status === 416) {
        const size = /^bytes \*\/(\d+)$/.exec(response.header('content-range') ?? '')?.[1];
        if (size !== undefined && Number(size) >= offset + length)
          throw this.#strange(request, `416 for a range inside the ${size} bytes`);
        return { sizeBytes: size === undefined ? offset : Number(size) };
      }
      return this.#orMissing(response, request);
    });
  }

  /** The beginning of an object, and how large it is; undefined when there is none. */
  async beginning(key: string, limit: number): Promise<{ bytes: Buffer; sizeBytes: number } | undefined> {
    const action = `read of ${key}`;
    const headers = { range: `bytes=0-${limit - 1}` };
    const request: Request = { method: 'GET', key, headers, action, expectedBytes: limit };
    return this.#exchange(request, async (response) => {
      if (response.status === 206) {
        const sizeBytes = this.#contentRange(response, request, 0, limit);
        return { bytes: await this.#collect(response, request, 0, Math.min(limit, sizeBytes), true), sizeBytes };
      }
      if (response.status === 200) {
        const size = contentLength(response);
        if (size === undefined) throw this.#strange(request, 'an object without its length');
        return {
          bytes: await this.#collect(response, request, 0, Math.min(limit, size), size <= limit),
          sizeBytes: size,
        };
      }
      // Of an empty object there is no first byte.
      if (response.status === 416) return { bytes: Buffer.alloc(0), sizeBytes: 0 };
      return this.#orMissing(response, request);
    });
  }

  async head(key: string): Promise<{ sizeBytes: number } | undefined> {
    const request: Request = { method: 'HEAD', key, action: `look at ${key}` };
    return this.#exchange(request, async (response) => {
      if (response.status === 200) {
        const sizeBytes = contentLength(response);
        if (sizeBytes === undefined) throw this.#strange(request, 'an object without its length');
        return { sizeBytes };
      }
      return this.#orMissing(response, request);
    });
  }

  /** Whether anything begins with `prefix`; one key of it. */
  async anyKey(prefix: string): Promise<string | undefined> {
    const { page } = await this.#listPage(prefix, undefined, 1);
    return page.objects[0]?.key;
  }

  /** All objects whose keys begin with `prefix`, by key, page by page; at least one page. `again` tries a page's request. */
  async *list(
    prefix: string,
    again: <T>(work: () => Promise<T>) => Promise<T> = (work) => work(),
  ): AsyncGenerator<S3Page, void, undefined> {
    let token: string | undefined;
    do {
      const { page, next }: { page: S3Page; next: string | undefined } = await again(() =>
        this.#listPage(prefix, token),
      );
      yield page;
      if (next !== undefined && next === token) {
        throw fail('STORE_REMOTE_ANSWER', {
          store: this.#store,
          action: `list of ${prefix}`,
          what: 'the same page again',
        });
      }
      token = next;
    } while (token !== undefined);
  }

  async #listPage(
    prefix: string,
    token: string | undefined,
    limit?: number,
  ): Promise<{ page: S3Page; next: string | undefined }> {
    const query: [string, string][] = [
      ['list-type', '2'],
      ['encoding-type', 'url'],
      ['prefix', prefix],
    ];
    if (token !== undefined) query.push(['continuation-token', token]);
    if (limit !== undefined) query.push(['max-keys', String(limit)]);
    const request: Request = { method: 'GET', query, action: `list of ${prefix}*` };
    return this.#exchange(request, async (response) => {
      if (response.status !== 200) throw await this.#refuse(response, request);
      const xml = (await this.#text(response, request, MAX_LIST_BYTES)).toString('utf8');
      const date = Date.parse(response.header('date') ?? '');
      const page = {
        objects: this.#parseList(xml, prefix, request),
        serverNowMs: Number.isFinite(date) ? date : Date.now(),
      };
      const more = tag(xml, 'IsTruncated') === 'true';
      const next = more ? tag(xml, 'NextContinuationToken') : undefined;
      if (more && !next) throw this.#strange(request, 'a part of a list without a way to the rest');
      return { page, next };
    });
  }

  #parseList(xml: string, prefix: string, request: Request): S3Object[] {
    if (!xml.includes('ListBucketResult')) throw this.#strange(request, 'something that is no list of objects');
    const encoded = tag(xml, 'EncodingType') === 'url';
    const objects: S3Object[] = [];
    for (const [, entry] of xml.matchAll(/<Contents>([\s\S]*?)<\/Contents>/g)) {
      const raw = tag(entry!, 'Key');
      const sizeBytes = Number(tag(entry!, 'Size'));
      const modifiedMs = Date.parse(tag(entry!, 'LastModified') ?? '');
      if (raw === undefined || !Number.isSafeInteger(sizeBytes) || !Number.isFinite(modifiedMs)) {
        throw this.#strange(request, 'an object without key, size or time');
      }
      const key = encoded ? decodeKey(raw) : raw;
      if (key?.startsWith(prefix)) objects.push({ key, sizeBytes, modifiedMs });
    }
    return objects;
  }

  get #store(): string {
    return this.#access.location.url;
  }

  /** The whole size that `Content-Range` tells. @throws when it is another range than the one asked for */
  #contentRange(response: Response, request: Request, offset: number, length: number): number {
    const header = response.header('content-range') ?? '';
    const range = /^bytes (\d+)-(\d+)\/(\d+)$/.exec(header);
    if (range === null) throw this.#strange(request, `a part without saying which ("${header.slice(0, 80)}")`);
    const [first, last, total] = range.slice(1).map(Number) as [number, number, number];
    if (first !== offset || last !== Math.min(offset + length, total) - 1)
      throw this.#strange(request, `the range ${first} to ${last}`);
    return total;
  }

  /** `length` bytes of the body after `skip`. `whole`: the body must end there. */
  async #collect(response: Response, request: Request, skip: number, length: number, whole: boolean): Promise<Buffer> {
    const declared = contentLength(response);
    if (whole && declared !== undefined && declared !== length) {
      throw this.#strange(request, `${declared} bytes instead of ${length}`);
    }
    const out = Buffer.allocUnsafeSlow(length);
    const digests = request.hashed === true ? new ArrivalDigests(out) : undefined;
    let done = 0;
    let left = skip;
    await response.body.each((piece) => {
      const useful = left === 0 ? piece : piece.subarray(Math.min(left, piece.length));
      left -= piece.length - useful.length;
      if (whole && done + useful.length > length) throw this.#strange(request, `more than ${length} bytes`);
      done += useful.copy(out, done, 0, Math.min(useful.length, length - done));
      digests?.cameTo(done);
      return whole || done < length;
    });
    if (done < length)
      throw fail('STORE_REMOTE', {
        store: this.#store,
        action: request.action,
        reason: `${done} of ${length} bytes came`,
      });
    return out;
  }

  async #text(response: Response, request: Request, limit: number): Promise<Buffer> {
    const parts: Buffer[] = [];
    let size = 0;
    await response.body.each((part) => {
      size += part.length;
      if (size > limit) throw this.#strange(request, `more than ${limit} bytes`);
      return parts.push(part) > 0;
    });
    return Buffer.concat(parts);
  }

  /** Undefined for "no such object"; anything else is an error. */
  async #orMissing(response: Response, request: Request): Promise<undefined> {
    if (response.status !== 404) throw await this.#refuse(response, request);
    const answer = await this.#answer(response, request);
    // HEAD has no body to tell the bucket from the object; the next GET or list does.
    if (answer.code === 'NoSuchBucket') throw refusal(this.#asked(request), answer);
    return undefined;
  }

  async #refuse(response: Response, request: Request): Promise<DsecError> {
    return refusal(this.#asked(request), await this.#answer(response, request));
  }

  async #answer(response: Response, request: Request): Promise<Answer> {
    const xml =
      request.method === 'HEAD'
        ? ''
        : (await this.#text(response, request, MAX_ERROR_BYTES).catch(() => '')).toString('utf8');
    return {
      status: response.status,
      code: tag(xml, 'Code'),
      message: tag(xml, 'Message'),
      region: response.header('x-amz-bucket-region') ?? tag(xml, 'Region'),
      retryAfter: response.header('retry-after'),
    };
  }

  #asked(request: Request): Asked {
    return { store: this.#store, bucket: this.#access.location.bucket, action: request.action };
  }

  #strange(request: Request, what: string): DsecError {
    return fail('STORE_REMOTE_ANSWER', { store: this.#store, action: request.action, what });
  }

  /** Sends, lets `use` read the answer, and gives up what is left of it. */
  async #exchange<T>(request: Request, use: (response: Response) => Promise<T>): Promise<T> {
    request.signal?.throwIfAborted();
    const ending = new StopController();
    const deadlineMs = Math.min(MAX_DEADLINE_MS, DEADLINE_MS + ((request.expectedBytes ?? 0) / SLOWEST_BYTES) * 1000);
    const onAbort = () => ending.abort(request.signal!.reason);
    request.signal?.addEventListener('abort', onAbort, { once: true });
    const timer = setTimeout(() => {
      ending.abort(
        fail('STORE_TIMEOUT', { what: `${this.#store}: ${request.action}`, timeoutMs: Math.round(deadlineMs) }),
      );
    }, deadlineMs);
    try {
      for (let renewed = false; ; renewed = true) {
        const response = await this.#send(request, ending.signal);
        if (!renewed && [400, 401, 403].includes(response.status)) {
          const answer = await this.#answer(response, request);
          if (isExpired(answer)) {
            this.#access.forget();
            continue;
          }
          throw refusal(this.#asked(request), answer);
        }
        try {
          return await use(response);
        } finally {
          giveUp(response);
        }
      }
    } catch (error) {
      // The reason of whoever ended it: the caller's, or the deadline.
      if (ending.signal.aborted) throw ending.signal.reason;
      throw connectionFailure(this.#asked(request), error);
    } finally {
      clearTimeout(timer);
      request.signal?.removeEventListener('abort', onAbort);
    }
  }

  async #send(request: Request, signal: StopSignal): Promise<Response> {
    const access = this.#access;
    if (this.#signer === undefined || this.#address === undefined) {
      const region = await access.region();
      this.#signer = new S3Signer(region);
      this.#address = addressOf(access.location, region);
    }
    const { origin, host, path: base } = this.#address;
    const credentials = await access.credentials();
    const path = request.key === undefined ? bucketPath(base) : `${base}${encodePath(request.key)}`;
    const query = [...(request.query ?? []), ...(access.location.signedQuery ?? [])];
    const { method } = request;
    const headers =
      credentials === undefined
        ? { ...request.headers, host }
        : this.#signer.sign({ method, host, path, query, headers: request.headers }, credentials);
    const agent = await agentFor(access, host);
    return exchange(
      agent,
      {
        origin,
        path: query.length === 0 ? path : `${path}?${encodeQuery(query)}`,
        method,
        headers,
        headersTimeout: IDLE_MS,
        bodyTimeout: IDLE_MS,
      },
      signal,
    );
  }
}

/** A list is asked of the bucket: `/bucket` with path style, `/` without. */
function bucketPath(base: string): string {
  return base === '/' ? base : base.replace(/\/$/, '');
}

function giveUp(response: Response): void {
  const length = contentLength(response);
  response.body.giveUp(length !== undefined && length <= MAX_DRAIN_BYTES);
}

function contentLength(response: Response): number | undefined {
  const text = response.header('content-length');
  return text !== undefined && /^\d{1,15}$/.test(text) ? Number(text) : undefined;
}

/** Text of the first `<name>`, entities resolved. */
function tag(xml: string, name: string): string | undefined {
  const start = xml.indexOf(`<${name}>`);
  if (start < 0) return undefined;
  const end = xml.indexOf(`</${name}>`, start);
  if (end < 0) return undefined;
  const entities: Record<string, string> = { lt: '<', gt: '>', amp: '&', quot: '"', apos: "'" };
  return xml
    .slice(start + name.length + 2, end)
    .replace(/&(lt|gt|amp|quot|apos);/g, (_, entity: string) => entities[entity]!);
}

function decodeKey(text: string): string | undefined {
  try {
    return decodeURIComponent(text.replace(/\+/g, ' '));
  } catch {
    return undefined;
  }
}

async function agentFor(access: S3Access, host: string): Promise<Dispatcher> {
  const loopback = /^(localhost|127\.[\d.]+|\[::1\])(:\d+)?$/.test(host);
  const proxy =
    !loopback && ['http_proxy', 'HTTP_PROXY', 'https_proxy', 'HTTPS_PROXY'].some((name) => process.env[name]);
  const key = `${access.location.caFile ?? ''} ${proxy}`;
  let agent = agents.get(key);
  if (agent === undefined) {
    agent = makeAgent(access, proxy);
    agents.set(key, agent);
    agent.catch(() => agents.delete(key));
  }
  return agent;
}

async function makeAgent(access: S3Access, proxy: boolean): Promise<Dispatcher> {
  const { Agent, EnvHttpProxyAgent } = await loadHttpAgents();
  const ca = await access.authorities();
  const connect = { timeout: CONNECT_TIMEOUT_MS, ...(ca === undefined ? {} : { ca }) };
  const options = { connections: CONNECTIONS, pipelining: 1, keepAliveTimeout: 30_000, connect };
  return proxy ? new EnvHttpProxyAgent({ ...options, requestTls: connect }) : new Agent(options);
}
