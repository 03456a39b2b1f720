/**
 * Follows the frames and blocks of a zstd stream (RFC 8878) without inflating it, to tell whether it ends where a frame
 * does. Node's own decoder ends without an error when a stream was cut.
 */

const FRAME_MAGIC = 0xfd2fb528;
const SKIPPABLE_MAGIC = 0x184d2a50;
const RLE_BLOCK = 1;

export function isZstdMagic(magic: number): boolean {
  return magic === FRAME_MAGIC || (magic & 0xfffffff0) >>> 0 === SKIPPABLE_MAGIC;
}

export class ZstdFrames {
  private readonly field = Buffer.alloc(4);
  private have = 0;
  private want = 4;
  private skip = 0;
  private next: (field: Buffer) => void = (field) => this.magic(field);
  private frames = 0;
  private hasChecksum = false;

  get isComplete(): boolean {
    return this.frames > 0 && this.want === 4 && this.have === 0 && this.skip === 0 && this.isBetween;
  }

  private isBetween = true;

  push(bytes: Buffer): void {
    let at = 0;
    while (at < bytes.length) {
      if (this.skip > 0) {
        const n = Math.min(this.skip, bytes.length - at);
        this.skip -= n;
        at += n;
        continue;
      }
      this.field[this.have++] = bytes[at++]!;
      if (this.have < this.want) continue;
      this.have = 0;
      this.next(this.field);
    }
  }

  private expect(want: number, next: (field: Buffer) => void): void {
    this.want = want;
    this.next = next;
  }

  private between(): void {
    this.frames++;
    this.isBetween = true;
    this.expect(4, (field) => this.magic(field));
  }

  private magic(field: Buffer): void {
    this.isBetween = false;
    if (field.readUInt32LE(0) === FRAME_MAGIC) this.expect(1, (next) => this.descriptor(next[0]!));
    else {
      this.expect(4, (next) => {
        this.skip = next.readUInt32LE(0);
        this.between();
      });
    }
  }

  private descriptor(flags: number): void {
    const isSingleSegment = (flags & 0x20) !== 0;
    const sizeBytes = [isSingleSegment ? 1 : 0, 2, 4, 8][flags >> 6]!;
    const dictionaryBytes = [0, 1, 2, 4][flags & 3]!;
    this.hasChecksum = (flags & 4) !== 0;
    this.skip = (isSingleSegment ? 0 : 1) + dictionaryBytes + sizeBytes;
    this.expect(3, (next) => this.block(next.readUIntLE(0, 3)));
  }

  private block(header: number): void {
    this.skip = ((header >> 1) & 3) === RLE_BLOCK ? 1 : header >> 3;
    if ((header & 1) === 0) return;
    if (this.hasChecksum) this.expect(4, () => this.between());
    else this.between();
  }
}
