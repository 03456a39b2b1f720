/** The resolvers that this machine asks: named by the deployment, or those of /etc/resolv.conf, which may change at any time. */
import { readFileSync, statSync } from 'node:fs';
import { isIP } from 'node:net';

export interface UpstreamServer {
  readonly address: string;
  readonly port: number;
}

const DNS_PORT = 53;
const LOOK_AGAIN_MS = 5_000;

export class UpstreamServers {
  private readonly given: readonly UpstreamServer[] | undefined;
  private readonly path: string;
  private found: readonly UpstreamServer[] = [];
  private lookedMs = Number.NEGATIVE_INFINITY;
  private changedMs = -1;

  constructor(given?: readonly UpstreamServer[], path = '/etc/resolv.conf') {
    this.given = given;
    this.path = path;
  }

  current(nowMs = performance.now()): readonly UpstreamServer[] {
    if (this.given !== undefined) return this.given;
    if (nowMs - this.lookedMs < LOOK_AGAIN_MS) return this.found;
    this.lookedMs = nowMs;
    try {
      const { mtimeMs } = statSync(this.path);
      if (mtimeMs !== this.changedMs) this.found = serversOf(readFileSync(this.path, 'latin1'));
      this.changedMs = mtimeMs;
    } catch {
      this.found = [];
    }
    return this.found;
  }
}

/** Those that $DSEC_DNS_SERVERS names. Undefined: none does. @throws when one of them is no address */
export function configuredServers(text = process.env.DSEC_DNS_SERVERS): readonly UpstreamServer[] | undefined {
  if (text === undefined || text.trim() === '') return undefined;
  return text
    .trim()
    .split(/[\s,]+/)
    .map((one) => {
      const server = upstreamServer(one);
      if (server === undefined)
        throw new Error(`DSEC_DNS_SERVERS: "${one}" is no address, as in 10.0.0.2 or [fd00::53]:5353`);
      return server;
    });
}

/** At most three, as the C library has it. */
function serversOf(text: string): UpstreamServer[] {
  return text
    .split('\n')
    .map((line) => /^\s*nameserver\s+(\S+)/.exec(line)?.[1] ?? '')
    .filter((address) => isIP(address.replace(/%.*$/, '')) !== 0)
    .slice(0, 3)
    .map((address) => ({ address, port: DNS_PORT }));
}

/** "10.0.0.2", "10.0.0.2:5353", "fd00::53", "[fd00::53]:5353". Undefined: none of these. */
export function upstreamServer(text: string): UpstreamServer | undefined {
  const [, bracketed, plain, port] =
    /^(?:\[([^\]]+)\]|([^:]+|[^[\]]*:[^[\]]*:[^[\]]*))(?::(\d{1,5}))?$/.exec(text) ?? [];
  const whole = isIP(text) !== 0 ? text : (bracketed ?? plain ?? '');
  const number = whole === text || port === undefined ? DNS_PORT : Number(port);
  return isIP(whole) === 0 || number < 1 || number > 65_535 ? undefined : { address: whole, port: number };
}
