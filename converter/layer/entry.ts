/**
 * One member of a layer, whatever it was read from: a tar, a folder, an OverlayFS upper.
 *
 * Paths, targets and xattr names are byte strings (see base/bytes.ts). `path` is as the source had it: it may be
 * absolute, hold `.`, `..` and doubled slashes; the tree resolves it inside the root.
 */
import type { ByteString } from '#base';

export type EntryKind =
  | 'file'
  | 'dir'
  | 'symlink'
  | 'hardlink'
  | 'char'
  | 'block'
  | 'fifo'
  | 'socket'
  /** `path` is removed from the layers below (only from sources that are not tars: there `.wh.` names mean it). */
  | 'whiteout'
  /** The directory `path` hides what the layers below have in it. */
  | 'opaque';

export interface Entry {
  path: ByteString;
  kind: EntryKind;
  /** Permission bits with setuid, setgid and sticky: 0..0o7777. */
  mode: number;
  uid: number;
  gid: number;
  /** Whole seconds since 1970, floored: negative before it. */
  mtimeSec: number;
  /** 0..999_999_999, added to `mtimeSec`. */
  mtimeNsec: number;
  /** Of a file: its full size in bytes, holes included. 0 for everything else. */
  sizeBytes: number;
  /** Of a symlink or hardlink. */
  target: ByteString;
  /** Of a char or block device. */
  major: number;
  minor: number;
  xattrs: Map<ByteString, Buffer> | undefined;
}

/** An entry with nothing but a path and a kind. */
export function bareEntry(path: ByteString, kind: EntryKind): Entry {
  return {
    path,
    kind,
    mode: 0,
    uid: 0,
    gid: 0,
    mtimeSec: 0,
    mtimeNsec: 0,
    sizeBytes: 0,
    target: '',
    major: 0,
    minor: 0,
    xattrs: undefined,
  };
}

/**
 * Receives a layer in order. After `entry` of a file of size > 0 come `data` and `hole` calls that add up to
 * `sizeBytes`, then `fileEnd`. `data` buffers are only valid during the call.
 */
export interface EntryHandler {
  entry(entry: Entry): void;
  data(bytes: Buffer): void;
  hole(sizeBytes: number): void;
  /** Called after every file, also an empty one. */
  fileEnd(): void;
}
