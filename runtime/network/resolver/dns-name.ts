/**
 * Names of the DNS. Here a name is text: lower-case labels of letters, digits, "-" and "_", joined by dots, without the last dot. What holds
 * any other byte has no text (undefined): nothing that a policy decides on may be written in two ways.
 */

/** Of one name on the wire, its last zero byte included. */
export const MAX_NAME_BYTES = 255;
const MAX_LABEL_BYTES = 63;
const TEXT = /^[a-z0-9_-]{1,63}(\.[a-z0-9_-]{1,63})*$/;

export interface WireName {
  /** Undefined: not for us. */
  readonly text: string | undefined;
  /** Where the message goes on. */
  readonly end: number;
}

/**
 * A name at `at`. Undefined: it is none. Compression leads backwards only, each time further back, so there is no circle.
 * @param compressed False: a pointer is an error.
 */
export function readName(message: Buffer, at: number, compressed = true): WireName | undefined {
  const labels: string[] = [];
  let end: number | undefined;
  let bytes = 1;
  let lowest = at;
  for (let cursor = at; ; ) {
    if (cursor >= message.length) return undefined;
    const length = message[cursor]!;
    if (length === 0) {
      const text = labels.join('.').toLowerCase();
      return { text: TEXT.test(text) ? text : undefined, end: end ?? cursor + 1 };
    }
    if ((length & 0xc0) === 0xc0) {
      if (!compressed || cursor + 1 >= message.length) return undefined;
      const target = ((length & 0x3f) << 8) | message[cursor + 1]!;
      if (target >= lowest) return undefined;
      end ??= cursor + 2;
      lowest = target;
      cursor = target;
      continue;
    }
    bytes += length + 1;
    if (length > MAX_LABEL_BYTES || bytes > MAX_NAME_BYTES || cursor + 1 + length > message.length) return undefined;
    const label = message.toString('latin1', cursor + 1, cursor + 1 + length);
    // A dot inside of a label is no dot between two.
    labels.push(label.includes('.') ? '\0' : label);
    cursor += 1 + length;
  }
}

/** @param name As `nameOf` gives it; its letters are kept as they are. */
export function wireName(name: string): Buffer {
  const parts = name.split('.').map((label) => Buffer.from(`${String.fromCharCode(label.length)}${label}`, 'latin1'));
  return Buffer.concat([...parts, Buffer.alloc(1)]);
}

/** Text as people write it ("Example.ORG."), or undefined when it is no name. */
export function nameOf(text: string): string | undefined {
  const name = text.toLowerCase().replace(/\.$/, '');
  return TEXT.test(name) && name.length + 2 <= MAX_NAME_BYTES ? name : undefined;
}
