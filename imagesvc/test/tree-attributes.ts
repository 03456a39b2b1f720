/**
 * Everything that a tree on disk says about its files, as one line a file, so that two trees are compared by comparing
 * lines: type, mode, owner, time to the nanosecond, size, content, attributes, link target, device numbers, and which
 * names are hard links of one another.
 */
import { createHash } from 'node:crypto';
import { closeSync, lstatSync, openSync, readdirSync, readlinkSync, readSync } from 'node:fs';
import { type ByteString, bytesOf, display, fromText } from '#base';
import { lxattrs } from '#linux';

const PIECE = Buffer.allocUnsafe(1 << 20);

/** Path from the root -> what it is. The root itself is `/`. */
export function attributesOf(root: string): Map<string, string> {
  const found = new Map<string, string>();
  const groups = new Map<string, string[]>();
  const contents = new Map<string, string>();
  const visit = (path: ByteString, inner: ByteString) => {
    const stat = lstatSync(bytesOf(path), { bigint: true });
    const fields = [kindOf(stat), (stat.mode & 0o7777n).toString(8), `${stat.uid}:${stat.gid}`, `${stat.mtimeNs}`];
    const shown = display(inner);
    if (stat.isSymbolicLink()) fields.push(`-> ${display(readlinkSync(bytesOf(path), { encoding: 'latin1' }))}`);
    if (stat.isCharacterDevice() || stat.isBlockDevice()) fields.push(`device ${stat.rdev}`);
    if (stat.isFile()) {
      const inode = `${stat.dev}:${stat.ino}`;
      const content = contents.get(inode) ?? digest(path);
      contents.set(inode, content);
      fields.push(`${stat.size}`, content);
    }
    for (const [name, value] of lxattrs(bytesOf(path))) fields.push(`${display(name)}=${value.toString('hex')}`);
    if (!stat.isDirectory() && stat.nlink > 1n) {
      const inode = `${stat.dev}:${stat.ino}`;
      groups.set(inode, [...(groups.get(inode) ?? []), shown]);
    }
    found.set(shown, fields.join(' '));
    if (!stat.isDirectory()) return;
    const names = readdirSync(bytesOf(path), { encoding: 'latin1' }).sort();
    for (const name of names) visit(`${path}/${name}`, inner === '/' ? `/${name}` : `${inner}/${name}`);
  };
  visit(fromText(root), '/');
  for (const names of groups.values()) {
    for (const name of names) found.set(name, `${found.get(name)} links ${names.join(' ')}`);
  }
  return found;
}

/** Lines for what differs, none when nothing does; at most so many. */
export function differences(expected: Map<string, string>, actual: Map<string, string>, most = 20): string[] {
  const lines: string[] = [];
  for (const [path, line] of expected) {
    const other = actual.get(path);
    if (other === line) continue;
    lines.push(other === undefined ? `${path}: missing` : `${path}: expected ${line}, is ${other}`);
  }
  for (const path of actual.keys()) if (!expected.has(path)) lines.push(`${path}: should not be there`);
  return lines.length > most ? [...lines.slice(0, most), `and ${lines.length - most} more`] : lines;
}

type Stat = ReturnType<typeof lstatSync> & object;

function kindOf(stat: { [K in keyof Stat as Stat[K] extends () => boolean ? K : never]: () => boolean }): string {
  if (stat.isFile()) return 'file';
  if (stat.isDirectory()) return 'dir';
  if (stat.isSymbolicLink()) return 'symlink';
  if (stat.isCharacterDevice()) return 'char';
  if (stat.isBlockDevice()) return 'block';
  if (stat.isFIFO()) return 'fifo';
  return 'socket';
}

function digest(path: ByteString): string {
  const hash = createHash('sha256');
  const fd = openSync(bytesOf(path), 'r');
  try {
    for (;;) {
      const n = readSync(fd, PIECE);
      if (n === 0) break;
      hash.update(PIECE.subarray(0, n));
    }
  } finally {
    closeSync(fd);
  }
  return hash.digest('hex').slice(0, 32);
}
