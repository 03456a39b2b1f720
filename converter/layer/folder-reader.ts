/**
 * Walks a folder of this machine and tells it as a layer: `dir:` sources, and OverlayFS uppers (`overlay`).
 *
 * Preorder, siblings in byte order, so the same tree gives the same calls. Every step goes through the descriptor of the
 * directory it stands in (`/proc/self/fd/N/name`): a directory that is swapped for a symlink while we walk leads nowhere
 * else, paths may be longer than PATH_MAX, and names need not be UTF-8. A file that changes while it is read is an error:
 * half of the old and half of the new is worse than no layer.
 */

import * as sync from 'node:fs';
import { type BigIntStats, constants, promises as fs } from 'node:fs';
import { type ByteString, byteString, bytesOf, type DsecError, display, systemCode } from '#base';
import { dataRuns, splitDevice } from '#linux';
import { fail } from '../errors.ts';
import { bareEntry, type Entry, type EntryHandler, type EntryKind } from './entry.ts';
import { readXattrs } from './folder-xattrs.ts';

export interface FolderOptions {
  /**
   * The folder is an OverlayFS upper: 0:0 character devices are whiteouts, `<prefix>.overlay.opaque` marks opaque
   * directories. `trusted`: the overlay was mounted without `userxattr` (then `user.overlay.*` are plain attributes that
   * anyone inside may have set); `user`: with it.
   */
  readonly overlay?: 'trusted' | 'user';
  /**
   * What the layers below show at a path. OverlayFS may mark a new directory opaque where nothing is below; with this the
   * mark is only told where it hides something, so that the layer can be laid over other bases too.
   */
  readonly lower?: (path: ByteString) => 'dir' | 'other' | undefined;
  /** True leaves the entry out, a directory with all that was added below it. Deletions are always told. */
  readonly skip?: (path: ByteString, kind: EntryKind) => boolean;
  /** Kinds that are left out with a note. Sockets by default: nothing can listen on one that was stored. */
  readonly omitKinds?: ReadonlySet<EntryKind>;
  readonly signal?: AbortSignal;
}

export interface FolderSummary {
  /** One line each for what could not be carried over, for people. */
  readonly notes: string[];
  /** Paths that `skip` left out; of a directory left out, the directory alone. */
  readonly skipped: ByteString[];
  readonly entries: number;
}

const READ_BYTES = 512 * 1024;
/** Breadth is free; depth costs a descriptor each. Deeper trees exist only to break tools. */
const MAX_DEPTH = 4096;
/** Lets timers and signals run now and then: the walk itself is synchronous. */
const YIELD_EVERY = 256;

interface Frame {
  readonly fd: number;
  /** '' for the root, else without leading or trailing slash. */
  readonly path: ByteString;
  readonly names: ByteString[];
  next: number;
  /** The directory's own entry, held back because it was skipped: told only if a deletion below needs it. */
  pending: { entry: Entry; opaque: boolean } | undefined;
  readonly skipping: boolean;
}

/**
 * @throws LAYER_FOLDER_READ, LAYER_FOLDER_DENIED, LAYER_FILE_CHANGED, LAYER_FOLDER_DEEP, LAYER_UPPER_REDIRECT
 */
export async function readFolder(
  folder: string,
  handler: EntryHandler,
  options: FolderOptions = {},
): Promise<FolderSummary> {
  const real = await fs.realpath(folder).catch((cause: unknown) => {
    throw unreadable(folder, systemCode(cause) ?? String(cause), cause);
  });
  const walk = new FolderWalk(real, handler, options);
  try {
    for (let step = 1; walk.step(); step++) {
      if (step % YIELD_EVERY === 0) {
        options.signal?.throwIfAborted();
        await new Promise((resolve) => setImmediate(resolve));
      }
    }
    return walk.summary();
  } finally {
    walk.close();
  }
}

class FolderWalk {
  private readonly folder: string;
  private readonly handler: EntryHandler;
  private readonly options: FolderOptions;
  private readonly omit: ReadonlySet<EntryKind>;
  private readonly stack: Frame[] = [];
  private readonly notes: string[] = [];
  private readonly skipped: ByteString[] = [];
  private entries = 0;
  private started = false;
  private readonly firstPaths = new Map<string, ByteString>();
  private readonly buffer = Buffer.allocUnsafe(READ_BYTES);

  constructor(folder: string, handler: EntryHandler, options: FolderOptions) {
    this.folder = folder;
    this.handler = handler;
    this.options = options;
    this.omit = options.omitKinds ?? new Set<EntryKind>(['socket']);
  }

  summary(): FolderSummary {
    return { notes: this.notes, skipped: this.skipped, entries: this.entries };
  }

  close(): void {
    for (const frame of this.stack.splice(0)) sync.closeSync(frame.fd);
  }

  /** Tells one entry. False at the end. */
  step(): boolean {
    if (!this.started) {
      this.started = true;
      this.enterRoot();
      return true;
    }
    const frame = this.stack[this.stack.length - 1];
    if (frame === undefined) return false;
    const name = frame.names[frame.next++];
    if (name === undefined) {
      this.stack.pop();
      sync.closeSync(frame.fd);
      return this.stack.length > 0;
    }
    const path = frame.path === '' ? name : `${frame.path}/${name}`;
    this.guarded(path, () => this.visit(frame, name, path));
    return true;
  }

  private enterRoot(): void {
    this.guarded('', () => {
      const fd = sync.openSync(this.folder, constants.O_RDONLY | constants.O_DIRECTORY);
      this.stack.push({ fd, path: '', names: [], next: 0, pending: undefined, skipping: false });
      const stat = sync.fstatSync(fd, { bigint: true });
      const { entry, opaque } = this.describe('.', inside(fd, '.'), stat, 'dir');
      this.tell(entry);
      // An opaque root hides every layer below, as an opaque directory does.
      if (opaque) this.tell({ ...entry, kind: 'opaque', xattrs: undefined });
      this.stack[0]!.names.push(...listNames(fd));
    });
  }

  private visit(frame: Frame, name: ByteString, path: ByteString): void {
    const at = inside(frame.fd, name);
    const stat = sync.lstatSync(at, { bigint: true });
    const kind = kindOf(stat);
    const overlay = this.options.overlay;
    if (overlay !== undefined && kind === 'char' && stat.rdev === 0n) {
      this.tellWhiteout(path);
      return;
    }
    const described = this.describe(path, at, stat, kind);
    const { entry, xattrWhiteout } = described;
    if (xattrWhiteout) {
      this.tellWhiteout(path);
      return;
    }
    const opaque = described.opaque && this.opaqueMatters(path, frame.skipping);
    if (kind !== 'dir' && this.omit.has(kind)) {
      if (!frame.skipping) this.notes.push(`${kind === 'fifo' ? 'pipe' : kind} ${display(path)} left out`);
      // It hid what was below; without it that would be back.
      if (overlay !== undefined && this.options.lower?.(path) !== undefined) this.tellWhiteout(path);
      return;
    }
    const skip = frame.skipping || this.options.skip?.(path, kind) === true;
    if (skip) {
      if (!frame.skipping) this.skipped.push(path);
      const below = overlay === undefined ? undefined : this.options.lower?.(path);
      if (kind !== 'dir') {
        if (below === 'dir') this.tellWhiteout(path);
        return;
      }
      if (below === 'other') {
        this.tellWhiteout(path);
        return;
      }
      if (overlay === undefined) return;
      this.descend(frame, name, path, stat, { entry, opaque }, true);
      if (opaque) this.flushPending();
      return;
    }
    if (kind === 'dir') {
      this.tell(entry);
      if (opaque) this.tell({ ...entry, kind: 'opaque', xattrs: undefined });
      this.descend(frame, name, path, stat, undefined, false);
      return;
    }
    if (stat.nlink > 1n) {
      const key = `${stat.dev}:${stat.ino}`;
      const first = this.firstPaths.get(key);
      if (first !== undefined) {
        this.tell({ ...entry, kind: 'hardlink', target: first, sizeBytes: 0, xattrs: undefined });
        return;
      }
      this.firstPaths.set(key, path);
    }
    if (kind === 'file') this.tellFile(at, entry, stat);
    else this.tell(entry);
  }

  private descend(
    frame: Frame,
    name: ByteString,
    path: ByteString,
    stat: BigIntStats,
    pending: Frame['pending'],
    skipping: boolean,
  ): void {
    if (this.stack.length >= MAX_DEPTH) {
      throw fail('LAYER_FOLDER_DEEP', { path: this.shown(path.slice(0, 200)), limit: MAX_DEPTH });
    }
    const flags = constants.O_RDONLY | constants.O_DIRECTORY | constants.O_NOFOLLOW;
    const fd = sync.openSync(inside(frame.fd, name), flags);
    this.stack.push({ fd, path, names: [], next: 0, pending, skipping });
    if (sync.fstatSync(fd, { bigint: true }).ino !== stat.ino)
      throw fail('LAYER_FILE_CHANGED', { path: this.shown(path) });
    this.stack[this.stack.length - 1]!.names.push(...listNames(fd));
  }

  /** An opaque mark over nothing is OverlayFS sparing itself a lookup; see `lower`. In what is skipped only known deletions count. */
  private opaqueMatters(path: ByteString, skipping: boolean): boolean {
    if (this.options.lower === undefined) return !skipping;
    return this.options.lower(path) === 'dir';
  }

  private tellWhiteout(path: ByteString): void {
    this.flushPending();
    this.tell(bareEntry(path, 'whiteout'));
  }

  /** Directories that were skipped but have a deletion below: it needs its parents. */
  private flushPending(): void {
    for (const frame of this.stack) {
      const pending = frame.pending;
      if (pending === undefined) continue;
      frame.pending = undefined;
      this.tell(pending.entry);
      if (pending.opaque) this.tell({ ...pending.entry, kind: 'opaque', xattrs: undefined });
    }
  }

  private tell(entry: Entry): void {
    this.entries++;
    this.handler.entry(entry);
  }

  private describe(
    path: ByteString,
    at: Buffer,
    stat: BigIntStats,
    kind: EntryKind,
  ): { entry: Entry; opaque: boolean; xattrWhiteout: boolean } {
    const { xattrs, marks } = readXattrs(at, this.options.overlay);
    if (marks.redirect) throw fail('LAYER_UPPER_REDIRECT', { path: this.shown(path) });
    const device = kind === 'char' || kind === 'block' ? splitDevice(stat.rdev) : { major: 0, minor: 0 };
    const mtimeSec = floorDiv(stat.mtimeNs, 1_000_000_000n);
    const entry: Entry = {
      path,
      kind,
      mode: Number(stat.mode & 0o7777n),
      uid: Number(stat.uid),
      gid: Number(stat.gid),
      mtimeSec: Number(mtimeSec),
      mtimeNsec: Number(stat.mtimeNs - mtimeSec * 1_000_000_000n),
      sizeBytes: kind === 'file' ? Number(stat.size) : 0,
      target: kind === 'symlink' ? byteString(sync.readlinkSync(at, { encoding: 'buffer' })) : '',
      major: device.major,
      minor: device.minor,
      xattrs,
    };
    return {
      entry,
      opaque: kind === 'dir' && marks.opaque,
      xattrWhiteout: kind === 'file' && stat.size === 0n && marks.whiteout,
    };
  }

  private tellFile(at: Buffer, entry: Entry, stat: BigIntStats): void {
    // O_NONBLOCK: were the file swapped for a pipe, open would wait for a writer.
    const fd = sync.openSync(at, constants.O_RDONLY | constants.O_NOFOLLOW | constants.O_NONBLOCK);
    try {
      if (!sameFile(stat, sync.fstatSync(fd, { bigint: true }))) throw this.changed(entry.path);
      this.tell(entry);
      const size = entry.sizeBytes;
      // Fewer blocks than bytes: there may be holes (or the file system compresses; then the runs cover everything).
      const runs = stat.blocks * 512n < stat.size ? dataRuns(fd, size) : [{ offset: 0, length: size }];
      let told = 0;
      for (const run of runs) {
        if (run.offset > told) this.handler.hole(run.offset - told);
        this.tellData(fd, entry.path, run.offset, run.offset + run.length);
        told = run.offset + run.length;
      }
      if (told < size) this.handler.hole(size - told);
      if (!sameFile(stat, sync.fstatSync(fd, { bigint: true }))) throw this.changed(entry.path);
      this.handler.fileEnd();
    } finally {
      sync.closeSync(fd);
    }
  }

  private tellData(fd: number, path: ByteString, from: number, end: number): void {
    for (let offset = from; offset < end; ) {
      const count = sync.readSync(fd, this.buffer, 0, Math.min(READ_BYTES, end - offset), offset);
      if (count === 0) throw this.changed(path);
      this.handler.data(this.buffer.subarray(0, count));
      offset += count;
    }
  }

  private changed(path: ByteString): DsecError {
    return fail('LAYER_FILE_CHANGED', { path: this.shown(path) });
  }

  private guarded(path: ByteString, work: () => void): void {
    try {
      work();
    } catch (cause) {
      const code = systemCode(cause);
      if (code === undefined || !/^E[A-Z0-9]+$/.test(code)) throw cause;
      if (path !== '' && ['ENOENT', 'ENOTDIR', 'ELOOP'].includes(code)) throw this.changed(path);
      throw unreadable(this.shown(path), code, cause);
    }
  }

  private shown(path: ByteString): string {
    return path === '' || path === '.' ? this.folder : `${this.folder}/${display(path)}`;
  }
}

function unreadable(path: string, reason: string, cause: unknown): DsecError {
  if (reason === 'EACCES' || reason === 'EPERM') return fail('LAYER_FOLDER_DENIED', { path }, cause);
  return fail('LAYER_FOLDER_READ', { path, reason }, cause);
}

function inside(fd: number, name: ByteString): Buffer {
  return bytesOf(`/proc/self/fd/${fd}/${name}`);
}

function listNames(fd: number): ByteString[] {
  const names = sync.readdirSync(inside(fd, '.'), { encoding: 'buffer' }).map((name) => byteString(name));
  return names.sort((a, b) => (a < b ? -1 : a > b ? 1 : 0));
}

function kindOf(stat: BigIntStats): EntryKind {
  switch (Number(stat.mode & 0o170000n)) {
    case 0o040000:
      return 'dir';
    case 0o120000:
      return 'symlink';
    case 0o020000:
      return 'char';
    case 0o060000:
      return 'block';
    case 0o010000:
      return 'fifo';
    case 0o140000:
      return 'socket';
    default:
      return 'file';
  }
}

function sameFile(a: BigIntStats, b: BigIntStats): boolean {
  return a.ino === b.ino && a.dev === b.dev && a.size === b.size && a.mtimeNs === b.mtimeNs && a.ctimeNs === b.ctimeNs;
}

function floorDiv(value: bigint, by: bigint): bigint {
  const whole = value / by;
  return value % by < 0n ? whole - 1n : whole;
}
