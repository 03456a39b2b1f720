/**
 * Requests and replies of one connection, after the handshake.
 *
 * Requests are answered in whatever order they are done. What a target answers at once is answered while the bytes are parsed,
 * and all of it leaves together. Payload bytes that are held, for requests at work and replies not yet taken by the client, are
 * bounded: beyond that nothing more is read from the socket, so that a client that does not read its replies waits for itself.
 *
 * Whatever a request gets wrong is answered with an error. Only a wrong magic ends the connection: nothing says where the next
 * request begins.
 */
import { messageOf } from '#base';
import { isInside } from '../range.ts';
import { errnoOf } from '../target-error.ts';
import type { ByteInput } from './byte-input.ts';
import type { Agreement } from './handshake.ts';
import { keepLarge, takeLarge } from './large-buffers.ts';
import {
  ALLOCATION_CONTEXT_ID,
  COMMAND,
  COMMAND_FLAG,
  ERROR,
  MAX_PAYLOAD_BYTES,
  REQUEST_BYTES,
  REQUEST_MAGIC,
  wireError,
} from './protocol.ts';
import { type Cookie, Replies } from './replies.ts';
import type { ReplyQueue } from './reply-queue.ts';

/** Payload held at once; one request alone may reach it. */
const MAX_HELD_BYTES = MAX_PAYLOAD_BYTES;
/** Requests at work at once. Clients keep tens. */
const MAX_REQUESTS = 1024;
/** A target may say where holes are for reads of this size and more: below, asking costs more than sending zeros. */
const HOLES_FROM_BYTES = 64 * 1024;
/** More runs than this in one read are sent as data. */
const MAX_RUNS = 16;
/** Copied behind its header; larger answers of a target travel as they are. */
const COPIED_BYTES = 16 * 1024;
/** Left of a payload, so that it is worth a system call of its own and a buffer that is used again. */
const RECEIVED_FROM_BYTES = 64 * 1024;

interface Request extends Cookie {
  readonly command: number;
  readonly flags: number;
  readonly offset: number;
  readonly length: number;
}

interface Payload {
  readonly request: Request;
  readonly bytes: Buffer;
  /** The buffer that `bytes` is the beginning of. */
  readonly whole: Buffer;
  received: number;
}

/** `waits`: for bytes, or for room. `disconnect`: the client has said goodbye. `broken`: it does not speak NBD. */
export type Parsed = 'waits' | 'disconnect' | 'broken';

export class Transmission {
  readonly #agreement: Agreement;
  readonly #queue: ReplyQueue;
  readonly #replies: Replies;
  /** Something is done: there may be room for what waits. */
  readonly #onProgress: () => void;
  readonly #receive: (into: Buffer, at: number) => number;
  #payload: Payload | undefined;
  /** The rest of a payload that is refused. */
  #skip: { readonly request: Request; readonly error: number; left: number } | undefined;
  /** A request that waits for room. */
  #held: Request | undefined;
  #heldBytes = 0;
  #working = 0;

  /**
   * @param receive takes what the socket has into `into[at..]` and answers how much that was: a large payload is neither copied
   *   again nor cut into the pieces that the stream reads
   */
  constructor(
    agreement: Agreement,
    queue: ReplyQueue,
    onProgress: () => void,
    receive: (into: Buffer, at: number) => number = () => 0,
  ) {
    this.#agreement = agreement;
    this.#queue = queue;
    this.#replies = new Replies(queue, agreement.structured);
    this.#onProgress = onProgress;
    this.#receive = receive;
  }

  get isIdle(): boolean {
    return this.#working === 0;
  }

  /** Whether the next request has to wait for room: nothing more should be read from the socket. */
  get isFull(): boolean {
    return this.#held !== undefined || this.#takesNoMore;
  }

  get #takesNoMore(): boolean {
    return this.#working >= MAX_REQUESTS || this.#heldBytes > MAX_HELD_BYTES;
  }

  /** Replies of so many bytes have left. */
  sent(sizeBytes: number): void {
    this.#heldBytes -= sizeBytes;
    this.#onProgress();
  }

  /** Answers and starts what `input` holds. */
  parse(input: ByteInput): Parsed {
    for (;;) {
      if (this.#skip !== undefined) {
        this.#skip.left -= input.skip(this.#skip.left);
        if (this.#skip.left > 0) return 'waits';
        this.#replyError(this.#skip.request, this.#skip.error, 'the write was refused');
        this.#skip = undefined;
      }
      if (this.#payload !== undefined) {
        const payload = this.#payload;
        const { request, bytes, whole } = payload;
        payload.received += input.takeInto(bytes, payload.received);
        while (bytes.length - payload.received >= RECEIVED_FROM_BYTES) {
          const count = this.#receive(bytes, payload.received);
          if (count === 0) break;
          payload.received += count;
        }
        if (payload.received < bytes.length) return 'waits';
        this.#payload = undefined;
        this.#write(request, bytes, whole);
      }
      let request = this.#held;
      this.#held = undefined;
      if (request === undefined) {
        if (this.#takesNoMore) return 'waits';
        const header = input.take(REQUEST_BYTES);
        if (header === undefined) return 'waits';
        if (header.readUInt32BE(0) !== REQUEST_MAGIC) return 'broken';
        request = decode(header);
      }
      if (request.command === COMMAND.DISC) return 'disconnect';
      if (!this.#start(request, input)) {
        this.#held = request;
        return 'waits';
      }
    }
  }

  /** False: there is no room for it now. */
  #start(request: Request, input: ByteInput): boolean {
    const { command, length } = request;
    const error = this.#errorIn(request);
    if (error !== undefined) {
      if (command === COMMAND.WRITE) this.#skip = { request, error: error[0], left: length };
      else this.#replyError(request, ...error);
      return true;
    }
    if (length === 0 && (command === COMMAND.READ || command === COMMAND.WRITE)) {
      this.#replyDone(request);
      return true;
    }
    switch (command) {
      case COMMAND.READ:
        if (!this.#hold(length)) return false;
        this.#read(request);
        return true;
      case COMMAND.WRITE: {
        if (!this.#hold(length)) return false;
        const whole = input.take(length);
        if (whole !== undefined) this.#write(request, whole);
        else {
          const buffer = length < RECEIVED_FROM_BYTES ? Buffer.allocUnsafe(length) : takeLarge(length);
          this.#payload = { request, whole: buffer, bytes: buffer.subarray(0, length), received: 0 };
        }
        return true;
      }
      default:
        this.#work(request, () => this.#perform(request));
        return true;
    }
  }

  #hold(length: number): boolean {
    if (this.#heldBytes > 0 && this.#heldBytes + length > MAX_HELD_BYTES) return false;
    this.#heldBytes += length;
    return true;
  }

  #errorIn({ command, flags, offset, length }: Request): readonly [number, string] | undefined {
    const { export: served, structured, allocation } = this.#agreement;
    const { target } = served;
    const known =
      FLAGS_OF[command] ?? (command === COMMAND.CACHE && served.prefetch !== undefined ? COMMAND_FLAG.FUA : undefined);
    if (known === undefined) return [ERROR.EINVAL, `command ${command} is not known`];
    if (command === COMMAND.BLOCK_STATUS && !allocation) return [ERROR.EINVAL, 'block status was not agreed'];
    if ((flags & ~known) !== 0) return [ERROR.EINVAL, `flags ${flags} do not belong to command ${command}`];
    if ((flags & COMMAND_FLAG.DF) !== 0 && !structured) return [ERROR.EINVAL, 'DF is for structured replies'];
    if (command === COMMAND.FLUSH) return undefined;
    const writes = command === COMMAND.WRITE || command === COMMAND.TRIM || command === COMMAND.WRITE_ZEROES;
    if (writes && served.readOnly) return [ERROR.EPERM, 'the export is read-only'];
    if (offset + length > target.sizeBytes) {
      return [writes ? ERROR.ENOSPC : ERROR.EINVAL, `the export ends at byte ${target.sizeBytes}`];
    }
    if (!isInside(target, offset, length)) {
      return [ERROR.EINVAL, `offset and length have to be multiples of ${target.blockSize}`];
    }
    if ((command === COMMAND.READ || command === COMMAND.WRITE) && length > MAX_PAYLOAD_BYTES) {
      return [ERROR.EOVERFLOW, `a request carries at most ${MAX_PAYLOAD_BYTES} bytes`];
    }
    if (command === COMMAND.BLOCK_STATUS && length === 0) return [ERROR.EINVAL, 'a status of nothing'];
    return undefined;
  }

  #read(request: Request): void {
    const { offset, length, flags } = request;
    const { immediate, extents } = this.#agreement.export;
    if (extents !== undefined && this.#agreement.structured && length >= HOLES_FROM_BYTES) {
      this.#work(request, async () => {
        const runs = await extents.extents(offset, length);
        if (!runs.some(({ zero }) => zero)) return this.#readData(request);
        if (runs.length > 1 && (flags & COMMAND_FLAG.DF) !== 0) return this.#readData(request);
        if (runs.length > MAX_RUNS || runs.reduce((sum, run) => sum + run.length, 0) < length) {
          return this.#readData(request);
        }
        await this.#readRuns(request, runs);
      });
      return;
    }
    try {
      if (immediate !== undefined && this.#readNow(request, offset, length, true)) return;
    } catch (error) {
      this.#heldBytes -= length;
      this.#replyFailure(request, error);
      return;
    }
    this.#work(request, () => this.#readData(request));
  }

  async #readRuns(request: Request, runs: readonly { readonly length: number; readonly zero: boolean }[]) {
    const pieces: (Buffer | undefined)[] = [];
    let at = request.offset;
    // All of it first: an error after half of the chunks would have to name what was sent in vain.
    for (const { length, zero } of runs) {
      pieces.push(zero ? undefined : await this.#agreement.export.target.read(at, length));
      at += length;
    }
    at = request.offset;
    runs.forEach(({ length }, i) => {
      const last = i === runs.length - 1;
      const data = pieces[i];
      if (data === undefined) {
        this.#heldBytes += this.#replies.hole(request, at, length, last) - length;
      } else {
        this.#heldBytes += this.#replies.dataHeader(request, at, length, last);
        this.#queue.attach(data);
      }
      at += length;
    });
    this.#queue.schedule();
  }

  /** Straight into the queue. False: the target would have to wait. */
  #readNow(request: Request, offset: number, length: number, last: boolean): boolean {
    const { immediate } = this.#agreement.export;
    const headerBytes = this.#replies.dataHeaderBytes;
    this.#queue.reserve(headerBytes + length);
    const { bytes, at } = this.#queue;
    try {
      if (!immediate!.readNow(bytes, at + headerBytes, offset, length)) {
        this.#queue.cancel();
        return false;
      }
    } catch (error) {
      this.#queue.cancel();
      throw error;
    }
    this.#replies.writeDataHeader(bytes, at, request, offset, length, last);
    this.#queue.commit(headerBytes + length);
    this.#heldBytes += headerBytes;
    this.#queue.schedule();
    return true;
  }

  async #readData(request: Request): Promise<void> {
    const { offset, length } = request;
    const { immediate, target } = this.#agreement.export;
    if (immediate !== undefined && this.#readNow(request, offset, length, true)) return;
    const data = await target.read(offset, length);
    if (length <= COPIED_BYTES) {
      const headerBytes = this.#replies.dataHeaderBytes;
      this.#queue.reserve(headerBytes + length);
      const { bytes, at } = this.#queue;
      this.#replies.writeDataHeader(bytes, at, request, offset, length, true);
      data.copy(bytes, at + headerBytes, 0, length);
      this.#queue.commit(headerBytes + length);
      this.#heldBytes += headerBytes;
    } else {
      this.#heldBytes += this.#replies.dataHeader(request, offset, length, true);
      this.#queue.attach(data);
    }
    this.#queue.schedule();
  }

  /** @param whole a large buffer, free for others when the write is done */
  #write(request: Request, data: Buffer, whole?: Buffer): void {
    const { offset, length, flags } = request;
    const { immediate, target } = this.#agreement.export;
    const fua = (flags & COMMAND_FLAG.FUA) !== 0;
    if (!fua && immediate !== undefined) {
      try {
        if (immediate.writeNow(offset, data)) {
          this.#heldBytes -= length;
          if (whole !== undefined && length >= RECEIVED_FROM_BYTES) keepLarge(whole);
          this.#replyDone(request);
          return;
        }
      } catch (error) {
        this.#heldBytes -= length;
        this.#replyFailure(request, error);
        return;
      }
    }
    this.#work(request, async () => {
      await target.write(offset, data, { fua });
      this.#heldBytes -= length;
      if (whole !== undefined && length >= RECEIVED_FROM_BYTES) keepLarge(whole);
      this.#replyDone(request);
    });
  }

  /** Everything without a payload. */
  async #perform(request: Request): Promise<void> {
    const { command, flags, offset, length } = request;
    const { target, prefetch } = this.#agreement.export;
    const fua = (flags & COMMAND_FLAG.FUA) !== 0;
    switch (command) {
      case COMMAND.FLUSH:
        await target.flush();
        break;
      case COMMAND.TRIM:
        await target.discard(offset, length);
        if (fua) await target.flush();
        break;
      case COMMAND.WRITE_ZEROES:
        await target.writeZeroes(offset, length, { fua, mayUnmap: (flags & COMMAND_FLAG.NO_HOLE) === 0 });
        break;
      case COMMAND.CACHE:
        // A hint: what fails here fails again when it is read.
        await prefetch?.prefetch(offset, length).catch(() => {});
        break;
      case COMMAND.BLOCK_STATUS: {
        const runs = await this.#agreement.export.extents!.extents(offset, length);
        const told = (flags & COMMAND_FLAG.REQ_ONE) !== 0 ? runs.slice(0, 1) : runs;
        this.#heldBytes += this.#replies.blockStatus(request, ALLOCATION_CONTEXT_ID, told);
        this.#queue.schedule();
        return;
      }
    }
    this.#replyDone(request);
  }

  #work(request: Request, work: () => Promise<void>): void {
    this.#working++;
    work()
      .catch((error: unknown) => {
        if (request.command === COMMAND.READ || request.command === COMMAND.WRITE) this.#heldBytes -= request.length;
        this.#replyFailure(request, error);
      })
      .finally(() => {
        this.#working--;
        this.#onProgress();
      });
  }

  #replyDone(request: Request): void {
    this.#heldBytes += this.#replies.done(request, request.command === COMMAND.READ);
    this.#queue.schedule();
  }

  #replyFailure(request: Request, error: unknown): void {
    this.#replyError(request, wireError(errnoOf(error)), messageOf(error));
  }

  #replyError(request: Request, error: number, message: string): void {
    const inChunk = request.command === COMMAND.READ || request.command === COMMAND.BLOCK_STATUS;
    this.#heldBytes += this.#replies.error(request, error, message, inChunk);
    this.#queue.schedule();
  }
}

const FLAGS_OF: Readonly<Record<number, number>> = {
  [COMMAND.READ]: COMMAND_FLAG.FUA | COMMAND_FLAG.DF,
  [COMMAND.WRITE]: COMMAND_FLAG.FUA,
  [COMMAND.FLUSH]: COMMAND_FLAG.FUA,
  [COMMAND.TRIM]: COMMAND_FLAG.FUA,
  [COMMAND.WRITE_ZEROES]: COMMAND_FLAG.FUA | COMMAND_FLAG.NO_HOLE,
  [COMMAND.BLOCK_STATUS]: COMMAND_FLAG.FUA | COMMAND_FLAG.REQ_ONE,
};

function decode(header: Buffer): Request {
  return {
    flags: header.readUInt16BE(4),
    command: header.readUInt16BE(6),
    cookieHigh: header.readUInt32BE(8),
    cookieLow: header.readUInt32BE(12),
    // Above 2^53 it is inexact, and far outside any disk all the same.
    offset: header.readUInt32BE(16) * 2 ** 32 + header.readUInt32BE(20),
    length: header.readUInt32BE(24),
  };
}
