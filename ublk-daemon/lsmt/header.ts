/**
 * Header and trailer of an LSMT file: one block of 4096 bytes, the same fields in both (docs/overlaybd.md).
 *
 * A header opens every file; a sealed file ends with a trailer, which is the one that counts. There is no checksum in them:
 * `parseHeader` checks magic, size and version, and every number against what the file can hold is checked by whoever reads on.
 */
import { fail } from '../errors.ts';

export const LSMT_BLOCK = 4096;
export const SECTOR = 512;
/** Of the fields; the rest of the block is zeros. */
const STRUCT_BYTES = 390;
const MAGIC = Buffer.from('4c534d5400010200657e63d29444084ca2d2c8ec4fcfae8a', 'hex');
const UUID_BYTES = 37;
const TAG_BYTES = 256;

export const LSMT_FLAG = { header: 1, data: 2, sealed: 4, gc: 8, sparse: 16 } as const;
const KNOWN_FLAGS = 31;
export const NULL_UUID = '00000000-0000-0000-0000-000000000000';

export interface LsmtHeader {
  readonly flags: number;
  /** Byte offset of the index. */
  readonly indexOffset: number;
  /** Entries, padding ones included where the writer counted them. */
  readonly indexEntries: number;
  /** Bytes of the device. */
  readonly virtualSize: number;
  /** Upper case, as all writers have it; `NULL_UUID` where there is none. */
  readonly uuid: string;
  readonly parentUuid: string;
  readonly version: number;
  readonly subVersion: number;
  readonly userTag: string;
}

export function hasLsmtMagic(bytes: Buffer): boolean {
  return bytes.length >= MAGIC.length && bytes.compare(MAGIC, 0, MAGIC.length, 0, MAGIC.length) === 0;
}

/** @param what names the file and the part, for messages. */
export function parseHeader(block: Buffer, what: string): LsmtHeader {
  const refuse = (problem: string) => fail('LSMT_HEADER', { file: what, problem });
  if (block.length < LSMT_BLOCK) throw refuse(`${block.length} bytes, a header has ${LSMT_BLOCK}`);
  if (!hasLsmtMagic(block)) throw refuse('the magic is missing');
  const size = block.readUInt32LE(24);
  if (size !== STRUCT_BYTES) throw refuse(`its size field is ${size}, expected ${STRUCT_BYTES}`);
  const flags = block.readUInt32LE(28);
  const version = block[132]!;
  if (version !== 1) throw refuse(`version ${version} is not known`);
  if ((flags & ~KNOWN_FLAGS) !== 0) {
    throw refuse(`flags 0x${flags.toString(16)} have bits that are not known`);
  }
  const header = {
    flags,
    indexOffset: readSafe(block, 32, 'the index offset', refuse),
    indexEntries: readSafe(block, 40, 'the index size', refuse),
    virtualSize: readSafe(block, 48, 'the virtual size', refuse),
    uuid: readText(block, 56, UUID_BYTES).toUpperCase(),
    parentUuid: readText(block, 93, UUID_BYTES).toUpperCase(),
    version,
    subVersion: block[133]!,
    userTag: readText(block, 134, TAG_BYTES),
  };
  // Unaligned sizes would make reads of half sectors; none of the tools writes one.
  if (header.virtualSize % SECTOR !== 0) throw refuse(`virtual size ${header.virtualSize} is no multiple of ${SECTOR}`);
  return {
    ...header,
    uuid: header.uuid === '' ? NULL_UUID : header.uuid,
    parentUuid: header.parentUuid === '' ? NULL_UUID : header.parentUuid,
  };
}

export type HeaderFields = Pick<LsmtHeader, 'flags' | 'virtualSize'> &
  Partial<Pick<LsmtHeader, 'indexOffset' | 'indexEntries' | 'uuid' | 'parentUuid' | 'userTag'>>;

export function encodeHeader(fields: HeaderFields): Buffer {
  const block = Buffer.alloc(LSMT_BLOCK);
  MAGIC.copy(block, 0);
  block.writeUInt32LE(STRUCT_BYTES, 24);
  block.writeUInt32LE(fields.flags, 28);
  block.writeBigUInt64LE(BigInt(fields.indexOffset ?? 0), 32);
  block.writeBigUInt64LE(BigInt(fields.indexEntries ?? 0), 40);
  block.writeBigUInt64LE(BigInt(fields.virtualSize), 48);
  block.write(checkedUuid(fields.uuid ?? NULL_UUID), 56, 'latin1');
  block.write(checkedUuid(fields.parentUuid ?? NULL_UUID), 93, 'latin1');
  block[132] = 1;
  block[133] = 1;
  const tag = Buffer.from(fields.userTag ?? '', 'utf8');
  if (tag.length >= TAG_BYTES)
    throw fail('LSMT_OPTION', { what: 'user tag', problem: `longer than ${TAG_BYTES - 1} bytes` });
  tag.copy(block, 134);
  return block;
}

const UUID = /^[0-9A-F]{8}-[0-9A-F]{4}-[0-9A-F]{4}-[0-9A-F]{4}-[0-9A-F]{12}$/;

/** In upper case. */
export function checkedUuid(text: string): string {
  const upper = text.toUpperCase();
  if (!UUID.test(upper))
    throw fail('LSMT_OPTION', { what: `uuid ${text}`, problem: 'not of the form 8-4-4-4-12 hex digits' });
  return upper;
}

function readSafe(block: Buffer, at: number, name: string, refuse: (problem: string) => Error): number {
  const value = block.readBigUInt64LE(at);
  if (value > BigInt(Number.MAX_SAFE_INTEGER)) throw refuse(`${name} ${value} is out of range`);
  return Number(value);
}

function readText(block: Buffer, at: number, length: number): string {
  const end = block.indexOf(0, at);
  return block.toString('utf8', at, end === -1 || end > at + length ? at + length : end);
}
