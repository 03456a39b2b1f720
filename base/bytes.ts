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

/** A byte string from what a user typed or a JSON file holds (UTF-8). */
export function fromText(text: string): ByteString {
  return Buffer.from(text, 'utf8').toString('latin1');
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
