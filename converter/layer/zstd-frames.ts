/**
 * Follows a zstd frame (RFC 8878) block by block without inflating it, to find where it ends: Node's own decoder knows
 * neither that a stream was cut in the middle of a frame nor, reliably, that another frame follows.
 */

const FRAME_MAGIC = 0xfd2fb528;
const SKIPPABLE_MAGIC = 0x184d2a50;
const RLE_BLOCK = 1;

export function isSkippableMagic(magic: number): boolean {
  return (magic & 0xfffffff0) >>> 0 === SKIPPABLE_MAGIC;
}

export function isZstdMagic(magic: number): boolean {
  return magic === FRAME_MAGIC || isSkippableMagic(magic);
}

/** One frame, whose first bytes are known to be a magic number of zstd. */
export class ZstdFrame {
  isComplete = false;
  private readonly field = Buffer.alloc(4);
  private have = 0;
  private want = 4;
  private skip = 0;
  private isLast = false;
  private hasChecksum = false;
  private next: (field: Buffer) => void = (field) => this.magic(field);

  /** @returns how many of the bytes belong to the frame. */
  push(bytes: Buffer): number {
    let at = 0;
    while (!this.isComplete) {
      const n = Math.min(this.skip, bytes.length - at);
      this.skip -= n;
      at += n;
      if (this.skip === 0 && this.isLast && this.want === 0) this.isComplete = true;
      else if (at === bytes.length) break;
      else {
        this.field[this.have++] = bytes[at++]!;
        if (this.have < this.want) continue;
        this.have = 0;
        this.next(this.field);
      }
    }
    return at;
  }

  private magic(field: Buffer): void {
    if (isSkippableMagic(field.readUInt32LE(0))) {
      this.next = (size) => {
        this.skip = size.readUInt32LE(0);
        this.end();
      };
    } else {
      this.want = 1;
      this.next = (flags) => this.descriptor(flags[0]!);
    }
  }

  private descriptor(flags: number): void {
    const isSingleSegment = (flags & 0x20) !== 0;
    const sizeBytes = [isSingleSegment ? 1 : 0, 2, 4, 8][flags >> 6]!;
    const dictionaryBytes = [0, 1, 2, 4][flags & 3]!;
    this.hasChecksum = (flags & 4) !== 0;
    this.skip = (isSingleSegment ? 0 : 1) + dictionaryBytes + sizeBytes;
    this.want = 3;
    this.next = (field) => this.block(field.readUIntLE(0, 3));
  }

  private block(header: number): void {
    this.skip = ((header >> 1) & 3) === RLE_BLOCK ? 1 : header >> 3;
    if ((header & 1) === 0) return;
    if (this.hasChecksum) this.skip += 4;
    this.end();
  }

  /** What is left to skip is the last of the frame. */
  private end(): void {
    this.isLast = true;
    this.want = 0;
  }
}
