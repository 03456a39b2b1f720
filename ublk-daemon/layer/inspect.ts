/** What `dsec disk dump` prints of a file and what `dsec disk verify` checks: any OverlayBD file, sealed or not. */
import { type ByteSource, FileSource, readBytes } from '../byte-source.ts';
import { fail } from '../errors.ts';
import { hasLsmtMagic, LSMT_BLOCK, LSMT_FLAG, type LsmtHeader, parseHeader, SECTOR } from '../lsmt/header.ts';
import { readSealedLayer } from '../lsmt/sealed-layer.ts';
import { decodeSegment, PADDING_OFFSET, SEGMENT_BYTES, type Segment } from '../lsmt/segment.ts';
import type { ZfileHeader } from '../zfile/header.ts';
import type { ZfileSource } from '../zfile/zfile-source.ts';
import { unwrap } from './layer-file.ts';

export type LsmtKind = 'sealed' | 'writable data' | 'writable index' | 'writable sparse';

export interface LayerDump {
  readonly file: string;
  readonly sizeBytes: number;
  readonly tar: boolean;
  readonly zfile?: ZfileDump;
  readonly lsmt?: LsmtDump;
}

export interface ZfileDump {
  readonly header: ZfileHeader;
  readonly trailer: ZfileHeader;
  readonly originalSize: number;
  readonly blocks: number;
  readonly storedBytes: number;
}

export interface LsmtDump {
  readonly kind: LsmtKind;
  readonly header: LsmtHeader;
  readonly trailer?: LsmtHeader;
  readonly entries: number;
  readonly paddingEntries: number;
  readonly dataBytes: number;
  readonly zeroedBytes: number;
  /** As stored, in 512-byte sectors, padding left out. */
  readonly segments: readonly Segment[];
}

export async function dumpLayer(path: string, { maxSegments = Number.POSITIVE_INFINITY } = {}): Promise<LayerDump> {
  const source = await FileSource.open(path);
  try {
    const { source: inner, isTar, zfile } = await unwrap(source);
    const isLsmt = inner.sizeBytes >= LSMT_BLOCK && hasLsmtMagic(await readBytes(inner, 0, 24));
    // A ZFile of anything else is legal; a bare file of anything else is not ours.
    if (!isLsmt && zfile === undefined) throw fail('DISK_NOT_A_LAYER', { file: path });
    return {
      file: path,
      sizeBytes: source.sizeBytes,
      tar: isTar,
      zfile: zfile === undefined ? undefined : dumpZfile(zfile),
      lsmt: isLsmt ? await dumpLsmt(inner, maxSegments) : undefined,
    };
  } finally {
    await source.close();
  }
}

export interface LayerVerdict {
  readonly file: string;
  readonly tar: boolean;
  readonly zfile: boolean;
  readonly kind: LsmtKind | undefined;
  /** ZFile blocks whose checksum was right. */
  readonly blocks: number;
  readonly segments: number;
  /** Whether each byte has been held against a checksum: LSMT alone has none. */
  readonly checksummed: boolean;
}

/** @throws what is wrong, first */
export async function verifyLayer(path: string): Promise<LayerVerdict> {
  const source = await FileSource.open(path);
  try {
    const { source: inner, isTar, zfile } = await unwrap(source);
    await zfile?.verifyBlocks();
    const isLsmt = inner.sizeBytes >= LSMT_BLOCK && hasLsmtMagic(await readBytes(inner, 0, 24));
    if (!isLsmt && zfile === undefined) throw fail('DISK_NOT_A_LAYER', { file: path });
    const lsmt = isLsmt ? await dumpLsmt(inner, 0) : undefined;
    return {
      file: path,
      tar: isTar,
      zfile: zfile !== undefined,
      kind: lsmt?.kind,
      blocks: zfile?.blockCount ?? 0,
      segments: lsmt === undefined ? 0 : lsmt.entries - lsmt.paddingEntries,
      checksummed: zfile?.facts.verify ?? false,
    };
  } finally {
    await source.close();
  }
}

function dumpZfile(zfile: ZfileSource): ZfileDump {
  const { header, trailer, sizeBytes, blockCount } = zfile;
  let storedBytes = 0;
  for (let at = 0; at < blockCount; at++) storedBytes += zfile.storedBytes(at);
  return { header, trailer, originalSize: sizeBytes, blocks: blockCount, storedBytes };
}

async function dumpLsmt(source: ByteSource, maxSegments: number): Promise<LsmtDump> {
  const header = parseHeader(await readBytes(source, 0, LSMT_BLOCK), `${source.name}: header`);
  const kind = await kindOf(source, header);
  if (kind === 'sealed') {
    const { trailer, index, paddingEntries } = await readSealedLayer(source);
    let dataSectors = 0;
    let zeroedSectors = 0;
    for (let at = 0; at < index.count; at++) {
      const sectors = index.end(at) - index.start(at);
      if (index.isZeroed(at)) zeroedSectors += sectors;
      else dataSectors += sectors;
    }
    return {
      kind,
      header,
      trailer,
      entries: index.count + paddingEntries,
      paddingEntries,
      dataBytes: dataSectors * SECTOR,
      zeroedBytes: zeroedSectors * SECTOR,
      segments: await segmentsOf(source, trailer.indexOffset, trailer.indexEntries, maxSegments),
    };
  }
  const entries = kind === 'writable index' ? Math.floor((source.sizeBytes - LSMT_BLOCK) / SEGMENT_BYTES) : 0;
  const segments = await segmentsOf(source, LSMT_BLOCK, entries, Number.POSITIVE_INFINITY);
  return {
    kind,
    header,
    entries,
    paddingEntries: entries - segments.length,
    dataBytes: sumBytes(segments, false),
    zeroedBytes: sumBytes(segments, true),
    segments: segments.slice(0, maxSegments),
  };
}

async function kindOf(source: ByteSource, header: LsmtHeader): Promise<LsmtKind> {
  if ((header.flags & LSMT_FLAG.data) === 0) return 'writable index';
  if ((header.flags & LSMT_FLAG.sealed) !== 0) return 'sealed';
  const writable = (header.flags & LSMT_FLAG.sparse) !== 0 ? 'writable sparse' : 'writable data';
  // Sealing in place leaves the header as it was: the trailer tells.
  if (source.sizeBytes < 2 * LSMT_BLOCK) return writable;
  const last = await readBytes(source, source.sizeBytes - LSMT_BLOCK, LSMT_BLOCK);
  return hasLsmtMagic(last) ? 'sealed' : writable;
}

async function segmentsOf(source: ByteSource, offset: number, entries: number, most: number): Promise<Segment[]> {
  const segments: Segment[] = [];
  const AT_ONCE = 4096;
  for (let done = 0; done < entries && segments.length < most; done += AT_ONCE) {
    const count = Math.min(AT_ONCE, entries - done);
    const bytes = await readBytes(source, offset + done * SEGMENT_BYTES, count * SEGMENT_BYTES);
    for (let at = 0; at < count && segments.length < most; at++) {
      const segment = decodeSegment(bytes, at * SEGMENT_BYTES);
      if (segment.offset !== PADDING_OFFSET) segments.push(segment);
    }
  }
  return segments;
}

function sumBytes(segments: readonly Segment[], zeroed: boolean): number {
  return segments.reduce((sum, segment) => sum + (segment.zeroed === zeroed ? segment.length * SECTOR : 0), 0);
}
