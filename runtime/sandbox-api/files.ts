/**
 * Files of a sandbox from outside. Paths are the sandbox's, absolute or from its root; no link leads out of it, whenever it was made.
 * Errors are RUNTIME_FILE with the path and the reason (`code` in its params: ENOENT, EISDIR, ...).
 */

export type FileKind = 'file' | 'directory' | 'symlink' | 'other';

export interface FileStatus {
  readonly kind: FileKind;
  /** With the bits of the kind. */
  readonly mode: number;
  readonly uid: number;
  readonly gid: number;
  readonly links: number;
  readonly size: number;
  /** Of 512 bytes: fewer than the size for a sparse file. */
  readonly blocks: number;
  readonly inode: bigint;
  /** Milliseconds since 1970. */
  readonly modifiedMs: number;
}

export interface FileEntry extends FileStatus {
  readonly name: Buffer;
}

export type SandboxPath = string | Buffer;

export interface WriteOptions {
  /** Of a new file; 0644. */
  readonly mode?: number;
  readonly uid?: number;
  readonly gid?: number;
}

/** A file that is to be at `path`, whole and as its digest says, however often the transfer breaks. */
export interface UploadSpec extends WriteOptions {
  readonly path: SandboxPath;
  readonly size: number;
  /** Of all of it, in hexadecimal digits. */
  readonly sha256: string;
  readonly modifiedMs?: number;
}

export interface UploadState {
  /** So much has come: go on there. */
  readonly offset: number;
  /** It is at its path. */
  readonly complete: boolean;
}

export interface SandboxFiles {
  stat(path: SandboxPath, options?: { readonly follow?: boolean }): Promise<FileStatus>;
  list(path: SandboxPath): Promise<FileEntry[]>;
  /** The whole of it. @throws RUNTIME_FILE beyond `limitBytes` (64 MiB), and when it is replaced meanwhile */
  read(path: SandboxPath, limitBytes?: number): Promise<Buffer>;
  /** Pieces of data with their offsets, holes left out; the last has the size. */
  pieces(
    path: SandboxPath,
    from?: number,
  ): AsyncIterable<{ readonly offset: number; readonly bytes: Buffer; readonly size: number }>;
  /** In place of what is there: all of it, or nothing when `content` fails. */
  write(path: SandboxPath, content: Buffer | AsyncIterable<Buffer>, options?: WriteOptions): Promise<FileStatus>;
  /** How far an upload of just this has come. */
  uploadState(spec: UploadSpec): Promise<UploadState>;
  /**
   * Goes on with it at `offset`; what has come stays when `content` fails. When all is there it is verified, and only then at its path.
   * @throws RUNTIME_UPLOAD_OFFSET when it does not continue there, RUNTIME_UPLOAD_DIGEST when it is something else: it begins anew then
   */
  uploadPart(spec: UploadSpec, offset: number, content: AsyncIterable<Buffer>): Promise<UploadState>;
  /** sha256 of a file. */
  digest(path: SandboxPath): Promise<string>;
  mkdir(path: SandboxPath, options?: { readonly mode?: number; readonly parents?: boolean }): Promise<void>;
  /** A folder only with `recursive`. */
  remove(path: SandboxPath, options?: { readonly recursive?: boolean }): Promise<void>;
  rename(from: SandboxPath, to: SandboxPath): Promise<void>;
  readlink(path: SandboxPath): Promise<Buffer>;
  symlink(target: SandboxPath, path: SandboxPath): Promise<void>;
  /** A file, link or folder of this machine to `to`. */
  upload(from: string, to: SandboxPath): Promise<void>;
  /** And back; the owner is whoever calls. */
  download(from: SandboxPath, to: string): Promise<void>;
}
