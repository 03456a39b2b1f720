/** Replies as bytes: simple ones, and chunks of structured ones, written into the reply queue. Each answers how long it is. */
import type { Extent } from '../capabilities.ts';
import {
  CHUNK,
  CHUNK_DONE,
  CHUNK_HEADER_BYTES,
  CHUNK_MAGIC,
  MAX_STRING_BYTES,
  SIMPLE_REPLY_BYTES,
  SIMPLE_REPLY_MAGIC,
  STATE,
} from './protocol.ts';
import type { ReplyQueue } from './reply-queue.ts';

/** The client's name for a request: 8 bytes that mean nothing to us. */
export interface Cookie {
  readonly cookieHigh: number;
  readonly cookieLow: number;
}

/** A run in a block status has 32 bits for its length; whole blocks of any size below that. */
const MAX_RUN_BYTES = 0xffff_f000;

export class Replies {
  readonly #queue: ReplyQueue;
  readonly #structured: boolean;
  /** Of what stands before the data of a read. */
  readonly dataHeaderBytes: number;

  constructor(queue: ReplyQueue, structured: boolean) {
    this.#queue = queue;
    this.#structured = structured;
    this.dataHeaderBytes = structured ? CHUNK_HEADER_BYTES + 8 : SIMPLE_REPLY_BYTES;
  }

  /** `inChunk`: commands that are answered in chunks alone once these are agreed. */
  done(cookie: Cookie, inChunk: boolean): number {
    if (inChunk && this.#structured) return this.#chunk(cookie, CHUNK.NONE, 0, true);
    return this.#simple(cookie, 0);
  }

  error(cookie: Cookie, error: number, message: string, inChunk: boolean): number {
    if (!inChunk || !this.#structured) return this.#simple(cookie, error);
    const text = Buffer.from(message).subarray(0, MAX_STRING_BYTES);
    return this.#chunk(cookie, CHUNK.ERROR, 6 + text.length, true, (bytes, at) => {
      bytes.writeUInt32BE(error, at);
      bytes.writeUInt16BE(text.length, at + 4);
      text.copy(bytes, at + 6);
    });
  }

  writeDataHeader(bytes: Buffer, at: number, cookie: Cookie, offset: number, length: number, last: boolean): void {
    if (!this.#structured) {
      writeSimple(bytes, at, cookie, 0);
      return;
    }
    writeChunkHeader(bytes, at, cookie, CHUNK.OFFSET_DATA, 8 + length, last);
    writeOffset(bytes, at + CHUNK_HEADER_BYTES, offset);
  }

  /** The data follows as it is. */
  dataHeader(cookie: Cookie, offset: number, length: number, last: boolean): number {
    this.#queue.reserve(this.dataHeaderBytes);
    this.writeDataHeader(this.#queue.bytes, this.#queue.at, cookie, offset, length, last);
    this.#queue.commit(this.dataHeaderBytes);
    return this.dataHeaderBytes;
  }

  hole(cookie: Cookie, offset: number, length: number, last: boolean): number {
    return this.#chunk(cookie, CHUNK.OFFSET_HOLE, 12, last, (bytes, at) => {
      writeOffset(bytes, at, offset);
      bytes.writeUInt32BE(length, at + 8);
    });
  }

  blockStatus(cookie: Cookie, contextId: number, runs: readonly Extent[]): number {
    return this.#chunk(cookie, CHUNK.BLOCK_STATUS, 4 + 8 * runs.length, true, (bytes, at) => {
      bytes.writeUInt32BE(contextId, at);
      runs.forEach(({ length, hole, zero }, i) => {
        bytes.writeUInt32BE(Math.min(length, MAX_RUN_BYTES), at + 4 + 8 * i);
        bytes.writeUInt32BE((hole ? STATE.HOLE : 0) | (zero ? STATE.ZERO : 0), at + 8 + 8 * i);
      });
    });
  }

  #simple(cookie: Cookie, error: number): number {
    this.#queue.reserve(SIMPLE_REPLY_BYTES);
    writeSimple(this.#queue.bytes, this.#queue.at, cookie, error);
    this.#queue.commit(SIMPLE_REPLY_BYTES);
    return SIMPLE_REPLY_BYTES;
  }

  #chunk(cookie: Cookie, type: number, length: number, last: boolean, fill?: (bytes: Buffer, at: number) => void) {
    this.#queue.reserve(CHUNK_HEADER_BYTES + length);
    const { bytes, at } = this.#queue;
    writeChunkHeader(bytes, at, cookie, type, length, last);
    fill?.(bytes, at + CHUNK_HEADER_BYTES);
    this.#queue.commit(CHUNK_HEADER_BYTES + length);
    return CHUNK_HEADER_BYTES + length;
  }
}

function writeSimple(bytes: Buffer, at: number, { cookieHigh, cookieLow }: Cookie, error: number): void {
  bytes.writeUInt32BE(SIMPLE_REPLY_MAGIC, at);
  bytes.writeUInt32BE(error, at + 4);
  bytes.writeUInt32BE(cookieHigh, at + 8);
  bytes.writeUInt32BE(cookieLow, at + 12);
}

function writeChunkHeader(
  bytes: Buffer,
  at: number,
  { cookieHigh, cookieLow }: Cookie,
  type: number,
  length: number,
  last: boolean,
): void {
  bytes.writeUInt32BE(CHUNK_MAGIC, at);
  bytes.writeUInt16BE(last ? CHUNK_DONE : 0, at + 4);
  bytes.writeUInt16BE(type, at + 6);
  bytes.writeUInt32BE(cookieHigh, at + 8);
  bytes.writeUInt32BE(cookieLow, at + 12);
  bytes.writeUInt32BE(length, at + 16);
}

function writeOffset(bytes: Buffer, at: number, offset: number): void {
  bytes.writeUInt32BE(Math.floor(offset / 2 ** 32), at);
  bytes.writeUInt32BE(offset >>> 0, at + 4);
}
