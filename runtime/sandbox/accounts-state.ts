/**
 * Whether the accounts of a running sandbox may have changed since they were read, told from outside without following anything of the
 * sandbox's: it is the size, times and identity of its /etc/passwd and /etc/group, and of nothing that a link leads to.
 */
import { lstatSync } from 'node:fs';
import { join } from 'node:path';

/** A change that comes within the kernel's tick of another may leave the same times. */
const SETTLED_MS = 2_000;

/** `root`: where it is mounted. Undefined when it cannot be told: then they have to be read again. */
export function accountsState(root: string): string | undefined {
  const folder = join(root, 'etc');
  const parts = [stateOf(folder, true)];
  if (parts[0] === undefined) return undefined;
  if (parts[0] !== ABSENT) parts.push(stateOf(join(folder, 'passwd'), false), stateOf(join(folder, 'group'), false));
  return parts.includes(undefined) ? undefined : parts.join(' ');
}

const ABSENT = 'absent';

function stateOf(path: string, isFolder: boolean): string | undefined {
  try {
    // Many images have none, and what is thrown costs more than all the rest of the question.
    const found = lstatSync(path, { bigint: true, throwIfNoEntry: false });
    if (found === undefined) return ABSENT;
    // Names in a folder come and go; what they lead to is looked at below.
    if (isFolder) return found.isDirectory() ? 'folder' : undefined;
    if (!found.isFile() || Math.abs(Date.now() - Number(found.ctimeMs)) < SETTLED_MS) return undefined;
    return [found.dev, found.ino, found.size, found.mtimeNs, found.ctimeNs].join(':');
  } catch {
    return undefined;
  }
}
