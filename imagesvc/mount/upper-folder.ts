/**
 * The writable side of a mount. The upper is the folder that the user names, so that what changed is there to see and to
 * pack; the work folder that OverlayFS also needs lies beside it, `<upper>.work`, on the same file system, and means
 * nothing to anybody else.
 *
 * A fresh upper (new, or empty and never mounted) takes over the attributes of the image's root: OverlayFS shows the
 * upper's as those of `/`, and a folder as mktemp makes it would shut out everyone but root.
 */
import {
  chmodSync,
  chownSync,
  existsSync,
  lstatSync,
  mkdirSync,
  readdirSync,
  realpathSync,
  rmdirSync,
  statSync,
} from 'node:fs';
import { join, resolve } from 'node:path';
import { fromText, messageOf } from '#base';
import { lgetxattr, llistxattr, lsetxattr, lutimes } from '#linux';
import { fail } from '../errors.ts';
import type { MountRecord } from './mount-record.ts';

export interface UpperFolders {
  /** Absolute, symlinks resolved. */
  readonly upper: string;
  readonly work: string;
  readonly fresh: boolean;
  /** Neither was there before. */
  readonly isNew: boolean;
  /** Removes what was made here, for when the mount fails. An upper that holds anything stays. */
  unmake(): void;
}

/**
 * Makes the folders where they are missing (their parents must be there).
 * @throws MOUNT_UPPER_INVALID
 */
export function makeUpperFolders(upperDir: string, workDir: string | undefined): UpperFolders {
  const made: string[] = [];
  const unmake = () => {
    for (const path of made.splice(0).reverse()) {
      // OverlayFS makes these in the work folder; nothing but them can be in there.
      const inner = ['work', 'incompat/volatile', 'incompat'].map((name) => join(path, name));
      for (const folder of [...inner, path]) {
        try {
          rmdirSync(folder);
        } catch {
          // Not there, or it holds something: then it is no longer ours alone.
        }
      }
    }
  };
  try {
    const upper = makeFolder(upperDir, 'upper', 0o755, made);
    const work = makeFolder(workDir ?? `${upper}.work`, 'work', 0o700, made);
    if (contains(upper, work) || contains(work, upper)) {
      throw fail('MOUNT_UPPER_INVALID', {
        path: work,
        why: `upper ${upper} and work folder must not lie in each other`,
      });
    }
    if (statSync(upper).dev !== statSync(work).dev) {
      throw fail('MOUNT_UPPER_INVALID', {
        path: work,
        why: `the work folder must be on the file system of the upper ${upper}; is the upper a mount point itself?`,
      });
    }
    const fresh = readdirSync(upper).length === 0 && readdirSync(work).length === 0;
    return { upper, work, fresh, isNew: made.length === 2, unmake };
  } catch (error) {
    unmake();
    throw error;
  }
}

function makeFolder(path: string, what: string, mode: number, made: string[]): string {
  const absolute = resolve(path);
  try {
    if (!existsSync(absolute)) {
      mkdirSync(absolute, { mode });
      made.push(absolute);
    }
    const real = realpathSync(absolute);
    if (!statSync(real).isDirectory()) throw new Error('it is not a folder');
    return real;
  } catch (error) {
    throw fail(
      'MOUNT_UPPER_INVALID',
      { path: absolute, why: `no ${what} folder can be there: ${messageOf(error)}` },
      error,
    );
  }
}

/** @throws MOUNT_UPPER_IN_USE when a mount already writes there: two would corrupt each other's view */
export function checkUpperUnused(folders: UpperFolders, records: readonly MountRecord[]): void {
  // What was just made holds nothing and has no second name.
  const { isNew } = folders;
  for (const record of records) {
    for (const taken of [record.upper, record.work]) {
      if (taken === undefined) continue;
      for (const wanted of [folders.upper, folders.work]) {
        if (contains(taken, wanted) || (!isNew && (contains(wanted, taken) || sameFolder(taken, wanted)))) {
          throw fail('MOUNT_UPPER_IN_USE', { path: wanted, id: record.id, target: record.target });
        }
      }
    }
  }
}

/** `inner` is `outer`, or lies in it. */
function contains(outer: string, inner: string): boolean {
  return inner === outer || inner.startsWith(outer === '/' ? '/' : `${outer}/`);
}

/** The same folder under two paths (a bind mount). */
function sameFolder(a: string, b: string): boolean {
  const left = statSync(a, { bigint: true, throwIfNoEntry: false });
  const right = statSync(b, { bigint: true, throwIfNoEntry: false });
  return left !== undefined && right !== undefined && left.ino === right.ino && left.dev === right.dev;
}

/** Gives the upper the owner, mode, attributes and times of `root`, the topmost layer's. */
export function adoptRootAttributes(upper: string, root: string): void {
  const stat = lstatSync(root, { bigint: true });
  chownSync(upper, Number(stat.uid), Number(stat.gid));
  chmodSync(upper, Number(stat.mode & 0o7777n));
  for (const name of llistxattr(fromText(root))) {
    // OverlayFS's own marks are about the layer, not about what it shows.
    if (name.startsWith('trusted.overlay.')) continue;
    const value = lgetxattr(fromText(root), name);
    if (value !== undefined) lsetxattr(fromText(upper), name, value);
  }
  const time = (ns: bigint) => {
    const nsec = ((ns % 1_000_000_000n) + 1_000_000_000n) % 1_000_000_000n;
    return { sec: Number((ns - nsec) / 1_000_000_000n), nsec: Number(nsec) };
  };
  lutimes(fromText(upper), time(stat.atimeNs), time(stat.mtimeNs));
}
