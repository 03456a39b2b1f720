/**
 * The launcher that stays, and the door of the runtime service: a dsec-agent that listens on a unix socket, open to root alone. What
 * comes through the door is a `ServiceClient`, whose standard streams stay with the launcher; sandboxes are launched with them.
 *
 * Each client ends in exactly one way: declined (before anything was done for it), told an exit status, or gone.
 */
import { spawn } from 'node:child_process';
import { constants } from 'node:os';
import { type Duplex, Readable } from 'node:stream';
import { messageOf } from '#base';
import type { AgentBinary } from '../backend/agent-binary.ts';
import { FRAME } from '../backend/agent-wire.ts';
import type { Backend } from '../backend/backend.ts';
import { LauncherChannel } from '../backend/launcher-channel.ts';
import { openOwnBackend } from '../backend/own-backend.ts';
import { fail } from '../errors.ts';
import type { TakeSignals } from '../sandbox/signal-forwarding.ts';
import { type Greeting, parseGreeting } from './greeting.ts';

export interface ServiceClient {
  readonly pid: number;
  readonly greeting: Greeting;
  /** Sandboxes with the client's standard streams. */
  readonly backend: Backend;
  /** Aborted when the client has gone: nobody waits for its sandbox any more. */
  readonly gone: AbortSignal;
  /** All signals that it gets from now on, and those that came before. */
  readonly takeSignals: TakeSignals;
  /** It shall do it itself. Only before `accept`. */
  decline(): void;
  /** It is done here; from now on the client passes its signals on. Safe to call twice. */
  accept(): void;
  output(stream: 'stdout' | 'stderr', bytes: Buffer): void;
  /** Resolves when it has not too much output before it, or is gone. */
  drained(): Promise<void>;
  /** Its standard input, read from now on as fast as this is. */
  readonly input: Readable;
  exit(status: number): void;
}

export interface ResidentLauncher {
  /** Resolves when the launcher has ended, with all its sandboxes. */
  readonly closed: Promise<void>;
  /** No new clients. */
  closeListener(): void;
  /** Ends it, with its sandboxes and clients. */
  close(): Promise<void>;
}

/** @throws RUNTIME_LAUNCHER_GONE when it cannot listen at `socket` */
export async function startResidentLauncher(
  agent: AgentBinary,
  socket: string,
  onClient: (client: ServiceClient) => void,
): Promise<ResidentLauncher> {
  const child = spawn(agent.path, ['launch', socket], {
    cwd: '/',
    env: {},
    // Its complaints are ours. It is not interrupted with us at a terminal: we end it.
    stdio: ['ignore', 'ignore', 'inherit', 'pipe'],
    detached: true,
  });
  let problem = 'it could not be started';
  const exited = new Promise<void>((resolve) => {
    child.once('error', (error) => {
      problem = messageOf(error);
      resolve();
    });
    child.once('exit', () => resolve());
  });
  const socketOf = child.stdio?.[3] as Duplex | null | undefined;
  if (socketOf === null || socketOf === undefined) throw fail('RUNTIME_LAUNCHER_GONE', { reason: problem });
  const clients = new Map<number, Client>();
  const channel: LauncherChannel = new LauncherChannel(socketOf, {
    greeted(id, pid, payload) {
      const greeting = parseGreeting(payload);
      if (greeting === undefined || greeting.build !== agent.build) return channel.toClient(id, FRAME.declined);
      const client = new Client(channel, id, pid, greeting, () => clients.delete(id));
      clients.set(id, client);
      onClient(client);
    },
    signalled: (id, number) => clients.get(id)?.signalled(number),
    gone: (id) => clients.get(id)?.leave(),
    stream: (id, kind, payload) => clients.get(id)?.streamed(kind, payload),
  });
  const closed = (async () => {
    await Promise.all([channel.closed, exited]);
    for (const client of [...clients.values()]) client.leave();
  })();
  await channel.ready;
  return {
    closed,
    closeListener: () => channel.closeListener(),
    async close() {
      channel.close();
      await closed;
    },
  };
}

class Client implements ServiceClient {
  readonly pid: number;
  readonly greeting: Greeting;
  readonly backend: Backend;
  private readonly channel: LauncherChannel;
  private readonly id: number;
  private readonly forget: () => void;
  private readonly leaving = new AbortController();
  private accepted = false;
  private ended = false;
  private handler: ((signal: NodeJS.Signals) => void) | undefined;
  private readonly early: NodeJS.Signals[] = [];
  /** Of its output, what it has not said that it took. */
  private aheadBytes = 0;
  private readonly draining: (() => void)[] = [];
  private stdin: Readable | undefined;

  constructor(channel: LauncherChannel, id: number, pid: number, greeting: Greeting, forget: () => void) {
    this.channel = channel;
    this.id = id;
    this.pid = pid;
    this.greeting = greeting;
    this.forget = forget;
    this.backend = openOwnBackend(undefined, { channel, client: id });
  }

  get gone(): AbortSignal {
    return this.leaving.signal;
  }

  readonly takeSignals: TakeSignals = (handler) => {
    this.handler = handler;
    for (const signal of this.early.splice(0)) handler(signal);
  };

  decline(): void {
    if (this.accepted) throw new Error('a client that was accepted is declined');
    this.end(FRAME.declined);
  }

  accept(): void {
    if (this.accepted || this.ended) return;
    this.accepted = true;
    // At once, before anything is done for it: one that has not heard of it does the command itself when we die.
    this.channel.toClient(this.id, FRAME.accepted);
  }

  output(stream: 'stdout' | 'stderr', bytes: Buffer): void {
    if (this.ended) return;
    this.accept();
    this.aheadBytes += bytes.length;
    this.channel.toClient(this.id, FRAME.output, Buffer.concat([Buffer.from([stream === 'stdout' ? 1 : 2]), bytes]));
  }

  drained(): Promise<void> {
    if (this.ended || this.aheadBytes <= AHEAD_BYTES) return Promise.resolve();
    return new Promise((resolve) => this.draining.push(resolve));
  }

  get input(): Readable {
    // What it may send is asked for when the last of it is wanted: one window is on its way at most.
    this.stdin ??= new Readable({ highWaterMark: INPUT_BYTES, read: () => this.wantInput() });
    return this.stdin;
  }

  streamed(kind: number, payload: Buffer): void {
    if (kind === FRAME.outputTaken) {
      this.aheadBytes -= payload.readUInt32LE(0);
      if (this.aheadBytes <= AHEAD_BYTES) for (const resolve of this.draining.splice(0)) resolve();
    } else if (kind === FRAME.input) {
      this.inputAhead -= payload.length;
      this.stdin?.push(payload);
    } else if (kind === FRAME.inputEnd) this.stdin?.push(null);
  }

  private inputAhead = 0;
  private wantInput(): void {
    if (this.ended || this.inputAhead > 0) return;
    this.inputAhead = INPUT_BYTES;
    const payload = Buffer.alloc(4);
    payload.writeUInt32LE(INPUT_BYTES, 0);
    this.accept();
    this.channel.toClient(this.id, FRAME.inputWanted, payload);
  }

  exit(status: number): void {
    if (this.ended) return;
    this.accept();
    const payload = Buffer.alloc(4);
    payload.writeInt32LE(status, 0);
    this.end(FRAME.exit, payload);
  }

  signalled(number: number): void {
    const signal = SIGNALS.get(number);
    if (signal === undefined) return;
    if (this.handler === undefined) this.early.push(signal);
    else this.handler(signal);
  }

  leave(): void {
    this.over();
    this.leaving.abort();
  }

  private over(): void {
    this.ended = true;
    this.forget();
    for (const resolve of this.draining.splice(0)) resolve();
    this.stdin?.destroy();
  }

  private end(kind: number, payload?: Buffer): void {
    if (this.ended) return;
    this.channel.toClient(this.id, kind, payload);
    this.over();
  }
}

const AHEAD_BYTES = 1 << 20;
const INPUT_BYTES = 128 << 10;

const SIGNALS: ReadonlyMap<number, NodeJS.Signals> = new Map(
  Object.entries(constants.signals).map(([name, number]) => [number, name as NodeJS.Signals]),
);
