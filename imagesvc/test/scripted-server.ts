/**
 * An S3 server that does what a test says: it serves objects from memory, and before that each request goes through `script`, which may
 * answer it itself, damage the answer, or let it pass.
 */
import { createServer, type IncomingMessage, type Server, type ServerResponse } from 'node:http';
import type { AddressInfo, Socket } from 'node:net';

export interface ScriptedRequest {
  readonly method: string;
  /** Without the bucket. */
  readonly key: string;
  readonly range: { readonly first: number; readonly last: number } | undefined;
  readonly headers: IncomingMessage['headers'];
  /** From 0, of requests for this server. */
  readonly count: number;
}

/** True: it has answered. */
export type Script = (request: ScriptedRequest, response: ServerResponse) => boolean | undefined | Promise<boolean>;

export class ScriptedServer {
  readonly objects = new Map<string, Buffer>();
  readonly requests: ScriptedRequest[] = [];
  connections = 0;
  script: Script = () => false;
  readonly #server: Server;
  readonly #sockets = new Set<Socket>();

  private constructor() {
    this.#server = createServer((request, response) => {
      this.#handle(request, response).catch(() => response.destroy());
    });
    this.#server.on('connection', (socket) => {
      this.connections++;
      this.#sockets.add(socket);
      socket.on('close', () => this.#sockets.delete(socket));
      socket.on('error', () => {});
    });
  }

  static async start(): Promise<ScriptedServer> {
    const scripted = new ScriptedServer();
    await new Promise<void>((done) => scripted.#server.listen(0, '127.0.0.1', done));
    return scripted;
  }

  url(prefix = ''): string {
    const { port } = this.#server.address() as AddressInfo;
    return `s3://bucket/${prefix}?endpoint=http://127.0.0.1:${port}`;
  }

  async stop(): Promise<void> {
    for (const socket of this.#sockets) socket.destroy();
    await new Promise((done) => this.#server.close(done));
  }

  async #handle(message: IncomingMessage, response: ServerResponse): Promise<void> {
    const url = new URL(message.url!, 'http://host');
    const match = /^bytes=(\d+)-(\d+)$/.exec(message.headers.range ?? '');
    const request: ScriptedRequest = {
      method: message.method!,
      key: decodeURIComponent(url.pathname.replace(/^\/bucket\/?/, '')),
      range: match === null ? undefined : { first: Number(match[1]), last: Number(match[2]) },
      headers: message.headers,
      count: this.requests.length,
    };
    this.requests.push(request);
    message.resume();
    if (await this.script(request, response)) return;
    const object = this.objects.get(request.key);
    if (object === undefined) return answerError(response, 404, 'NoSuchKey');
    if (request.range === undefined) {
      response.writeHead(200, { 'content-length': object.length });
      response.end(request.method === 'HEAD' ? undefined : object);
      return;
    }
    const { first, last } = request.range;
    if (first >= object.length) {
      response.writeHead(416, { 'content-range': `bytes */${object.length}`, 'content-length': 0 });
      response.end();
      return;
    }
    const end = Math.min(last, object.length - 1);
    const part = object.subarray(first, end + 1);
    response.writeHead(206, {
      'content-range': `bytes ${first}-${end}/${object.length}`,
      'content-length': part.length,
    });
    response.end(part);
  }
}

export function answerError(
  response: ServerResponse,
  status: number,
  code: string,
  headers: Record<string, string> = {},
): void {
  const xml = `<?xml version="1.0"?><Error><Code>${code}</Code><Message>said so</Message></Error>`;
  response.writeHead(status, { 'content-type': 'application/xml', 'content-length': xml.length, ...headers });
  response.end(xml);
}
