/**
 * How a request of a client reaches its edge as it is: headers, body and answer as streams, upgrades too. Node's own client, not the pool of
 * service-base: an answer may come before the body was sent (a command that ends before its input does), and the client must get it whole.
 */
import { type ClientRequest, Agent as HttpAgent, request as httpRequest, type RequestOptions } from 'node:http';
import { Agent as HttpsAgent, request as httpsRequest } from 'node:https';
import { authorizationOf, type ClusterToken } from '../service-base/cluster-token.ts';
import { parsePeerUrl } from '../service-base/peer-client.ts';
import { type ClientTlsFiles, clientTls, type TlsBytes } from '../service-base/tls-files.ts';

const CONNECT_MS = 5000;

export type EdgeRequest = Pick<RequestOptions, 'method' | 'path' | 'headers'> & { readonly agent?: false };

class LateConnection extends Error {
  readonly code = 'ETIMEDOUT';

  constructor() {
    super(`no connection in ${CONNECT_MS / 1000} s`);
  }
}

export class EdgeConnections {
  private readonly plain = new HttpAgent({ keepAlive: true, maxFreeSockets: 64, timeout: 0 });
  private readonly secure: HttpsAgent;
  private readonly tls: TlsBytes;
  private readonly token: ClusterToken | undefined;
  /** By the URL of the edge. */
  private readonly unanswered = new Map<string, Set<ClientRequest>>();

  /** @throws SERVICE_TLS_FILE */
  constructor(token: ClusterToken | undefined, tls: ClientTlsFiles = {}) {
    this.token = token;
    this.tls = clientTls(tls);
    this.secure = new HttpsAgent({ keepAlive: true, maxFreeSockets: 64, ...this.tls });
  }

  /** Not ended yet. `url`: of the edge. `agent: false`: a connection of its own. */
  open(url: string, options: EdgeRequest): ClientRequest {
    const request = this.make(url, options);
    const unanswered = this.unanswered.get(url) ?? new Set();
    this.unanswered.set(url, unanswered.add(request));
    const known = () => {
      unanswered.delete(request);
      if (unanswered.size === 0 && this.unanswered.get(url) === unanswered) this.unanswered.delete(url);
    };
    for (const event of ['response', 'upgrade', 'close'] as const) request.once(event, known);
    request.once('socket', (socket) => {
      if (!socket.connecting) return;
      const late = setTimeout(() => request.destroy(new LateConnection()), CONNECT_MS);
      for (const event of ['connect', 'close'] as const) socket.once(event, () => clearTimeout(late));
    });
    return request;
  }

  /** Known to be away: what waits for the head of an answer would wait until a connection notices, a quarter of an hour. */
  lost(url: string, reason: string): void {
    for (const request of this.unanswered.get(url) ?? []) request.destroy(new Error(reason));
  }

  private make(url: string, options: EdgeRequest): ClientRequest {
    const { origin, socketPath } = parsePeerUrl(url);
    const headers = { ...options.headers, ...authorizationOf(this.token) };
    const agent = options.agent ?? this.plain;
    if (socketPath !== undefined) return httpRequest({ ...options, headers, socketPath, agent });
    const { hostname, port, protocol } = new URL(origin);
    const host = hostname.replace(/^\[|\]$/g, '');
    if (protocol !== 'https:') return httpRequest({ ...options, headers, host, port: port || 80, agent });
    const secure = options.agent === false ? new HttpsAgent(this.tls) : this.secure;
    return httpsRequest({ ...options, headers, host, port: port || 443, agent: secure });
  }

  close(): void {
    this.plain.destroy();
    this.secure.destroy();
  }
}
