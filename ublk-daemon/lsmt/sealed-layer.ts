/**
 * A sealed LSMT file, as `commit` and `close_seal` of the C++ tools write it and as we do.
 *
 * Its trailer is the last 4096 bytes. Padding entries are dropped wherever they are. Everything an entry says is held against the
 * file: order, no overlap, sectors inside the device, bytes inside the data. What passes is as good as the bytes: LSMT itself has no
 * checksum, which is why layers travel inside a ZFile or under a digest.
 */
import { setImmediate as nextTurn } from 'node:timers/promises';
import { type ByteSource, readBytes } from '../byte-source.ts';
import { fail } from '../errors.ts';
import { hasLsmtMagic, LSMT_BLOCK, LSMT_FLAG, type LsmtHeader, parseHeader, SECTOR } from './header.ts';
import { IndexMemory } from './index-memory.ts';
import {
  MAX_SEGMENT_SECTORS,
  PADDING_OFFSET,
  SEGMENT_BYTES,
  segmentLength,
  segmentMoffset,
  segmentOffset,
  segmentZeroed,
} from './segment.ts';
import { IndexBuilder, type SegmentIndex } from './segment-index.ts';

/** Of an index that is read at all; a file must also have the bytes for them. */
const MAX_ENTRIES = 128_000_000;
const ENTRIES_AT_ONCE = 65_536;
const FIRST_SECTOR = LSMT_BLOCK / SECTOR;

export interface SealedLayer {
  readonly name: string;
  readonly source: ByteSource;
  readonly header: LsmtHeader;
  readonly trailer: LsmtHeader;
  /** Entries with their layer number 0; padding is not among them. */
  readonly index: SegmentIndex;
  readonly paddingEntries: number;
}

/** Whether `source` begins like an LSMT file. */
export async function isLsmt(source: ByteSource): Promise<boolean> {
  return source.sizeBytes >= LSMT_BLOCK && hasLsmtMagic(await readBytes(source, 0, 24));
}

/**
 * @param layerNumber what the index says of each segment
 * @param memory for all indexes of the disk
 */
export async function readSealedLayer(
  source: ByteSource,
  layerNumber = 0,
  memory = new IndexMemory(),
): Promise<SealedLayer> {
  const { name, sizeBytes } = source;
  if (sizeBytes < 2 * LSMT_BLOCK) {
    throw fail('LSMT_TRUNCATED', { file: name, sizeBytes, problem: 'a sealed layer has a header and a trailer' });
  }
  const header = parseHeader(await readBytes(source, 0, LSMT_BLOCK), `${name}: header`);
  if ((header.flags & LSMT_FLAG.header) === 0) {
    throw fail('LSMT_HEADER', { file: `${name}: header`, problem: 'it is marked as a trailer' });
  }
  if ((header.flags & LSMT_FLAG.data) === 0) {
    throw fail('LSMT_NOT_SEALED', { file: name, problem: 'this is the index file of a writable layer' });
  }
  const trailerOffset = sizeBytes - LSMT_BLOCK;
  const lastBlock = await readBytes(source, trailerOffset, LSMT_BLOCK);
  if (!hasLsmtMagic(lastBlock) && (header.flags & LSMT_FLAG.sealed) === 0) {
    throw fail('LSMT_NOT_SEALED', {
      file: name,
      problem: 'it has no trailer: a writable layer, or one that was cut off',
    });
  }
  const trailer = parseHeader(lastBlock, `${name}: trailer`);
  const { flags, indexOffset, indexEntries } = trailer;
  if ((flags & LSMT_FLAG.header) !== 0 || (flags & LSMT_FLAG.data) === 0 || (flags & LSMT_FLAG.sealed) === 0) {
    throw fail('LSMT_HEADER', {
      file: `${name}: trailer`,
      problem: `flags 0x${flags.toString(16)} are none of a trailer`,
    });
  }
  if (indexEntries > MAX_ENTRIES) {
    throw fail('LSMT_INDEX', { file: name, problem: `${indexEntries} entries, at most ${MAX_ENTRIES} are read` });
  }
  const indexBytes = indexEntries * SEGMENT_BYTES;
  if (indexOffset < LSMT_BLOCK || indexOffset % SECTOR !== 0 || indexOffset + indexBytes > trailerOffset) {
    throw fail('LSMT_INDEX', {
      file: name,
      problem: `${indexEntries} entries at byte ${indexOffset} do not fit before the trailer at ${trailerOffset}`,
    });
  }
  memory.take(indexEntries, name);
  const reader = new EntryReader(name, trailer.virtualSize, indexOffset, indexEntries, layerNumber);
  for (let done = 0; done < indexEntries; done += ENTRIES_AT_ONCE) {
    const count = Math.min(ENTRIES_AT_ONCE, indexEntries - done);
    reader.take(await readBytes(source, indexOffset + done * SEGMENT_BYTES, count * SEGMENT_BYTES), count);
    // What is at hand is read without waiting: a long index would keep all other disks of this process waiting.
    if (done + count < indexEntries) await nextTurn();
  }
  return { name, source, header, trailer, index: reader.index.build(), paddingEntries: reader.padding };
}

/** The checks of a sorted index, entry by entry. */
class EntryReader {
  readonly index: IndexBuilder;
  padding = 0;
  private readonly name: string;
  private readonly endSector: number;
  private readonly dataEnd: number;
  private readonly layerNumber: number;
  private entry = 0;
  private last = 0;

  constructor(name: string, virtualSize: number, indexOffset: number, entries: number, layerNumber: number) {
    this.name = name;
    this.endSector = virtualSize / SECTOR;
    this.dataEnd = indexOffset / SECTOR;
    this.layerNumber = layerNumber;
    // Room for more comes with what is found good.
    this.index = new IndexBuilder(Math.min(entries, ENTRIES_AT_ONCE), entries);
  }

  take(bytes: Buffer, count: number): void {
    for (let i = 0; i < count; i++, this.entry++) {
      const at = i * SEGMENT_BYTES;
      const offset = segmentOffset(bytes, at);
      if (offset === PADDING_OFFSET) {
        this.padding++;
        continue;
      }
      const length = segmentLength(bytes, at);
      const moffset = segmentMoffset(bytes, at);
      const zeroed = segmentZeroed(bytes, at);
      if (length === 0 || length > MAX_SEGMENT_SECTORS) throw this.bad('its length is 0');
      if (offset < this.last) {
        throw this.bad(`sector ${offset} comes after an entry that ends at ${this.last}: out of order or overlapping`);
      }
      const end = offset + length;
      if (end > this.endSector)
        throw this.bad(`sectors ${offset} to ${end} are outside the device of ${this.endSector}`);
      const dataEnd = zeroed ? moffset : moffset + length;
      if (moffset < FIRST_SECTOR || dataEnd > this.dataEnd) {
        throw this.bad(
          `its data at sectors ${moffset} to ${dataEnd} of the file is outside the data (${FIRST_SECTOR} to ${this.dataEnd})`,
        );
      }
      this.index.add(offset, end, moffset, zeroed, this.layerNumber);
      this.last = end;
    }
  }

  private bad(problem: string): Error {
    return fail('LSMT_INDEX', { file: this.name, problem: `entry ${this.entry}: ${problem}` });
  }
}
