/**
 * The keeper (dsec-agent keep) as this process sees it: the parent of all sandboxes that stay. It outlives us; whoever connects next is
 * told what there is and gets again what we have not said that we took.
 */
import { spawn } from 'node:child_process';
import { connect, type Socket } from 'node:net';
import { setTimeout as delay } from 'node:timers/promises';
import { getSystemErrorName } from 'node:util';
import { isDsecError } from '#base';
import type { AgentBinary } from '../backend/agent-binary.ts';
import {
  FRAME,
  type Frame,
  FrameParser,
  frameBytes,
  PayloadReader,
  PayloadWriter,
  PROTOCOL_VERSION,
} from '../backend/agent-wire.ts';
import { LaunchFailure } from '../backend/launcher-channel.ts';
import { readFrames, turnWriter } from '../backend/socket-frames.ts';
import { fail } from '../errors.ts';

export const KEPT_STATES = ['held', 'begun', 'running', 'ended', 'failed'] as const;
export type KeptState = (typeof KEPT_STATES)[number];

export interface Kept {
  readonly id: number;
  /** As it was given to `hold`. */
  readonly name: string;
  readonly state: KeptState;
  readonly pid: number;
  /** Of one that has ended, as waitpid has it. */
  readonly status: number;
}

export interface KeptEvents {
  started(pid: number): void;
  ended(status: number): void;
  failed(error: Error): void;
  /** From its agent. */
  frame(kind: number, about: number, payload: Buffer): void;
  /** The keeper has gone, and every sandbox with it. */
  lost(error: Error): void;
}

/** So long one that nobody needs has to end. */
const END_MS = 10_000;

export class KeeperChannel {
  /** Hash of its program's sources. Orders are understood by the same alone; what it keeps can be taken up by others. */
  readonly build: string;
  /** What there was when we connected. */
  readonly kept: readonly Kept[];
  readonly closed: Promise<void>;
  private readonly socket: Socket;
  private readonly events = new Map<number, KeptEvents>();
  /** Frames that came before anybody wanted them, of those that somebody will want; others are late, and dropped. */
  private readonly early = new Map<number, Frame[]>();
  /** By id: who waits for the process of one that has a user namespace. */
  private readonly preparing = new Map<number, { resolve(pid: number): void; reject(error: Error): void }>();
  private readonly holding = new Map<number, (errno: number) => void>();
  private readonly taken = new Map<number, number>();
  private nextId: number;
  private isClosed = false;
  private readonly write: (bytes: Buffer) => void;
  private takenBytes = 0;
  private takenTimer: NodeJS.Timeout | undefined;

  private constructor(
    socket: Socket,
    build: string,
    kept: readonly Kept[],
    rest: FrameParser,
    first: readonly Frame[],
  ) {
    this.socket = socket;
    this.build = build;
    this.write = turnWriter(socket);
    this.kept = kept;
    for (const { id } of kept) this.early.set(id, []);
    this.nextId = Math.max(0, ...kept.map(({ id }) => id)) + 1;
    for (const frame of first) this.receive(frame);
    this.closed = new Promise((resolve) => {
      readFrames(
        socket,
        rest,
        (frame) => this.receive(frame),
        (reason) => {
          this.isClosed = true;
          const error = fail('RUNTIME_KEEPER_GONE', { reason });
          for (const resume of this.holding.values()) resume(-1);
          for (const { reject } of this.preparing.values()) reject(error);
          for (const events of [...this.events.values()]) events.lost(error);
          resolve();
        },
      );
    });
  }

  /** The one that runs, or a new one, also where one of another build runs that keeps nothing. @throws RUNTIME_KEEPER_GONE */
  static async open(agent: AgentBinary, socketPath: string): Promise<KeeperChannel> {
    for (const deadline = Date.now() + END_MS; ; await delay(10)) {
      const found = await KeeperChannel.find(socketPath);
      if (found === undefined) return KeeperChannel.start(agent, socketPath);
      if (found.build === agent.build || found.kept.length > 0 || Date.now() > deadline) return found;
      // It ends when nobody is connected.
      found.close();
    }
  }

  /** Undefined when none runs. */
  static async find(socketPath: string): Promise<KeeperChannel | undefined> {
    const socket = connect({ path: socketPath });
    const connected = await new Promise<boolean>((resolve) => {
      socket.once('connect', () => resolve(true));
      socket.once('error', () => resolve(false));
    });
    if (!connected) return undefined;
    try {
      return await KeeperChannel.greet(socket);
    } catch (error) {
      // It was being killed.
      if (isDsecError(error, 'RUNTIME_KEEPER_GONE')) return undefined;
      throw error;
    }
  }

  private static async start(agent: AgentBinary, socketPath: string): Promise<KeeperChannel> {
    const child = spawn(agent.path, ['keep', socketPath], {
      cwd: '/',
      env: {},
      stdio: ['ignore', 'pipe', 'inherit'],
      detached: true,
    });
    const listens = new Promise<boolean>((resolve) => {
      child.stdout.once('data', () => resolve(true));
      child.stdout.once('close', () => resolve(false));
      child.once('error', () => resolve(false));
    });
    const ready = await listens;
    child.stdout.destroy();
    child.unref();
    const channel = ready ? await KeeperChannel.find(socketPath) : undefined;
    if (channel === undefined) throw fail('RUNTIME_KEEPER_GONE', { reason: `it does not listen at ${socketPath}` });
    return channel;
  }

  /** Reads until it has told all that it keeps. */
  private static async greet(socket: Socket): Promise<KeeperChannel> {
    const parser = new FrameParser();
    const kept: Kept[] = [];
    let version: number | undefined;
    let build = '';
    return new Promise((resolve, reject) => {
      const gone = () => reject(fail('RUNTIME_KEEPER_GONE', { reason: 'it ended the connection' }));
      const receive = (bytes: Buffer) => {
        try {
          const frames = parser.push(bytes);
          for (const [index, frame] of frames.entries()) {
            const reader = new PayloadReader(frame.payload);
            if (frame.kind === FRAME.ready) {
              version = reader.u32();
              build = reader.bytes().toString('latin1');
            }
            if (frame.kind === FRAME.kept) kept.push(keptOf(frame.id, reader));
            if (frame.kind !== FRAME.allKept) continue;
            if (version !== PROTOCOL_VERSION) {
              throw fail('RUNTIME_AGENT_PROTOCOL', {
                problem: `the keeper speaks version ${version}, not ${PROTOCOL_VERSION}`,
              });
            }
            socket.off('data', receive);
            socket.off('close', gone);
            resolve(new KeeperChannel(socket, build, kept, parser, frames.slice(index + 1)));
            return;
          }
        } catch (error) {
          socket.destroy();
          reject(error);
        }
      };
      socket.on('data', receive);
      socket.once('close', gone);
      socket.on('error', () => {});
    });
  }

  /** Takes the lock at `lockPath` under a new id; undefined when somebody else has it. @throws RUNTIME_KEEPER_GONE */
  async hold(name: string, lockPath: string, patienceMs = 500): Promise<number | undefined> {
    for (const deadline = Date.now() + patienceMs; ; ) {
      const id = this.nextId++;
      const held = new Promise<number>((resolve) => this.holding.set(id, resolve));
      this.send(FRAME.hold, id, new PayloadWriter().bytes(name).bytes(lockPath).done());
      const errno = await held;
      this.holding.delete(id);
      if (errno === 0) {
        this.early.set(id, []);
        return id;
      }
      if (errno < 0) throw fail('RUNTIME_KEEPER_GONE', { reason: 'it has ended' });
      if (errno !== EAGAIN) {
        const code = getSystemErrorName(-errno);
        const cause = Object.assign(new Error(code), { code, path: lockPath });
        throw fail('RUNTIME_KEEPER_GONE', { reason: `it cannot lock ${lockPath}: ${code}` }, cause);
      }
      if (Date.now() > deadline) return undefined;
      await delay(10);
    }
  }

  /** All that comes about `id` from now on, and what came before. */
  listen(id: number, events: KeptEvents): void {
    this.events.set(id, events);
    const early = this.early.get(id) ?? [];
    this.early.delete(id);
    for (const frame of early) this.receive(frame);
    if (this.isClosed) events.lost(fail('RUNTIME_KEEPER_GONE', { reason: 'it has ended' }));
  }

  prepare(id: number, preparation: Buffer): void {
    this.send(FRAME.prepare, id, preparation);
  }
  /** As `prepare`, with a user namespace: resolves with the process that is in it. @throws LaunchFailure, RUNTIME_KEEPER_GONE */
  prepareMapped(id: number, preparation: Buffer): Promise<number> {
    const prepared = new Promise<number>((resolve, reject) => this.preparing.set(id, { resolve, reject }));
    prepared.catch(() => {});
    this.prepare(id, preparation);
    if (this.isClosed) this.preparing.get(id)?.reject(fail('RUNTIME_KEEPER_GONE', { reason: 'it has ended' }));
    return prepared.finally(() => this.preparing.delete(id));
  }
  /** By an OCI runtime; `payload` as runtime/agent/src/oci.rs reads it. */
  startByRuntime(id: number, payload: Buffer): void {
    this.send(FRAME.startByRuntime, id, payload);
  }
  launch(id: number, order: Buffer): void {
    this.send(FRAME.launch, id, order);
  }
  /** SIGKILL to its first process, and with it to all. */
  cancel(id: number): void {
    this.send(FRAME.cancel, id, NOTHING);
  }
  /** Of one that does not run: the lock goes. */
  forget(id: number): void {
    this.events.delete(id);
    this.early.delete(id);
    this.send(FRAME.forget, id, NOTHING);
  }
  toAgent(id: number, kind: number, about: number, payload: Buffer = NOTHING, group?: string): void {
    const out = new PayloadWriter();
    if (group !== undefined) out.bytes(group);
    out.u8(kind).u32(about);
    this.send(group === undefined ? FRAME.toAgent : FRAME.toAgentInGroup, id, Buffer.concat([out.done(), payload]));
  }

  /** The keeper and its sandboxes stay. */
  close(): void {
    this.isClosed = true;
    this.events.clear();
    // What this turn has said goes out.
    this.socket.uncork();
    this.socket.destroy();
  }

  private send(kind: number, id: number, payload: Buffer): void {
    if (this.isClosed) return;
    this.tellTaken();
    this.write(frameBytes(kind, id, payload));
  }

  private receive(frame: Frame): void {
    const { kind, id, payload } = frame;
    const reader = new PayloadReader(payload);
    if (kind === FRAME.held) {
      this.holding.get(id)?.(reader.i32());
      return;
    }
    if (kind === FRAME.prepared) {
      this.preparing.get(id)?.resolve(reader.u32());
      return;
    }
    if (kind === FRAME.failed) this.preparing.get(id)?.reject(failureOf(new PayloadReader(payload)));
    const events = this.events.get(id);
    if (events === undefined) {
      this.early.get(id)?.push(frame);
      return;
    }
    switch (kind) {
      case FRAME.started:
        events.started(reader.u32());
        return;
      case FRAME.ended:
        events.ended(reader.i32());
        return;
      case FRAME.failed:
        events.failed(failureOf(reader));
        return;
      case FRAME.fromAgent:
        events.frame(reader.u8(), reader.u32(), reader.rest());
        this.take(id, payload.length);
        return;
      default:
        throw fail('RUNTIME_AGENT_PROTOCOL', { problem: `a frame of type ${kind} from the keeper` });
    }
  }

  /** What was handled needs no repetition: said with whatever is sent next, or a little later, as it hurts nobody to hear it twice. */
  private take(id: number, bytes: number): void {
    this.taken.set(id, (this.taken.get(id) ?? 0) + 1);
    this.takenBytes += bytes;
    if (this.takenBytes > TAKEN_BYTES) this.tellTaken();
    else this.takenTimer ??= setTimeout(() => this.tellTaken(), TAKEN_MS).unref();
  }

  private tellTaken(): void {
    if (this.taken.size === 0 || this.isClosed) return;
    clearTimeout(this.takenTimer);
    this.takenTimer = undefined;
    this.takenBytes = 0;
    for (const [id, count] of this.taken) {
      this.write(frameBytes(FRAME.taken, id, new PayloadWriter().u32(count).done()));
    }
    this.taken.clear();
  }
}

const NOTHING = Buffer.alloc(0);
/** Far less than the keeper holds back for one sandbox. */
const TAKEN_BYTES = 256 << 10;
const TAKEN_MS = 20;
const EAGAIN = 11;

function failureOf(reader: PayloadReader): LaunchFailure {
  return new LaunchFailure(reader.u8(), reader.i32(), reader.bytes().toString());
}

function keptOf(id: number, reader: PayloadReader): Kept {
  const state = KEPT_STATES[reader.u8()];
  if (state === undefined) throw fail('RUNTIME_AGENT_PROTOCOL', { problem: 'an unknown state of a sandbox' });
  const [pid, status] = [reader.u32(), reader.i32()];
  return { id, state, pid, status, name: reader.bytes().toString() };
}
