/**
 * How a request of a client reaches its edge as it is: headers, body and answer as streams, upgrades too. Node's own client, not the pool of
 * service-base: an answer may come before the body was sent (a command that ends before its input does), and the client must get it whole.
 */
import { type ClientRequest, Agent as HttpAgent, request as httpRequest, type RequestOptions } from 'node:http';
import { Agent as HttpsAgent, request as httpsRequest } from 'node:https';
import { parsePeerUrl } from '../service-base/peer-client.ts';
import { type ClientTlsFiles, clientTls } from '../service-base/tls-files.ts';

export class EdgeConnections {
  private readonly plain = new HttpAgent({ keepAlive: true, maxFreeSockets: 64, timeout: 0 });
  private readonly secure: HttpsAgent;
  private readonly token: string | undefined;

  /** @throws SERVICE_TLS_FILE */
  constructor(token: string | undefined, tls: ClientTlsFiles = {}) {
    this.token = token;
    this.secure = new HttpsAgent({ keepAlive: true, maxFreeSockets: 64, ...clientTls(tls) });
  }

  /** Not ended yet. `url`: of the edge. */
  open(url: string, options: Pick<RequestOptions, 'method' | 'path' | 'headers'>): ClientRequest {
    const { origin, socketPath } = parsePeerUrl(url);
    const { token } = this;
    const headers = { ...options.headers, ...(token === undefined ? {} : { authorization: `Bearer ${token}` }) };
    if (socketPath !== undefined) return httpRequest({ ...options, headers, socketPath, agent: this.plain });
    const { hostname, port, protocol } = new URL(origin);
    const host = hostname.replace(/^\[|\]$/g, '');
    if (protocol === 'https:') {
      return httpsRequest({ ...options, headers, host, port: port || 443, agent: this.secure });
    }
    return httpRequest({ ...options, headers, host, port: port || 80, agent: this.plain });
  }

  close(): void {
    this.plain.destroy();
    this.secure.destroy();
  }
}
