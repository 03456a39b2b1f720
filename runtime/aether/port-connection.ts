/**
 * A connection to a port inside a sandbox, as a stream: opened by the agent, to 127.0.0.1 or ::1 there, whatever network the sandbox has. Each
 * direction ends by itself; a reader that is slow slows the service, a service that is slow slows the writer.
 */
import { constants } from 'node:os';
import { Duplex } from 'node:stream';
import { getSystemErrorMap } from 'node:util';
import { AGENT_FRAME, type PayloadReader, PayloadWriter } from '../backend/agent-wire.ts';
import { fail } from '../errors.ts';
import type { AgentStream, AgentStreams } from './agent-streams.ts';

/** Of what the service writes: so much may be here and not read. */
const WINDOW_BYTES = 256 << 10;
const GRANT_BYTES = WINDOW_BYTES / 4;
/** Of what is written to it: so much may be on its way. */
const AHEAD_BYTES = 128 << 10;
const PART_BYTES = 32 << 10;
const CONNECT_MS = 10_000;
const { ECONNABORTED } = constants.errno;

export interface PortOptions {
  readonly sandbox: string;
  readonly port: number;
  readonly signal?: AbortSignal;
}

/** @throws RUNTIME_PORT_CLOSED, RUNTIME_SANDBOX_GONE */
export async function connectPort(streams: AgentStreams, options: PortOptions): Promise<Duplex> {
  const { sandbox, port, signal } = options;
  signal?.throwIfAborted();
  const connection = new PortConnection(streams, options);
  const aborted = () => connection.destroy(signal?.reason as Error);
  signal?.addEventListener('abort', aborted, { once: true });
  const timer = setTimeout(() => {
    connection.destroy(fail('RUNTIME_PORT_CLOSED', { name: sandbox, port, reason: 'nothing accepts the connection' }));
  }, CONNECT_MS);
  try {
    await connection.opened;
    return connection;
  } finally {
    clearTimeout(timer);
    signal?.removeEventListener('abort', aborted);
  }
}

class PortConnection extends Duplex implements AgentStream {
  readonly opened: Promise<void>;
  private readonly streams: AgentStreams;
  private readonly options: PortOptions;
  private readonly id: number;
  private settle: { resolve(): void; reject(error: Error): void } | undefined;
  private received = 0;
  private granted = WINDOW_BYTES;
  private ahead = 0;
  private isOpen = false;
  /** The service writes no more. */
  private hasEnd = false;
  private writeOn: (() => void) | undefined;
  /** The agent knows nothing of it any more. */
  private isOver = false;

  constructor(streams: AgentStreams, options: PortOptions) {
    super({ allowHalfOpen: true, readableHighWaterMark: GRANT_BYTES, writableHighWaterMark: PART_BYTES });
    this.streams = streams;
    this.options = options;
    this.opened = new Promise((resolve, reject) => {
      this.settle = { resolve, reject };
    });
    this.opened.catch(() => {});
    // Whoever has it listens too; without anybody it must not end this process.
    this.on('error', () => {});
    this.id = streams.add(this);
    streams.send(AGENT_FRAME.connect, this.id, new PayloadWriter().u16(options.port).u32(WINDOW_BYTES).done());
  }

  onFrame(kind: number, reader: PayloadReader): void {
    switch (kind) {
      case AGENT_FRAME.connected:
        this.isOpen = true;
        this.settle?.resolve();
        return;
      case AGENT_FRAME.received: {
        const bytes = reader.rest();
        this.received += bytes.length;
        if (this.received > this.granted) throw fail('RUNTIME_AGENT_PROTOCOL', { problem: 'more than was asked for' });
        // What came is part of a larger piece of memory.
        if (this.push(Buffer.from(bytes))) this.grant();
        return;
      }
      case AGENT_FRAME.receivedEnd:
        this.hasEnd = true;
        this.push(null);
        return;
      case AGENT_FRAME.sent:
        this.ahead = Math.max(0, this.ahead - reader.u32());
        if (this.ahead < AHEAD_BYTES) this.goOn();
        return;
      default:
        throw fail('RUNTIME_AGENT_PROTOCOL', { problem: `a frame of type ${kind} about a connection` });
    }
  }

  onClosed(errno: number): void {
    this.isOver = true;
    if (errno !== 0 || !this.isOpen) {
      const broken = () => void this.destroy(this.problem(errno || ECONNABORTED));
      // The service had said all it had to say: that comes first.
      if (this.isOpen && this.hasEnd && !this.readableEnded) this.once('end', broken);
      else broken();
      this.goOn();
      return;
    }
    if (!this.readableEnded) this.push(null);
    this.goOn();
  }

  onLost(error: Error): void {
    this.isOver = true;
    this.destroy(error);
  }

  override _read(): void {
    this.grant();
  }

  override _write(bytes: Buffer, _encoding: BufferEncoding, done: (error?: Error | null) => void): void {
    let at = 0;
    const go = () => {
      while (at < bytes.length && this.ahead < AHEAD_BYTES && !this.isOver) {
        const part = bytes.subarray(at, at + PART_BYTES);
        this.ahead += part.length;
        at += part.length;
        this.streams.send(AGENT_FRAME.send, this.id, part);
      }
      if (at >= bytes.length || this.isOver) done();
      else this.writeOn = go;
    };
    go();
  }

  override _final(done: (error?: Error | null) => void): void {
    if (!this.isOver) this.streams.send(AGENT_FRAME.sendEnd, this.id);
    done();
  }

  override _destroy(error: Error | null, done: (error?: Error | null) => void): void {
    this.isOver = true;
    this.streams.close(this.id);
    const { sandbox: name, port } = this.options;
    this.settle?.reject(error ?? fail('RUNTIME_PORT_CLOSED', { name, port, reason: 'the connection was given up' }));
    done(error);
    this.goOn();
  }

  private goOn(): void {
    const { writeOn } = this;
    this.writeOn = undefined;
    writeOn?.();
  }

  /** As far as it may go: never more than a window beyond what was taken from here. */
  private grant(): void {
    const limit = this.received - this.readableLength + WINDOW_BYTES;
    if (this.isOver || limit - this.granted < GRANT_BYTES) return;
    this.granted = limit;
    this.streams.send(AGENT_FRAME.take, this.id, new PayloadWriter().u64(BigInt(limit)).done());
  }

  private problem(errno: number): Error {
    const { sandbox: name, port } = this.options;
    const [code, text] = getSystemErrorMap().get(-errno) ?? [`errno ${errno}`, `error ${errno}`];
    const reason = code === 'ECONNREFUSED' ? 'nothing listens there' : text;
    return fail('RUNTIME_PORT_CLOSED', { name, port, reason, code });
  }
}
