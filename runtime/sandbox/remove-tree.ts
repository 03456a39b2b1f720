/**
 * Removing what a sandbox had. Most had next to nothing: a few small files are removed at once, which costs a tenth of what as many
 * turns through the thread pool do. The rest goes there, so that a large tree holds up nobody.
 */
import { execFile } from 'node:child_process';
import { lstatSync, readdirSync, rmdirSync, unlinkSync } from 'node:fs';
import { rm } from 'node:fs/promises';
import { join } from 'node:path';
import { promisify } from 'node:util';

const execFileAsync = promisify(execFile);

const AT_ONCE = 64;
/** Taking a large file's blocks back takes a while. */
const SMALL_BYTES = 1 << 20;

/** Never through a mount: whoever calls knows that nothing is mounted in there. What is not there is no error. */
export async function removeTree(path: string): Promise<void> {
  if (removeFew(path)) return;
  try {
    await rm(path, { recursive: true, force: true });
  } catch {
    // A sandbox can make paths that are too long to name; rm(1) goes through them step by step.
    await execFileAsync('rm', ['-rf', '--one-file-system', '--', path]);
  }
}

/** False: something is left. */
function removeFew(path: string): boolean {
  let left = AT_ONCE;
  const remove = (one: string, isFolder: boolean): boolean => {
    if (--left < 0) return false;
    if (!isFolder) {
      if (lstatSync(one).size > SMALL_BYTES) return false;
      unlinkSync(one);
      return true;
    }
    // A name that is no UTF-8 would be another one as text: then it is not found, and the folder not empty.
    for (const entry of readdirSync(one, { withFileTypes: true })) {
      if (!remove(join(one, entry.name), entry.isDirectory())) return false;
    }
    rmdirSync(one);
    return true;
  };
  try {
    const stat = lstatSync(path, { throwIfNoEntry: false });
    return stat === undefined || remove(path, stat.isDirectory());
  } catch {
    return false;
  }
}
