/**
 * A tar archive, pushed in chunks of any size, as calls to an `EntryHandler`. Synchronous and byte-exact: v7, ustar,
 * PAX, GNU, with every extension resolved (see pax.ts, sparse.ts). File data is handed on as parts of the pushed chunk,
 * never copied; memory is bounded whatever the archive claims.
 *
 * It follows what wrote and unpacks the layers of real images: only files have data (a size on links and directories
 * is ignored), an archive ends at its first zero block or where the bytes end, what follows is ignored. Names are not
 * interpreted: `.wh.` is the tree's business. After a throw, its own or the handler's, a reader is spent.
 */
import { type ByteString, byteString, type DsecError, display } from '#base';
import { type converterErrors, fail } from '../errors.ts';
import type { Entry, EntryHandler, EntryKind } from './entry.ts';
import { applyPax, MAX_PAX_BYTES, PaxFields } from './pax.ts';
import { appendGnuExtents, checkMap, SparseLines, type SparseMap, SparsePlayer } from './sparse.ts';
import {
  BLOCK_BYTES,
  checksumFrom,
  FIELD,
  isGnu,
  readName,
  readNumber,
  readText,
  signedChecksum,
  sumBytes,
  sumWords,
} from './tar-fields.ts';

/** Bytes of a GNU long name or link. Linux takes 4096. */
const MAX_LONG_NAME_BYTES = 1 << 20;

export interface TarReaderOptions {
  /** Names the layer in errors: "layer 2/5 sha256:0123456789ab". */
  readonly label?: string;
}

/** What the next bytes are. */
const State = {
  header: 0,
  fileData: 1,
  padding: 2,
  /** Of an extended header or long name, collected whole. */
  body: 3,
  /** Another block of an old GNU sparse map. */
  sparseBlock: 4,
  /** The map in front of PAX 1.0 sparse data, then its padding. */
  sparseLines: 5,
  sparseFill: 6,
  sparseData: 7,
  /** Stored bytes that the sparse map does not name. */
  sparseRest: 8,
  ended: 9,
  failed: 10,
} as const;

/** Type flags. */
const OLD_FILE = 0x00;
const FILE = 0x30;
const CONTIGUOUS_FILE = 0x37;
const GNU_SPARSE = 0x53;
const GNU_LONG_LINK = 0x4b;
const GNU_LONG_NAME = 0x4c;
const PAX_GLOBAL = 0x67;
const PAX_LOCAL = 0x78;

/** What '1' to '6' make. */
const KINDS: readonly EntryKind[] = ['hardlink', 'symlink', 'char', 'block', 'dir', 'fifo'];

export class TarReader {
  private readonly handler: EntryHandler;
  private readonly label: string;
  private state: number = State.header;
  /** Bytes left in this state. */
  private left = 0;
  /** Zero bytes that follow the member's stored bytes, up to the next block. */
  private pad = 0;
  /** Offset in the archive of the chunk being read. */
  private base = 0;
  /** Where the member at hand begins, and its name, for errors. */
  private memberAt = 0;
  private memberName: ByteString = '';
  /** Bytes of a block or body that began in an earlier chunk. */
  private stash = Buffer.allocUnsafeSlow(BLOCK_BYTES);
  private stashed = 0;
  private bodyType = 0;
  private global: PaxFields | undefined = undefined;
  private pax: PaxFields | undefined = undefined;
  private longName: ByteString | undefined = undefined;
  private longLink: ByteString | undefined = undefined;
  private sparseEntry: Entry | undefined = undefined;
  private sparseMap: SparseMap = [];
  private sparseLines = new SparseLines();
  private sparsePlayer: SparsePlayer | undefined = undefined;
  private words: Int32Array | undefined = undefined;
  private error: DsecError | undefined = undefined;

  constructor(handler: EntryHandler, options: TarReaderOptions = {}) {
    this.handler = handler;
    this.label = options.label ?? 'tar';
  }

  /**
   * Reads on. Handlers run before it returns; `bytes` is not kept.
   * @throws TAR_* errors, and whatever a handler throws.
   */
  push(bytes: Buffer): void {
    const end = bytes.length;
    let at = 0;
    // Checksums are summed by words where the chunk is aligned, which it is unless it was cut out of another buffer.
    this.words =
      (bytes.byteOffset & 3) === 0 && end >= BLOCK_BYTES
        ? new Int32Array(bytes.buffer, bytes.byteOffset, end >> 2)
        : undefined;
    while (at < end) {
      switch (this.state) {
        case State.header:
          if (this.stashed === 0 && end - at >= BLOCK_BYTES) {
            const sum =
              this.words !== undefined && (at & 3) === 0 ? sumWords(this.words, at >> 2) : sumBytes(bytes, at);
            this.header(bytes, at, this.base + at, sum);
            at += BLOCK_BYTES;
          } else {
            at = this.fill(bytes, at, BLOCK_BYTES);
            if (this.stashed < BLOCK_BYTES) break;
            this.stashed = 0;
            this.header(this.stash, 0, this.base + at - BLOCK_BYTES, sumBytes(this.stash, 0));
          }
          break;
        case State.fileData: {
          const n = Math.min(this.left, end - at);
          this.handler.data(n === end ? bytes : bytes.subarray(at, at + n));
          at += n;
          this.left -= n;
          if (this.left === 0) this.fileDone();
          break;
        }
        case State.padding: {
          const n = Math.min(this.left, end - at);
          at += n;
          this.left -= n;
          if (this.left === 0) this.state = State.header;
          break;
        }
        case State.body:
          if (this.stashed === 0 && end - at >= this.left) {
            const start = at;
            at += this.left;
            this.body(bytes, start, at);
          } else {
            at = this.fill(bytes, at, this.left);
            if (this.stashed < this.left) break;
            this.stashed = 0;
            this.body(this.stash, 0, this.left);
          }
          break;
        case State.ended:
          at = end;
          break;
        case State.failed:
          throw this.error;
        default:
          at = this.sparse(bytes, at);
      }
    }
    this.base += end;
  }

  /**
   * No more bytes will come.
   * @throws TAR_TRUNCATED if a member has begun and is not complete.
   */
  end(): void {
    if (this.state === State.failed) throw this.error;
    // The padding of the last member, and an end block that was cut short, may be missing.
    const isBetweenMembers =
      this.state === State.ended ||
      ((this.state === State.header || this.state === State.padding) &&
        this.pax === undefined &&
        this.longName === undefined &&
        this.longLink === undefined &&
        this.stash.subarray(0, this.stashed).every((byte) => byte === 0));
    if (!isBetweenMembers) {
      if (this.state === State.header && this.stashed > 0) {
        this.memberName = `the one after ${this.memberName}`;
        this.memberAt = this.base - this.stashed;
      }
      this.refuse('TAR_TRUNCATED', { end: this.base });
    }
    this.state = State.ended;
  }

  /** Adds to the stash until it holds `wanted` bytes. It grows with what arrives, not with what was promised. */
  private fill(bytes: Buffer, at: number, wanted: number): number {
    const n = Math.min(wanted - this.stashed, bytes.length - at);
    if (this.stashed + n > this.stash.length) {
      const grown = Buffer.allocUnsafeSlow(Math.min(wanted, Math.max(this.stashed + n, 2 * this.stash.length)));
      this.stash.copy(grown, 0, 0, this.stashed);
      this.stash = grown;
    }
    bytes.copy(this.stash, this.stashed, at, at + n);
    this.stashed += n;
    return at + n;
  }

  private header(b: Buffer, o: number, at: number, sum: number): void {
    if (sum === 0) {
      this.state = State.ended;
      return;
    }
    const stored = readNumber(b, o + FIELD.checksum, 8);
    if (stored !== checksumFrom(sum, b, o) && stored !== signedChecksum(b, o)) {
      const after = this.memberName;
      this.memberAt = at;
      this.memberName = readText(b, o, 100);
      this.refuse('TAR_CHECKSUM', {
        expected: checksumFrom(sum, b, o),
        after: at === 0 ? 'at the beginning' : `after ${display(after)}`,
      });
    }
    const type = b[o + FIELD.type]!;
    // An extended header does not begin the member anew: errors name where its first block is.
    if (this.pax === undefined && this.longName === undefined && this.longLink === undefined) this.memberAt = at;
    if (type === PAX_LOCAL || type === PAX_GLOBAL || type === GNU_LONG_NAME || type === GNU_LONG_LINK) {
      this.extension(b, o, type);
    } else this.member(b, o, type);
  }

  private extension(b: Buffer, o: number, type: number): void {
    this.memberName = readText(b, o, 100);
    const limit = type === PAX_LOCAL || type === PAX_GLOBAL ? MAX_PAX_BYTES : MAX_LONG_NAME_BYTES;
    const size = this.size(readNumber(b, o + FIELD.size, 12));
    if (size > limit) this.refuse('TAR_LIMIT', { what: 'the extended header', actual: size, limit });
    this.bodyType = type;
    this.left = size;
    this.pad = -size & (BLOCK_BYTES - 1);
    if (size === 0) this.body(b, 0, 0);
    else this.state = State.body;
  }

  private body(b: Buffer, start: number, end: number): void {
    switch (this.bodyType) {
      case PAX_GLOBAL: {
        this.global ??= new PaxFields();
        const problem = applyPax(b, start, end, this.global);
        if (problem !== undefined) this.refuse('TAR_PAX', { problem });
        const held = this.global.heldBytes();
        if (held > MAX_PAX_BYTES) {
          this.refuse('TAR_LIMIT', { what: 'the global headers together', actual: held, limit: MAX_PAX_BYTES });
        }
        break;
      }
      case PAX_LOCAL: {
        this.pax = this.global === undefined ? new PaxFields() : this.global.inherit();
        const problem = applyPax(b, start, end, this.pax);
        if (problem !== undefined) this.refuse('TAR_PAX', { problem });
        break;
      }
      default: {
        const nul = b.subarray(start, end).indexOf(0);
        const text = byteString(b, start, nul < 0 ? end : start + nul);
        if (this.bodyType === GNU_LONG_NAME) this.longName = text;
        else this.longLink = text;
      }
    }
    if (this.stash.length > 64 << 10) this.stash = Buffer.allocUnsafeSlow(BLOCK_BYTES);
    this.skipPadding();
  }

  private member(b: Buffer, o: number, type: number): void {
    const pax = this.pax ?? this.global;
    const path = pax?.sparseName ?? pax?.path ?? this.longName ?? readName(b, o);
    this.memberName = path;
    let kind: EntryKind = 'file';
    if (type >= 0x31 && type <= 0x36) kind = KINDS[type - 0x31]!;
    else if (type === OLD_FILE) {
      if (path.charCodeAt(path.length - 1) === 0x2f) kind = 'dir';
    } else if (type !== FILE && type !== CONTIGUOUS_FILE && type !== GNU_SPARSE) {
      this.refuse('TAR_TYPE', { type: display(String.fromCharCode(type)) });
    }
    const isDevice = kind === 'char' || kind === 'block';
    const isLink = kind === 'symlink' || kind === 'hardlink';
    const hasTime = pax?.mtimeSec !== undefined;
    const storedBytes = kind === 'file' ? this.size(pax?.sizeBytes ?? readNumber(b, o + FIELD.size, 12)) : 0;
    const entry: Entry = {
      path,
      kind,
      mode: this.whole('mode', readNumber(b, o + FIELD.mode, 8)) & 0o7777,
      uid: this.owner('uid', pax?.uid ?? readNumber(b, o + FIELD.uid, 8)),
      gid: this.owner('gid', pax?.gid ?? readNumber(b, o + FIELD.gid, 8)),
      mtimeSec: hasTime ? pax.mtimeSec! : this.whole('mtime', readNumber(b, o + FIELD.mtime, 12)),
      mtimeNsec: hasTime ? pax.mtimeNsec : 0,
      sizeBytes: storedBytes,
      target: isLink ? (pax?.link ?? this.longLink ?? readText(b, o + FIELD.link, 100)) : '',
      major: isDevice ? this.device('major', readNumber(b, o + FIELD.major, 8)) : 0,
      minor: isDevice ? this.device('minor', readNumber(b, o + FIELD.minor, 8)) : 0,
      // The handler may keep the map: a global header's own is not given away.
      xattrs: pax?.xattrs === undefined ? undefined : pax === this.global ? new Map(pax.xattrs) : pax.xattrs,
    };
    this.pax = undefined;
    this.longName = undefined;
    this.longLink = undefined;
    if (kind !== 'file') {
      this.state = State.header;
      this.handler.entry(entry);
      return;
    }
    this.left = storedBytes;
    this.pad = -storedBytes & (BLOCK_BYTES - 1);
    if (type === GNU_SPARSE) this.beginGnuSparse(b, o, entry);
    else if (pax !== undefined && (pax.sparseMajor !== undefined || pax.sparseSize !== undefined)) {
      this.beginPaxSparse(pax, entry);
    } else {
      this.state = State.fileData;
      this.handler.entry(entry);
      if (storedBytes === 0) this.fileDone();
    }
  }

  private fileDone(): void {
    this.handler.fileEnd();
    this.skipPadding();
  }

  private skipPadding(): void {
    this.left = this.pad;
    this.state = this.pad === 0 ? State.header : State.padding;
  }

  // ---- sparse files

  private beginGnuSparse(b: Buffer, o: number, entry: Entry): void {
    if (!isGnu(b, o)) this.refuse('TAR_SPARSE', { problem: 'a member of type S without the GNU magic' });
    entry.sizeBytes = this.size(readNumber(b, o + FIELD.sparseSize, 12));
    this.sparseEntry = entry;
    this.sparseMap = [];
    this.refuseSparse(appendGnuExtents(b, o + FIELD.sparseMap, 4, this.sparseMap));
    if (b[o + FIELD.sparseMore] !== 0) this.state = State.sparseBlock;
    else this.playSparse();
  }

  private beginPaxSparse(pax: PaxFields, entry: Entry): void {
    this.sparseEntry = entry;
    if (pax.sparseMajor === 1) {
      const size = pax.sparseRealSize ?? pax.sparseSize;
      if (size === undefined) this.refuse('TAR_SPARSE', { problem: 'GNU.sparse.realsize is missing' });
      entry.sizeBytes = size;
      this.sparseLines = new SparseLines();
      this.state = State.sparseLines;
      if (this.left === 0) this.refuse('TAR_SPARSE', { problem: 'the sparse map is missing' });
      return;
    }
    if (pax.sparseMajor !== undefined && pax.sparseMajor !== 0) {
      this.refuse('TAR_SPARSE', { problem: `sparse format ${pax.sparseMajor} is not known` });
    }
    const size = pax.sparseSize ?? pax.sparseRealSize;
    if (size === undefined) this.refuse('TAR_SPARSE', { problem: 'GNU.sparse.size is missing' });
    entry.sizeBytes = size;
    if (pax.sparseMap !== undefined) this.sparseMap = pax.sparseMap.slice();
    else {
      const offsets = pax.sparseOffsets ?? [];
      const lengths = pax.sparseLengths ?? [];
      if (offsets.length !== lengths.length) {
        this.refuse('TAR_SPARSE', { problem: `${offsets.length} sparse offsets for ${lengths.length} lengths` });
      }
      this.sparseMap = [];
      for (let i = 0; i < offsets.length; i++) this.sparseMap.push(offsets[i]!, lengths[i]!);
    }
    this.playSparse();
  }

  /** The map is complete; `left` stored bytes follow. */
  private playSparse(): void {
    const entry = this.sparseEntry!;
    this.refuseSparse(checkMap(this.sparseMap, entry.sizeBytes, this.left));
    this.handler.entry(entry);
    this.sparsePlayer = new SparsePlayer(this.sparseMap, entry.sizeBytes, this.handler);
    this.state = State.sparseData;
    this.sparsePlayed();
  }

  private sparsePlayed(): void {
    if (this.sparsePlayer!.leftBytes > 0) return;
    this.sparsePlayer = undefined;
    this.sparseEntry = undefined;
    this.sparseMap = [];
    this.handler.fileEnd();
    if (this.left > 0) this.state = State.sparseRest;
    else this.skipPadding();
  }

  /** One step in a sparse state. @returns how far it read. */
  private sparse(bytes: Buffer, at: number): number {
    const end = Math.min(bytes.length, at + this.left);
    switch (this.state) {
      case State.sparseBlock: {
        const stop = this.fill(bytes, at, BLOCK_BYTES);
        if (this.stashed < BLOCK_BYTES) return stop;
        this.stashed = 0;
        this.refuseSparse(appendGnuExtents(this.stash, 0, 21, this.sparseMap));
        if (this.stash[504] === 0) this.playSparse();
        return stop;
      }
      case State.sparseLines: {
        const lines = this.sparseLines;
        const stop = lines.push(bytes, at, end);
        this.left -= stop - at;
        this.refuseSparse(lines.problem);
        if (lines.isComplete) {
          this.sparseMap = lines.map;
          this.sparseFill = Math.min(this.left, -lines.usedBytes & (BLOCK_BYTES - 1));
          this.state = State.sparseFill;
          if (this.sparseFill === 0) this.playSparse();
        } else if (this.left === 0) this.refuse('TAR_SPARSE', { problem: 'the sparse map does not end' });
        return stop;
      }
      case State.sparseFill: {
        const n = Math.min(this.sparseFill, bytes.length - at);
        this.sparseFill -= n;
        this.left -= n;
        if (this.sparseFill === 0) this.playSparse();
        return at + n;
      }
      case State.sparseData: {
        const stop = Math.min(end, at + this.sparsePlayer!.leftBytes);
        this.left -= stop - at;
        this.sparsePlayer!.data(bytes.subarray(at, stop));
        this.sparsePlayed();
        return stop;
      }
      default:
        this.left -= end - at;
        if (this.left === 0) this.skipPadding();
        return end;
    }
  }

  /** Bytes between a PAX 1.0 map and the data. */
  private sparseFill = 0;

  private refuseSparse(problem: string | undefined): void {
    if (problem !== undefined) this.refuse('TAR_SPARSE', { problem });
  }

  // ---- values

  private size(value: number): number {
    if (value >= 0 && value <= Number.MAX_SAFE_INTEGER - BLOCK_BYTES) return value;
    return this.refuse('TAR_NUMBER', { field: 'size', problem: problemOf(value) });
  }

  private whole(field: string, value: number): number {
    if (Number.isSafeInteger(value)) return value;
    return this.refuse('TAR_NUMBER', { field, problem: problemOf(value) });
  }

  /** 32 bits, as chown takes them: small negative numbers, the old way to write `nobody`, wrap; -1 means nothing. */
  private owner(field: string, value: number): number {
    if ((value >= 0 && value <= 0xffff_ffff) || (value < -1 && value >= -0x8000_0000)) return value >>> 0;
    return this.refuse('TAR_NUMBER', { field, problem: problemOf(value) });
  }

  private device(field: string, value: number): number {
    if (value >= 0 && value <= 0xffff_ffff) return value;
    return this.refuse('TAR_NUMBER', { field, problem: problemOf(value) });
  }

  private refuse(code: keyof typeof converterErrors & string, params: Record<string, string | number>): never {
    const member = this.memberName === '' ? 'the first member' : display(this.memberName.slice(0, 300));
    this.error = fail(code, { layer: this.label, member, offset: this.memberAt, ...params });
    this.state = State.failed;
    throw this.error;
  }
}

function problemOf(value: number): string {
  return Number.isNaN(value) ? 'not a number' : `out of range (${value})`;
}
