/**
 * Files that are replaced as a whole and survive a power failure: contents are synced before a name points to them, and a folder is synced
 * after a name in it has changed.
 */
import { open, rename, rm } from 'node:fs/promises';
import { systemCode } from '#base';

/** Makes the names in a folder durable. File systems that cannot are let be: they have nothing better to offer. */
export async function syncFolder(path: string): Promise<void> {
  const folder = await open(path, 'r');
  try {
    await folder.sync();
  } catch (error) {
    if (!['EINVAL', 'ENOTSUP', 'ENOSYS'].includes(systemCode(error) ?? '')) throw error;
  } finally {
    await folder.close();
  }
}

/**
 * Gives `path` these contents, or leaves it as it is. Mode 0600. Safe when the folder has been synced, which the caller does: when that
 * fails the new contents count all the same. Two at once for the same path are the caller's to keep apart.
 * @param fresh where the contents are until then, in the same folder
 * @param onWritten called when they are safe there, before `path` is replaced
 */
export async function replaceFile(
  path: string,
  text: string,
  { fresh = `${path}.new`, onWritten }: { readonly fresh?: string; readonly onWritten?: () => void } = {},
): Promise<void> {
  try {
    const file = await open(fresh, 'w', 0o600);
    try {
      await file.writeFile(text);
      await file.sync();
    } finally {
      await file.close();
    }
    onWritten?.();
    await rename(fresh, path);
  } catch (error) {
    await rm(fresh, { force: true }).catch(() => {});
    throw error;
  }
}
