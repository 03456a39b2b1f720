/**
 * A registry for tests, on 127.0.0.1, whose every answer can be scripted: `intercept` sees each request first. It keeps
 * what it was asked, so that a test can say what must not have been sent.
 */
import { createServer, type IncomingMessage, type Server, type ServerResponse } from 'node:http';
import { createServer as createTlsServer } from 'node:https';
import type { AddressInfo } from 'node:net';
import { type Digest, digestOf } from '#base';
import type { Clock } from '../source/retry.ts';

export interface Asked {
  readonly method: string;
  /** Path and query. */
  readonly url: string;
  readonly authorization: string | undefined;
  readonly range: string | undefined;
  readonly body: Buffer;
}

export type Handler = (
  asked: Asked,
  response: ServerResponse,
  request: IncomingMessage,
) => boolean | undefined | Promise<boolean | undefined>;

export class FakeRegistry {
  readonly asked: Asked[] = [];
  readonly blobs = new Map<string, Buffer>();
  readonly manifests = new Map<string, { bytes: Buffer; mediaType: string }>();
  /** True: it has answered. */
  intercept: Handler = () => false;
  readonly #server: Server;
  readonly scheme: 'http' | 'https';

  private constructor(tls: { key: string; cert: string } | undefined) {
    const listener = (request: IncomingMessage, response: ServerResponse) => void this.#answer(request, response);
    this.scheme = tls ? 'https' : 'http';
    this.#server = tls ? createTlsServer(tls, listener) : createServer(listener);
    // Clients try TLS first.
    this.#server.on('clientError', (_error, socket) => socket.destroy());
  }

  static async start(tls?: { key: string; cert: string }, address = '127.0.0.1'): Promise<FakeRegistry> {
    const made = new FakeRegistry(tls);
    await new Promise<void>((done) => made.#server.listen(0, address, done));
    return made;
  }

  get port(): number {
    return (this.#server.address() as AddressInfo).port;
  }

  get host(): string {
    return `${(this.#server.address() as AddressInfo).address}:${this.port}`;
  }

  get origin(): string {
    return `${this.scheme}://${this.host}`;
  }

  /** Requests, without the client's first contact. */
  get calls(): Asked[] {
    return this.asked.filter((asked) => asked.url !== '/v2/');
  }

  addBlob(bytes: Buffer): Digest {
    this.blobs.set(digestOf(bytes), bytes);
    return digestOf(bytes);
  }

  addManifest(repository: string, tag: string, value: unknown, mediaType: string): Digest {
    const bytes = Buffer.isBuffer(value) ? value : Buffer.from(JSON.stringify(value));
    this.manifests.set(`${repository}/${tag}`, { bytes, mediaType });
    this.manifests.set(`${repository}/${digestOf(bytes)}`, { bytes, mediaType });
    return digestOf(bytes);
  }

  async close(): Promise<void> {
    this.#server.closeAllConnections();
    await new Promise((done) => this.#server.close(done));
  }

  async #answer(request: IncomingMessage, response: ServerResponse): Promise<void> {
    const parts: Buffer[] = [];
    try {
      for await (const part of request) parts.push(part as Buffer);
    } catch {
      return;
    }
    const asked: Asked = {
      method: request.method ?? '',
      url: request.url ?? '',
      authorization: request.headers.authorization,
      range: request.headers.range,
      body: Buffer.concat(parts),
    };
    this.asked.push(asked);
    if (asked.url === '/v2/') {
      response.end();
      return;
    }
    if (await this.intercept(asked, response, request)) return;
    const path = asked.url.replace(/\?.*/, '');
    const blob = /^\/v2\/(.+)\/blobs\/(sha256:\w+)$/.exec(path);
    const manifest = /^\/v2\/(.+)\/manifests\/(.+)$/.exec(path);
    if (blob && this.blobs.has(blob[2]!)) sendRange(asked, response, this.blobs.get(blob[2]!)!);
    else if (manifest && asked.method !== 'PUT' && this.manifests.has(`${manifest[1]}/${manifest[2]}`)) {
      const { bytes, mediaType } = this.manifests.get(`${manifest[1]}/${manifest[2]}`)!;
      response.writeHead(200, { 'content-type': mediaType, 'content-length': bytes.length });
      response.end(asked.method === 'HEAD' ? undefined : bytes);
    } else refuse(response, 404, 'NOT_KNOWN', 'nothing here');
  }
}

export function sendRange(asked: Asked, response: ServerResponse, bytes: Buffer): void {
  const range = /^bytes=(\d+)-(\d+)$/.exec(asked.range ?? '');
  if (range === null) {
    response.writeHead(200, { 'content-length': bytes.length });
    response.end(asked.method === 'HEAD' ? undefined : bytes);
    return;
  }
  const [from, to] = [Number(range[1]), Math.min(Number(range[2]), bytes.length - 1)];
  const part = bytes.subarray(from, to + 1);
  response.writeHead(206, { 'content-length': part.length, 'content-range': `bytes ${from}-${to}/${bytes.length}` });
  response.end(part);
}

/** Sends `part` of what the headers promise, then breaks the connection. */
export function breakAfter(
  response: ServerResponse,
  status: number,
  headers: Record<string, string | number>,
  part: Buffer,
): true {
  response.writeHead(status, headers);
  response.write(part, () => setTimeout(() => response.destroy(), 5));
  return true;
}

export function refuse(
  response: ServerResponse,
  status: number,
  code: string,
  message: string,
  headers: Record<string, string> = {},
): true {
  response.writeHead(status, { 'content-type': 'application/json', ...headers });
  response.end(JSON.stringify({ errors: [{ code, message }] }));
  return true;
}

export function sendJson(response: ServerResponse, value: unknown): true {
  response.writeHead(200, { 'content-type': 'application/json' });
  response.end(JSON.stringify(value));
  return true;
}

/** Waits that take no time and are written down. */
export class TestClock implements Clock {
  readonly slept: number[] = [];
  time = 1_000_000;

  now(): number {
    return this.time;
  }

  async sleep(ms: number, signal: AbortSignal | undefined): Promise<void> {
    signal?.throwIfAborted();
    this.slept.push(ms);
  }

  random(): number {
    return 0;
  }
}
