/**
 * The file tree of an image while its layers are applied, bottom first.
 *
 * Layers form groups (see collapse-plan.ts); each group becomes one EROFS layer. So the tree remembers, beside what is
 * there, what the current group did to the groups below: which directories it passed through or made, which lower names it
 * removed or replaced, which directories it made opaque. group-view.ts reads that to write the group.
 *
 * Everything that is not a directory is immutable once placed; a name that changes gets another node.
 */
import type { ByteString } from '#base';
import type { Entry } from '../layer/entry.ts';
import type { FileData } from '../layer/spool-format.ts';

export interface Attributes {
  mode: number;
  uid: number;
  gid: number;
  mtimeSec: number;
  mtimeNsec: number;
  xattrs: Map<ByteString, Buffer> | undefined;
}

export type LeafKind = 'file' | 'symlink' | 'char' | 'block' | 'fifo' | 'socket';

export class LeafNode implements Attributes {
  readonly kind: LeafKind;
  mode: number;
  uid: number;
  gid: number;
  mtimeSec: number;
  mtimeNsec: number;
  xattrs: Map<ByteString, Buffer> | undefined;
  /** The group whose layer holds every name of this node. */
  readonly group: number;
  readonly sizeBytes: number;
  readonly data: FileData | undefined;
  readonly target: ByteString;
  readonly major: number;
  readonly minor: number;
  /** Node that stands for this one in a later group, where that group's layers hard-link to it. */
  successor: LeafNode | undefined;
  /** Set by the EROFS writer: names in the group being written, and the inode's number. */
  links = 0;
  nid = -1;

  constructor(kind: LeafKind, from: Entry | LeafNode, group: number, data: FileData | undefined) {
    this.kind = kind;
    this.mode = from.mode;
    this.uid = from.uid;
    this.gid = from.gid;
    this.mtimeSec = from.mtimeSec;
    this.mtimeNsec = from.mtimeNsec;
    this.xattrs = from.xattrs;
    this.group = group;
    this.sizeBytes = from.sizeBytes;
    this.data = data;
    this.target = from.target;
    this.major = from.major;
    this.minor = from.minor;
  }
}

export class DirNode implements Attributes {
  readonly kind = 'dir';
  mode = 0o755;
  uid = 0;
  gid = 0;
  mtimeSec = 0;
  mtimeNsec = 0;
  xattrs: Map<ByteString, Buffer> | undefined = undefined;
  readonly children = new Map<ByteString, Node>();
  /** The group that made it. */
  readonly born: number;
  /** The last group that has it in its layer. */
  touched: number;
  /** The last group in whose layer it is opaque. */
  opaque = -1;
  /** Lower names that group `shadowGroup` removed or replaced; the value says whether the lower one was a directory. */
  shadow: Map<ByteString, boolean> | undefined = undefined;
  shadowGroup = -1;
  nid = -1;

  constructor(group: number) {
    this.born = group;
    this.touched = group;
  }

  /** Notes that a name of a lower group is hidden by `group`. */
  hide(name: ByteString, wasDirectory: boolean, group: number): void {
    if (this.shadowGroup !== group) {
      this.shadow = new Map();
      this.shadowGroup = group;
    }
    this.shadow!.set(name, wasDirectory || this.shadow!.get(name) === true);
  }

  shadowIn(group: number): ReadonlyMap<ByteString, boolean> | undefined {
    return this.shadowGroup === group ? this.shadow : undefined;
  }
}

export type Node = DirNode | LeafNode;

export function setAttributes(node: DirNode, entry: Entry): void {
  node.mode = entry.mode;
  node.uid = entry.uid;
  node.gid = entry.gid;
  node.mtimeSec = entry.mtimeSec;
  node.mtimeNsec = entry.mtimeNsec;
  node.xattrs = entry.xattrs;
}
