/**
 * The reading end of a BPF ring buffer, mapped: a page with how far was read, one with how far was written, then the data, twice in a row so
 * that no record is cut. Nothing wakes us; whoever wants records asks. Each record has eight bytes in front: its length, with two bits for
 * "still being written" and "given up", and the kernel's own number.
 */
import { type Mapping, mapFile } from '#linux';

const PAGE = 4096;
const HEADER = 8;
const DISCARDED = 0x40000000;

export class RingReader {
  private readonly consumer: Mapping;
  private readonly producer: Mapping;
  private readonly read: BigInt64Array;
  private readonly written: BigInt64Array;
  private readonly words: Int32Array;
  private readonly mask: number;

  /** @param fd Of the ring's map. */
  constructor(fd: number, sizeBytes: number) {
    this.consumer = mapFile(fd, PAGE, 0);
    this.producer = mapFile(fd, PAGE + 2 * sizeBytes, PAGE, { writable: false });
    this.read = new BigInt64Array(this.consumer.bytes.buffer, this.consumer.bytes.byteOffset, 1);
    this.written = new BigInt64Array(this.producer.bytes.buffer, this.producer.bytes.byteOffset, 1);
    this.words = new Int32Array(this.producer.bytes.buffer, this.producer.bytes.byteOffset);
    this.mask = sizeBytes - 1;
  }

  /** All that is whole. */
  take(): Buffer[] {
    const records: Buffer[] = [];
    let at = Atomics.load(this.read, 0);
    const end = Atomics.load(this.written, 0);
    while (at < end) {
      const place = PAGE + (Number(at) & this.mask);
      const header = Atomics.load(this.words, place >> 2);
      // The topmost bit: still being written.
      if (header < 0) break;
      const length = header & 0x3fffffff;
      if ((header & DISCARDED) === 0) {
        records.push(Buffer.from(this.producer.bytes.subarray(place + HEADER, place + HEADER + length)));
      }
      at += BigInt((length + HEADER + 7) & ~7);
      Atomics.store(this.read, 0, at);
    }
    return records;
  }

  close(): void {
    this.consumer.unmap();
    this.producer.unmap();
  }
}
