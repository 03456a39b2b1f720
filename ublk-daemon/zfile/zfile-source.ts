/**
 * A ZFile as the bytes it holds. Blocks are read in runs, checked against their CRC, decompressed, and kept decoded.
 *
 * A block whose CRC is wrong is read once more (a cache below may have had a bad moment), then refused: never given out.
 */
import { crc32cRaw } from '#base';
import { type BlockMemory, type ByteSource, readBytes } from '../byte-source.ts';
import { fail } from '../errors.ts';
import { sharedBlocks } from './block-cache.ts';
import { type BlockCodec, blockCodec, codecProblem } from './codec.ts';
import {
  algorithmOf,
  hasZfileMagic,
  hex,
  parseZfileHeader,
  ZFILE_BLOCK,
  ZFILE_FLAG,
  type ZfileHeader,
} from './header.ts';

/** Register that block checksums begin from. */
export const BLOCK_CRC_SEED = 100007;
const CRC_BYTES = 4;
const ENTRY_BYTES = 4;
const MAX_BLOCK = 65_536;
const MAX_EXPANSION = 1024;
/** As many as the C++ tools read. */
const MAX_BLOCKS = 1_000_000_000;
/** Bytes of the jump table read at once. */
const TABLE_PART = 256 * 1024;
/** Compressed bytes read at once. */
const MAX_RUN = 1024 * 1024;

export async function isZfile(source: ByteSource): Promise<boolean> {
  return source.sizeBytes >= ZFILE_BLOCK && hasZfileMagic(await readBytes(source, 0, 24));
}

export class ZfileSource implements ByteSource {
  readonly name: string;
  /** As at the front of the file. */
  readonly header: ZfileHeader;
  readonly trailer: ZfileHeader;
  /** The one of the two that counts. */
  readonly facts: ZfileHeader;
  private readonly source: ByteSource;
  private readonly codec: BlockCodec;
  /** Where each block begins; one more for the end. */
  private readonly offsets: Float64Array;
  private readonly blocks: BlockMemory;

  private constructor(
    source: ByteSource,
    headers: { header: ZfileHeader; trailer: ZfileHeader; facts: ZfileHeader },
    offsets: Float64Array,
  ) {
    this.name = source.name;
    this.source = source;
    this.blocks = source.blockMemory?.() ?? sharedBlocks.forFile();
    this.header = headers.header;
    this.trailer = headers.trailer;
    this.facts = headers.facts;
    this.offsets = offsets;
    this.codec = blockCodec(algorithmOf(headers.facts, source.name));
  }

  get sizeBytes(): number {
    return this.facts.originalSize;
  }

  get blockCount(): number {
    return this.offsets.length - 1;
  }

  /** Bytes of block `at` in the file, its CRC included. */
  storedBytes(at: number): number {
    return this.offsets[at + 1]! - this.offsets[at]!;
  }

  static async open(source: ByteSource): Promise<ZfileSource> {
    const { name, sizeBytes } = source;
    if (sizeBytes < 2 * ZFILE_BLOCK) {
      throw fail('ZFILE_TRUNCATED', { file: name, sizeBytes, problem: 'a ZFile has a header and a trailer' });
    }
    const header = parseZfileHeader(await readBytes(source, 0, ZFILE_BLOCK), `${name}: header`);
    if ((header.flags & ZFILE_FLAG.header) === 0) {
      throw fail('ZFILE_HEADER', { file: `${name}: header`, problem: 'it is marked as a trailer' });
    }
    const last = await readBytes(source, sizeBytes - ZFILE_BLOCK, ZFILE_BLOCK);
    if (!hasZfileMagic(last)) {
      throw fail('ZFILE_TRUNCATED', { file: name, sizeBytes, problem: 'it does not end with a trailer' });
    }
    const trailer = parseZfileHeader(last, `${name}: trailer`);
    if ((trailer.flags & ZFILE_FLAG.header) !== 0 || (trailer.flags & ZFILE_FLAG.sealed) === 0) {
      throw fail('ZFILE_HEADER', { file: `${name}: trailer`, problem: 'its flags are none of a trailer' });
    }
    const isFinal = (header.flags & ZFILE_FLAG.overwritten) !== 0;
    if (isFinal) holdAgainst(name, header, trailer);
    const facts = isFinal ? header : trailer;
    checkFacts(name, facts);
    return new ZfileSource(source, { header, trailer, facts }, await readJumpTable(source, facts));
  }

  read(into: Buffer, offset: number): Promise<void> | undefined {
    const done = this.readCached(into, offset);
    return done === into.length ? undefined : this.readSlowly(into, offset, done);
  }

  readNow(into: Buffer, offset: number): boolean {
    return this.readCached(into, offset) === into.length;
  }

  /** As far as blocks are there decoded. */
  private readCached(into: Buffer, offset: number): number {
    if (offset + into.length > this.sizeBytes) {
      throw fail('DISK_SHORT_READ', { file: this.name, offset, length: into.length });
    }
    const { blockSize } = this.facts;
    let done = 0;
    while (done < into.length) {
      const at = offset + done;
      const block = this.blocks.get(Math.floor(at / blockSize));
      if (block === undefined) break;
      done += block.copy(into, done, at % blockSize);
    }
    return done;
  }

  private async readSlowly(into: Buffer, offset: number, begun: number): Promise<void> {
    const { blockSize } = this.facts;
    const lastBlock = Math.floor((offset + into.length - 1) / blockSize);
    for (let done = begun; done < into.length; ) {
      const first = Math.floor((offset + done) / blockSize);
      const cached = this.blocks.get(first);
      if (cached !== undefined) {
        done += cached.copy(into, done, (offset + done) % blockSize);
        continue;
      }
      let end = first + 1;
      while (end <= lastBlock && this.offsets[end + 1]! - this.offsets[first]! <= MAX_RUN) end++;
      const stored = await readBytes(this.source, this.offsets[first]!, this.offsets[end]! - this.offsets[first]!);
      for (let at = first; at < end; at++) {
        const block = await this.decode(at, stored.subarray(this.offsets[at]! - this.offsets[first]!));
        done += block.copy(into, done, (offset + done) % blockSize);
      }
    }
  }

  /** Every block from the file, past the cache. @throws at the first bad one */
  async verifyBlocks(): Promise<void> {
    for (let at = 0; at < this.blockCount; at++) {
      const stored = await readBytes(this.source, this.offsets[at]!, this.storedBytes(at));
      this.decodeOnce(at, stored);
    }
  }

  private async decode(at: number, stored: Buffer): Promise<Buffer> {
    let block: Buffer;
    try {
      block = this.decodeOnce(at, stored.subarray(0, this.storedBytes(at)));
    } catch {
      block = this.decodeOnce(at, await readBytes(this.source, this.offsets[at]!, this.storedBytes(at)));
    }
    this.blocks.put(at, block);
    return block;
  }

  private decodeOnce(at: number, stored: Buffer): Buffer {
    const { verify, blockSize, originalSize } = this.facts;
    const data = verify ? stored.subarray(0, stored.length - CRC_BYTES) : stored;
    if (verify) {
      const expected = stored.readUInt32LE(data.length);
      const actual = crc32cRaw(BLOCK_CRC_SEED, data);
      if (actual !== expected) {
        throw fail('ZFILE_CHECKSUM', {
          file: this.name,
          what: `block ${at} (byte ${this.offsets[at]})`,
          actual: hex(actual),
          expected: hex(expected),
        });
      }
    }
    try {
      return this.codec.decompress(data, Math.min(blockSize, originalSize - at * blockSize));
    } catch (error) {
      throw fail('ZFILE_BLOCK', { file: this.name, block: at, problem: codecProblem(error) }, error);
    }
  }

  close(): Promise<void> {
    return this.source.close();
  }
}

function holdAgainst(file: string, header: ZfileHeader, trailer: ZfileHeader): void {
  for (const field of [
    'indexOffset',
    'indexEntries',
    'originalSize',
    'indexCrc',
    'blockSize',
    'algorithm',
    'verify',
  ] as const) {
    if (header[field] === trailer[field]) continue;
    throw fail('ZFILE_HEADER', {
      file,
      problem: `${field} is ${header[field]} in the header and ${trailer[field]} in the trailer`,
    });
  }
}

function checkFacts(file: string, facts: ZfileHeader): void {
  const { flags, useDictionary, dictionaryBytes, blockSize, originalSize, indexEntries } = facts;
  if (useDictionary || dictionaryBytes !== 0) {
    throw fail('ZFILE_UNSUPPORTED', { file, problem: 'compressed with a dictionary' });
  }
  if ((flags & ZFILE_FLAG.packedIndex) !== 0) {
    throw fail('ZFILE_UNSUPPORTED', { file, problem: 'its index is compressed' });
  }
  algorithmOf(facts, file);
  if (blockSize < 512 || blockSize > MAX_BLOCK || (blockSize & (blockSize - 1)) !== 0) {
    throw fail('ZFILE_HEADER', {
      file,
      problem: `block size ${blockSize} is no power of two from 512 to ${MAX_BLOCK}`,
    });
  }
  const expected = Math.ceil(originalSize / blockSize);
  if (indexEntries !== expected) {
    throw fail('ZFILE_HEADER', {
      file,
      problem: `${indexEntries} blocks, but ${originalSize} bytes in blocks of ${blockSize} are ${expected}`,
    });
  }
}

async function readJumpTable(source: ByteSource, facts: ZfileHeader): Promise<Float64Array> {
  const { name, sizeBytes } = source;
  const { indexOffset, indexEntries, indexCrc, flags, verify, blockSize } = facts;
  const indexBytes = indexEntries * ENTRY_BYTES;
  if (indexOffset < ZFILE_BLOCK || indexOffset + indexBytes !== sizeBytes - ZFILE_BLOCK) {
    throw fail('ZFILE_TRUNCATED', {
      file: name,
      sizeBytes,
      problem: `its index of ${indexEntries} blocks at byte ${indexOffset} does not end at the trailer`,
    });
  }
  if (indexEntries > MAX_BLOCKS) {
    throw fail('ZFILE_HEADER', { file: name, problem: `${indexEntries} blocks, at most ${MAX_BLOCKS} are read` });
  }
  // In parts, and room for no more than what has been found good: a count costs a liar nothing, nor does a file full of holes.
  const part = async (at: number) => readBytes(source, indexOffset + at, Math.min(TABLE_PART, indexBytes - at));
  if ((flags & ZFILE_FLAG.digests) !== 0) {
    let actual = 0;
    for (let at = 0; at < indexBytes; at += TABLE_PART) actual = crc32cRaw(actual, await part(at));
    if (actual !== indexCrc) {
      throw fail('ZFILE_CHECKSUM', { file: name, what: 'index', actual: hex(actual), expected: hex(indexCrc) });
    }
  }
  let offsets = new Float64Array(Math.min(indexEntries + 1, TABLE_PART));
  let position = ZFILE_BLOCK;
  let table: Buffer = Buffer.alloc(0);
  for (let at = 0; at < indexEntries; at++) {
    const inPart = (at * ENTRY_BYTES) % TABLE_PART;
    if (inPart === 0) table = await part(at * ENTRY_BYTES);
    if (at + 1 === offsets.length) {
      const larger = new Float64Array(Math.min(indexEntries + 1, offsets.length * 2));
      larger.set(offsets);
      offsets = larger;
    }
    offsets[at] = position;
    const stored = table.readUInt32LE(inPart);
    if (stored <= (verify ? CRC_BYTES : 0)) {
      throw fail('ZFILE_BLOCK', { file: name, block: at, problem: `${stored} bytes hold no data` });
    }
    // What no codec makes of a block; bounds what is read for one.
    if (stored > blockSize + MAX_EXPANSION) {
      throw fail('ZFILE_BLOCK', { file: name, block: at, problem: `${stored} bytes stored for ${blockSize}` });
    }
    position += stored;
  }
  offsets[indexEntries] = position;
  if (position !== indexOffset) {
    throw fail('ZFILE_TRUNCATED', {
      file: name,
      sizeBytes,
      problem: `its blocks end at byte ${position}, its index begins at ${indexOffset}`,
    });
  }
  return offsets;
}
