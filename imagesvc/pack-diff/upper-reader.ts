/**
 * An OverlayFS upper directory as a layer: what changed, as entries the converter takes.
 *
 * The walk and the reading of OverlayFS's marks are the converter's (`readFolder`); this adds what a packed layer leaves
 * out: build residue (residue-policy.ts), the caller's patterns, and sockets and pipes, which mean nothing without the
 * processes that held them. Patterns drop additions only. A deletion is always kept, and so are the parents it needs: a
 * dropped deletion would bring back what the sandbox had removed.
 */
import type { ByteString } from '#base';
import { type EntryHandler, type EntryKind, type FolderSummary, readFolder } from '#converter';
import { parseExcludePattern } from './exclude-pattern.ts';
import { RESIDUE_PATTERNS } from './residue-policy.ts';

export interface UpperOptions {
  /** Patterns (exclude-pattern.ts) to leave out besides the policy's. */
  readonly exclude?: readonly string[];
  /** Leave build residue out. True by default. */
  readonly policy?: boolean;
  /** The overlay was mounted with `userxattr`. */
  readonly userXattr?: boolean;
  /** What the layers below show at a path (`openLowerView`): without it, marks that hide nothing here may hide something over another base. */
  readonly lower?: (path: ByteString) => 'dir' | 'other' | undefined;
  readonly signal?: AbortSignal;
}

const OMITTED: ReadonlySet<EntryKind> = new Set<EntryKind>(['socket', 'fifo']);

/**
 * @throws PACK_PATTERN for a bad pattern; LAYER_FILE_CHANGED when something still writes to the upper;
 * LAYER_UPPER_REDIRECT for one that was written with `redirect_dir` or `metacopy` on.
 */
export async function readUpper(
  upperDir: string,
  handler: EntryHandler,
  options: UpperOptions = {},
): Promise<FolderSummary> {
  const texts = [...(options.policy === false ? [] : RESIDUE_PATTERNS), ...(options.exclude ?? [])];
  const patterns = texts.map(parseExcludePattern);
  return readFolder(upperDir, handler, {
    overlay: options.userXattr === true ? 'user' : 'trusted',
    lower: options.lower,
    omitKinds: OMITTED,
    skip: (path, kind) => patterns.some((pattern) => pattern.matches(path, kind === 'dir')),
    signal: options.signal,
  });
}
