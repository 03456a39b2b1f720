/**
 * `dsec export`: the merged tree as one tar. Parents come before what they hold, siblings by name, a further name of a file
 * as a hard link to its first: the same image gives the same bytes. Tars cannot hold sockets: those are left out with a note.
 */
import { type ByteString, display } from '#base';
import { type Entry, tarHeader } from '#converter';
import type { ImageTree, WalkItem } from './image-tree.ts';

const PIECE_BYTES = 256 * 1024;
const RECORD = 512;

/** @param note gets a sentence for each thing left out */
export async function* exportTar(tree: ImageTree, note: (text: string) => void = () => {}): AsyncGenerator<Buffer> {
  let pieces: Buffer[] = [];
  let held = 0;
  const hold = (bytes: Buffer): boolean => {
    pieces.push(bytes);
    held += bytes.length;
    return held >= PIECE_BYTES;
  };
  const flush = (): Buffer => {
    const out = pieces.length === 1 ? pieces[0]! : Buffer.concat(pieces);
    pieces = [];
    held = 0;
    return out;
  };
  for (const item of tree.walk()) {
    const entry = entryOf(tree, item);
    if (entry.kind === 'socket') {
      note(`${display(item.path)}: left out, a tar cannot hold a socket`);
      continue;
    }
    if (hold(tarHeader(entry))) yield flush();
    if (entry.kind !== 'file' || entry.sizeBytes === 0) continue;
    for await (const bytes of tree.stream(item.node)) if (hold(bytes)) yield flush();
    const rest = entry.sizeBytes % RECORD;
    if (rest !== 0) hold(Buffer.alloc(RECORD - rest));
  }
  hold(Buffer.alloc(2 * RECORD));
  yield flush();
}

/** A node as a member of a tar: names relative, `.` for the root. */
function entryOf(tree: ImageTree, { path, node, linkTo }: WalkItem): Entry {
  const stat = tree.stat(node);
  const isLink = linkTo !== undefined;
  let target: ByteString = '';
  if (isLink) target = relative(linkTo);
  else if (stat.kind === 'symlink') target = tree.readlink(node);
  return {
    path: relative(path),
    kind: isLink && stat.kind !== 'socket' ? 'hardlink' : stat.kind,
    mode: stat.mode & 0o7777,
    uid: stat.uid,
    gid: stat.gid,
    mtimeSec: stat.mtimeSec,
    mtimeNsec: stat.mtimeNsec,
    sizeBytes: stat.kind === 'file' && !isLink ? stat.sizeBytes : 0,
    target,
    major: stat.major,
    minor: stat.minor,
    xattrs: isLink ? undefined : tree.xattrs(node),
  };
}

function relative(path: ByteString): ByteString {
  return path === '/' ? '.' : path.slice(1);
}
