/**
 * A conversation with one registry: where it is (https, or http where that is allowed), who we are to it, and which
 * answers are worth another try. What is said in it is registry-client.ts's business.
 */
import { fail } from '../errors.ts';
import { RegistryAuth } from './auth.ts';
import { type Credentials, findCredentials, parseCredentials } from './credentials.ts';
import {
  discard,
  HttpClient,
  type HttpRequest,
  type HttpResponse,
  type HttpTimeouts,
  isLoopback,
  readBody,
} from './http-client.ts';
import { quote } from './quote.ts';
import { type Clock, parseRetryAfter, systemClock, TransientFailure, withRetries } from './retry.ts';

export interface RegistryClientOptions {
  /** Host and port: `docker.io`, `localhost:5000`, `[::1]:5000`. */
  readonly registry: string;
  /** `user:password`, in place of what the user's files hold. */
  readonly credentials?: string;
  /** Any certificate is accepted, and plain http. */
  readonly insecure?: boolean;
  /** Ends everything. */
  readonly signal?: AbortSignal;
  /** Requests at the same time to one host; 8. */
  readonly connections?: number;
  /** For HOME, DOCKER_CONFIG, proxies; the process's own. */
  readonly env?: NodeJS.ProcessEnv;
  readonly clock?: Clock;
  readonly timeouts?: HttpTimeouts;
}

export interface RegistryRequest {
  readonly method: HttpRequest['method'];
  readonly url: URL;
  readonly repository: string;
  /** `repository:NAME:pull` */
  readonly scope: string;
  /** For messages: what is asked for, with the repository. */
  readonly action: string;
  readonly headers?: Readonly<Record<string, string>>;
  readonly body?: HttpRequest['body'];
  readonly headersTimeoutMs?: number;
  readonly signal?: AbortSignal;
}

const DEFAULT_CONNECTIONS = 8;
const MAX_DETAIL_BYTES = 64 * 1024;
/** Challenges answered for one request: a stale token, a moved realm, a widened scope. */
const MAX_CHALLENGES = 3;

export class RegistrySession {
  readonly registry: string;
  readonly clock: Clock;
  readonly #insecure: boolean;
  readonly #signal: AbortSignal | undefined;
  readonly #http: HttpClient;
  readonly #auth: RegistryAuth;
  #base: Promise<URL> | undefined;

  constructor(options: RegistryClientOptions) {
    const { registry, env = process.env } = options;
    const given: Credentials | undefined =
      options.credentials === undefined ? undefined : parseCredentials(options.credentials);
    this.registry = registry;
    this.clock = options.clock ?? systemClock;
    this.#insecure = options.insecure ?? false;
    this.#signal = options.signal;
    this.#http = new HttpClient({
      registry,
      insecure: this.#insecure,
      connections: options.connections ?? DEFAULT_CONNECTIONS,
      env,
      timeouts: options.timeouts,
    });
    this.#auth = new RegistryAuth({
      registry,
      http: this.#http,
      clock: this.clock,
      insecure: this.#insecure,
      signal: options.signal,
      find: async (repository) =>
        given === undefined ? findCredentials(registry, repository, env) : { credentials: given, notes: [] },
    });
  }

  close(): Promise<void> {
    return this.#http.close();
  }

  /** An address below the registry's root: `url('library/x/manifests/latest')`. */
  async url(path: string): Promise<URL> {
    return new URL(`/v2/${path}`, await this.#origin());
  }

  /**
   * Where the registry said to go on: an upload's place, the next page. Never down from https to http: a registry behind
   * a proxy that ends TLS may name itself with http, and is asked with https all the same.
   */
  async follow(location: string | undefined, from: URL, action: string): Promise<URL> {
    const base = await this.#origin();
    let url: URL;
    try {
      url = new URL(location ?? '', from);
      if (location === undefined || !/^https?:$/.test(url.protocol)) throw new Error('no http address');
    } catch {
      throw this.unexpected(action, 'it does not say where to go on (no usable Location)');
    }
    if (base.protocol === 'https:' && url.protocol === 'http:') {
      if (url.hostname !== base.hostname) {
        throw this.unexpected(action, `it leads from https to http (${quote(url.host)})`);
      }
      url = new URL(`${url.pathname}${url.search}`, base);
    }
    url.username = '';
    url.password = '';
    return url;
  }

  /** Runs `work` again as long as it throws TransientFailure and patience lasts. */
  run<T>(signal: AbortSignal | undefined, work: () => Promise<T>): Promise<T> {
    return withRetries(this.clock, this.#joined(signal), work);
  }

  /**
   * One request, authorized. Any answer but 401, 429 and 5xx is handed back.
   * @throws TransientFailure, SOURCE_REGISTRY_UNAUTHORIZED, SOURCE_REGISTRY_UNREACHABLE, SOURCE_REGISTRY_REDIRECT
   */
  async exchange(request: RegistryRequest): Promise<HttpResponse> {
    const { repository, scope, action } = request;
    const signal = this.#joined(request.signal);
    const own = (await this.#origin()).origin === request.url.origin;
    const answered = new Set<string>();
    for (;;) {
      // A place that the registry named on another host gets nothing of ours.
      const authorization = own ? await this.#auth.header(repository, scope) : undefined;
      const response = await this.#http.send({ ...request, signal, authorization });
      if (this.#isTransient(response, own)) {
        const { status } = response;
        const retryAfterMs = parseRetryAfter(response.header('retry-after'), this.clock.now());
        const detail = await this.#detail(response);
        throw new TransientFailure(
          fail('SOURCE_REGISTRY_BUSY', { registry: this.registry, action, status, detail }),
          retryAfterMs,
        );
      }
      if (response.status !== 401 || !own) return response;
      const challenge = response.header('www-authenticate');
      const detail = await this.#detail(response);
      const done = await this.#auth.answer(challenge, repository, scope, authorization, answered);
      if (done === undefined || answered.size >= MAX_CHALLENGES) {
        throw fail('SOURCE_REGISTRY_UNAUTHORIZED', {
          registry: this.registry,
          repository,
          action,
          detail: detail + this.#auth.note(),
        });
      }
      answered.add(done);
    }
  }

  /** The error for an answer that is none of those expected. Reads the registry's explanation. */
  async refusal(response: HttpResponse, request: RegistryRequest) {
    const { status } = response;
    const detail = await this.#detail(response);
    const params = { registry: this.registry, repository: request.repository, action: request.action, detail };
    if (status === 401) return fail('SOURCE_REGISTRY_UNAUTHORIZED', params);
    if (status === 403) return fail('SOURCE_REGISTRY_FORBIDDEN', params);
    if (status === 404) return fail('SOURCE_REGISTRY_NOT_FOUND', params);
    return this.unexpected(request.action, `status ${status}${detail}`);
  }

  /** The whole body of a small answer. */
  read(response: HttpResponse, request: RegistryRequest, limit: number): Promise<Buffer> {
    return readBody(this.registry, request.action, response, limit, this.#joined(request.signal));
  }

  unexpected(action: string, problem: string) {
    return fail('SOURCE_REGISTRY_RESPONSE', { registry: this.registry, action, problem });
  }

  #isTransient(response: HttpResponse, own: boolean): boolean {
    const { status, elsewhere } = response;
    if ([429, 500, 502, 503, 504].includes(status)) return true;
    // A signed address of a storage host runs out; the registry signs another one.
    return elsewhere && own && (status === 401 || status === 403);
  }

  /** `: NAME_UNKNOWN: repository name not known`, from the registry's JSON, or nothing. */
  async #detail(response: HttpResponse): Promise<string> {
    try {
      const bytes = await readBody(this.registry, 'error', response, MAX_DETAIL_BYTES);
      const errors = (JSON.parse(bytes.toString('utf8')) as { errors?: unknown }).errors;
      const first = Array.isArray(errors)
        ? (errors[0] as { code?: unknown; message?: unknown } | undefined)
        : undefined;
      const texts = [first?.code, first?.message].filter((text) => typeof text === 'string' && text !== '') as string[];
      if (texts.length === 0) return '';
      return `: ${quote(this.#auth.redact(texts.join(': ')), 300).slice(1, -1)}`;
    } catch {
      discard(response);
      return '';
    }
  }

  #joined(signal: AbortSignal | undefined): AbortSignal | undefined {
    if (signal === undefined || this.#signal === undefined || signal === this.#signal) return signal ?? this.#signal;
    return AbortSignal.any([signal, this.#signal]);
  }

  #origin(): Promise<URL> {
    this.#base ??= this.#findOrigin().catch((error) => {
      this.#base = undefined;
      throw error;
    });
    return this.#base;
  }

  /** Plain http is tried, after https, only where it is allowed: with `insecure`, and on this machine itself. */
  async #findOrigin(): Promise<URL> {
    const host = this.registry === 'docker.io' ? 'registry-1.docker.io' : this.registry;
    const secure = new URL(`https://${host}`);
    if (!this.#insecure && !isLoopback(secure.hostname)) return secure;
    const plain = new URL(`http://${host}`);
    for (const origin of [secure, plain]) {
      const request = {
        method: 'GET',
        url: new URL('/v2/', origin),
        action: 'first contact',
        signal: this.#signal,
      } as const;
      try {
        discard(await this.#http.send(request));
        return origin;
      } catch (error) {
        if (origin === plain || this.#signal?.aborted) throw error;
      }
    }
    return plain;
  }
}
