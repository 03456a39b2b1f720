/** Attributes as people and programs read them: the columns of `ls -l`, and one JSON object an entry. */
import { type ByteString, bytesOf, display } from '#base';
import { erofs } from '#converter';
import type { ImageTree } from './image-tree.ts';
import type { Kind } from './inode.ts';
import type { TreeNode } from './tree-node.ts';

const TYPE_LETTERS: Readonly<Record<Kind, string>> = {
  file: '-',
  dir: 'd',
  symlink: 'l',
  char: 'c',
  block: 'b',
  fifo: 'p',
  socket: 's',
};

/** `drwxr-xr-x` */
export function modeText(kind: Kind, mode: number): string {
  const bit = (mask: number, letter: string) => (mode & mask ? letter : '-');
  const special = (mask: number, execute: number, both: string, alone: string) =>
    mode & mask ? (mode & execute ? both : alone) : bit(execute, 'x');
  return (
    TYPE_LETTERS[kind] +
    bit(0o400, 'r') +
    bit(0o200, 'w') +
    special(0o4000, 0o100, 's', 'S') +
    bit(0o040, 'r') +
    bit(0o020, 'w') +
    special(0o2000, 0o010, 's', 'S') +
    bit(0o004, 'r') +
    bit(0o002, 'w') +
    special(0o1000, 0o001, 't', 'T')
  );
}

/** `0755`, as chmod takes it. */
export function octalMode(mode: number): string {
  return (mode & 0o7777).toString(8).padStart(4, '0');
}

const DAY = 86_400;
const TWO_DIGITS = Array.from({ length: 60 }, (_, k) => String(k).padStart(2, '0'));
/** The date of the latest day asked for: files of one image mostly share a few. */
let latestDay = Number.NaN;
let latestDate = '';

/** `2024-01-31 12:00:00`, UTC; `@seconds` outside the years that have a date. */
export function timeText(seconds: number): string {
  if (!(Math.abs(seconds) <= 8.64e12)) return `@${seconds}`;
  const day = Math.floor(seconds / DAY);
  if (day !== latestDay) {
    latestDay = day;
    latestDate = new Date(day * DAY * 1000).toISOString().slice(0, -14);
  }
  const rest = seconds - day * DAY;
  const hour = Math.floor(rest / 3600);
  const minute = Math.floor(rest / 60) % 60;
  return `${latestDate} ${TWO_DIGITS[hour]}:${TWO_DIGITS[minute]}:${TWO_DIGITS[rest % 60]}`;
}

/** `base/display`, quick for the names that need nothing. */
export function shown(name: ByteString): string {
  return /^[\x20-\x5b\x5d-\x7e]*$/.test(name) ? name : display(name);
}

/** A byte string for JSON: text, and the bytes beside it where they are no text. */
export function jsonText(key: string, value: ByteString): Record<string, string> {
  if (/^[\x20-\x7e]*$/.test(value)) return { [key]: value };
  const bytes = bytesOf(value);
  const text = bytes.toString('utf8');
  if (Buffer.from(text, 'utf8').equals(bytes)) return { [key]: text };
  return { [key]: display(value), [`${key}Base64`]: bytes.toString('base64') };
}

/** One object on one line; layers count from 1, the bottom one. Put together by hand: listings have hundreds of thousands of them. */
export function jsonEntry(tree: ImageTree, node: TreeNode, path: ByteString): string {
  const { inode, kind } = node;
  const nlink = node.parts.length > 1 ? 1 : inode.nlink;
  let more = '';
  if (kind === 'symlink') more = `,${jsonMembers('target', tree.readlink(node))}`;
  else if (kind === 'char' || kind === 'block') {
    const { major, minor } = erofs.decodeDevice(inode.union);
    more = `,"major":${major},"minor":${minor}`;
  }
  return `{${jsonMembers('path', path)},"kind":"${kind}","mode":"${octalMode(inode.mode)}","sizeBytes":${inode.sizeBytes},"nlink":${nlink},"uid":${inode.uid},"gid":${inode.gid},"mtimeSec":${inode.mtimeSec},"mtimeNsec":${inode.mtimeNsec},"ino":${inode.nid},"layer":${node.layer + 1}${more}}`;
}

function jsonMembers(key: string, value: ByteString): string {
  if (/^[\x20\x21\x23-\x5b\x5d-\x7e]*$/.test(value)) return `"${key}":"${value}"`;
  return JSON.stringify(jsonText(key, value)).slice(1, -1);
}
