/**
 * A launcher process (dsec-agent launch) as this process sees it: orders out, what became of them back, and for the resident
 * service the clients that come to its door. Whatever happens to the launcher, each promise given here is kept or rejected.
 */
import type { Duplex } from 'node:stream';
import { getSystemErrorMap } from 'node:util';
import { fail } from '../errors.ts';
import { FRAME, type Frame, FrameParser, frameBytes, PayloadReader, PROTOCOL_VERSION } from './agent-wire.ts';
import { stageText } from './launch-order.ts';
import { readFrames, turnWriter } from './socket-frames.ts';

export interface LauncherReady {
  readonly pid: number;
  /** Hash of the sources that it was built from. */
  readonly build: string;
}

/** Why a sandbox never ran its command. */
export class LaunchFailure extends Error {
  readonly stage: number;
  /** `ENOENT`, ... */
  readonly code: string;

  constructor(stage: number, errno: number, what: string) {
    const [code, text] = getSystemErrorMap().get(-errno) ?? [`errno ${errno}`, `error ${errno}`];
    super(`${stageText(stage)} ${what}: ${text}`);
    this.stage = stage;
    this.code = code;
  }
}

export interface Launched {
  /** Says what shall run. Once. */
  order(order: Buffer): void;
  /** Ends it, whatever it does. */
  cancel(): void;
  /** With a user namespace: its process, which is in it and waits for the order. Rejects as `started`. */
  readonly prepared: Promise<number>;
  /** The command runs as this process; rejects with a LaunchFailure, or RUNTIME_LAUNCHER_GONE. */
  readonly started: Promise<number>;
  /** As waitpid tells it; after `started`. Rejects when nobody can know any more. */
  readonly ended: Promise<number>;
}

export interface ClientEvents {
  /** `payload`: as the client sent it. */
  greeted(id: number, pid: number, payload: Buffer): void;
  signalled(id: number, number: number): void;
  gone(id: number): void;
  /** Of its input, or what it took of its output: FRAME.input, inputEnd, outputTaken. */
  stream(id: number, kind: number, payload: Buffer): void;
}

interface Waiting {
  prepared(pid: number): void;
  started(pid: number): void;
  ended(status: number): void;
  failed(error: Error): void;
}

export class LauncherChannel {
  readonly ready: Promise<LauncherReady>;
  /** Resolves when the other end has gone. */
  readonly closed: Promise<void>;
  private readonly socket: Duplex;
  private readonly waiting = new Map<number, Waiting>();
  private readonly clients: ClientEvents | undefined;
  private isClosed = false;
  private readonly write: (bytes: Buffer) => void;
  private nextId = 1;
  private readonly noteReady: { resolve(ready: LauncherReady): void; reject(error: Error): void };

  constructor(socket: Duplex, clients?: ClientEvents) {
    this.socket = socket;
    this.write = turnWriter(socket);
    this.clients = clients;
    const ready = settled<LauncherReady>();
    this.ready = ready.promise;
    this.noteReady = ready;
    this.closed = new Promise((resolve) => {
      readFrames(
        socket,
        new FrameParser(),
        (frame) => this.receive(frame),
        (problem) => {
          this.isClosed = true;
          this.abandon(problem);
          resolve();
        },
      );
    });
  }

  /** Begins a sandbox; it waits for its order. */
  prepare(preparation: Buffer): Launched {
    const id = this.nextId++;
    const prepared = settled<number>();
    const started = settled<number>();
    const ended = settled<number>();
    this.waiting.set(id, {
      prepared: prepared.resolve,
      started: started.resolve,
      ended: ended.resolve,
      failed(error) {
        prepared.reject(error);
        started.reject(error);
        ended.reject(error);
      },
    });
    this.send(FRAME.prepare, id, preparation);
    if (this.isClosed) this.abandon('it has ended');
    return {
      order: (order) => this.send(FRAME.launch, id, order),
      cancel: () => this.send(FRAME.cancel, id, Buffer.alloc(0)),
      prepared: prepared.promise,
      started: started.promise,
      ended: ended.promise,
    };
  }

  toClient(id: number, kind: number, payload: Buffer = Buffer.alloc(0)): void {
    this.send(FRAME.toClient, id, Buffer.concat([Buffer.from([kind]), payload]));
  }

  /** No new clients; the socket file stays. */
  closeListener(): void {
    this.send(FRAME.closeListener, 0, Buffer.alloc(0));
  }

  /** Ends the launcher, and every sandbox that still runs. */
  close(): void {
    // What this turn has said goes out.
    this.socket.uncork();
    this.socket.destroy();
  }

  private send(kind: number, id: number, payload: Buffer): void {
    if (!this.isClosed) this.write(frameBytes(kind, id, payload));
  }

  private receive({ kind, id, payload }: Frame): void {
    const reader = new PayloadReader(payload);
    const one = this.waiting.get(id);
    switch (kind) {
      case FRAME.ready: {
        const version = reader.u32();
        if (version !== PROTOCOL_VERSION) {
          throw fail('RUNTIME_AGENT_PROTOCOL', { problem: `version ${version} instead of ${PROTOCOL_VERSION}` });
        }
        this.noteReady.resolve({ pid: id, build: reader.bytes().toString() });
        return;
      }
      case FRAME.prepared:
        one?.prepared(reader.u32());
        return;
      case FRAME.started:
        one?.started(reader.u32());
        return;
      case FRAME.ended:
        this.waiting.delete(id);
        one?.ended(reader.i32());
        return;
      case FRAME.failed: {
        this.waiting.delete(id);
        const [stage, errno] = [reader.u8(), reader.i32()];
        one?.failed(new LaunchFailure(stage, errno, reader.bytes().toString()));
        return;
      }
      case FRAME.client:
        this.clients?.greeted(id, reader.u32(), payload.subarray(4));
        return;
      case FRAME.clientSignal:
        this.clients?.signalled(id, reader.u32());
        return;
      case FRAME.clientStream:
        this.clients?.stream(id, reader.u8(), payload.subarray(1));
        return;
      case FRAME.clientGone:
        this.clients?.gone(id);
        return;
      default:
        throw fail('RUNTIME_AGENT_PROTOCOL', { problem: `a frame of type ${kind}` });
    }
  }

  private abandon(reason: string): void {
    const error = fail('RUNTIME_LAUNCHER_GONE', { reason });
    this.noteReady.reject(error);
    for (const one of this.waiting.values()) one.failed(error);
    this.waiting.clear();
  }
}

/** A promise and its two ends. Nobody has to listen to it. */
function settled<T>(): { promise: Promise<T>; resolve(value: T): void; reject(error: Error): void } {
  let resolve!: (value: T) => void;
  let reject!: (error: Error) => void;
  const promise = new Promise<T>((yes, no) => {
    resolve = yes;
    reject = no;
  });
  promise.catch(() => {});
  return { promise, resolve, reject };
}
