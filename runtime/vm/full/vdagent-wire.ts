/**
 * The protocol of SPICE's agents in guests (spice-vdagent, vdservice of Windows), as far as a clipboard needs it: messages in chunks, over a port of
 * virtio-serial, numbers little-endian. A chunk is `port u32, size u32`, then bytes; of the bytes of port 1 messages are made: `protocol u32 = 1, type u32,
 * opaque u64, size u32`, then the body. A message may have many chunks, and a chunk many messages.
 *
 * The guest can send what it wants: nothing is kept that is not wanted, nothing is kept beyond its limit, and what is no such stream ends it.
 */

/** Types of messages. */
export const VDAGENT = {
  clipboard: 4,
  capabilities: 6,
  grab: 7,
  request: 8,
  release: 9,
} as const;

/** Bits of `capabilities`. */
export const VDAGENT_CAPABILITY = {
  /** A clipboard is offered by its types, and given when somebody asks for one. */
  byDemand: 5,
  /** Several of them: each message about one says which. */
  selection: 6,
  /** Its texts have lines that end with CR LF. */
  carriageReturns: 9,
} as const;

/** Of a message that is kept: `body` as it came; undefined: it was larger than `limitOf` says. */
export interface VdAgentMessage {
  readonly type: number;
  readonly sizeBytes: number;
  readonly body: Buffer | undefined;
}

const PORT = 1;
/** Messages between an agent and a SPICE server, which is not here: passed over. */
const SERVER_PORT = 2;
const PROTOCOL = 1;
const CHUNK_HEAD_BYTES = 8;
const MESSAGE_HEAD_BYTES = 20;
/** Agents take no larger chunks. */
const CHUNK_BYTES = 2048;

interface BegunMessage extends VdAgentMessage {
  readonly isWanted: boolean;
  left: number;
}

/** A message, in chunks. */
export function vdAgentMessage(type: number, body: Buffer): Buffer {
  const head = Buffer.alloc(MESSAGE_HEAD_BYTES);
  head.writeUInt32LE(PROTOCOL, 0);
  head.writeUInt32LE(type, 4);
  head.writeUInt32LE(body.length, 16);
  const message = Buffer.concat([head, body]);
  const parts: Buffer[] = [];
  for (let at = 0; at < message.length; at += CHUNK_BYTES) {
    const content = message.subarray(at, at + CHUNK_BYTES);
    const chunk = Buffer.alloc(CHUNK_HEAD_BYTES);
    chunk.writeUInt32LE(PORT, 0);
    chunk.writeUInt32LE(content.length, 4);
    parts.push(chunk, content);
  }
  return Buffer.concat(parts);
}

/** Numbers of 32 bits, as bodies have them. */
export function vdAgentNumbers(...numbers: readonly number[]): Buffer {
  const bytes = Buffer.alloc(4 * numbers.length);
  for (const [at, number] of numbers.entries()) bytes.writeUInt32LE(number >>> 0, 4 * at);
  return bytes;
}

export class VdAgentReader {
  private readonly limitOf: (type: number) => number;
  /** A head that has begun. */
  private readonly head = Buffer.alloc(MESSAGE_HEAD_BYTES);
  private headBytes = 0;
  private chunk: { readonly port: number; left: number } | undefined;
  private message: BegunMessage | undefined;
  /** Of a chunk's head, while there is no chunk. */
  private readonly chunkHead = Buffer.alloc(CHUNK_HEAD_BYTES);
  private chunkHeadBytes = 0;

  /** @param limitOf Bytes of a body of this type that are kept; 0: nobody wants it. Asked when its head has come. */
  constructor(limitOf: (type: number) => number) {
    this.limitOf = limitOf;
  }

  /** Messages that these bytes end. @throws Error when they cannot be such a stream; no more may be given then */
  *take(bytes: Buffer): Generator<VdAgentMessage> {
    let rest = bytes;
    while (rest.length > 0) {
      if (this.chunk === undefined) {
        const count = rest.copy(this.chunkHead, this.chunkHeadBytes);
        this.chunkHeadBytes += count;
        rest = rest.subarray(count);
        if (this.chunkHeadBytes === CHUNK_HEAD_BYTES) this.beginChunk();
        continue;
      }
      const content = rest.subarray(0, this.chunk.left);
      rest = rest.subarray(content.length);
      const { port } = this.chunk;
      this.chunk.left -= content.length;
      if (this.chunk.left === 0) this.chunk = undefined;
      if (port === PORT) yield* this.takeContent(content);
    }
  }

  private beginChunk(): void {
    this.chunkHeadBytes = 0;
    const port = this.chunkHead.readUInt32LE(0);
    if (port !== PORT && port !== SERVER_PORT) throw new Error(`a chunk of port ${port}`);
    const left = this.chunkHead.readUInt32LE(4);
    if (left > 0) this.chunk = { port, left };
  }

  private *takeContent(content: Buffer): Generator<VdAgentMessage> {
    let rest = content;
    while (rest.length > 0) {
      if (this.message === undefined) {
        const count = rest.copy(this.head, this.headBytes);
        this.headBytes += count;
        rest = rest.subarray(count);
        if (this.headBytes < MESSAGE_HEAD_BYTES) return;
        this.message = this.beginMessage();
      }
      const { message } = this;
      const { type, sizeBytes, body } = message;
      const part = rest.subarray(0, message.left);
      rest = rest.subarray(part.length);
      if (body !== undefined) part.copy(body, sizeBytes - message.left);
      message.left -= part.length;
      if (message.left > 0) return;
      this.message = undefined;
      if (message.isWanted) yield { type, sizeBytes, body };
    }
  }

  private beginMessage(): BegunMessage {
    this.headBytes = 0;
    const protocol = this.head.readUInt32LE(0);
    if (protocol !== PROTOCOL) throw new Error(`a message of protocol ${protocol}`);
    const type = this.head.readUInt32LE(4);
    const sizeBytes = this.head.readUInt32LE(16);
    const limit = this.limitOf(type);
    const isWanted = limit > 0;
    const body = isWanted && sizeBytes <= limit ? Buffer.allocUnsafeSlow(sizeBytes) : undefined;
    return { type, sizeBytes, isWanted, left: sizeBytes, body };
  }
}
