/**
 * Makes a sealed layer of a data file by what is put at its end: the sorted index and a trailer, as `close_seal` of the C++ tools does. The
 * header stays as it was. Takes time by the number of segments, not by the bytes they have.
 */
import type { FileHandle } from 'node:fs/promises';
import { writeAll } from '../layer/byte-sink.ts';
import { encodeHeader, LSMT_FLAG, SECTOR } from '../lsmt/header.ts';
import { SEGMENT_BYTES } from '../lsmt/segment.ts';
import type { SegmentIndex } from '../lsmt/segment-index.ts';
import { EntryLog } from './entry-log.ts';

const ENTRIES_AT_ONCE = 64 * 1024;

/** On the disk when it is done. @param end of the data, a multiple of 512 */
export async function appendSeal(
  file: FileHandle,
  end: number,
  index: SegmentIndex,
  identity: { virtualSize: number; uuid: string; parentUuid: string; flags?: number },
): Promise<void> {
  let position = end;
  let log = new EntryLog();
  let indexEntries = 0;
  for (let at = 0; at < index.count; at++) {
    log.add(index.start(at), index.end(at), index.moffset(at), index.isZeroed(at));
    if (log.count < ENTRIES_AT_ONCE && at + 1 < index.count) continue;
    await writeAll(file, log.plain(), position);
    position += log.count * SEGMENT_BYTES;
    indexEntries += log.count;
    log = new EntryLog();
  }
  const { virtualSize, uuid, parentUuid } = identity;
  const flags = LSMT_FLAG.data | LSMT_FLAG.sealed | (identity.flags ?? 0);
  const trailer = encodeHeader({ virtualSize, uuid, parentUuid, flags, indexOffset: end, indexEntries });
  await writeAll(file, trailer, Math.ceil(position / SECTOR) * SECTOR);
  await file.sync();
}
