/** A registry in memory, with or without a list of referrers: what registries that are not at hand do. */
import { createHash } from 'node:crypto';
import { createServer, type IncomingMessage, type Server, type ServerResponse } from 'node:http';
import type { AddressInfo } from 'node:net';

interface Stored {
  readonly bytes: Buffer;
  readonly type: string;
}

export class MadeUpRegistry {
  readonly blobs = new Map<string, Buffer>();
  /** By digest and by tag. */
  readonly manifests = new Map<string, Stored>();
  readonly requests: string[] = [];
  /** Of each path, the status in place of an answer. */
  refuse: ((method: string, path: string) => number | undefined) | undefined;
  /** An answer waits for what it gives. */
  hold: ((method: string, path: string) => Promise<void> | undefined) | undefined;
  readonly host: string;
  readonly #keepsReferrers: boolean;
  readonly #server: Server;

  private constructor(server: Server, keepsReferrers: boolean) {
    this.#server = server;
    this.#keepsReferrers = keepsReferrers;
    this.host = `127.0.0.1:${(server.address() as AddressInfo).port}`;
  }

  static async start(keepsReferrers: boolean): Promise<MadeUpRegistry> {
    const server = createServer();
    await new Promise<void>((listening) => server.listen(0, '127.0.0.1', listening));
    const registry = new MadeUpRegistry(server, keepsReferrers);
    server.on('request', (request, response) => void registry.#handle(request, response));
    return registry;
  }

  async stop(): Promise<void> {
    this.#server.closeAllConnections();
    await new Promise((closed) => this.#server.close(closed));
  }

  async #handle(request: IncomingMessage, response: ServerResponse): Promise<void> {
    const { method = 'GET', url = '/' } = request;
    const { pathname, searchParams } = new URL(url, 'http://registry');
    this.requests.push(`${method} ${url}`);
    const parts: Buffer[] = [];
    for await (const part of request) parts.push(part as Buffer);
    const body = Buffer.concat(parts);
    const answer = (status: number, bytes: Buffer | string = '', headers: Record<string, string> = {}) => {
      response.writeHead(status, { 'content-length': String(Buffer.byteLength(bytes)), ...headers });
      response.end(method === 'HEAD' ? undefined : bytes);
    };
    await this.hold?.(method, pathname);
    const refused = this.refuse?.(method, pathname);
    if (refused !== undefined) return answer(refused, '{"errors":[]}');
    const [, kind, name] = /\/(manifests|blobs|referrers)\/([^/]*)\/?$/.exec(pathname) ?? [];
    if (pathname === '/v2/') return answer(200, '{}');
    if (kind === 'blobs' && name === 'uploads') {
      return answer(202, '', { location: `${pathname.replace(/\/$/, '')}/1` });
    }
    if (/\/blobs\/uploads\/1$/.test(pathname)) {
      if (method === 'PUT') this.blobs.set(searchParams.get('digest')!, Buffer.concat([this.#part, body]));
      this.#part = method === 'PATCH' ? Buffer.concat([this.#part, body]) : Buffer.alloc(0);
      return answer(method === 'PUT' ? 201 : 202, '', { location: pathname });
    }
    if (kind === 'blobs') {
      const bytes = this.blobs.get(name!);
      return bytes === undefined ? answer(404) : answer(200, bytes);
    }
    if (kind === 'manifests' && method === 'PUT') return this.#putManifest(name!, body, request, answer);
    if (kind === 'manifests') {
      const found = this.manifests.get(name!);
      return found === undefined ? answer(404) : answer(200, found.bytes, { 'content-type': found.type });
    }
    if (kind === 'referrers' && this.#keepsReferrers) return answer(200, this.#referrers(name!));
    answer(404, '404 page not found');
  }

  #part = Buffer.alloc(0);

  #putManifest(
    name: string,
    bytes: Buffer,
    request: IncomingMessage,
    answer: (status: number, bytes?: string, headers?: Record<string, string>) => void,
  ): void {
    const stored = { bytes, type: request.headers['content-type'] ?? '' };
    const { subject } = JSON.parse(bytes.toString('utf8')) as { subject?: { digest: string } };
    this.manifests.set(`sha256:${createHash('sha256').update(bytes).digest('hex')}`, stored);
    this.manifests.set(name, stored);
    answer(201, '', subject !== undefined && this.#keepsReferrers ? { 'oci-subject': subject.digest } : {});
  }

  /** As some do, without heeding the filter. */
  #referrers(subject: string): string {
    const manifests = [...this.manifests].flatMap(([digest, { bytes, type: mediaType }]) => {
      const parsed = JSON.parse(bytes.toString('utf8')) as Record<string, unknown> & { subject?: { digest: string } };
      if (!digest.startsWith('sha256:') || parsed.subject?.digest !== subject) return [];
      const { artifactType, annotations } = parsed;
      return [{ mediaType, digest, size: bytes.length, artifactType, annotations }];
    });
    return JSON.stringify({ schemaVersion: 2, manifests });
  }
}
