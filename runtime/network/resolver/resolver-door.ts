/** Where sandboxes ask: UDP and TCP at one address of this machine. Who asks is known by the address that the question comes from. */
import { createSocket, type Socket as UdpSocket } from 'node:dgram';
import { once } from 'node:events';
import { createServer, isIPv6, type Server, type Socket } from 'node:net';
import { type Query, udpLimit } from './dns-message.ts';
import type { DeniedName } from './sandbox-answers.ts';

export interface DoorAddress {
  readonly address: string;
  /** 53; 0: any that is free. */
  readonly port?: number;
}

/** Never rejects. Undefined: no answer. */
export type Answerer = (
  message: Buffer,
  from: DeniedName['from'],
  limitBytes: (query: Query) => number,
) => Promise<Buffer | undefined>;

const DNS_PORT = 53;
const TCP_BYTES = 65_535;
const MAX_CONNECTIONS = 1_024;
/** From one address. */
const MAX_CONNECTIONS_EACH = 16;
const IDLE_MS = 10_000;
/** Of one connection. */
const ANSWERS_AT_ONCE = 16;
/** Nobody has to ask for more than some hundred bytes. */
const MAX_QUERY_BYTES = 1_024;
const UDP_BUFFER_BYTES = 1 << 20;

export class ResolverDoor {
  readonly address: string;
  readonly port: number;
  private readonly answerer: Answerer;
  private readonly udp: UdpSocket;
  private readonly tcp: Server;
  private readonly connections = new Map<Socket, string>();
  private isClosed = false;

  private constructor(answerer: Answerer, address: string, port: number, udp: UdpSocket, tcp: Server) {
    this.answerer = answerer;
    this.address = address;
    this.port = port;
    this.udp = udp;
    this.tcp = tcp;
    udp.on('error', () => {});
    udp.on('message', (message, from) => {
      if (message.length > MAX_QUERY_BYTES || from.port === 0) return;
      void answerer(message, from, udpLimit).then((answer) => {
        if (answer !== undefined && !this.isClosed) udp.send(answer, from.port, from.address, () => {});
      });
    });
    tcp.maxConnections = MAX_CONNECTIONS;
    tcp.on('connection', (socket) => this.serve(socket));
    tcp.on('error', () => {});
  }

  static async open(answerer: Answerer, { address, port = DNS_PORT }: DoorAddress): Promise<ResolverDoor> {
    const tcp = createServer({ allowHalfOpen: true });
    tcp.listen({ host: address, port, exclusive: true });
    await once(tcp, 'listening');
    const bound = tcp.address() as { port: number };
    try {
      return new ResolverDoor(answerer, address, bound.port, await bindUdp(address, bound.port), tcp);
    } catch (error) {
      tcp.close();
      throw error;
    }
  }

  close(): void {
    if (this.isClosed) return;
    this.isClosed = true;
    this.udp.close();
    this.tcp.close();
    for (const socket of this.connections.keys()) socket.destroy();
  }

  /** Questions one after the other, each behind its length; answers in the order that they are ready. */
  private serve(socket: Socket): void {
    const { remoteAddress: address, remotePort: port } = socket;
    const others = [...this.connections.values()].filter((other) => other === address).length;
    if (address === undefined || port === undefined || others >= MAX_CONNECTIONS_EACH) {
      socket.destroy();
      return;
    }
    this.connections.set(socket, address);
    let received: Buffer = Buffer.alloc(0);
    let answering = 0;
    let ended = false;
    const goOn = () => {
      if (ended && answering === 0) socket.end();
      // Nothing more is read of one that asks and does not read.
      if (answering < ANSWERS_AT_ONCE && !socket.writableNeedDrain) socket.resume();
      else socket.pause();
    };
    const answer = async (message: Buffer) => {
      answering++;
      const bytes = await this.answerer(message, { address, port }, () => TCP_BYTES);
      answering--;
      if (socket.destroyed) return;
      if (bytes !== undefined) {
        const head = Buffer.alloc(2);
        head.writeUInt16BE(bytes.length);
        socket.write(Buffer.concat([head, bytes]));
      }
      goOn();
    };
    socket.setTimeout(IDLE_MS, () => socket.destroy());
    socket.on('error', () => {});
    socket.on('close', () => this.connections.delete(socket));
    socket.on('drain', goOn);
    socket.on('end', () => {
      ended = true;
      goOn();
    });
    socket.on('data', (bytes: Buffer) => {
      received = received.length === 0 ? bytes : Buffer.concat([received, bytes]);
      while (received.length >= 2) {
        const length = received.readUInt16BE(0);
        if (length > MAX_QUERY_BYTES) return void socket.destroy();
        if (received.length < 2 + length) break;
        void answer(received.subarray(2, 2 + length));
        received = received.subarray(2 + length);
      }
      goOn();
    });
  }
}

async function bindUdp(address: string, port: number): Promise<UdpSocket> {
  const udp = createSocket({ type: isIPv6(address) ? 'udp6' : 'udp4', recvBufferSize: UDP_BUFFER_BYTES });
  const bound = once(udp, 'listening');
  udp.bind({ address, port, exclusive: true });
  try {
    await bound;
  } catch (error) {
    udp.close();
    throw error;
  }
  return udp;
}
