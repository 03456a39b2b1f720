/**
 * Requests to the API: one at a time (`once`), and with what is retried (`call`).
 *
 * Tried again is only what the API says may help (429 and 503 that are retryable), and what got no answer; and only where twice is as once: reads,
 * and changes that carry an operation id (x-dsec-operation), of which the service does each once and repeats its answer. Waits grow, with chance, and are never
 * shorter than Retry-After. It ends with the call's time, or when nothing has come for the client's patience.
 */
import { randomUUID } from 'node:crypto';
import * as http from 'node:http';
import * as https from 'node:https';
import { Readable } from 'node:stream';
import { setTimeout as delay } from 'node:timers/promises';
import type { Endpoint } from './context.ts';
import { connectionLost, DSecError, DSecTimeoutError, type ErrorFacts, errorFrom, protocolError } from './errors.ts';

export interface CallOptions {
  /** Ends the call; it rejects with the signal's reason. */
  readonly signal?: AbortSignal;
  /** For the whole call, whatever it takes. */
  readonly timeoutMs?: number;
}

export type Query = Readonly<Record<string, string | number | boolean | undefined>>;

export interface Call extends CallOptions {
  readonly query?: Query;
  /** Sent as JSON. */
  readonly body?: object;
  /** Sent as they are. */
  readonly bytes?: Uint8Array | AsyncIterable<Uint8Array>;
  readonly operation?: string;
}

export interface TransportOptions {
  /** How long no answer, or a refusal that may pass, is borne. */
  readonly patienceMs: number;
}

const CONNECT_MS = 15_000;
const FIRST_WAIT_MS = 100;
const LONGEST_WAIT_MS = 10_000;
const ERROR_BYTES = 1 << 20;
/** So that a peer that vanished without a word is noticed while nothing is sent. */
const KEEP_ALIVE_MS = 15_000;

export class Transport {
  readonly url: string;
  readonly patienceMs: number;
  private readonly token: string | undefined;
  private readonly agent: http.Agent;
  private readonly request: typeof http.request;

  constructor({ url, token, ca }: Endpoint, { patienceMs }: TransportOptions) {
    this.url = url;
    this.token = token;
    this.patienceMs = patienceMs;
    const secure = url.startsWith('https:');
    const options = { keepAlive: true, keepAliveMsecs: KEEP_ALIVE_MS };
    this.agent = secure ? new https.Agent({ ...options, ca }) : new http.Agent(options);
    this.request = secure ? (https.request as typeof http.request) : http.request;
  }

  close(): void {
    this.agent.destroy();
  }

  get headers(): Record<string, string> {
    return this.token === undefined ? {} : { authorization: `Bearer ${this.token}` };
  }

  /** The answer's JSON. A change is one operation, however often it is sent. */
  async json<T>(method: string, path: string, call: Call = {}): Promise<T> {
    return this.call(method, path, call, async (answer) => parsed<T>(await drain(answer)));
  }

  /** `take` is part of what is tried again. */
  async call<T>(
    method: string,
    path: string,
    call: Call,
    take: (answer: http.IncomingMessage) => Promise<T>,
  ): Promise<T> {
    const operation = call.operation ?? operationFor(method, call);
    // What is too large for the service to put on record is sent once, unless twice is as once.
    const once = operation === undefined && !['GET', 'PUT'].includes(method);
    return within(call, (signal) =>
      this.retrying(async () => take(await this.once(method, path, { ...call, operation, signal })), {
        signal,
        deadline: call.timeoutMs === undefined ? undefined : Date.now() + call.timeoutMs,
        once,
      }),
    );
  }

  /** A change whose outcome is awaited once it is under way: `stop` ends the waits between tries alone. For `undoable`. */
  async begin<T>(
    path: string,
    body: object,
    options: { readonly stop?: AbortSignal; readonly deadline?: number } = {},
  ): Promise<T> {
    // Its request id makes it one.
    const operation = operationFor('POST', { body });
    const once = async () => parsed<T>(await drain(await this.once('POST', path, { body, operation })));
    return this.retrying(once, { signal: options.stop, deadline: options.deadline });
  }

  /** Until it succeeds or fails for good. */
  async retrying<T>(
    work: () => Promise<T>,
    {
      signal,
      deadline,
      once,
    }: { readonly signal?: AbortSignal; readonly deadline?: number; readonly once?: boolean } = {},
  ): Promise<T> {
    const backOff = new BackOff(this.patienceMs, deadline);
    for (;;) {
      try {
        return await work();
      } catch (error) {
        if (once === true && isUncertain(error)) throw error;
        await backOff.after(error, signal);
      }
    }
  }

  /** One try; the answer is a good one, and its body is still to come. @throws DSecError */
  async once(method: string, path: string, call: Call = {}): Promise<http.IncomingMessage> {
    const { body, bytes, operation, signal } = call;
    signal?.throwIfAborted();
    const requestId = randomUUID();
    const headers: Record<string, string> = { ...this.headers, 'x-request-id': requestId, accept: '*/*' };
    if (operation !== undefined) headers['x-dsec-operation'] = operation;
    let content: Buffer | AsyncIterable<Uint8Array> | undefined;
    if (body !== undefined) {
      headers['content-type'] = 'application/json';
      content = Buffer.from(JSON.stringify(body));
    } else if (bytes !== undefined) {
      headers['content-type'] = 'application/octet-stream';
      content = bytes instanceof Uint8Array ? Buffer.from(bytes.buffer, bytes.byteOffset, bytes.byteLength) : bytes;
    }
    if (Buffer.isBuffer(content)) headers['content-length'] = String(content.length);
    const answer = await this.send(method, `${this.url}${path}${queryOf(call.query)}`, headers, content, signal);
    const status = answer.statusCode ?? 500;
    if (status < 300) return answer;
    const told = await drain(answer, ERROR_BYTES);
    throw errorFrom(factsOf(status, answer.headers, told, requestId));
  }

  private send(
    method: string,
    url: string,
    headers: Record<string, string>,
    content: Buffer | AsyncIterable<Uint8Array> | undefined,
    signal: AbortSignal | undefined,
  ): Promise<http.IncomingMessage> {
    return new Promise((resolve, reject) => {
      const sent = this.request(url, { method, headers, agent: this.agent, signal });
      let sourceError: unknown;
      let connecting: NodeJS.Timeout | undefined;
      sent.once('socket', (socket) => {
        if (!socket.connecting) return;
        connecting = setTimeout(() => sent.destroy(new Error('no connection within 15 s')), CONNECT_MS);
        socket.once('connect', () => clearTimeout(connecting));
      });
      sent.once('response', resolve);
      sent.once('error', (error) => reject(failureOf(sourceError ?? error, sourceError !== undefined, signal)));
      sent.once('close', () => clearTimeout(connecting));
      if (content === undefined || Buffer.isBuffer(content)) {
        sent.end(content);
        return;
      }
      const source = Readable.from(content, { objectMode: false });
      source.once('error', (error) => {
        sourceError = error;
        sent.destroy(error);
      });
      source.pipe(sent);
      // An answer may come before all of it was sent.
      const stop = () => {
        source.unpipe(sent);
        source.destroy();
      };
      sent.once('response', stop);
      sent.once('close', stop);
    });
  }
}

/** What comes of an answer, or the reason that it broke off. @throws ConnectionLost */
export async function* bodyOf(answer: http.IncomingMessage, signal?: AbortSignal): AsyncGenerator<Buffer> {
  try {
    for await (const bytes of answer) yield bytes as Buffer;
  } catch (error) {
    signal?.throwIfAborted();
    throw connectionLost('it broke off in the middle of an answer', error);
  } finally {
    answer.destroy();
  }
}

export async function drain(answer: http.IncomingMessage, limit = Number.MAX_SAFE_INTEGER): Promise<Buffer> {
  const parts: Buffer[] = [];
  let length = 0;
  try {
    for await (const bytes of answer) {
      length += (bytes as Buffer).length;
      if (length > limit) break;
      parts.push(bytes as Buffer);
    }
  } catch (error) {
    throw connectionLost('it broke off in the middle of an answer', error);
  }
  return Buffer.concat(parts);
}

/** Of what the service can put on record. */
const OPERATION_BYTES = 1 << 20;

function operationFor(method: string, { body, bytes }: Call): string | undefined {
  if (method === 'GET') return undefined;
  const size =
    bytes instanceof Uint8Array ? bytes.length : body === undefined ? 0 : Buffer.byteLength(JSON.stringify(body));
  return size > OPERATION_BYTES ? undefined : randomUUID();
}

/** It may have been done. */
function isUncertain(error: unknown): boolean {
  if (!(error instanceof DSecError)) return false;
  return error.code === 'CONNECTION_LOST' || ['EDGE_UNREACHABLE', 'SERVICE_LOST'].includes(error.code);
}

/** @throws ProtocolError */
export function parsed<T>(text: Buffer | string): T {
  try {
    return JSON.parse(text.length === 0 ? '{}' : text.toString()) as T;
  } catch (error) {
    throw protocolError('an answer that is no JSON', error);
  }
}

/** Waits between tries, as long as they may be worth it. */
export class BackOff {
  private readonly patienceMs: number;
  private readonly deadline: number | undefined;
  private since: number | undefined;
  private tries = 0;

  /** @param deadline Of the call; patience ends what has none. */
  constructor(patienceMs: number, deadline?: number) {
    this.patienceMs = patienceMs;
    this.deadline = deadline;
  }

  /** Something came. */
  progress(): void {
    this.since = undefined;
    this.tries = 0;
  }

  /** @throws the error itself when it is not to be tried again */
  async after(error: unknown, signal?: AbortSignal): Promise<void> {
    signal?.throwIfAborted();
    if (!(error instanceof DSecError) || !isWorthRetrying(error)) throw error;
    this.since ??= Date.now();
    const grown = Math.min(LONGEST_WAIT_MS, FIRST_WAIT_MS * 2 ** this.tries++);
    const waitMs = Math.max(error.retryAfterMs ?? 0, grown * (0.5 + Math.random() / 2));
    if (Date.now() + waitMs > (this.deadline ?? this.since + this.patienceMs)) throw error;
    await delay(waitMs, undefined, { signal }).catch(() => signal?.throwIfAborted());
  }
}

function isWorthRetrying({ code, status, retryable, retryAfterMs }: DSecError): boolean {
  if (code === 'CONNECTION_LOST') return true;
  // A 429 that does not say when (a full quota) may last.
  return (status === 503 && retryable) || ((status === 429 || status === 503) && retryAfterMs !== undefined);
}

/** Rejects when the signal or the time says so, and tells `work` by a signal of its own. */
export async function within<T>(
  { signal, timeoutMs }: CallOptions,
  work: (signal: AbortSignal | undefined) => Promise<T>,
): Promise<T> {
  if (timeoutMs === undefined) return work(signal);
  const time = new AbortController();
  const over = new DSecTimeoutError({ code: 'TIMEOUT', message: `not done within ${timeoutMs} ms`, retryable: true });
  const timer = setTimeout(() => time.abort(over), timeoutMs);
  try {
    return await work(signal === undefined ? time.signal : AbortSignal.any([signal, time.signal]));
  } catch (error) {
    if (signal?.aborted !== true && time.signal.aborted) throw over;
    throw error;
  } finally {
    clearTimeout(timer);
  }
}

const UNDO_MS = 15_000;

/**
 * Something that is there once `begin` has succeeded. Given up meanwhile, its end is awaited all the same and it is undone: `begin` must end its own waits, but no
 * request that is under way, when `stop` is aborted.
 */
export async function undoable<T>(
  options: CallOptions,
  begin: (stop: AbortSignal | undefined) => Promise<T>,
  undo: (made: T) => Promise<unknown>,
): Promise<T> {
  return within(options, async (stop) => {
    stop?.throwIfAborted();
    const beginning = begin(stop);
    if (stop === undefined) return beginning;
    let given: (() => void) | undefined;
    const stopped = new Promise<void>((resolve) => {
      given = resolve;
      stop.addEventListener('abort', given, { once: true });
    });
    try {
      await Promise.race([beginning, stopped]);
      if (!stop.aborted) return await beginning;
      const undone = beginning.then(undo).catch(() => {});
      await Promise.race([undone, delay(UNDO_MS, undefined, { ref: false })]);
      throw stop.reason;
    } finally {
      stop.removeEventListener('abort', given!);
    }
  });
}

function failureOf(error: unknown, ofSource: boolean, signal: AbortSignal | undefined): unknown {
  if (signal?.aborted) return signal.reason;
  if (ofSource) return error;
  return connectionLost(error instanceof Error ? error.message : String(error), error);
}

function factsOf(status: number, headers: http.IncomingHttpHeaders, body: Buffer, requestId: string): ErrorFacts {
  const retryAfterMs = retryAfterOf(headers['retry-after']);
  const id = typeof headers['x-request-id'] === 'string' ? headers['x-request-id'] : requestId;
  try {
    const { error } = JSON.parse(body.toString()) as { error: ErrorFacts };
    if (typeof error.code !== 'string') throw new Error('no code');
    return { ...error, message: String(error.message), requestId: error.requestId ?? id, status, retryAfterMs };
  } catch {
    // Somebody between here and there.
    const gateway = [429, 502, 503, 504].includes(status);
    const code = gateway && status !== 429 ? 'CONNECTION_LOST' : `HTTP_${status}`;
    return { code, message: `HTTP status ${status}`, requestId: id, status, retryable: gateway, retryAfterMs };
  }
}

function retryAfterOf(value: string | undefined): number | undefined {
  if (value === undefined) return undefined;
  const seconds = /^\d+(\.\d+)?$/.test(value) ? Number(value) : (Date.parse(value) - Date.now()) / 1000;
  return Number.isFinite(seconds) ? Math.max(0, seconds * 1000) : undefined;
}

export function queryOf(query: Query = {}): string {
  const pairs = Object.entries(query).filter(([, value]) => value !== undefined);
  if (pairs.length === 0) return '';
  return `?${pairs.map(([key, value]) => `${key}=${encodeURIComponent(String(value))}`).join('&')}`;
}
