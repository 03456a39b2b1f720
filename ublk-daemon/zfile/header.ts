/**
 * Header and trailer of a ZFile: 512 bytes, of which 96 are fields (docs/overlaybd.md).
 *
 * `digest` is the raw CRC-32C of all 512 bytes with the digest taken as zero. Where the header has the flag `overwritten` it holds the final
 * values; otherwise the trailer alone does.
 */
import { crc32cRaw } from '#base';
import { fail } from '../errors.ts';

export const ZFILE_BLOCK = 512;
const STRUCT_BYTES = 96;
const MAGIC = Buffer.from('5a46696c6500010074756a692e79796640416c6962616261', 'hex');
const DIGEST_AT = 28;

export const ZFILE_FLAG = { header: 1, data: 2, sealed: 4, overwritten: 8, digests: 16, packedIndex: 32 } as const;

export type ZfileAlgorithm = 'lz4' | 'zstd';
const ALGORITHMS: readonly (ZfileAlgorithm | undefined)[] = [undefined, 'lz4', 'zstd'];

export interface ZfileHeader {
  readonly flags: number;
  readonly digest: number;
  readonly indexOffset: number;
  /** Blocks. */
  readonly indexEntries: number;
  readonly originalSize: number;
  readonly indexCrc: number;
  readonly blockSize: number;
  /** As stored; `algorithmOf` gives its name or refuses. */
  readonly algorithm: number;
  readonly level: number;
  readonly useDictionary: boolean;
  readonly dictionaryBytes: number;
  /** A CRC behind each block. */
  readonly verify: boolean;
}

export function hasZfileMagic(bytes: Buffer): boolean {
  return bytes.length >= MAGIC.length && bytes.compare(MAGIC, 0, MAGIC.length, 0, MAGIC.length) === 0;
}

export function parseZfileHeader(block: Buffer, what: string): ZfileHeader {
  const refuse = (problem: string) => fail('ZFILE_HEADER', { file: what, problem });
  if (block.length < ZFILE_BLOCK) throw refuse(`${block.length} bytes, a header has ${ZFILE_BLOCK}`);
  if (!hasZfileMagic(block)) throw refuse('the magic is missing');
  const size = block.readUInt32LE(24);
  if (size !== STRUCT_BYTES) throw refuse(`its size field is ${size}, expected ${STRUCT_BYTES}`);
  const flags = readSafe(block, 32, 'flags', refuse);
  const digest = block.readUInt32LE(DIGEST_AT);
  if ((flags & ZFILE_FLAG.digests) !== 0) {
    const actual = headerDigest(block);
    if (actual !== digest)
      throw fail('ZFILE_CHECKSUM', { file: what, what: 'digest', actual: hex(actual), expected: hex(digest) });
  }
  return {
    flags,
    digest,
    indexOffset: readSafe(block, 40, 'the index offset', refuse),
    indexEntries: readSafe(block, 48, 'the index size', refuse),
    originalSize: readSafe(block, 56, 'the original size', refuse),
    indexCrc: block.readUInt32LE(64),
    blockSize: block.readUInt32LE(72),
    algorithm: block[76]!,
    level: block[77]!,
    useDictionary: block[78] !== 0,
    dictionaryBytes: block.readUInt32LE(84),
    verify: block[88] !== 0,
  };
}

export function algorithmOf(header: ZfileHeader, file: string): ZfileAlgorithm {
  const name = ALGORITHMS[header.algorithm];
  if (name === undefined) {
    const problem =
      header.algorithm === 0 ? 'compressed with minilzo' : `compression algorithm ${header.algorithm} is not known`;
    throw fail('ZFILE_UNSUPPORTED', { file, problem });
  }
  return name;
}

export function encodeZfileHeader(fields: Omit<ZfileHeader, 'digest'>): Buffer {
  const block = Buffer.alloc(ZFILE_BLOCK);
  MAGIC.copy(block, 0);
  block.writeUInt32LE(STRUCT_BYTES, 24);
  block.writeBigUInt64LE(BigInt(fields.flags), 32);
  block.writeBigUInt64LE(BigInt(fields.indexOffset), 40);
  block.writeBigUInt64LE(BigInt(fields.indexEntries), 48);
  block.writeBigUInt64LE(BigInt(fields.originalSize), 56);
  block.writeUInt32LE(fields.indexCrc, 64);
  block.writeUInt32LE(fields.blockSize, 72);
  block[76] = fields.algorithm;
  block[77] = fields.level;
  block[78] = fields.useDictionary ? 1 : 0;
  block.writeUInt32LE(fields.dictionaryBytes, 84);
  block[88] = fields.verify ? 1 : 0;
  block.writeUInt32LE(headerDigest(block), DIGEST_AT);
  return block;
}

export function algorithmNumber(name: ZfileAlgorithm): number {
  return ALGORITHMS.indexOf(name);
}

const ZERO_DIGEST = new Uint8Array(4);

function headerDigest(block: Buffer): number {
  const before = crc32cRaw(0, block, 0, DIGEST_AT);
  return crc32cRaw(crc32cRaw(before, ZERO_DIGEST), block, DIGEST_AT + 4, ZFILE_BLOCK);
}

export function hex(value: number): string {
  return `0x${value.toString(16).padStart(8, '0')}`;
}

function readSafe(block: Buffer, at: number, name: string, refuse: (problem: string) => Error): number {
  const value = block.readBigUInt64LE(at);
  if (value > BigInt(Number.MAX_SAFE_INTEGER)) throw refuse(`${name} ${value} is out of range`);
  return Number(value);
}
