/**
 * What has been received and not been taken yet. The parser asks for what it needs and gets it whole or not at all, so that it
 * never sees half a message. Slices are views of what the socket gave: nothing is copied unless it came in pieces.
 */
export class ByteInput {
  #chunks: Buffer[] = [];
  /** Where in the first chunk the untaken part begins. */
  #start = 0;
  #available = 0;

  get available(): number {
    return this.#available;
  }

  push(chunk: Buffer): void {
    if (chunk.length === 0) return;
    this.#chunks.push(chunk);
    this.#available += chunk.length;
  }

  /** The next `length` bytes; undefined while they are not all here. */
  take(length: number): Buffer | undefined {
    if (length > this.#available) return undefined;
    const first = this.#chunks[0];
    if (first !== undefined && first.length - this.#start >= length) {
      const bytes = first.subarray(this.#start, this.#start + length);
      this.#advance(length);
      return bytes;
    }
    const bytes = Buffer.allocUnsafe(length);
    this.takeInto(bytes, 0);
    return bytes;
  }

  /** Whatever is here, up to the end of `into`; returns how many bytes. */
  takeInto(into: Buffer, at: number): number {
    let done = 0;
    while (at + done < into.length && this.#available > 0) {
      const first = this.#chunks[0]!;
      const count = Math.min(first.length - this.#start, into.length - at - done);
      first.copy(into, at + done, this.#start, this.#start + count);
      this.#advance(count);
      done += count;
    }
    return done;
  }

  /** Drops up to `length` bytes; returns how many. */
  skip(length: number): number {
    let done = 0;
    while (done < length && this.#available > 0) {
      const count = Math.min(this.#chunks[0]!.length - this.#start, length - done);
      this.#advance(count);
      done += count;
    }
    return done;
  }

  clear(): void {
    this.#chunks = [];
    this.#start = 0;
    this.#available = 0;
  }

  #advance(count: number): void {
    this.#start += count;
    this.#available -= count;
    if (this.#start === this.#chunks[0]!.length) {
      this.#chunks.shift();
      this.#start = 0;
    }
  }
}
