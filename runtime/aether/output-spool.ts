/**
 * One stream of a command's output on disk, outside the sandbox: its first bytes and its last, whatever comes in between is counted. It
 * survives this process: what was written is found again by the next one, with the offset to go on from.
 *
 *     magic "DSECOUT1", u64 total; the head; then a ring that holds the rest, byte n at (n - head) mod tail
 *
 * Offsets are those of the stream since its beginning. Writing the same bytes again is harmless: after a restart they may come twice.
 */
import { closeSync, constants, existsSync, ftruncateSync, mkdirSync, openSync, readSync, writeSync } from 'node:fs';
import { dirname } from 'node:path';
import { systemCode } from '#base';

export interface SpoolLimits {
  readonly headBytes: number;
  readonly tailBytes: number;
}

export const SPOOL_LIMITS: SpoolLimits = { headBytes: 32 << 20, tailBytes: 32 << 20 };

const MAGIC = Buffer.from('DSECOUT1');
const HEADER_BYTES = 16;

export type SpoolPart =
  | { readonly bytes: Buffer; readonly missing?: undefined }
  | { readonly bytes?: undefined; readonly missing: number };

export class OutputSpool {
  private readonly path: string;
  private readonly limits: SpoolLimits;
  private fd: number | undefined;
  private written = 0;

  /** File and folder are made by the first byte. */
  constructor(path: string, limits: SpoolLimits = SPOOL_LIMITS) {
    this.path = path;
    this.limits = limits;
    if (existsSync(path)) this.recall();
  }

  /** All that was ever written. */
  get total(): number {
    return this.written;
  }

  /** Whether the next byte would take the place of an older one. */
  get isFull(): boolean {
    return this.written >= this.limits.headBytes + this.limits.tailBytes;
  }

  /** `offset`: of the first byte; at most `total`. */
  write(offset: number, bytes: Buffer): void {
    if (offset > this.written) throw new RangeError(`output from ${offset} on, after ${this.written}`);
    let rest = bytes.subarray(this.written - offset);
    if (rest.length === 0) return;
    const fd = this.open();
    while (rest.length > 0) {
      const { at, room } = this.place(this.written);
      const part = rest.subarray(0, room);
      writeAll(fd, part, at);
      this.written += part.length;
      rest = rest.subarray(part.length);
    }
    const header = Buffer.alloc(HEADER_BYTES);
    MAGIC.copy(header);
    header.writeBigUInt64LE(BigInt(this.written), 8);
    writeAll(fd, header, 0);
  }

  /** From `offset` on, at most `length` bytes, or how many are missing there; undefined at the end. */
  read(offset: number, length: number): SpoolPart | undefined {
    if (offset >= this.written) return undefined;
    const oldest = this.oldestOfTail();
    if (offset >= this.limits.headBytes && offset < oldest) return { missing: oldest - offset };
    const { at, room } = this.place(offset);
    const buffer = Buffer.allocUnsafe(Math.min(length, room, this.written - offset));
    const n = readSync(this.opened(), buffer, 0, buffer.length, at);
    if (n === 0) throw new Error(`${this.path}: shorter than it says`);
    return { bytes: buffer.subarray(0, n) };
  }

  /** The oldest byte behind the head that is still there, were `more` bytes written. */
  oldestOfTail(more = 0): number {
    return Math.max(this.limits.headBytes, this.written + more - this.limits.tailBytes);
  }

  /** No descriptor is held any more, until something is written or read again. */
  close(): void {
    if (this.fd !== undefined) closeSync(this.fd);
    this.fd = undefined;
  }

  private place(offset: number): { at: number; room: number } {
    const { headBytes, tailBytes } = this.limits;
    if (offset < headBytes) return { at: HEADER_BYTES + offset, room: headBytes - offset };
    const inRing = (offset - headBytes) % tailBytes;
    return { at: HEADER_BYTES + headBytes + inRing, room: tailBytes - inRing };
  }

  /** @throws ENOENT: it was forgotten */
  private opened(): number {
    this.fd ??= openSync(this.path, constants.O_RDWR);
    return this.fd;
  }

  private open(): number {
    if (this.fd === undefined) {
      const open = () => openSync(this.path, constants.O_RDWR | constants.O_CREAT, 0o600);
      try {
        this.fd = open();
      } catch (error) {
        if (systemCode(error) !== 'ENOENT') throw error;
        // Of a command that had written nothing so far.
        mkdirSync(dirname(this.path), { mode: 0o700 });
        this.fd = open();
      }
    }
    return this.fd;
  }

  private recall(): void {
    const fd = this.open();
    const header = Buffer.alloc(HEADER_BYTES);
    const n = readSync(fd, header, 0, HEADER_BYTES, 0);
    // A crash before the first header was written: nothing of it counts.
    if (n < HEADER_BYTES || !header.subarray(0, 8).equals(MAGIC)) ftruncateSync(fd, 0);
    else this.written = Number(header.readBigUInt64LE(8));
    this.close();
  }
}

function writeAll(fd: number, bytes: Buffer, at: number): void {
  for (let done = 0; done < bytes.length; ) done += writeSync(fd, bytes, done, bytes.length - done, at + done);
}
