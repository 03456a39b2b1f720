/**
 * Extended attributes of an image. One that more than two inodes carry is stored once in a shared area and referred to by
 * number; the others lie inline after their inode. The name filter in front lets the kernel answer "no such attribute"
 * (asked for security.capability at every exec) without reading them.
 */
import { type ByteString, byteString, writeByteString } from '#base';
import { XATTR_ENTRY_SIZE, XATTR_FILTER_BITS, XATTR_FILTER_SEED, XATTR_HEADER_SIZE, XATTR_PREFIX } from './layout.ts';
import { xxh32 } from './xxh32.ts';

type Xattrs = ReadonlyMap<ByteString, Buffer>;

const SHARED_FROM_USES = 3;
const MAX_SHARED_PER_INODE = 255;
const MAX_VALUE_BYTES = 65535;
const MAX_NAME_BYTES = 255;
/** Longer names first: `system.posix_acl_access` is a whole name, not a prefix. */
const PREFIXES = Object.entries(XATTR_PREFIX).map(([index, prefix]) => ({ index: Number(index), prefix }));

interface Split {
  readonly index: number;
  readonly rest: ByteString;
}

/** Index and remainder of a name, or undefined when EROFS has no way to write it. */
export function splitXattrName(name: ByteString): Split | undefined {
  for (const { index, prefix } of PREFIXES) {
    if (prefix.endsWith('.') ? name.startsWith(prefix) && name.length > prefix.length : name === prefix) {
      const rest = name.slice(prefix.length);
      return rest.length <= MAX_NAME_BYTES ? { index, rest } : undefined;
    }
  }
  return undefined;
}

/** Whether an attribute can be stored at all. */
export function canStoreXattr(name: ByteString, value: Buffer): boolean {
  return splitXattrName(name) !== undefined && value.length <= MAX_VALUE_BYTES;
}

function encodeEntry(name: ByteString, value: Buffer): Buffer {
  const { index, rest } = splitXattrName(name)!;
  const out = Buffer.alloc(align4(XATTR_ENTRY_SIZE + rest.length + value.length));
  out[0] = rest.length;
  out[1] = index;
  out.writeUInt16LE(value.length, 2);
  writeByteString(out, rest, XATTR_ENTRY_SIZE);
  value.copy(out, XATTR_ENTRY_SIZE + rest.length);
  return out;
}

const align4 = (n: number) => (n + 3) & ~3;

function keyOf(name: ByteString, value: Buffer): string {
  return `${name}\0${byteString(value)}`;
}

export class XattrTable {
  readonly #uses = new Map<string, { uses: number; entry: Buffer; id: number }>();
  readonly #bodies = new Map<string, Buffer>();
  #shared = Buffer.alloc(0);

  /** First pass: every inode's attributes, in the order of the inodes. */
  count(xattrs: Xattrs): void {
    for (const [name, value] of xattrs) {
      const key = keyOf(name, value);
      const known = this.#uses.get(key);
      if (known) known.uses++;
      else this.#uses.set(key, { uses: 1, entry: encodeEntry(name, value), id: -1 });
    }
  }

  /** Between the passes: numbers the shared ones. Returns the shared area; its ids count 4-byte units from `baseBytes`. */
  share(baseBytes: number): Buffer {
    const parts: Buffer[] = [];
    let at = baseBytes;
    for (const [, use] of [...this.#uses]
      .filter(([, u]) => u.uses >= SHARED_FROM_USES)
      .sort((a, b) => (a[0] < b[0] ? -1 : 1))) {
      use.id = at / 4;
      parts.push(use.entry);
      at += use.entry.length;
    }
    this.#shared = Buffer.concat(parts);
    return this.#shared;
  }

  /** Bytes that `share` will return. */
  sharedBytes(): number {
    let sum = 0;
    for (const use of this.#uses.values()) if (use.uses >= SHARED_FROM_USES) sum += use.entry.length;
    return sum;
  }

  /** Size of an inode's attribute area, the same before and after `share`. */
  bodyBytes(xattrs: Xattrs | undefined): number {
    if (xattrs === undefined || xattrs.size === 0) return 0;
    let size = XATTR_HEADER_SIZE;
    let shared = 0;
    for (const [name, value] of xattrs) {
      const use = this.#uses.get(keyOf(name, value))!;
      if (use.uses >= SHARED_FROM_USES && shared < MAX_SHARED_PER_INODE) {
        shared++;
        size += 4;
      } else {
        size += use.entry.length;
      }
    }
    return size;
  }

  /** An inode's attribute area. Equal sets share the buffer. */
  body(xattrs: Xattrs): Buffer {
    const names = [...xattrs]
      .map(([name, value]) => ({ name, key: keyOf(name, value) }))
      .sort((a, b) => (a.key < b.key ? -1 : 1));
    const all = names.map((n) => n.key).join('\0\0');
    const known = this.#bodies.get(all);
    if (known) return known;
    const ids: number[] = [];
    const inline: Buffer[] = [];
    let filter = 0;
    for (const { name, key } of names) {
      const { index, rest } = splitXattrName(name)!;
      filter |= 1 << (xxh32(rest, XATTR_FILTER_SEED + index) & (XATTR_FILTER_BITS - 1));
      const use = this.#uses.get(key)!;
      if (use.id >= 0 && ids.length < MAX_SHARED_PER_INODE) ids.push(use.id);
      else inline.push(use.entry);
    }
    const head = Buffer.alloc(XATTR_HEADER_SIZE + 4 * ids.length);
    head.writeUInt32LE(~filter >>> 0, 0);
    head[4] = ids.length;
    for (const [i, id] of ids.entries()) head.writeUInt32LE(id, XATTR_HEADER_SIZE + 4 * i);
    const body = Buffer.concat([head, ...inline]);
    // Sets without anything shared are mostly unique; remembering them all would only cost memory.
    if (inline.length === 0) this.#bodies.set(all, body);
    return body;
  }
}
