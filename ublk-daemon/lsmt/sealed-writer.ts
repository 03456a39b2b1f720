/**
 * Makes a sealed layer of segments that come in order of the device: header, data without gaps, index, trailer, as `overlaybd-commit`
 * lays it out. Neighbours become one segment where their bytes are neighbours too; runs are cut to what an entry can say.
 *
 * The index is filled up to 4096 bytes with padding entries, which count; an empty index stays empty.
 */
import type { ByteSink } from '../layer/byte-sink.ts';
import { encodeHeader, LSMT_BLOCK, LSMT_FLAG, SECTOR } from './header.ts';
import { encodePadding, encodeSegment, MAX_SEGMENT_SECTORS, SEGMENT_BYTES } from './segment.ts';

export interface LayerIdentity {
  readonly virtualSize: number;
  readonly uuid?: string;
  readonly parentUuid?: string;
  readonly userTag?: string;
}

/** As many sectors as the C++ tools put into an entry of data. */
const LONGEST = 16_320;
const ENTRIES_A_BLOCK = LSMT_BLOCK / SEGMENT_BYTES;

export class SealedWriter {
  segments = 0;
  private readonly sink: ByteSink;
  private readonly identity: LayerIdentity;
  private entries = Buffer.allocUnsafe(64 * LSMT_BLOCK);
  private start = 0;
  private length = 0;
  private moffset = 0;
  private zeroed = false;

  static async begin(sink: ByteSink, identity: LayerIdentity): Promise<SealedWriter> {
    const flags = LSMT_FLAG.header | LSMT_FLAG.data | LSMT_FLAG.sealed;
    await sink.append(encodeHeader({ ...identity, flags }));
    return new SealedWriter(sink, identity);
  }

  private constructor(sink: ByteSink, identity: LayerIdentity) {
    this.sink = sink;
    this.identity = identity;
  }

  /** Bytes of the sectors from `start` on; after what came before. */
  async data(start: number, bytes: Buffer): Promise<void> {
    this.note(start, bytes.length / SECTOR, false);
    await this.sink.append(bytes);
  }

  zeroes(start: number, sectors: number): void {
    this.note(start, sectors, true);
  }

  async finish(): Promise<void> {
    this.flushRun();
    const indexOffset = this.sink.written;
    while (this.segments % ENTRIES_A_BLOCK !== 0) {
      encodePadding(this.entries, this.room());
      this.segments++;
    }
    await this.sink.append(this.entries.subarray(0, this.segments * SEGMENT_BYTES));
    const flags = LSMT_FLAG.data | LSMT_FLAG.sealed;
    await this.sink.append(encodeHeader({ ...this.identity, flags, indexOffset, indexEntries: this.segments }));
  }

  private note(start: number, sectors: number, zeroed: boolean): void {
    if (this.length > 0 && (this.zeroed !== zeroed || this.start + this.length !== start)) this.flushRun();
    if (this.length === 0) {
      this.start = start;
      this.zeroed = zeroed;
      this.moffset = this.sink.written / SECTOR;
    }
    this.length += sectors;
    const most = zeroed ? MAX_SEGMENT_SECTORS : LONGEST;
    while (this.length >= most) this.emit(most);
  }

  private flushRun(): void {
    if (this.length > 0) this.emit(this.length);
  }

  private emit(sectors: number): void {
    encodeSegment(this.entries, this.room(), this.start, sectors, this.moffset, this.zeroed);
    this.segments++;
    this.start += sectors;
    if (!this.zeroed) this.moffset += sectors;
    this.length -= sectors;
  }

  private room(): number {
    const at = this.segments * SEGMENT_BYTES;
    if (at + SEGMENT_BYTES > this.entries.length) this.entries = Buffer.concat([this.entries], this.entries.length * 2);
    return at;
  }
}
