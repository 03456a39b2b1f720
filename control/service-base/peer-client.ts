/**
 * Another service of the cluster, as a client: connections that stay, the cluster's token, TLS, and errors that arrive as what they were there.
 * `url`: http://HOST:PORT, https://HOST:PORT or unix:/path.
 */
import type { Readable } from 'node:stream';
import { type Dispatcher, Pool } from 'undici';
import { DsecError, messageOf, systemCode } from '#base';
import { fail } from '../errors.ts';
import { authorizationOf, type ClusterToken, type TokenGiven, tokenOf } from './cluster-token.ts';
import { type ClientTlsFiles, clientTls } from './tls-files.ts';

export interface PeerOptions {
  readonly url: string;
  readonly token?: TokenGiven;
  readonly tls?: ClientTlsFiles;
  /** Requests at the same time; more wait here. 256 by default. */
  readonly connections?: number;
  /** For a connection: 5 s by default. */
  readonly connectMs?: number;
}

export interface PeerRequest {
  readonly method: Dispatcher.HttpMethod;
  readonly path: string;
  /** JSON unless it is text, bytes or a stream. */
  readonly body?: object | string | Buffer | Readable;
  readonly headers?: Readonly<Record<string, string>>;
  readonly signal?: AbortSignal;
  /** For the head of the answer: 60 s by default; 0: however long. */
  readonly timeoutMs?: number;
}

export interface PeerAnswer {
  readonly status: number;
  readonly headers: Dispatcher.ResponseData['headers'];
  /** To be read or destroyed. Not bounded in time between its parts. */
  readonly body: Dispatcher.ResponseData['body'];
}

const MOST_JSON_BYTES = 256 << 20;

/** Nobody took the request: nothing was done. */
const NEVER_SENT: ReadonlySet<string> = new Set([
  'ECONNREFUSED',
  'ENOENT',
  'EACCES',
  'EHOSTUNREACH',
  'ENETUNREACH',
  'ENOTFOUND',
  'EAI_AGAIN',
  'UND_ERR_CONNECT_TIMEOUT',
  'ETIMEDOUT',
]);
/** A connection that is there may break with the same codes: by then something was sent. */
const OF_CONNECTED: ReadonlySet<string> = new Set(['read', 'write', 'writev']);
const NO_TLS = /^(?:CERT_|UNABLE_TO_|DEPTH_ZERO|SELF_SIGNED|HOSTNAME_|ERR_TLS|ERR_SSL)/;

export class PeerClient {
  readonly url: string;
  private readonly pool: Pool;
  private readonly token: ClusterToken | undefined;

  /** @throws SERVICE_URL, SERVICE_TLS_FILE */
  constructor({ url, token, tls = {}, connections = 256, connectMs = 5000 }: PeerOptions) {
    this.url = url;
    const { origin, socketPath } = parsePeerUrl(url);
    this.pool = new Pool(origin, {
      connections,
      pipelining: 1,
      keepAliveTimeout: 60_000,
      connect: { timeout: connectMs, socketPath, ...clientTls(tls) },
    });
    this.token = tokenOf(token);
  }

  /** The answer as JSON. @throws SERVICE_UNREACHABLE, SERVICE_LOST, SERVICE_ANSWER, what was thrown there, the signal's reason */
  async json<T>(request: PeerRequest): Promise<T> {
    const { status, body } = await this.request(request);
    let text: string;
    try {
      text = await textOf(body);
    } catch (error) {
      throw this.problem(error, request.signal);
    }
    if (status >= 300) throw thrownByPeer(text, status, this.url);
    try {
      return JSON.parse(text) as T;
    } catch (error) {
      throw fail('SERVICE_ANSWER', { url: this.url, problem: 'it is no JSON' }, error);
    }
  }

  /** Whatever is answered, errors too. @throws SERVICE_UNREACHABLE, SERVICE_LOST, the signal's reason */
  async request({ method, path, body, headers, signal, timeoutMs = 60_000 }: PeerRequest): Promise<PeerAnswer> {
    const raw = body === undefined || typeof body === 'string' || Buffer.isBuffer(body) || 'pipe' in body;
    const type = raw ? undefined : { 'content-type': 'application/json' };
    try {
      const { statusCode, ...answer } = await this.pool.request({
        method,
        path,
        body: raw ? (body as string | Buffer | Readable | undefined) : JSON.stringify(body),
        headers: { ...authorizationOf(this.token), ...type, ...headers },
        signal,
        headersTimeout: timeoutMs,
        bodyTimeout: 0,
      });
      return { status: statusCode, headers: answer.headers, body: answer.body };
    } catch (error) {
      throw this.problem(error, signal);
    }
  }

  async close(): Promise<void> {
    await this.pool.destroy();
  }

  private problem(error: unknown, signal: AbortSignal | undefined): unknown {
    if (signal?.aborted) return signal.reason;
    return connectionProblem(this.url, error);
  }
}

/** SERVICE_UNREACHABLE: nobody has taken what was asked; SERVICE_LOST: somebody may have. */
export function connectionProblem(url: string, error: unknown): DsecError {
  const code = codeOf(error);
  const isNeverSent = NEVER_SENT.has(code) && !OF_CONNECTED.has(String((error as { syscall?: unknown }).syscall));
  if (!isNeverSent && !isDistrust(error)) return lostIn(url, error);
  return fail('SERVICE_UNREACHABLE', { url, reason: messageOf(error) || code, wayBack: '' }, error);
}

/** Somebody may have taken what was asked. */
export function lostIn(url: string, error: unknown): DsecError {
  return fail('SERVICE_LOST', { url, reason: messageOf(error) || codeOf(error) }, error);
}

/** One end does not trust the other. */
export function isDistrust(error: unknown): boolean {
  return NO_TLS.test(codeOf(error));
}

function codeOf(error: unknown): string {
  return systemCode(error) ?? systemCode((error as { cause?: unknown }).cause) ?? '';
}

/** @throws SERVICE_URL */
export function parsePeerUrl(url: string): { readonly origin: string; readonly socketPath: string | undefined } {
  if (url.startsWith('unix:/')) return { origin: 'http://localhost', socketPath: url.slice('unix:'.length) };
  const parsed = URL.canParse(url) ? new URL(url) : undefined;
  const plain = parsed !== undefined && ['http:', 'https:'].includes(parsed.protocol);
  if (!plain || parsed.pathname !== '/' || parsed.search !== '' || parsed.username !== '')
    throw fail('SERVICE_URL', { url });
  return { origin: parsed.origin, socketPath: undefined };
}

/** As services write errors. */
export interface PeerError {
  readonly code: string;
  readonly message: string;
  readonly hint?: string;
  readonly exit?: number;
  readonly retryable?: boolean;
  readonly reason?: string;
}

/** An error that another service answered with, as it was there. */
export function thrownByPeer(text: string, status: number, url: string): DsecError {
  let body: { readonly error?: PeerError } | null | undefined;
  try {
    body = JSON.parse(text) as typeof body;
  } catch {
    // It is no JSON: there is no error in it.
  }
  return thrownOf(body?.error, status, url);
}

export function thrownOf(error: PeerError | undefined, status: number, url: string): DsecError {
  const { code, message, hint, exit = 1, retryable, reason } = error ?? ({} as Partial<PeerError>);
  if (typeof code !== 'string' || typeof message !== 'string') {
    return fail('SERVICE_ANSWER', { url, problem: `status ${status} without an error in it` });
  }
  return new DsecError(code, { message, hint, retryable, exit, http: status }, { ended: reason });
}

async function textOf(body: PeerAnswer['body']): Promise<string> {
  const parts: Buffer[] = [];
  let size = 0;
  for await (const part of body) {
    size += (part as Buffer).length;
    if (size > MOST_JSON_BYTES) throw new Error(`an answer of more than ${MOST_JSON_BYTES} bytes`);
    parts.push(part as Buffer);
  }
  return Buffer.concat(parts).toString('utf8');
}
