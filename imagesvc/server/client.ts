/**
 * The image service as a client sees it. `convertRemotely` is what `dsec convert --server` does: asks for a job, follows it, and
 * goes on after a broken connection or a restart of the service; the same request is the same job, so asking again is safe.
 *
 * Errors of the service arrive as what they were there, code and exit status included.
 */
import { setTimeout as delay } from 'node:timers/promises';
import type { Agent, Dispatcher } from 'undici';
import { DsecError, type ErrorRow, isDsecError, messageOf, type Progress, silent } from '#base';
import { converterErrors, loadHttpAgents } from '#converter';
import { linuxErrors } from '#linux';
import { fail, imagesvcErrors } from '../errors.ts';
import { type ConvertRequest, isEnded, type JobResult, type JobView } from './jobs/job.ts';

export interface ClientOptions {
  /** `http://HOST:PORT`, `https://HOST:PORT`, `unix:/path` */
  readonly url: string;
  readonly token?: string;
  /** How long the service may be away: 60 s by default. */
  readonly patienceMs?: number;
}

export interface ConvertWish extends ConvertRequest {
  readonly credentials?: string;
}

type Method = 'GET' | 'POST' | 'DELETE';

export interface ServerEvent {
  readonly id: string | undefined;
  readonly type: string;
  readonly data: string;
}

export class ImageServiceClient {
  readonly url: string;
  readonly #base: string;
  readonly #socketPath: string | undefined;
  #agent: Promise<Agent> | undefined;
  readonly #token: string | undefined;
  readonly #patienceMs: number;
  #answered = false;

  /** @throws SERVER_URL */
  constructor({ url, token, patienceMs = 60_000 }: ClientOptions) {
    const { base, socketPath } = parseServerUrl(url);
    this.url = url;
    this.#base = base;
    this.#token = token;
    this.#patienceMs = patienceMs;
    this.#socketPath = socketPath;
  }

  async close(): Promise<void> {
    await (await this.#agent)?.destroy();
  }

  /** Made by the first request: commands that ask no service do not load undici. */
  async #openAgent(): Promise<Agent> {
    const { Agent } = await loadHttpAgents();
    const connect = { socketPath: this.#socketPath, timeout: 10_000 };
    return new Agent({ connect, headersTimeout: 60_000, bodyTimeout: 60_000 });
  }

  convert(wish: ConvertWish, signal?: AbortSignal): Promise<JobView> {
    return this.#json('POST', '/v1/convert', wish, signal) as Promise<JobView>;
  }

  job(id: string, signal?: AbortSignal): Promise<JobView> {
    return this.#json('GET', `/v1/jobs/${encodeURIComponent(id)}`, undefined, signal) as Promise<JobView>;
  }

  cancel(id: string, signal?: AbortSignal): Promise<JobView> {
    return this.#json('DELETE', `/v1/jobs/${encodeURIComponent(id)}`, undefined, signal) as Promise<JobView>;
  }

  /** Follows a job to its end, over as many connections as it takes. */
  async follow(id: string, onProgress: Progress, signal?: AbortSignal): Promise<JobView> {
    let lastId: string | undefined;
    let latest: JobView | undefined;
    const waiting = new Patience(this.#patienceMs);
    for (;;) {
      try {
        for await (const event of this.#events(id, lastId, signal)) {
          waiting.over();
          lastId = event.id ?? lastId;
          if (event.type === 'progress') onProgress(JSON.parse(event.data) as Parameters<Progress>[0]);
          else if (event.type === 'state') latest = JSON.parse(event.data) as JobView;
        }
        if (latest !== undefined && isEnded(latest.state)) return latest;
        // The service ends streams when it shuts down.
        latest = await this.job(id, signal);
        if (isEnded(latest.state)) return latest;
        await waiting.next(undefined, signal);
      } catch (error) {
        signal?.throwIfAborted();
        if (!isTransient(error)) throw error;
        await waiting.next(error, signal);
      }
    }
  }

  async *#events(id: string, lastId: string | undefined, signal?: AbortSignal): AsyncGenerator<ServerEvent> {
    const path = `/v1/jobs/${encodeURIComponent(id)}/events`;
    const answer = await this.#send('GET', path, { 'last-event-id': lastId }, undefined, signal);
    try {
      yield* parseEvents(answer.body);
    } catch (error) {
      signal?.throwIfAborted();
      throw fail('SERVER_UNREACHABLE', { url: this.url, reason: messageOf(error) }, error);
    }
  }

  /** Asks until there is an answer: all that is asked for may be asked for twice. */
  async #json(method: Method, path: string, body: unknown, signal?: AbortSignal): Promise<unknown> {
    // A wrong address should be known soon; one that has answered is worth waiting for.
    const waiting = new Patience(this.#answered ? this.#patienceMs : Math.min(this.#patienceMs, FIRST_ANSWER_MS));
    for (;;) {
      try {
        const answer = await this.#send(method, path, {}, body, signal);
        return JSON.parse(await answer.body.text()) as unknown;
      } catch (error) {
        signal?.throwIfAborted();
        if (error instanceof SyntaxError) throw fail('SERVER_PROTOCOL', { url: this.url, why: 'no JSON' }, error);
        const known =
          error instanceof DsecError
            ? error
            : fail('SERVER_UNREACHABLE', { url: this.url, reason: messageOf(error) }, error);
        if (!isTransient(known)) throw known;
        if (known.code !== 'SERVER_UNREACHABLE') waiting.extend(BUSY_MS);
        await waiting.next(known, signal);
      }
    }
  }

  async #send(
    method: Method,
    path: string,
    headers: Record<string, string | undefined>,
    body?: unknown,
    signal?: AbortSignal,
  ): Promise<Dispatcher.ResponseData> {
    const all: Record<string, string> = { accept: 'application/json, text/event-stream' };
    for (const [name, value] of Object.entries(headers)) if (value !== undefined) all[name] = value;
    if (this.#token !== undefined) all.authorization = `Bearer ${this.#token}`;
    if (body !== undefined) all['content-type'] = 'application/json';
    const { request } = await loadHttpAgents();
    this.#agent ??= this.#openAgent();
    const dispatcher = await this.#agent;
    let answer: Dispatcher.ResponseData;
    try {
      answer = await request(`${this.#base}${path}`, {
        method,
        headers: all,
        body: body === undefined ? undefined : JSON.stringify(body),
        signal,
        dispatcher,
      });
    } catch (error) {
      signal?.throwIfAborted();
      throw fail('SERVER_UNREACHABLE', { url: this.url, reason: reasonOf(error) }, error);
    }
    this.#answered = true;
    if (answer.statusCode < 300) return answer;
    const text = await answer.body.text().catch(() => '');
    throw (
      errorOf(text) ?? fail('SERVER_PROTOCOL', { url: this.url, why: `it answers with status ${answer.statusCode}` })
    );
  }
}

/** Waits longer and longer while something is away, and gives up in the end. */
class Patience {
  #limitMs: number;
  #sinceMs: number | undefined;
  #pauseMs = 100;

  constructor(limitMs: number) {
    this.#limitMs = limitMs;
  }

  extend(limitMs: number): void {
    this.#limitMs = Math.max(this.#limitMs, limitMs);
  }

  over(): void {
    this.#sinceMs = undefined;
    this.#pauseMs = 100;
  }

  /** @throws `error`, when it has been going on for too long */
  async next(error: unknown, signal?: AbortSignal): Promise<void> {
    this.#sinceMs ??= Date.now();
    if (error !== undefined && Date.now() - this.#sinceMs > this.#limitMs) throw error;
    await delay(this.#pauseMs * (0.75 + Math.random() / 2), undefined, { signal });
    this.#pauseMs = Math.min(this.#pauseMs * 2, 3000);
  }
}

const FIRST_ANSWER_MS = 5_000;
/** A service that has too much to do is waited for longer than one that is away. */
const BUSY_MS = 30 * 60_000;
const TRANSIENT = ['SERVER_UNREACHABLE', 'SERVER_DRAINING', 'SERVER_BUSY', 'SERVER_TOO_MANY_JOBS', 'SERVER_QUEUE_FULL'];

function isTransient(error: unknown): boolean {
  return isDsecError(error) && TRANSIENT.includes(error.code);
}

/** undici hides the reason of a refused connection in an AggregateError without a message. */
function reasonOf(error: unknown): string {
  const inner = error instanceof AggregateError ? error.errors[0] : error;
  return messageOf(inner) || String((inner as { code?: unknown }).code ?? inner);
}

/** @throws SERVER_URL */
function parseServerUrl(text: string): { base: string; socketPath: string | undefined } {
  if (text.startsWith('unix:')) {
    const socketPath = text.slice('unix:'.length).replace(/^\/\/(?=\/)/, '');
    if (!socketPath.startsWith('/')) throw fail('SERVER_URL', { url: text });
    return { base: 'http://localhost', socketPath };
  }
  let url: URL;
  try {
    url = new URL(text);
  } catch (error) {
    throw fail('SERVER_URL', { url: text }, error);
  }
  if (url.protocol !== 'http:' && url.protocol !== 'https:') throw fail('SERVER_URL', { url: text });
  if (url.username !== '' || url.password !== '')
    throw fail('SERVER_URL', { url: `${url.protocol}//(not shown)@${url.host}` });
  return { base: `${url.origin}${url.pathname.replace(/\/+$/, '')}`, socketPath: undefined };
}

const ROWS: Readonly<Record<string, ErrorRow>> = { ...linuxErrors, ...converterErrors, ...imagesvcErrors };

interface ErrorFacts {
  readonly code: string;
  readonly message: string;
  readonly hint?: string;
  readonly exit?: number;
  readonly retryable?: boolean;
}

/** The error that the service tells of, as if it had been thrown here. */
function asThrown({ code, message, hint, exit, retryable }: ErrorFacts): DsecError {
  const row = ROWS[code];
  // Texts are filled in already.
  return new DsecError(code, {
    message,
    hint,
    retryable: retryable ?? row?.retryable,
    exit: exit ?? row?.exit ?? 6,
    http: row?.http ?? 502,
  });
}

function errorOf(text: string): DsecError | undefined {
  try {
    const { error } = JSON.parse(text) as { error?: Partial<ErrorFacts> };
    if (typeof error?.code !== 'string' || typeof error.message !== 'string') return undefined;
    return asThrown(error as ErrorFacts);
  } catch {
    return undefined;
  }
}

/** Server-sent events as the HTML standard defines their stream. */
export async function* parseEvents(pieces: AsyncIterable<Uint8Array>): AsyncGenerator<ServerEvent> {
  const decoder = new TextDecoder();
  let rest = '';
  let id: string | undefined;
  let type = '';
  let data: string[] = [];
  for await (const piece of pieces) {
    rest += decoder.decode(piece, { stream: true });
    // A carriage return at the end may be half of a line end.
    const lines = rest.split(/\r\n|\n|\r(?=[^\n])/);
    rest = lines.pop()!;
    for (const line of lines) {
      if (line === '') {
        if (data.length > 0) yield { id, type: type || 'message', data: data.join('\n') };
        type = '';
        data = [];
        continue;
      }
      const colon = line.indexOf(':');
      const field = colon < 0 ? line : line.slice(0, colon);
      const value = colon < 0 ? '' : line.slice(colon + 1).replace(/^ /, '');
      if (field === 'data') data.push(value);
      else if (field === 'event') type = value;
      else if (field === 'id') id = value;
    }
  }
}

/** How long a cancelled job may take to stop before we go anyway. */
const CANCEL_WAIT_MS = 6_000;
const ANSWER_WAIT_MS = 2_000;

/**
 * Converts on the service's machine. When `signal` is aborted, the job is cancelled there.
 * @throws what the conversion throws there; SERVER_* errors
 */
export async function convertRemotely(
  options: ClientOptions,
  wish: ConvertWish,
  { progress = silent, signal }: { readonly progress?: Progress; readonly signal?: AbortSignal } = {},
): Promise<JobResult & { readonly source: string }> {
  const client = new ImageServiceClient(options);
  try {
    progress({ task: wish.name, phase: 'ask' });
    const { id } = await ask(client, wish, signal);
    let job: JobView;
    try {
      signal?.throwIfAborted();
      job = await client.follow(id, progress, signal);
    } catch (error) {
      if (signal?.aborted) await cancelAndWait(client, id);
      throw error;
    }
    progress({ task: wish.name, phase: 'done' });
    if (job.state === 'done' && job.result !== undefined) return { source: wish.source, ...job.result };
    if (job.state === 'cancelled') throw fail('SERVER_JOB_CANCELLED', { id });
    if (job.error === undefined) throw fail('SERVER_PROTOCOL', { url: options.url, why: `job ${id} has no result` });
    throw asThrown(job.error);
  } finally {
    await client.close();
  }
}

/** Stopping a question leaves open whether it was heard, and then there would be no id to cancel by: the answer has a moment. */
async function ask(client: ImageServiceClient, wish: ConvertWish, signal: AbortSignal | undefined): Promise<JobView> {
  const stop = new AbortController();
  const soon = () => setTimeout(() => stop.abort(signal?.reason), ANSWER_WAIT_MS).unref();
  signal?.addEventListener('abort', soon, { once: true });
  try {
    return await client.convert(wish, stop.signal);
  } finally {
    signal?.removeEventListener('abort', soon);
  }
}

async function cancelAndWait(client: ImageServiceClient, id: string): Promise<void> {
  const enough = AbortSignal.timeout(CANCEL_WAIT_MS);
  try {
    await client.cancel(id, enough);
    await client.follow(id, silent, enough);
  } catch {
    // It has ended, or cannot be reached: there is nothing more to do about it here.
  }
}
