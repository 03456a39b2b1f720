/**
 * Asks edges for sandboxes, over one open request to each (control/edge/create-stream.ts): thousands of creations a second cost a line each, not a
 * request. What is known of an outcome is told as PeerClient does it: SERVICE_UNREACHABLE is what nobody has taken, SERVICE_LOST what may have been done.
 */
import type { ClientRequest, IncomingMessage } from 'node:http';
import { isDsecError } from '#base';
import { CREATE_STREAM, NDJSON } from '../edge/create-stream.ts';
import { fail } from '../errors.ts';
import { LineReader, LineWriter } from '../service-base/ndjson.ts';
import {
  connectionProblem,
  isDistrust,
  lostIn,
  type PeerError,
  thrownByPeer,
  thrownOf,
} from '../service-base/peer-client.ts';
import type { EdgeConnections } from './edge-connection.ts';
import type { EdgeSandbox } from './sandbox-view.ts';

interface Waiting {
  readonly resolve: (made: EdgeSandbox) => void;
  readonly reject: (error: unknown) => void;
  readonly atMs: number;
}

interface AnswerLine {
  readonly n?: number;
  readonly sandbox?: EdgeSandbox;
  readonly status?: number;
  readonly error?: PeerError;
  /** It takes no more. */
  readonly end?: boolean;
}

/** An edge that has not said what became of a creation by then has lost it, or is gone. */
const ANSWER_MS = 120_000;
const LOOK_MS = 5000;
/** A connection that nobody has used for so long is given back. */
const IDLE_MS = 60_000;
const MOST_LINE_BYTES = 8 << 20;
const MOST_ERROR_BYTES = 64 << 10;

export interface EdgeCreatesOptions {
  readonly connections: EdgeConnections;
  /** @throws EDGE_UNKNOWN */
  readonly urlOf: (edge: string) => string;
  readonly now?: () => number;
  readonly answerMs?: number;
}

export class EdgeCreates {
  private readonly options: EdgeCreatesOptions;
  /** That take more, by edge. */
  private readonly streams = new Map<string, CreateStream>();
  /** Those too that take no more, and answer what is under way. */
  private readonly all = new Set<CreateStream>();
  private readonly looking: NodeJS.Timeout;

  constructor(options: EdgeCreatesOptions) {
    this.options = options;
    const { now = Date.now, answerMs = ANSWER_MS } = options;
    this.looking = setInterval(
      () => {
        for (const stream of [...this.all]) stream.look(now(), answerMs);
      },
      Math.min(LOOK_MS, answerMs),
    ).unref();
  }

  /**
   * `requestId`: of the request that this is done for, to be found in logs.
   * @throws EDGE_UNKNOWN, SERVICE_UNREACHABLE, SERVICE_LOST, SERVICE_ANSWER, what was thrown there
   */
  create(edge: string, body: object, requestId: string): Promise<EdgeSandbox> {
    const url = this.options.urlOf(edge);
    let stream = this.streams.get(edge);
    if (stream === undefined || !stream.takes || stream.url !== url) {
      stream?.finish();
      const request = this.options.connections.open(url, {
        method: 'POST',
        path: CREATE_STREAM,
        headers: { 'content-type': NDJSON, 'x-request-id': requestId },
        // A connection that was used before may be closed already, and nobody could tell that from a creation that was lost.
        agent: false,
      });
      const opened = new CreateStream(edge, url, request, () => {
        this.all.delete(opened);
        if (this.streams.get(edge) === opened) this.streams.delete(edge);
      });
      stream = opened;
      this.all.add(opened);
      this.streams.set(edge, opened);
    }
    return stream.create(body, requestId, (this.options.now ?? Date.now)());
  }

  /** It is known to be away: whoever waits for its answer need not wait until a connection notices. */
  lost(edge: string, reason: string): void {
    for (const stream of [...this.all]) if (stream.edge === edge) stream.break(reason);
  }

  close(): void {
    clearInterval(this.looking);
    for (const stream of [...this.all]) stream.break('this service is ending');
  }
}

class CreateStream {
  readonly edge: string;
  readonly url: string;
  /** Whether it takes one more. */
  takes = true;
  private readonly request: ClientRequest;
  private readonly lines: LineWriter;
  private readonly waiting = new Map<number, Waiting>();
  private readonly onGone: () => void;
  private last = 0;
  private usedMs = 0;
  /** From here on lines may have arrived. */
  private connected = false;
  private answers = false;

  constructor(edge: string, url: string, request: ClientRequest, onGone: () => void) {
    this.edge = edge;
    this.url = url;
    this.request = request;
    this.lines = new LineWriter(request);
    this.onGone = onGone;
    request.once('response', (answer) => this.answered(answer));
    request.once('socket', (socket) => {
      const connected = () => {
        this.connected = true;
      };
      if (socket.connecting) socket.once(url.startsWith('https:') ? 'secureConnect' : 'connect', connected);
      else connected();
    });
    request.once('error', (error) => this.gone(this.problem(error)));
    request.once('close', () => this.gone(this.problem(new Error('the connection was closed'))));
    // What waits for a connection goes out with the first line.
    request.flushHeaders();
  }

  create(body: object, requestId: string, atMs: number): Promise<EdgeSandbox> {
    this.usedMs = atMs;
    return new Promise((resolve, reject) => {
      const n = ++this.last;
      this.waiting.set(n, { resolve, reject, atMs });
      this.lines.write({ n, requestId, create: body });
    });
  }

  /** No more; what is under way is answered still. */
  finish(): void {
    if (!this.takes) return;
    this.takes = false;
    this.lines.end();
  }

  break(reason: string): void {
    this.gone(lostIn(this.url, new Error(reason)));
    this.request.destroy();
  }

  look(nowMs: number, answerMs: number): void {
    for (const [n, { reject, atMs }] of this.waiting) {
      if (nowMs - atMs < answerMs) break;
      this.waiting.delete(n);
      reject(lostIn(this.url, new Error(`no answer in ${Math.round(answerMs / 1000)} s`)));
      // Its connection may be one that nobody hears: what comes next gets another one.
      this.finish();
    }
    if (this.waiting.size > 0) return;
    if (this.takes && nowMs - this.usedMs > IDLE_MS) this.finish();
    else if (!this.takes && nowMs - this.usedMs > answerMs) this.break('it does not end');
  }

  /** Once there was a connection nobody can say that nothing was done; but an end that does not trust the other one has not listened. */
  private problem(error: unknown): unknown {
    const problem = connectionProblem(this.url, error);
    const isTaken = this.answers || (this.connected && !isDistrust(error));
    return isTaken && isDsecError(problem, 'SERVICE_UNREACHABLE') ? lostIn(this.url, error) : problem;
  }

  private answered(answer: IncomingMessage): void {
    this.answers = true;
    answer.on('error', (error) => this.gone(this.problem(error)));
    if (answer.statusCode !== 200) {
      void this.refused(answer, answer.statusCode ?? 502);
      return;
    }
    const lines = new LineReader(MOST_LINE_BYTES);
    answer.on('data', (bytes: Buffer) => {
      try {
        for (const line of lines.take(bytes)) this.heard(JSON.parse(line) as AnswerLine);
      } catch (error) {
        this.gone(fail('SERVICE_ANSWER', { url: this.url, problem: 'a line of it is no JSON' }, error));
        this.request.destroy();
      }
    });
  }

  private heard({ n, sandbox, status = 500, error, end }: AnswerLine): void {
    if (end === true) {
      this.finish();
      return;
    }
    const waiting = n === undefined ? undefined : this.waiting.get(n);
    // It was given up.
    if (n === undefined || waiting === undefined) return;
    this.waiting.delete(n);
    if (sandbox !== undefined) waiting.resolve(sandbox);
    else waiting.reject(thrownOf(error, status, this.url));
  }

  private async refused(answer: IncomingMessage, status: number): Promise<void> {
    let text = '';
    try {
      for await (const part of answer) {
        if (text.length < MOST_ERROR_BYTES) text += part;
      }
    } catch {
      // As much as came.
    }
    this.gone(thrownByPeer(text, status, this.url));
    this.request.destroy();
  }

  private gone(error: unknown): void {
    this.takes = false;
    this.onGone();
    const waiting = [...this.waiting.values()];
    this.waiting.clear();
    for (const { reject } of waiting) reject(error);
  }
}
