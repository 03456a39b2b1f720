/**
 * Makes a ZFile of bytes that come in order. Header, blocks, index, trailer; the header is written again at the end with the final
 * values, as `overlaybd-commit -z` does, so that readers need not look for the trailer.
 *
 * The C++ reader takes blocks of at most 64 KiB as stored: with blocks of 64 KiB, one that does not compress is refused here, since nobody
 * could read it.
 */
import { crc32cRaw } from '#base';
import { fail } from '../errors.ts';
import type { ByteSink } from '../layer/byte-sink.ts';
import { type BlockCodec, blockCodec } from './codec.ts';
import { algorithmNumber, encodeZfileHeader, ZFILE_FLAG, type ZfileAlgorithm } from './header.ts';
import { BLOCK_CRC_SEED } from './zfile-source.ts';

export interface ZfileOptions {
  readonly algorithm: ZfileAlgorithm;
  /** 4096 to 65536, a power of two. */
  readonly blockSize?: number;
  /** Of zstd. */
  readonly level?: number;
}

const MAX_STORED = 65_536;
const GATHERED_BYTES = 1024 * 1024;

export class ZfileWriter implements ByteSink {
  written = 0;
  private readonly sink: ByteSink;
  private readonly algorithm: ZfileAlgorithm;
  private readonly blockSize: number;
  private readonly level: number;
  private readonly codec: BlockCodec;
  private readonly pending: Buffer;
  private pendingBytes = 0;
  private stored: Buffer[] = [];
  private storedBytes = 0;
  private readonly lengths: number[] = [];

  /** @param sink gets the file from its byte 0 on, but for the header, which `finish` gives back. */
  static async begin(sink: ByteSink, options: ZfileOptions): Promise<ZfileWriter> {
    const writer = new ZfileWriter(sink, options);
    await sink.append(writer.header(ZFILE_FLAG.header | ZFILE_FLAG.data | ZFILE_FLAG.digests, 0, 0));
    return writer;
  }

  private constructor(sink: ByteSink, { algorithm, blockSize = 4096, level = 3 }: ZfileOptions) {
    if (blockSize < 4096 || blockSize > 65_536 || (blockSize & (blockSize - 1)) !== 0) {
      throw fail('LSMT_OPTION', { what: `block size ${blockSize}`, problem: 'not 4, 8, 16, 32 or 64 KiB' });
    }
    this.sink = sink;
    this.algorithm = algorithm;
    this.blockSize = blockSize;
    this.level = algorithm === 'zstd' ? level : 0;
    this.codec = blockCodec(algorithm, level);
    this.pending = Buffer.allocUnsafe(blockSize);
  }

  async append(bytes: Buffer): Promise<void> {
    this.written += bytes.length;
    for (let at = 0; at < bytes.length; ) {
      if (this.pendingBytes === 0 && bytes.length - at >= this.blockSize) {
        await this.addBlock(bytes.subarray(at, at + this.blockSize));
        at += this.blockSize;
        continue;
      }
      const count = bytes.copy(this.pending, this.pendingBytes, at);
      this.pendingBytes += count;
      at += count;
      if (this.pendingBytes < this.blockSize) return;
      this.pendingBytes = 0;
      await this.addBlock(this.pending);
    }
  }

  /** @returns the header, to be written over the first bytes. */
  async finish(): Promise<Buffer> {
    if (this.pendingBytes > 0) await this.addBlock(this.pending.subarray(0, this.pendingBytes));
    await this.pushOut();
    const indexOffset = this.sink.written;
    const table = Buffer.allocUnsafe(this.lengths.length * 4);
    this.lengths.forEach((length, at) => {
      table.writeUInt32LE(length, at * 4);
    });
    const indexCrc = crc32cRaw(0, table);
    await this.sink.append(table);
    const common = ZFILE_FLAG.data | ZFILE_FLAG.digests;
    await this.sink.append(this.header(common | ZFILE_FLAG.sealed, indexOffset, indexCrc));
    return this.header(common | ZFILE_FLAG.header | ZFILE_FLAG.overwritten, indexOffset, indexCrc);
  }

  private async addBlock(block: Buffer): Promise<void> {
    const data = this.codec.compress(block);
    const length = data.length + 4;
    if (length > MAX_STORED) {
      throw fail('ZFILE_INCOMPRESSIBLE', { block: this.lengths.length, blockSize: this.blockSize });
    }
    const checksum = Buffer.allocUnsafe(4);
    checksum.writeUInt32LE(crc32cRaw(BLOCK_CRC_SEED, data), 0);
    this.stored.push(data, checksum);
    this.storedBytes += length;
    this.lengths.push(length);
    if (this.storedBytes >= GATHERED_BYTES) await this.pushOut();
  }

  private async pushOut(): Promise<void> {
    const bytes = Buffer.concat(this.stored);
    this.stored = [];
    this.storedBytes = 0;
    await this.sink.append(bytes);
  }

  private header(flags: number, indexOffset: number, indexCrc: number): Buffer {
    return encodeZfileHeader({
      flags,
      indexOffset,
      indexEntries: indexOffset === 0 ? 0 : this.lengths.length,
      originalSize: indexOffset === 0 ? 0 : this.written,
      indexCrc,
      blockSize: this.blockSize,
      algorithm: algorithmNumber(this.algorithm),
      level: this.level,
      useDictionary: false,
      dictionaryBytes: 0,
      verify: true,
    });
  }
}
