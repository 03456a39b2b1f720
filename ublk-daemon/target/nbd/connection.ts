/**
 * One client: its socket, the handshake, then requests until it says goodbye, goes away, or stops speaking NBD. Ends only when
 * no request of it is at work any more, so that a target may be closed after its connections.
 */
import type { Socket } from 'node:net';
import { receiveNow } from '#linux';
import { ByteInput } from './byte-input.ts';
import type { OpenExport } from './export.ts';
import { Handshake } from './handshake.ts';
import { ReplyQueue } from './reply-queue.ts';
import { Transmission } from './transmission.ts';

export interface ConnectionOptions {
  readonly exports: ReadonlyMap<string, OpenExport>;
  /** How long a client may take to agree on an export. */
  readonly handshakeMs: number;
  /** It has agreed on one. */
  onAgreed?(found: OpenExport): void;
}

export class Connection {
  /** Resolves, never rejects, when the client is gone and nothing of it is at work. */
  readonly ended: Promise<void>;
  readonly #socket: Socket;
  readonly #options: ConnectionOptions;
  readonly #input = new ByteInput();
  readonly #queue: ReplyQueue;
  readonly #handshake: Handshake;
  #transmission: Transmission | undefined;
  #timer: NodeJS.Timeout | undefined;
  /** Nothing is parsed any more; what is at work is finished and answered. */
  #leaving = false;
  #gone = false;
  #ending = false;
  #parsing = false;
  #resolveEnded: () => void = () => {};

  constructor(socket: Socket, options: ConnectionOptions) {
    this.#socket = socket;
    this.#options = options;
    this.#queue = new ReplyQueue(socket, (sizeBytes) => this.#transmission?.sent(sizeBytes));
    this.#handshake = new Handshake(options.exports, (bytes) => {
      if (!this.#gone) socket.write(bytes);
    });
    this.ended = new Promise((resolve) => {
      this.#resolveEnded = resolve;
    });
    socket.setNoDelay(true);
    socket.on('error', () => {});
    socket.on('data', (chunk: Buffer) => {
      this.#input.push(chunk);
      this.#advance();
    });
    // The client has gone without a word. What is at work is finished.
    socket.on('end', () => this.#leave());
    socket.on('close', () => {
      this.#gone = true;
      clearTimeout(this.#timer);
      this.#leave();
    });
    this.#timer = setTimeout(() => socket.destroy(), options.handshakeMs);
    this.#timer.unref();
    this.#handshake.greet();
  }

  /** Takes no more requests, finishes those at work, ends. */
  leave(): Promise<void> {
    this.#leave();
    return this.ended;
  }

  /** At once, whatever is at work: its answers are lost. */
  destroy(): Promise<void> {
    this.#socket.destroy();
    return this.ended;
  }

  #advance(): void {
    // What is answered at once frees room at once: the loop that runs goes on by itself.
    if (this.#parsing || this.#leaving) return;
    this.#parsing = true;
    try {
      if (this.#transmission === undefined) this.#negotiate();
      if (this.#transmission !== undefined) this.#serve(this.#transmission);
    } finally {
      this.#parsing = false;
    }
  }

  #negotiate(): void {
    for (;;) {
      const step = this.#handshake.step(this.#input);
      if (step === undefined) {
        // A client that asks and does not listen.
        if (this.#socket.writableLength <= MAX_UNSENT_BYTES) continue;
        this.#socket.destroy();
        return;
      }
      if (step === 'more') return;
      clearTimeout(this.#timer);
      if (step === 'end') {
        this.#leave();
        return;
      }
      this.#options.onAgreed?.(step.export);
      this.#transmission = new Transmission(
        step,
        this.#queue,
        () => this.#progress(),
        (into, at) => this.#receive(into, at),
      );
      return;
    }
  }

  #serve(transmission: Transmission): void {
    for (;;) {
      this.#queue.held = true;
      const parsed = transmission.parse(this.#input);
      this.#queue.held = false;
      const wasFull = transmission.isFull;
      this.#queue.flush();
      if (parsed !== 'waits') {
        this.#leave();
        return;
      }
      // What left at once made room.
      if (!wasFull || transmission.isFull) break;
    }
    // Not before it is full: stopping and starting a socket costs two system calls.
    if (transmission.isFull) this.#socket.pause();
    else if (this.#socket.isPaused()) this.#socket.resume();
  }

  /** Past the stream, where it holds nothing that comes first. */
  #receive(into: Buffer, at: number): number {
    const fd = (this.#socket as { _handle?: { fd?: number } | null })._handle?.fd ?? -1;
    if (fd < 0 || this.#socket.readableLength > 0 || this.#socket.isPaused()) return 0;
    return receiveNow(fd, into, at);
  }

  #progress(): void {
    if (this.#leaving) {
      this.#leave();
      return;
    }
    if (this.#transmission !== undefined && (this.#socket.isPaused() || this.#input.available > 0)) this.#advance();
  }

  #leave(): void {
    if (!this.#leaving) {
      this.#leaving = true;
      this.#input.clear();
      // Nobody parses it; read all the same, so that the end of the connection is seen.
      if (!this.#gone) this.#socket.removeAllListeners('data').resume();
    }
    if (this.#transmission !== undefined && !this.#transmission.isIdle) return;
    if (this.#gone) {
      this.#resolveEnded();
      return;
    }
    if (this.#ending) return;
    this.#ending = true;
    this.#queue.flush();
    // A client that does not close its side must not keep ours.
    this.#socket.end(() => this.#socket.destroy());
    this.#timer = setTimeout(() => this.#socket.destroy(), LINGER_MS);
    this.#timer.unref();
  }
}

/** Replies to options that a client leaves unread. */
const MAX_UNSENT_BYTES = 2 ** 20;
/** For the last replies to be taken. */
const LINGER_MS = 10_000;
