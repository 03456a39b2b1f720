/**
 * What the index file of a writable layer says, and where its good part ends.
 *
 * The end of the file may be torn: a process or machine died while a batch was written, and nobody was told that it is safe. Such an end is
 * cut. What lies before the seal of a batch (entry-log.ts) was safe once: if that does not read, the layer is damaged, and nothing is
 * cut silently. Index files of the C++ tools have no seals: there the first entry that cannot be is where the good part ends.
 */
import { fail } from '../errors.ts';
import { LSMT_BLOCK, SECTOR } from '../lsmt/header.ts';
import type { LiveIndex } from '../lsmt/live-index.ts';
import {
  PADDING_OFFSET,
  SEGMENT_BYTES,
  segmentLength,
  segmentMoffset,
  segmentOffset,
  segmentZeroed,
} from '../lsmt/segment.ts';
import { checkSeal, type EntryLog } from './entry-log.ts';

const FIRST_SECTOR = LSMT_BLOCK / SECTOR;

export interface Replayed {
  /** Entries that took effect. */
  readonly entries: number;
  /** Bytes of `bytes` that are good. */
  readonly goodBytes: number;
  /** Sectors of the data file that they need. */
  readonly dataSectors: number;
}

/** @param bytes the index file behind its header @param into gets what took effect, too */
export function replay(
  bytes: Buffer,
  index: LiveIndex,
  facts: { readonly file: string; readonly deviceSectors: number; readonly fileSectors: number },
  into?: EntryLog,
): Replayed {
  const whole = bytes.length - (bytes.length % SEGMENT_BYTES);
  const goodBytes = findEnd(bytes, whole, facts);
  let entries = 0;
  let dataSectors = FIRST_SECTOR;
  for (let at = 0; at < goodBytes; at += SEGMENT_BYTES) {
    const start = segmentOffset(bytes, at);
    if (start === PADDING_OFFSET) continue;
    const sectors = segmentLength(bytes, at);
    const moffset = segmentMoffset(bytes, at);
    const zeroed = segmentZeroed(bytes, at);
    index.write(start, start + sectors, zeroed ? undefined : moffset);
    into?.add(start, start + sectors, moffset, zeroed);
    // Of zeros too: the C++ tools refuse an entry whose place is past the end.
    dataSectors = Math.max(dataSectors, zeroed ? moffset : moffset + sectors);
    entries++;
  }
  return { entries, goodBytes, dataSectors };
}

function findEnd(bytes: Buffer, whole: number, facts: Parameters<typeof replay>[2]): number {
  let batchStart = 0;
  /** Behind the last seal that is right. */
  let sealedEnd = 0;
  let bad: { at: number; problem: string } | undefined;
  let end = whole;
  for (let at = 0; at < whole; at += SEGMENT_BYTES) {
    if (segmentOffset(bytes, at) !== PADDING_OFFSET) {
      if (bad !== undefined) continue;
      const problem = problemOf(bytes, at, facts);
      if (problem === undefined) continue;
      bad = { at, problem };
      end = at;
      continue;
    }
    const seal = checkSeal(bytes, at, batchStart);
    if (seal === 'right') {
      if (bad !== undefined) {
        const entry = bad.at / SEGMENT_BYTES;
        throw fail('DISK_INDEX_DAMAGED', { file: facts.file, entry, problem: bad.problem });
      }
      sealedEnd = at + SEGMENT_BYTES;
    } else if (seal === 'wrong' && bad === undefined) {
      bad = { at: batchStart, problem: 'the entries from here on do not have the checksum of their batch' };
      end = sealedEnd;
    }
    batchStart = at + SEGMENT_BYTES;
  }
  return end;
}

function problemOf(bytes: Buffer, at: number, facts: Parameters<typeof replay>[2]): string | undefined {
  const start = segmentOffset(bytes, at);
  const sectors = segmentLength(bytes, at);
  const moffset = segmentMoffset(bytes, at);
  const dataEnd = segmentZeroed(bytes, at) ? moffset : moffset + sectors;
  if (sectors === 0) return 'it is empty';
  if (start + sectors > facts.deviceSectors) return `sectors ${start} to ${start + sectors} are outside the device`;
  if (moffset < FIRST_SECTOR) return 'its data would be in the header';
  if (dataEnd > facts.fileSectors) return `its data at sectors ${moffset} to ${dataEnd} is not in the data file`;
  return undefined;
}
