/**
 * Names, link targets and xattr names are bytes to Linux. We carry them as latin1 ("binary") strings, one character a
 * byte: exact, compact, usable as Map keys. These functions are the only way in and out.
 */

/** A byte string, one UTF-16 unit (0..255) per byte. */
export type ByteString = string;

export function bytesOf(text: ByteString): Buffer {
  return Buffer.from(text, 'latin1');
}

export function byteString(bytes: Buffer, start = 0, end = bytes.length): ByteString {
  return bytes.toString('latin1', start, end);
}

/** Writes a byte string; returns its length. */
export function writeByteString(into: Buffer, text: ByteString, offset: number): number {
  return into.write(text, offset, 'latin1');
}

/** A byte string from what a user typed or a JSON file holds (UTF-8); `textOf`'s stand-ins become their bytes again. */
export function fromText(text: string): ByteString {
  if (!STAND_IN.test(text)) return Buffer.from(text, 'utf8').toString('latin1');
  return text
    .split(STAND_INS)
    .map((part) =>
      STAND_IN.test(part)
        ? String.fromCharCode(part.charCodeAt(0) & 0xff)
        : Buffer.from(part, 'utf8').toString('latin1'),
    )
    .join('');
}

// A lone surrogate: with the flag `u` half of a pair does not match. No valid UTF-8 gives one.
const STAND_IN = /[\udc80-\udcff]/u;
const STAND_INS = /([\udc80-\udcff])/u;

/**
 * Text from bytes that should be UTF-8. Each byte that is not becomes a stand-in, a lone surrogate U+DC80 to U+DCFF, so
 * that nothing is lost: `fromText` gives the same bytes. Node's own functions do not know stand-ins: see `nodePath`.
 */
export function textOf(bytes: Buffer): string {
  const whole = bytes.toString('utf8');
  if (!whole.includes('\ufffd')) return whole;
  let text = '';
  for (let at = 0; at < bytes.length; ) {
    const length = [1, 2, 3, 4].find((n) => {
      const part = bytes.subarray(at, at + n);
      return part.length === n && Buffer.from(part.toString('utf8'), 'utf8').equals(part);
    });
    text += length === undefined ? String.fromCharCode(0xdc00 | bytes[at]!) : bytes.toString('utf8', at, at + length);
    at += length ?? 1;
  }
  return text;
}

/** Whether text has stand-ins of bytes that are not UTF-8. */
export function hasStandIns(text: string): boolean {
  return STAND_IN.test(text);
}

/** A path as Node's fs takes it: text, or its bytes where text cannot say them. */
export function nodePath(text: string): string | Buffer {
  return hasStandIns(text) ? bytesOf(fromText(text)) : text;
}

/** For people: stand-ins as `\xNN`. */
export function displayText(text: string): string {
  return hasStandIns(text) ? text.replace(/[\udc80-\udcff]/gu, (c) => escapeByte(c.charCodeAt(0) & 0xff)) : text;
}

/** For people: UTF-8 where it is valid and printable, `\xNN` escapes for control characters and for bytes that are not UTF-8. */
export function display(name: ByteString): string {
  const bytes = bytesOf(name);
  const text = bytes.toString('utf8');
  if (!text.includes('�') || Buffer.from(text, 'utf8').equals(bytes)) {
    return text.replace(/[\u0000-\u001f\u007f\\]/g, (c) => (c === '\\' ? '\\\\' : escapeByte(c.charCodeAt(0))));
  }
  let out = '';
  for (const byte of bytes)
    out += byte >= 0x20 && byte < 0x7f && byte !== 0x5c ? String.fromCharCode(byte) : escapeByte(byte);
  return out;
}

function escapeByte(byte: number): string {
  return `\\x${byte.toString(16).padStart(2, '0')}`;
}

/** `1.4 GiB`: three significant digits, binary units. */
export function humanSize(sizeBytes: number): string {
  const units = ['B', 'KiB', 'MiB', 'GiB', 'TiB'];
  let value = sizeBytes;
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit++;
  }
  return `${unit === 0 ? value : value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toFixed(2)} ${units[unit]}`;
}
