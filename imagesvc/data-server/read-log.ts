/**
 * What is read of a server's blobs, in order, while `dsec trace` records: kept in memory that the threads share, so that the
 * thread that takes a request notes it without asking anyone. When it is full, reads are counted and no longer kept.
 */

/** Can be sent to another thread. */
export interface ReadLogHandle {
  readonly shared: SharedArrayBuffer;
  /** Of the blob. */
  readonly node: number;
}

export interface LoggedRead {
  readonly node: number;
  readonly offset: number;
  readonly length: number;
  /** By the clock that all threads of the process share. */
  readonly ms: number;
}

const HEADER_BYTES = 8;
/** node, offset, length, ms */
const FIELDS = 4;
/** 16 MiB: enough for half a terabyte in reads of a mebibyte, or 2 GiB in reads of a page. */
const CAPACITY = 1 << 19;

export class ReadLog {
  readonly shared: SharedArrayBuffer;
  readonly #next: Int32Array;
  readonly #fields: Float64Array;
  readonly #capacity: number;

  constructor(shared = new SharedArrayBuffer(HEADER_BYTES + CAPACITY * FIELDS * 8)) {
    this.shared = shared;
    this.#next = new Int32Array(shared, 0, 1);
    this.#fields = new Float64Array(shared, HEADER_BYTES);
    this.#capacity = this.#fields.length / FIELDS;
  }

  static withCapacity(reads: number): ReadLog {
    return new ReadLog(new SharedArrayBuffer(HEADER_BYTES + reads * FIELDS * 8));
  }

  add(node: number, offset: number, length: number): void {
    const index = Atomics.add(this.#next, 0, 1);
    if (index >= this.#capacity) {
      // So that the count does not run over.
      if (index > 2 ** 30) Atomics.store(this.#next, 0, 2 ** 30);
      return;
    }
    const at = index * FIELDS;
    this.#fields[at] = node;
    this.#fields[at + 1] = offset;
    this.#fields[at + 3] = Number(process.hrtime.bigint() / 1000n) / 1000;
    // Last: without a length there is no entry yet.
    this.#fields[at + 2] = length;
  }

  reads(): { reads: LoggedRead[]; dropped: number } {
    const count = Atomics.load(this.#next, 0);
    const reads: LoggedRead[] = [];
    for (let at = 0; at < Math.min(count, this.#capacity) * FIELDS; at += FIELDS) {
      const [node = 0, offset = 0, length = 0, ms = 0] = this.#fields.subarray(at, at + FIELDS);
      if (length > 0) reads.push({ node, offset, length, ms });
    }
    return { reads, dropped: Math.max(0, count - this.#capacity) };
  }
}
