/**
 * A layer as registries carry it: a tar of one file, `overlaybd.commit`, whose true size stands in a pax record before it. The payload
 * begins at byte 1536 (docs/overlaybd.md).
 */
import { type ByteSource, PartSource, readBytes } from '../byte-source.ts';
import { fail } from '../errors.ts';

const BLOCK = 512;
export const TAR_PAYLOAD_OFFSET = 3 * BLOCK;
const MAX_PAX_BYTES = 64 * 1024;
/** Headers before the payload that are read: the pax ones. */
const MAX_HEADERS = 8;

/** The payload when `source` is such a tar, else undefined. */
export async function tarPayload(source: ByteSource): Promise<PartSource | undefined> {
  if (source.sizeBytes < BLOCK || !isTarHeader(await readBytes(source, 0, BLOCK))) return undefined;
  const refuse = (problem: string) => fail('DISK_TAR', { file: source.name, problem });
  let at = 0;
  let paxSize: number | undefined;
  for (let count = 0; count < MAX_HEADERS; count++) {
    if (at + BLOCK > source.sizeBytes) throw refuse('it ends before its layer');
    const header = await readBytes(source, at, BLOCK);
    if (!isTarHeader(header)) throw refuse(`byte ${at} is no tar header`);
    const type = String.fromCharCode(header[156]!);
    const size = octal(header.toString('latin1', 124, 136));
    if (size === undefined) throw refuse(`the size in the header at byte ${at} is no number`);
    at += BLOCK;
    if (type === 'x' || type === 'g') {
      if (size > MAX_PAX_BYTES || at + size > source.sizeBytes) throw refuse(`a pax header of ${size} bytes`);
      const found = sizeRecord(await readBytes(source, at, size));
      if (found === null) throw refuse('its pax header is damaged');
      if (type === 'x') paxSize = found ?? paxSize;
      at += Math.ceil(size / BLOCK) * BLOCK;
      continue;
    }
    if (type !== '0' && type !== '\0') throw refuse(`its first member is of type ${JSON.stringify(type)}, not a file`);
    const payload = paxSize ?? size;
    if (at + payload > source.sizeBytes) {
      throw refuse(`its layer of ${payload} bytes does not fit into ${source.sizeBytes}: the file was cut off`);
    }
    return new PartSource(source, at, payload);
  }
  throw refuse('no file among its first members');
}

/** What stands before a payload of `payloadBytes`. */
export function tarFront(payloadBytes: number): Buffer {
  const record = paxRecord('size', String(payloadBytes));
  const front = Buffer.alloc(TAR_PAYLOAD_OFFSET);
  writeHeader(front, 0, 'overlaybd.pax', 'x', record.length);
  front.write(record, BLOCK, 'latin1');
  // 0, as the C++ tools write it: the pax record counts, for sizes beyond 8 GiB too.
  writeHeader(front, 2 * BLOCK, 'overlaybd.commit', '0', 0);
  return front;
}

/** What stands after it: padding and the two blocks that end a tar. */
export function tarEnd(payloadBytes: number): Buffer {
  return Buffer.alloc(((BLOCK - (payloadBytes % BLOCK)) % BLOCK) + 2 * BLOCK);
}

function writeHeader(into: Buffer, at: number, name: string, type: string, size: number): void {
  into.write(name, at, 'latin1');
  into.write('000644 \0', at + 100, 'latin1');
  into.write('000000 \0', at + 108, 'latin1');
  into.write('000000 \0', at + 116, 'latin1');
  into.write(`${size.toString(8).padStart(11, '0')} `, at + 124, 'latin1');
  into.write('00000000000 ', at + 136, 'latin1');
  into.write(type, at + 156, 'latin1');
  into.write('ustar\x0000', at + 257, 'latin1');
  into.write(
    `${headerSum(into.subarray(at, at + BLOCK))
      .toString(8)
      .padStart(6, '0')}\0 `,
    at + 148,
    'latin1',
  );
}

/** The record's own length counts, its digits included. */
function paxRecord(key: string, value: string): string {
  const rest = ` ${key}=${value}\n`;
  let length = rest.length + 1;
  while (String(length).length + rest.length !== length) length++;
  return `${length}${rest}`;
}

/** The size, undefined without a record of it, null where the records are damaged. */
function sizeRecord(bytes: Buffer): number | undefined | null {
  const text = bytes.toString('latin1');
  let found: number | undefined;
  for (let at = 0; at < text.length; ) {
    if (text[at] === '\0') break;
    const match = /^(\d{1,6}) /.exec(text.slice(at, at + 8));
    const length = match === null ? 0 : Number(match[1]);
    const record = text.slice(at, at + length);
    if (match === null || record.length !== length || !record.endsWith('\n')) return null;
    const [key, value] = splitOnce(record.slice(match[0].length, -1));
    if (key === 'size') {
      if (!/^\d{1,15}$/.test(value)) return null;
      found = Number(value);
    }
    at += length;
  }
  return found;
}

function splitOnce(text: string): [string, string] {
  const at = text.indexOf('=');
  return at === -1 ? [text, ''] : [text.slice(0, at), text.slice(at + 1)];
}

function isTarHeader(block: Buffer): boolean {
  if (block.toString('latin1', 257, 262) !== 'ustar') return false;
  const sum = octal(block.toString('latin1', 148, 156));
  return sum !== undefined && (sum === headerSum(block) || sum === signedSum(block));
}

function headerSum(block: Buffer): number {
  let sum = 0;
  for (let at = 0; at < BLOCK; at++) sum += at >= 148 && at < 156 ? 0x20 : block[at]!;
  return sum;
}

function signedSum(block: Buffer): number {
  let sum = 0;
  for (let at = 0; at < BLOCK; at++) sum += at >= 148 && at < 156 ? 0x20 : block.readInt8(at);
  return sum;
}

function octal(text: string): number | undefined {
  const digits = text.replace(/[\0 ]+/g, ' ').trim();
  return digits === '' ? 0 : /^[0-7]+$/.test(digits) ? Number.parseInt(digits, 8) : undefined;
}
