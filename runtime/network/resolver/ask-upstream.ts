/**
 * One question to an upstream, its answer believed only when it is one to this question: over a socket of its own with a port that the kernel
 * chooses at random and that takes nothing but from the server asked, with a random id, and with the letters of the name large and small at
 * random (an answer repeats them). Whoever forges answers has to guess all of that; one that guesses often has the question moved to TCP.
 */
import { randomBytes } from 'node:crypto';
import { createSocket } from 'node:dgram';
import { connect, isIPv6 } from 'node:net';
import { parseUpstreamAnswer, type UpstreamAnswer, upstreamQuery } from './dns-message.ts';
import type { UpstreamServer } from './upstream-servers.ts';

export interface AskLimits {
  readonly udpMs: number;
  readonly tcpMs: number;
  /** Answers that are none to the question before it goes over TCP. */
  readonly forgeries: number;
}

export const ASK_LIMITS: AskLimits = { udpMs: 1_500, tcpMs: 3_000, forgeries: 3 };

/** Undefined: no answer in time. */
export async function askUpstream(
  server: UpstreamServer,
  name: string,
  type: number,
  limits: AskLimits = ASK_LIMITS,
): Promise<UpstreamAnswer | undefined> {
  const outcome = await overUdp(server, name, type, limits);
  const again = outcome === 'tcp' || outcome?.truncated === true;
  return again ? overTcp(server, name, type, limits.tcpMs) : outcome;
}

/** Ids and letters of one question. */
function freshQuery(name: string, type: number): Buffer {
  const random = randomBytes(2 + name.length);
  const spelled = [...name].map((letter, at) => ((random[2 + at]! & 1) === 0 ? letter : letter.toUpperCase())).join('');
  return upstreamQuery(random.readUInt16BE(0), spelled, type);
}

function overUdp(
  { address, port }: UpstreamServer,
  name: string,
  type: number,
  { udpMs, forgeries }: AskLimits,
): Promise<UpstreamAnswer | 'tcp' | undefined> {
  return new Promise((resolve) => {
    const socket = createSocket(isIPv6(address.replace(/%.*$/, '')) ? 'udp6' : 'udp4');
    const query = freshQuery(name, type);
    let wrong = 0;
    const end = (outcome: UpstreamAnswer | 'tcp' | undefined) => {
      clearTimeout(timer);
      socket.removeAllListeners('message');
      try {
        socket.close();
      } catch {
        // It is closed already.
      }
      resolve(outcome);
    };
    const timer = setTimeout(() => end(wrong > 0 ? 'tcp' : undefined), udpMs);
    // Nobody listens there, among others.
    socket.on('error', () => end(undefined));
    socket.on('message', (message) => {
      const answer = parseUpstreamAnswer(query, message, true);
      if (answer !== undefined) end(answer);
      else if (++wrong >= forgeries) end('tcp');
    });
    socket.connect(port, address, () => socket.send(query, (error) => error && end(undefined)));
  });
}

function overTcp(
  { address, port }: UpstreamServer,
  name: string,
  type: number,
  timeMs: number,
): Promise<UpstreamAnswer | undefined> {
  return new Promise((resolve) => {
    const socket = connect({ host: address, port });
    const query = freshQuery(name, type);
    let received: Buffer = Buffer.alloc(0);
    const end = (outcome: UpstreamAnswer | undefined) => {
      clearTimeout(timer);
      socket.destroy();
      resolve(outcome);
    };
    const timer = setTimeout(() => end(undefined), timeMs);
    socket.on('error', () => end(undefined));
    socket.on('close', () => end(undefined));
    socket.on('data', (bytes: Buffer) => {
      received = Buffer.concat([received, bytes]);
      if (received.length < 2 || received.length < 2 + received.readUInt16BE(0)) return;
      const answer = parseUpstreamAnswer(query, received.subarray(2, 2 + received.readUInt16BE(0)), false);
      end(answer?.truncated === true ? undefined : answer);
    });
    const length = Buffer.alloc(2);
    length.writeUInt16BE(query.length);
    socket.once('connect', () => socket.write(Buffer.concat([length, query])));
  });
}
