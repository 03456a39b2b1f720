/**
 * The host's end of a guest's link: frames to and from it, each once and in order, over a channel of its machine that may go and come back (another process
 * of the machine after a resume, this service started anew, a snapshot where the link is vsock). The other end is runtime/agent/src/guest/link.rs.
 *
 * - What is sent is numbered and kept until the guest says that it has it; after each connection the rest is sent again.
 * - What comes has numbers too, and is said to be taken when it was handled: what a process before this one had handled and not said comes again, as
 *   from the keeper. A guest says whatever it likes: what makes no sense ends it.
 */
import { randomBytes, randomInt } from 'node:crypto';
import type { Duplex } from 'node:stream';
import { messageOf } from '#base';
import type { AgentChannel } from '../../aether/agent-channel.ts';
import {
  FRAME,
  FrameParser,
  frameBytes,
  PayloadReader,
  PayloadWriter,
  PROTOCOL_VERSION,
} from '../../backend/agent-wire.ts';
import { LaunchFailure } from '../../backend/launcher-channel.ts';
import { fail } from '../../errors.ts';
import { type OpenChannel, socketChannel } from './open-channel.ts';
import { MOST_TO_GUEST, PACKET, PACKET_HEADER, type Packet, PacketParser, packetBytes } from './packets.ts';

export interface GuestEvents {
  /** `made`: paths in its root that only mounts needed. */
  started(made: readonly string[]): void;
  failed(error: LaunchFailure): void;
  /** Its agent has ended; status as waitpid has it. */
  ended(status: number): void;
  /** Of its agent. */
  frame(kind: number, about: number, payload: Buffer): void;
  /** It sent what cannot be understood, and is heard no more. */
  broken(problem: string): void;
}

const HELLO_MS = 1_000;
const CONNECT_AGAIN_MS = 20;
const ZEROS = Buffer.alloc(MOST_TO_GUEST);
const NOTHING = Buffer.alloc(0);
const FRAME_HEADER = 9;
/** What may wait in a socket beside what the guest has yet to take: a guest that asks on and on and reads nothing fills no memory here. */
const MOST_WAITING = 1 << 20;
/** An emulated guest on a machine that is pressed takes seconds; more is none that answers. */
const PATIENCE_MS = 60_000;

export class GuestLink implements AgentChannel {
  private readonly open: OpenChannel;
  private readonly events: GuestEvents;
  private session = newSession();
  private socket: Duplex | undefined;
  /** Of connecting; what an earlier one brings is of no use. */
  private attempt = 0;
  /** The guest has answered on this connection. */
  private isOpen = false;
  private isClosed = false;
  /** What comes waits in its socket. */
  private isHeldBack = false;
  private timer: NodeJS.Timeout | undefined;
  private sent = 0;
  private unsettled: { readonly number: number; readonly payload: Buffer }[] = [];
  /** Of those. */
  private unsettledBytes = 0;
  private waiting: (() => void)[] = [];
  /** Of the guest's frames; 0: none in this session. */
  private last = 0;
  private tells = false;
  private outOfMemory = 0;
  /** Not one of a process before this one, whose answers may come yet. */
  private nextWork = randomInt(1, 2 ** 30);
  private readonly working = new Map<number, { resolve(answer: Buffer): void; reject(error: Error): void }>();

  /** @param channel Or the path of a unix socket that the machine listens on. */
  constructor(channel: OpenChannel | string, events: GuestEvents) {
    this.open = typeof channel === 'string' ? socketChannel(channel) : channel;
    this.events = events;
    this.connect();
  }

  /** How often memory ran out in the guest. */
  get outOfMemoryCount(): number {
    return this.outOfMemory;
  }

  /** Once the guest is there it makes its root and starts its agent. */
  launch(order: Buffer): void {
    this.send(FRAME.launch, 0, order);
  }

  cancel(): void {
    this.send(FRAME.cancel, 0, NOTHING);
  }

  toAgent(kind: number, about: number, payload: Buffer = NOTHING, group?: string): void {
    const out = new PayloadWriter();
    if (group !== undefined) out.bytes(group);
    out.u8(kind).u32(about);
    this.send(group === undefined ? FRAME.toAgent : FRAME.toAgentInGroup, 0, Buffer.concat([out.done(), payload]));
  }

  /** What guest/guest-order.ts writes. @throws GuestFailure, VM_GUEST_SILENT, what the link was closed with */
  work(payload: Buffer, timeMs = PATIENCE_MS): Promise<Buffer> {
    const id = this.nextWork++;
    const answered = new Promise<Buffer>((resolve, reject) => {
      if (this.isClosed) return reject(gone());
      this.working.set(id, { resolve, reject });
      this.send(FRAME.guestWork, id, payload);
    });
    return answeredWithin(answered, timeMs).finally(() => this.working.delete(id));
  }

  /** Resolves when the guest has all that was sent so far. @throws VM_GUEST_SILENT */
  settled(timeMs = PATIENCE_MS): Promise<void> {
    const taken = new Promise<void>((resolve) => {
      if (this.unsettled.length === 0) resolve();
      else this.waiting.push(resolve);
    });
    return answeredWithin(taken, timeMs);
  }

  /** Nothing more of the guest is heard until `hear`; nothing of it is lost. */
  holdBack(): void {
    this.isHeldBack = true;
    this.socket?.pause();
  }

  /** One that was not held back: nothing. */
  hear(): void {
    this.isHeldBack = false;
    this.socket?.resume();
  }

  /** The machine is going to be another process, reached in the same way. */
  disconnect(): void {
    clearTimeout(this.timer);
    this.attempt++;
    this.isOpen = false;
    const socket = this.socket;
    this.socket = undefined;
    socket?.destroy();
  }

  /** @param fresh The guest goes on from another moment than that of the last frame that came. */
  reconnect({ fresh = false }: { readonly fresh?: boolean } = {}): void {
    if (fresh) {
      this.session = newSession();
      this.sent = 0;
      this.last = 0;
      this.unsettled = this.unsettled.map(({ payload }) => ({ number: ++this.sent, payload }));
    }
    this.disconnect();
    this.connect();
  }

  /** Nothing more is told. The guest goes on. */
  close(): void {
    if (this.isClosed) return;
    this.isClosed = true;
    this.disconnect();
    for (const { reject } of this.working.values()) reject(gone());
    this.working.clear();
    for (const resolve of this.waiting.splice(0)) resolve();
  }

  private connect(): void {
    if (this.isClosed) return;
    const attempt = this.attempt;
    this.open().then(
      (socket) => {
        if (this.attempt === attempt) this.take(socket);
        else socket.on('error', () => {}).destroy();
      },
      () => {
        if (this.attempt === attempt) this.connectAgain();
      },
    );
  }

  private take(socket: Duplex): void {
    this.socket = socket;
    const parser = new PacketParser();
    socket.on('data', (bytes: Buffer) => {
      if (this.socket !== socket) return;
      try {
        for (const packet of parser.push(bytes)) {
          this.receive(packet);
          if (this.socket !== socket) return;
          if (socket.writableLength <= this.unsettledBytes + MOST_WAITING) continue;
          // What it has yet to take is sent again on the next one.
          this.connectAgain();
          return;
        }
      } catch (error) {
        this.close();
        this.events.broken(messageOf(error));
      }
    });
    socket.on('error', () => {});
    socket.on('close', () => {
      if (this.socket === socket) this.connectAgain();
    });
    socket.write(ZEROS);
    this.greet();
    // It may have been stopped, so that nothing of it is lost.
    if (!this.isHeldBack) socket.resume();
    else socket.pause();
  }

  private connectAgain(): void {
    this.disconnect();
    this.timer = setTimeout(() => this.connect(), CONNECT_AGAIN_MS).unref();
  }

  /** Until it answers: the guest may have yet to boot. */
  private greet(): void {
    clearTimeout(this.timer);
    this.put(PACKET.hello, 0, NOTHING);
    this.timer = setTimeout(() => {
      if (!this.isOpen) this.greet();
    }, HELLO_MS).unref();
  }

  private put(kind: number, number: number, payload: Buffer): void {
    this.socket?.write(packetBytes({ kind, session: this.session, number, taken: this.last, payload }));
  }

  private send(kind: number, id: number, payload: Buffer): void {
    if (this.isClosed) return;
    const bytes = frameBytes(kind, id, payload);
    for (let at = 0; at < bytes.length; at += MOST_TO_GUEST) {
      const part = bytes.subarray(at, at + MOST_TO_GUEST);
      this.unsettled.push({ number: ++this.sent, payload: part });
      this.unsettledBytes += sizeOf(part);
      if (this.isOpen) this.put(PACKET.frames, this.sent, part);
    }
  }

  private receive(packet: Packet): void {
    if (packet.session !== this.session || this.isClosed) return;
    const { kind, number, taken, payload } = packet;
    this.settle(taken);
    if (kind === PACKET.welcome) {
      const version = new PayloadReader(payload).u32();
      if (version !== PROTOCOL_VERSION) {
        throw fail('RUNTIME_AGENT_PROTOCOL', {
          problem: `the guest speaks version ${version}, not ${PROTOCOL_VERSION}`,
        });
      }
      this.isOpen = true;
      this.settle(number);
      for (const one of this.unsettled) this.put(PACKET.frames, one.number, one.payload);
      return;
    }
    if (kind !== PACKET.frames || number <= this.last) {
      if (kind === PACKET.frames) this.tell();
      return;
    }
    if (this.last !== 0 && number !== this.last + 1) {
      // One was lost on its way: it sends them again.
      this.greet();
      return;
    }
    const [frame, ...more] = new FrameParser().push(payload);
    if (frame === undefined || more.length > 0 || payload.length !== FRAME_HEADER + frame.payload.length) {
      throw fail('RUNTIME_AGENT_PROTOCOL', { problem: 'a packet that is no frame' });
    }
    this.last = number;
    this.handle(frame.kind, frame.id, frame.payload);
    this.tell();
  }

  private handle(kind: number, id: number, payload: Buffer): void {
    const reader = new PayloadReader(payload);
    switch (kind) {
      case FRAME.fromAgent:
        this.events.frame(reader.u8(), reader.u32(), reader.rest());
        return;
      case FRAME.started: {
        reader.u32();
        this.events.started(reader.list(() => reader.bytes().toString('latin1')));
        return;
      }
      case FRAME.failed:
        this.events.failed(new LaunchFailure(reader.u8(), reader.i32(), reader.bytes().toString()));
        return;
      case FRAME.ended:
        this.events.ended(reader.i32());
        return;
      case FRAME.outOfMemory:
        this.outOfMemory = Number(reader.u64());
        return;
      case FRAME.guestDone: {
        const waiting = this.working.get(id);
        this.working.delete(id);
        const errno = reader.i32();
        if (errno === 0) waiting?.resolve(reader.rest());
        else waiting?.reject(new GuestFailure(errno));
        return;
      }
      default:
        throw fail('RUNTIME_AGENT_PROTOCOL', { problem: `a frame of type ${kind} from the guest` });
    }
  }

  /** What was handled needs no repetition; said once for all of a turn. */
  private tell(): void {
    if (this.tells) return;
    this.tells = true;
    queueMicrotask(() => {
      this.tells = false;
      if (this.isOpen) this.put(PACKET.taken, 0, NOTHING);
    });
  }

  private settle(number: number): void {
    let count = 0;
    while (count < this.unsettled.length && this.unsettled[count]!.number <= number) count++;
    for (const { payload } of this.unsettled.splice(0, count)) this.unsettledBytes -= sizeOf(payload);
    if (this.unsettled.length === 0) for (const resolve of this.waiting.splice(0)) resolve();
  }
}

/** errno of what a guest was asked for. */
export class GuestFailure extends Error {
  readonly errno: number;

  constructor(errno: number) {
    super(`errno ${errno}`);
    this.errno = errno;
  }
}

/** @throws VM_GUEST_SILENT after `timeMs`; what it is answered later is forgotten */
export async function answeredWithin<T>(answered: Promise<T>, timeMs = PATIENCE_MS): Promise<T> {
  let timer: NodeJS.Timeout | undefined;
  const silent = new Promise<never>((_resolve, reject) => {
    timer = setTimeout(() => reject(fail('VM_GUEST_SILENT', { seconds: Math.round(timeMs / 1000) })), timeMs).unref();
  });
  try {
    return await Promise.race([answered, silent]);
  } finally {
    clearTimeout(timer);
  }
}

function sizeOf(part: Buffer): number {
  return PACKET_HEADER + part.length;
}

function gone(): Error {
  return new Error('the link to the guest is closed');
}

function newSession(): bigint {
  // 0 is none.
  return randomBytes(8).readBigUInt64LE() | 1n;
}
