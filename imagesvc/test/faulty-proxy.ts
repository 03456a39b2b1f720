/**
 * An HTTP proxy in front of a store's server that spoils a share of all requests, each kind of fault in turn: the answer is cut
 * short, has wrong bytes in it, never comes, comes slowly or as a refusal to go on so fast, or the connection is reset. Which
 * requests it meets follows from the seed and their order alone. Bytes are damaged only where a digest tells: in blobs.
 */
import {
  Agent,
  createServer,
  request as httpRequest,
  type IncomingMessage,
  type Server,
  type ServerResponse,
} from 'node:http';
import type { AddressInfo, Socket } from 'node:net';
import { setTimeout as sleep } from 'node:timers/promises';

export const PROXY_FAULTS = ['truncate', 'corrupt', 'stall', 'drip', 'slow-down', 'reset', 'reset-midway'] as const;
export type ProxyFault = (typeof PROXY_FAULTS)[number];

export interface FaultyProxyOptions {
  /** Of all requests; 0.05. */
  readonly share?: number;
  readonly seed?: number;
  readonly faults?: readonly ProxyFault[];
}

const DRIP_BYTES = 16 * 1024;
const DRIP_MS = 25;
/** Between two stalls: each costs a reader without a hedge as long as its client waits for silent servers. */
const REQUESTS_A_STALL = 100;

export class FaultyProxy {
  readonly counts = new Map<ProxyFault, number>();
  requests = 0;
  /** Requests that have come and are not answered. */
  underWay = 0;
  /** Off: everything passes. */
  spoils = true;
  readonly #target: URL;
  readonly #share: number;
  readonly #faults: readonly ProxyFault[];
  readonly #server: Server;
  readonly #agent = new Agent({ keepAlive: true });
  readonly #sockets = new Set<Socket>();
  #state: number;
  #turn = 0;
  #stalledAt = Number.NEGATIVE_INFINITY;

  private constructor(target: string, { share = 0.05, seed = 1, faults = PROXY_FAULTS }: FaultyProxyOptions) {
    this.#target = new URL(target);
    this.#share = share;
    this.#faults = faults;
    this.#state = seed;
    this.#server = createServer((request, response) => {
      this.underWay++;
      response.once('close', () => this.underWay--);
      this.#handle(request, response).catch(() => response.destroy());
    });
    this.#server.on('connection', (socket) => {
      this.#sockets.add(socket);
      socket.on('close', () => this.#sockets.delete(socket));
      socket.on('error', () => {});
    });
  }

  /** @param target `http://host:port` */
  static async start(target: string, options: FaultyProxyOptions = {}): Promise<FaultyProxy> {
    const proxy = new FaultyProxy(target, options);
    await new Promise<void>((done) => proxy.#server.listen(0, '127.0.0.1', done));
    return proxy;
  }

  /** `127.0.0.1:PORT` */
  get host(): string {
    return `127.0.0.1:${(this.#server.address() as AddressInfo).port}`;
  }

  get spoilt(): number {
    return [...this.counts.values()].reduce((sum, count) => sum + count, 0);
  }

  async stop(): Promise<void> {
    for (const socket of this.#sockets) socket.destroy();
    this.#agent.destroy();
    await new Promise((done) => this.#server.close(done));
  }

  #draw(isBlob: boolean): ProxyFault | undefined {
    this.requests++;
    this.#state = (this.#state * 1_103_515_245 + 12_345) % 2 ** 31;
    if (!this.spoils || this.#state / 2 ** 31 >= this.#share) return undefined;
    for (let tries = 0; tries < this.#faults.length; tries++) {
      const fault = this.#faults[this.#turn++ % this.#faults.length]!;
      if (fault === 'corrupt' && !isBlob) continue;
      if (fault === 'stall') {
        if (this.requests - this.#stalledAt < REQUESTS_A_STALL) continue;
        this.#stalledAt = this.requests;
      }
      this.counts.set(fault, (this.counts.get(fault) ?? 0) + 1);
      return fault;
    }
    return undefined;
  }

  async #handle(message: IncomingMessage, response: ServerResponse): Promise<void> {
    const isBlob = message.method === 'GET' && message.url!.includes('/blobs/');
    const fault = this.#draw(isBlob);
    if (fault === 'stall') {
      message.resume();
      return;
    }
    if (fault === 'reset') {
      message.socket.resetAndDestroy();
      return;
    }
    if (fault === 'slow-down') {
      message.resume();
      response.writeHead(503, { 'retry-after': '0', 'content-length': 0 }).end();
      return;
    }
    // The request as it came, its Host too: that is what it was signed for.
    const { hostname, port } = this.#target;
    const { method, url, headers } = message;
    const forward = httpRequest({ agent: this.#agent, hostname, port, method, path: url, headers });
    const answered = new Promise<IncomingMessage>((done, failed) => {
      forward.once('response', done).once('error', failed);
    });
    message.pipe(forward);
    const answer = await answered;
    response.writeHead(answer.statusCode!, answer.headers);
    const limit = Number(answer.headers['content-length'] ?? 0) / 2;
    let done = 0;
    for await (const piece of answer as AsyncIterable<Buffer>) {
      const midway = done + piece.length > limit;
      if ((fault === 'truncate' || fault === 'reset-midway') && midway) {
        const rest = piece.subarray(0, Math.max(0, Math.floor(limit) - done));
        await new Promise<void>((flushed) => response.write(rest, () => flushed()));
        if (fault === 'truncate') message.socket.end();
        else message.socket.resetAndDestroy();
        answer.destroy();
        return;
      }
      if (fault === 'corrupt' && midway && done <= limit) piece[piece.length >> 1]! ^= 0x20;
      done += piece.length;
      if (fault === 'drip') await drip(response, piece);
      else if (!response.write(piece)) await drained(response);
    }
    response.end();
  }
}

async function drip(response: ServerResponse, piece: Buffer): Promise<void> {
  for (let at = 0; at < piece.length && !response.destroyed; at += DRIP_BYTES) {
    response.write(piece.subarray(at, at + DRIP_BYTES));
    await sleep(DRIP_MS);
  }
}

/** Or closed. */
function drained(response: ServerResponse): Promise<void> {
  return new Promise((go) => {
    const on = () => {
      response.off('drain', on).off('close', on);
      go();
    };
    if (response.destroyed) go();
    else response.on('drain', on).on('close', on);
  });
}
