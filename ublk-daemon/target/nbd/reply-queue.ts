/**
 * Replies on their way out. They are written into slabs, one behind the other, and leave in one system call for all that one
 * turn has made. A slab is used again when the kernel has taken what was in it.
 */
import type { Socket } from 'node:net';
import { sendNow } from '#linux';
import { keepLarge, takeLarge } from './large-buffers.ts';

const SLAB_BYTES = 128 * 1024;

interface Slab {
  readonly bytes: Buffer;
  /** Where free space begins, and where what has not been handed on. */
  end: number;
  start: number;
  /** Parts of it that the socket still has. */
  pending: number;
}

/** A batch that the socket has. */
interface Batch {
  readonly slabs: Slab[];
  readonly large: Buffer[];
  readonly sizeBytes: number;
}

export class ReplyQueue {
  readonly #socket: Socket;
  readonly #onSent: (sizeBytes: number) => void;
  #slab: Slab = newSlab();
  #parts: Buffer[] = [];
  #slabs: Slab[] = [];
  #large: Buffer[] = [];
  #queuedBytes = 0;
  #scheduled = false;
  /** Where `reserve` has made room. */
  bytes: Buffer = this.#slab.bytes;
  at = 0;
  /** Whoever sets it calls `flush` afterwards, so that nothing need be scheduled. */
  held = false;

  /** `onSent`: so many bytes have left. */
  constructor(socket: Socket, onSent: (sizeBytes: number) => void) {
    this.#socket = socket;
    this.#onSent = onSent;
  }

  /** Room for `length` bytes in one piece, at `bytes[at]`; nothing is queued before `commit`. */
  reserve(length: number): void {
    if (length > SLAB_BYTES / 4) {
      this.bytes = takeLarge(length);
      this.at = 0;
      return;
    }
    if (this.#slab.end + length > SLAB_BYTES) this.#nextSlab();
    this.bytes = this.#slab.bytes;
    this.at = this.#slab.end;
  }

  /** Queues what was reserved, filled by now. */
  commit(length: number): void {
    this.#queuedBytes += length;
    if (this.bytes === this.#slab.bytes) {
      this.#slab.end += length;
      return;
    }
    this.#seal();
    this.#parts.push(this.bytes.subarray(0, length));
    this.#large.push(this.bytes);
  }

  /** Gives back what was reserved. */
  cancel(): void {
    if (this.bytes !== this.#slab.bytes) keepLarge(this.bytes);
  }

  /** Queues bytes that the caller leaves alone from now on. */
  attach(data: Buffer): void {
    this.#seal();
    this.#parts.push(data);
    this.#queuedBytes += data.length;
  }

  /** Hands everything to the socket at the end of this turn, with what other requests have to say until then. */
  schedule(): void {
    if (this.#scheduled || this.held) return;
    this.#scheduled = true;
    setImmediate(() => {
      this.#scheduled = false;
      this.flush();
    });
  }

  /**
   * Sends everything. What the kernel takes at once goes past the stream, whose bookkeeping costs more than the system call; the
   * rest waits in the stream, and then everything does until that has left.
   */
  flush(): void {
    this.#seal();
    const parts = this.#parts;
    if (parts.length === 0) return;
    const batch: Batch = { slabs: this.#slabs, large: this.#large, sizeBytes: this.#queuedBytes };
    this.#parts = [];
    this.#slabs = [];
    this.#large = [];
    this.#queuedBytes = 0;
    const rest = this.#sendNow(parts);
    if (rest.length === 0) {
      this.#sent(batch);
      return;
    }
    this.#socket.cork();
    for (let i = 0; i < rest.length - 1; i++) this.#socket.write(rest[i]!);
    this.#socket.write(rest.at(-1)!, () => this.#sent(batch));
    this.#socket.uncork();
  }

  /** What is left of `parts`. */
  #sendNow(parts: Buffer[]): Buffer[] {
    // Gone with the socket: a descriptor that is closed may be another file's already.
    const fd = (this.#socket as { _handle?: { fd?: number } | null })._handle?.fd ?? -1;
    if (fd < 0 || this.#socket.writableLength > 0 || this.#socket.connecting) return parts;
    for (let i = 0; i < parts.length; i++) {
      const part = parts[i]!;
      const count = sendNow(fd, part);
      if (count < part.length) return [part.subarray(count), ...parts.slice(i + 1)];
    }
    return [];
  }

  /** Called for a socket that has failed, too: then nothing left, but nobody has the memory any more. */
  #sent({ slabs, large, sizeBytes }: Batch): void {
    for (const slab of slabs) {
      slab.pending--;
      if (slab.pending > 0) continue;
      if (slab !== this.#slab) keepSlab(slab);
      else if (slab.start === slab.end) {
        slab.start = 0;
        slab.end = 0;
      }
    }
    for (const bytes of large) keepLarge(bytes);
    this.#onSent(sizeBytes);
  }

  /** What the current slab has got since becomes a part. */
  #seal(): void {
    const slab = this.#slab;
    if (slab.end === slab.start) return;
    this.#parts.push(slab.bytes.subarray(slab.start, slab.end));
    this.#slabs.push(slab);
    slab.start = slab.end;
    slab.pending++;
  }

  #nextSlab(): void {
    this.#seal();
    const old = this.#slab;
    if (old.pending === 0) {
      old.start = 0;
      old.end = 0;
      return;
    }
    this.#slab = freeSlabs.pop() ?? newSlab();
  }
}

const freeSlabs: Slab[] = [];

function newSlab(): Slab {
  return { bytes: Buffer.allocUnsafeSlow(SLAB_BYTES), start: 0, end: 0, pending: 0 };
}

function keepSlab(slab: Slab): void {
  if (freeSlabs.length >= 16) return;
  slab.start = 0;
  slab.end = 0;
  freeSlabs.push(slab);
}
