/**
 * A door before an API, for tests: what passes through it is broken as it is told (`fault`). Other processes tell it over /test/faults: POST one, DELETE all, PUT
 * kills and restarts what is behind it, GET says what came.
 */
import { createServer, type IncomingMessage, request, type Server, type ServerResponse } from 'node:http';
import type { AddressInfo } from 'node:net';
import { setTimeout as delay } from 'node:timers/promises';

/** For the next `times` requests whose method and path match. */
export interface Fault {
  readonly match: string;
  readonly times: number;
  /** Answered at once with this status. */
  readonly status?: number;
  readonly retryAfter?: string;
  readonly code?: string;
  readonly retryable?: boolean;
  /** The answer breaks off behind so many bytes of its body. */
  readonly cutAfter?: number;
  /** What was asked for is done; nobody is told. */
  readonly loseAnswer?: boolean;
  /** The connection breaks behind so many bytes of the request's body. */
  readonly cutRequestAfter?: number;
  /** The connection breaks, both ways, so much later, while it is being done. */
  readonly cutMs?: number;
  /** The answer, once what was asked for is done, so much later. */
  readonly delayMs?: number;
  /** Each piece of the answer so much later. */
  readonly slowMs?: number;
}

export interface FrontOptions {
  /** What is behind it. */
  readonly target: { readonly host: string; readonly port: number };
  readonly restart: () => Promise<void>;
}

export class Front {
  readonly faults: (Fault & { left: number })[] = [];
  /** Method and path of all requests that came. */
  readonly seen: string[] = [];
  private readonly server: Server;
  private readonly options: FrontOptions;

  constructor(options: FrontOptions) {
    this.options = options;
    this.server = createServer((asked, answer) => {
      this.serve(asked, answer).catch(() => answer.destroy());
    });
  }

  async listen(): Promise<string> {
    await new Promise<void>((resolve) => this.server.listen(0, '127.0.0.1', resolve));
    return `http://127.0.0.1:${(this.server.address() as AddressInfo).port}`;
  }

  async close(): Promise<void> {
    this.server.closeAllConnections();
    await new Promise((resolve) => this.server.close(resolve));
  }

  fault(fault: Fault): void {
    this.faults.push({ ...fault, left: fault.times });
  }

  private async serve(asked: IncomingMessage, answer: ServerResponse): Promise<void> {
    asked.on('error', () => {});
    answer.on('error', () => {});
    if (asked.url === '/test/faults') return this.control(asked, answer);
    const line = `${asked.method} ${asked.url}`;
    this.seen.push(line);
    const fault = this.faults.find(({ match, left }) => left > 0 && new RegExp(match).test(line));
    if (fault !== undefined) fault.left--;
    if (fault?.status !== undefined) {
      if (fault.retryAfter !== undefined) answer.setHeader('retry-after', fault.retryAfter);
      const { code = 'TEST_FAULT', retryable = false } = fault;
      answer.writeHead(fault.status, { 'content-type': 'application/json', connection: 'close' });
      answer.end(JSON.stringify({ error: { code, message: 'told to', retryable, requestId: 'test-request' } }));
      return;
    }
    this.pass(asked, answer, fault);
  }

  private pass(asked: IncomingMessage, answer: ServerResponse, fault: Fault | undefined): void {
    const { method, url, headers } = asked;
    const passed = request({ ...this.options.target, method, path: url, headers, agent: false });
    passed.once('error', () => answer.destroy());
    const done = fault?.loseAnswer === true || fault?.delayMs !== undefined;
    // What is asked for shall be done, whoever has gone.
    if (!done) answer.once('close', () => passed.destroy());
    if (fault?.cutMs !== undefined) setTimeout(() => answer.destroy(), fault.cutMs).unref();
    let came = 0;
    asked.on('data', (bytes: Buffer) => {
      came += bytes.length;
      if (came >= (fault?.cutRequestAfter ?? Number.POSITIVE_INFINITY)) asked.destroy();
    });
    asked.pipe(passed);
    passed.once('response', (told) => {
      this.give(told, answer, fault).catch(() => answer.destroy());
    });
  }

  private async give(told: IncomingMessage, answer: ServerResponse, fault: Fault | undefined): Promise<void> {
    if (fault?.loseAnswer) {
      for await (const _ of told);
      answer.destroy();
      return;
    }
    if (fault?.delayMs !== undefined) await delay(fault.delayMs);
    answer.writeHead(told.statusCode!, told.headers);
    const gone = new Promise((resolve) => answer.once('close', resolve));
    let left = fault?.cutAfter ?? Number.POSITIVE_INFINITY;
    for await (const bytes of told as AsyncIterable<Buffer>) {
      if (fault?.slowMs !== undefined) await delay(fault.slowMs);
      if (bytes.length >= left) {
        answer.write(bytes.subarray(0, left), () => answer.destroy());
        return;
      }
      left -= bytes.length;
      if (!answer.write(bytes)) await Promise.race([new Promise((go) => answer.once('drain', go)), gone]);
      if (answer.destroyed) return;
    }
    answer.end();
  }

  private async control(asked: IncomingMessage, answer: ServerResponse): Promise<void> {
    const parts: Buffer[] = [];
    for await (const bytes of asked) parts.push(bytes as Buffer);
    if (asked.method === 'PUT') await this.options.restart();
    if (asked.method === 'POST') this.fault(JSON.parse(Buffer.concat(parts).toString()) as Fault);
    if (asked.method === 'DELETE') {
      this.faults.length = 0;
      this.seen.length = 0;
    }
    answer.writeHead(200, { 'content-type': 'application/json' }).end(JSON.stringify({ seen: this.seen }));
  }
}
