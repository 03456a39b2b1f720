/**
 * The protocol of dsec-agent, this end: frames on a stream socket and values in their payloads. docs/agent-protocol.md is the
 * specification, runtime/agent/src/wire.rs the other end.
 */
import { fail } from '../errors.ts';

export const PROTOCOL_VERSION = 3;

export const FRAME = {
  // To the launcher.
  launch: 1,
  toClient: 2,
  closeListener: 3,
  prepare: 4,
  cancel: 5,
  // To the keeper, beside prepare, launch and cancel.
  hold: 6,
  toAgent: 7,
  toAgentInGroup: 8,
  taken: 9,
  forget: 10,
  startByRuntime: 11,
  // To a guest's first process, beside launch, cancel, toAgent and toAgentInGroup.
  guestWork: 12,
  // From it.
  ready: 100,
  started: 101,
  ended: 102,
  failed: 103,
  held: 104,
  kept: 105,
  allKept: 106,
  fromAgent: 107,
  prepared: 108,
  // From a guest's first process, beside started, ended, failed and fromAgent.
  guestDone: 109,
  outOfMemory: 114,
  client: 110,
  clientSignal: 111,
  clientGone: 112,
  clientStream: 113,
  // To a client, by way of the launcher.
  declined: 40,
  accepted: 41,
  output: 42,
  exit: 43,
  inputWanted: 45,
  // From a client, in a clientStream.
  input: 32,
  inputEnd: 33,
  outputTaken: 34,
} as const;

/** Between host and agent. The id is the command's, or the request's. */
export const AGENT_FRAME = {
  exec: 50,
  stdin: 51,
  stdinClose: 52,
  kill: 53,
  resize: 54,
  credit: 55,
  drop: 56,
  script: 57,
  which: 58,
  group: 59,
  file: 60,
  connect: 61,
  send: 62,
  sendEnd: 63,
  take: 64,
  close: 65,
  watch: 66,
  lifetime: 67,
  hello: 150,
  runs: 151,
  refused: 152,
  data: 153,
  exited: 154,
  endOfStream: 155,
  stdinTaken: 156,
  stdinGone: 157,
  mark: 158,
  these: 159,
  fileDone: 160,
  fileFailed: 161,
  connected: 162,
  received: 163,
  receivedEnd: 164,
  sent: 165,
  closed: 166,
  watches: 167,
  events: 168,
} as const;

/** Of a payload, both ways. */
export const MAX_PAYLOAD_BYTES = 8 << 20;

const HEADER_BYTES = 9;

export interface Frame {
  readonly kind: number;
  readonly id: number;
  readonly payload: Buffer;
}

export function frameBytes(kind: number, id: number, payload: Buffer): Buffer {
  const header = Buffer.alloc(HEADER_BYTES);
  header.writeUInt32LE(payload.length, 0);
  header.writeUInt8(kind, 4);
  header.writeUInt32LE(id, 5);
  return Buffer.concat([header, payload]);
}

/** Cuts a stream into frames. */
export class FrameParser {
  private rest: Buffer = Buffer.alloc(0);

  /** The frames that are whole now. @throws RUNTIME_AGENT_PROTOCOL */
  push(bytes: Buffer): Frame[] {
    this.rest = this.rest.length === 0 ? bytes : Buffer.concat([this.rest, bytes]);
    const frames: Frame[] = [];
    let at = 0;
    while (this.rest.length - at >= HEADER_BYTES) {
      const length = this.rest.readUInt32LE(at);
      if (length > MAX_PAYLOAD_BYTES) throw fail('RUNTIME_AGENT_PROTOCOL', { problem: `a frame of ${length} bytes` });
      const end = at + HEADER_BYTES + length;
      if (this.rest.length < end) break;
      const payload = this.rest.subarray(at + HEADER_BYTES, end);
      frames.push({ kind: this.rest.readUInt8(at + 4), id: this.rest.readUInt32LE(at + 5), payload });
      at = end;
    }
    this.rest = this.rest.subarray(at);
    return frames;
  }
}

/** Text is UTF-8. */
export class PayloadWriter {
  private readonly parts: Buffer[] = [];

  u8(value: number): this {
    return this.add(1, (buffer) => buffer.writeUInt8(value));
  }
  u16(value: number): this {
    return this.add(2, (buffer) => buffer.writeUInt16LE(value));
  }
  u32(value: number): this {
    return this.add(4, (buffer) => buffer.writeUInt32LE(value));
  }
  u64(value: bigint): this {
    return this.add(8, (buffer) => buffer.writeBigUInt64LE(value));
  }
  bytes(value: Buffer | string): this {
    const bytes = typeof value === 'string' ? Buffer.from(value) : value;
    this.u32(bytes.length).parts.push(bytes);
    return this;
  }
  list<T>(items: readonly T[], item: (value: T) => void): this {
    this.u32(items.length);
    for (const value of items) item(value);
    return this;
  }
  done(): Buffer {
    return Buffer.concat(this.parts);
  }

  private add(size: number, write: (buffer: Buffer) => void): this {
    const buffer = Buffer.alloc(size);
    write(buffer);
    this.parts.push(buffer);
    return this;
  }
}

export class PayloadReader {
  private readonly buffer: Buffer;
  private at = 0;

  constructor(buffer: Buffer) {
    this.buffer = buffer;
  }

  get isAtEnd(): boolean {
    return this.at === this.buffer.length;
  }
  u8(): number {
    return this.take(1).readUInt8(0);
  }
  u16(): number {
    return this.take(2).readUInt16LE(0);
  }
  u32(): number {
    return this.take(4).readUInt32LE(0);
  }
  i32(): number {
    return this.take(4).readInt32LE(0);
  }
  u64(): bigint {
    return this.take(8).readBigUInt64LE(0);
  }
  i64(): bigint {
    return this.take(8).readBigInt64LE(0);
  }
  bytes(): Buffer {
    return this.take(this.u32());
  }
  rest(): Buffer {
    return this.take(this.buffer.length - this.at);
  }
  list<T>(item: () => T): T[] {
    const count = this.u32();
    const items: T[] = [];
    for (let i = 0; i < count; i++) items.push(item());
    return items;
  }

  /** @throws RUNTIME_AGENT_PROTOCOL beyond the end */
  private take(size: number): Buffer {
    if (this.at + size > this.buffer.length)
      throw fail('RUNTIME_AGENT_PROTOCOL', { problem: 'a payload that is too short' });
    this.at += size;
    return this.buffer.subarray(this.at - size, this.at);
  }
}
