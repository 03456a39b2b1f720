/**
 * One HTTP exchange over undici, with the rules that must hold for credentials: redirects are followed here, by hand;
 * Authorization goes only to the origin it was meant for; https never becomes http. No retries, no tokens: see
 * registry-client.ts.
 */
import { Readable } from 'node:stream';
import type { Dispatcher } from 'undici';
import { type DsecError, messageOf, systemCode } from '#base';
import { fail } from '../errors.ts';
import { list, quote } from './quote.ts';
import { TransientFailure } from './retry.ts';

export interface HttpRequest {
  readonly method: 'GET' | 'HEAD' | 'POST' | 'PUT' | 'PATCH' | 'DELETE';
  readonly url: URL;
  readonly headers?: Readonly<Record<string, string>>;
  /** Sent to the origin of `url` alone. */
  readonly authorization?: string;
  /** Made anew for each hop. */
  readonly body?: () => Buffer | AsyncIterable<Buffer>;
  /** The body holds a credential: no redirect to another origin is followed. */
  readonly secretBody?: boolean;
  readonly signal?: AbortSignal;
  readonly headersTimeoutMs?: number;
  /** For messages: `manifest latest of library/busybox`. */
  readonly action: string;
}

export interface HttpResponse {
  readonly status: number;
  header(name: string): string | undefined;
  /** To be read to its end or destroyed. */
  readonly body: Readable;
  /** Where the answer came from. */
  readonly url: URL;
  /** Whether redirects led away from the origin that was asked. */
  readonly elsewhere: boolean;
}

export interface HttpOptions {
  /** For messages. */
  readonly registry: string;
  readonly insecure: boolean;
  /** Connections to one origin; more requests wait. */
  readonly connections: number;
  readonly env: NodeJS.ProcessEnv;
  readonly timeouts?: HttpTimeouts;
}

export interface HttpTimeouts {
  /** Until the head of an answer is there; 30 s. */
  readonly headersMs?: number;
  /** Between two parts of a body; 60 s. */
  readonly bodyIdleMs?: number;
}

const HEADERS_TIMEOUT_MS = 30_000;
const BODY_IDLE_MS = 60_000;
const CONNECT_TIMEOUT_MS = 15_000;
const MAX_REDIRECTS = 10;
const MAX_DRAIN_BYTES = 16 * 1024;
const USER_AGENT = 'dsec/0.1';

export class HttpClient {
  readonly #options: HttpOptions;
  readonly #agents = new Map<string, Dispatcher>();
  #closed = false;

  constructor(options: HttpOptions) {
    this.#options = options;
  }

  /** @throws TransientFailure when no answer came; SOURCE_REGISTRY_UNREACHABLE, SOURCE_REGISTRY_REDIRECT */
  async send(request: HttpRequest): Promise<HttpResponse> {
    let { url, method } = request;
    const seen: string[] = [];
    let elsewhere = false;
    for (;;) {
      // Once away, always away: a foreign host may not send us back with our credentials to a place of its choice.
      elsewhere ||= url.origin !== request.url.origin;
      const response = await this.#exchange(request, method, url, elsewhere);
      if (![301, 302, 303, 307, 308].includes(response.status)) return response;
      const location = response.header('location');
      if (location === undefined) return response;
      discard(response);
      seen.push(url.host);
      if (seen.length > MAX_REDIRECTS) {
        throw this.#redirect(request, `more than ${MAX_REDIRECTS} in a row, through ${list([...new Set(seen)])}`);
      }
      const next = this.#target(request, url, location);
      if (method !== 'GET' && method !== 'HEAD') {
        if (response.status === 303) method = 'GET';
        else if (response.status !== 307 && response.status !== 308) {
          throw this.#redirect(request, `status ${response.status} in answer to ${method}`);
        } else if (next.origin !== request.url.origin && request.secretBody === true) {
          throw this.#redirect(request, 'the request holds a credential and would go to another host');
        }
      }
      url = next;
    }
  }

  /** Ends all connections at once. */
  async close(): Promise<void> {
    this.#closed = true;
    const agents = [...this.#agents.values()];
    this.#agents.clear();
    await Promise.all(agents.map((agent) => agent.destroy()));
  }

  async #exchange(
    request: HttpRequest,
    method: HttpRequest['method'],
    url: URL,
    elsewhere: boolean,
  ): Promise<HttpResponse> {
    request.signal?.throwIfAborted();
    const { timeouts } = this.#options;
    const headers: Record<string, string> = { 'user-agent': USER_AGENT, ...request.headers };
    if (request.authorization !== undefined && !elsewhere) headers.authorization = request.authorization;
    const made = method === 'GET' || method === 'HEAD' ? undefined : request.body?.();
    const body = made === undefined || Buffer.isBuffer(made) ? made : Readable.from(made, { objectMode: false });
    const agent = await this.#agentFor(url, request.action);
    let response: Dispatcher.ResponseData;
    try {
      response = await agent.request({
        origin: url.origin,
        path: `${url.pathname}${url.search}`,
        method,
        headers,
        body,
        signal: request.signal,
        headersTimeout: request.headersTimeoutMs ?? timeouts?.headersMs ?? HEADERS_TIMEOUT_MS,
        bodyTimeout: timeouts?.bodyIdleMs ?? BODY_IDLE_MS,
      });
    } catch (error) {
      request.signal?.throwIfAborted();
      throw networkFailure(this.#options.registry, request.action, url, error);
    }
    // A body that is given up emits an error that nobody else listens for.
    response.body.on('error', () => {});
    return {
      status: response.statusCode,
      header: (name) => {
        const value = response.headers[name];
        return Array.isArray(value) ? value.join(', ') : value;
      },
      body: response.body,
      url,
      elsewhere,
    };
  }

  #target(request: HttpRequest, from: URL, location: string): URL {
    let next: URL;
    try {
      next = new URL(location, from);
    } catch {
      throw this.#redirect(request, `${quote(location.replace(/\?.*/, ''))} is not an address`);
    }
    if (next.protocol !== 'http:' && next.protocol !== 'https:') {
      throw this.#redirect(request, `it leads to ${quote(next.protocol)}`);
    }
    if (from.protocol === 'https:' && next.protocol === 'http:' && !this.#options.insecure) {
      throw this.#redirect(request, `it leads from https to http (${next.host})`);
    }
    // Credentials in an address would be sent to whoever the redirect names.
    next.username = '';
    next.password = '';
    return next;
  }

  async #agentFor(url: URL, action: string): Promise<Dispatcher> {
    // 50 ms to load: only those who talk to a registry pay.
    const { Agent, EnvHttpProxyAgent } = await import('./undici-agents.ts');
    if (this.#closed) {
      const remedy = 'it was closed while work was under way; start again';
      throw fail('SOURCE_REGISTRY_UNREACHABLE', {
        registry: this.#options.registry,
        action,
        problem: 'the client is closed',
        remedy,
      });
    }
    const { env, insecure, connections } = this.#options;
    const loopback = isLoopback(url.hostname);
    const verified = !insecure && !loopback;
    const proxied = !loopback && hasProxy(env);
    const key = `${verified} ${proxied}`;
    let agent = this.#agents.get(key);
    if (agent === undefined) {
      const tls = { timeout: CONNECT_TIMEOUT_MS, ...(verified ? {} : { rejectUnauthorized: false }) };
      agent = proxied
        ? new EnvHttpProxyAgent({
            httpProxy: env.http_proxy ?? env.HTTP_PROXY,
            httpsProxy: env.https_proxy ?? env.HTTPS_PROXY,
            noProxy: env.no_proxy ?? env.NO_PROXY,
            connections,
            connect: tls,
            requestTls: tls,
          })
        : new Agent({ connections, connect: tls });
      this.#agents.set(key, agent);
    }
    return agent;
  }

  #redirect(request: HttpRequest, problem: string): DsecError {
    return fail('SOURCE_REGISTRY_REDIRECT', {
      registry: this.#options.registry,
      action: request.action,
      problem,
      remedy: problem.includes('https to http')
        ? 'if this network is trusted, allow it with --insecure'
        : 'check that this address is a container registry',
    });
  }
}

export function isLoopback(hostname: string): boolean {
  const host = hostname.replace(/^\[|\]$/g, '').toLowerCase();
  return host === 'localhost' || host.endsWith('.localhost') || host === '::1' || /^127(?:\.\d{1,3}){3}$/.test(host);
}

/** Gives up what is left of an answer. A short rest is read, since destroying it would end the connection too. */
export function discard(response: HttpResponse): void {
  const length = response.header('content-length');
  if (length !== undefined && Number(length) <= MAX_DRAIN_BYTES) response.body.resume();
  else response.body.destroy();
}

/** The whole body. @throws SOURCE_TOO_LARGE, TransientFailure when it breaks off */
export async function readBody(
  registry: string,
  action: string,
  response: HttpResponse,
  limit: number,
  signal?: AbortSignal,
): Promise<Buffer> {
  const parts: Buffer[] = [];
  let size = 0;
  try {
    for await (const part of response.body as AsyncIterable<Buffer>) {
      size += part.length;
      if (size > limit) break;
      parts.push(part);
    }
  } catch (error) {
    signal?.throwIfAborted();
    throw networkFailure(registry, action, response.url, error);
  }
  if (size > limit) throw fail('SOURCE_TOO_LARGE', { where: registry, what: action, actual: `over ${limit}`, limit });
  return Buffer.concat(parts);
}

/** What a failed connection means: a permanent error, or a TransientFailure. */
export function networkFailure(
  registry: string,
  action: string,
  url: URL,
  error: unknown,
): DsecError | TransientFailure {
  const code = systemCode(error) ?? systemCode((error as { cause?: unknown } | null)?.cause) ?? '';
  const certificate = /CERT|SELF_SIGNED|UNABLE_TO|ALTNAME/.test(code);
  const plain = /WRONG_VERSION_NUMBER|EPROTO|PACKET_LENGTH|UNSUPPORTED_PROTOCOL/.test(code);
  const unknownHost = code === 'ENOTFOUND';
  const remedy = certificate
    ? 'add the certificate authority with NODE_EXTRA_CA_CERTS=FILE, or accept any certificate with --insecure'
    : plain
      ? 'it seems to speak plain HTTP: allow that with --insecure'
      : unknownHost
        ? 'check the host name'
        : code === 'ECONNRESET' && url.protocol === 'https:'
          ? 'check the address and the network; if it speaks plain HTTP only, allow that with --insecure'
          : 'check the address and the network, and try again';
  const problem = unknownHost ? `no host ${url.hostname}` : `${url.host}: ${describe(error, code)}`;
  const made = fail('SOURCE_REGISTRY_UNREACHABLE', { registry, action, problem, remedy }, error);
  return certificate || plain || unknownHost ? made : new TransientFailure(made);
}

function describe(error: unknown, code: string): string {
  switch (code) {
    case 'ECONNREFUSED':
      return 'connection refused';
    case 'UND_ERR_HEADERS_TIMEOUT':
      return 'no answer came in time';
    case 'UND_ERR_BODY_TIMEOUT':
      return 'nothing more came';
    case 'UND_ERR_SOCKET':
    case 'ECONNRESET':
    case 'EPIPE':
      return 'the connection broke';
    default:
      return quote(messageOf(error) || code, 160);
  }
}

function hasProxy(env: NodeJS.ProcessEnv): boolean {
  return Boolean(env.http_proxy ?? env.HTTP_PROXY ?? env.https_proxy ?? env.HTTPS_PROXY);
}
