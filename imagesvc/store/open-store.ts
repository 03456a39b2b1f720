/** From what the user wrote to a store. Opening makes nothing: a store that does not exist yet is an empty one. */
import { homedir } from 'node:os';
import { isAbsolute, join, resolve } from 'node:path';
import { fileURLToPath } from 'node:url';
import { messageOf } from '#base';
import { fail } from '../errors.ts';
import type { BlobStore } from './blob-store.ts';
import { FolderStore } from './folder-store.ts';

/** `$DSEC_STORE`; else /var/lib/dsec/store for root; else the user's data folder. */
export function defaultStoreUrl(env: NodeJS.ProcessEnv = process.env, uid = process.getuid?.()): string {
  if (env.DSEC_STORE) return env.DSEC_STORE;
  if (uid === 0) return 'file:///var/lib/dsec/store';
  // XDG base directories: a relative path there is to be ignored.
  const data = env.XDG_DATA_HOME && isAbsolute(env.XDG_DATA_HOME) ? env.XDG_DATA_HOME : join(homedir(), '.local/share');
  return join(data, 'dsec/store');
}

/**
 * `file:///path` or a path, `s3://bucket/prefix?…` (docs/s3.md), `docker://host/repository` (read only).
 * `sync: false`: a folder store does not wait for the disk; a power cut may then cost what was just published.
 * @throws STORE_SCHEME, STORE_URL, STORE_VERSION, STORE_FOREIGN, STORE_NOT_FOLDER, STORE_ACCESS, STORE_REMOTE*
 */
export async function openStore(url: string, options: { readonly sync?: boolean } = {}): Promise<BlobStore> {
  // What speaks to the network is loaded only for it.
  if (/^s3:\/\//i.test(url)) {
    const { S3Store } = await import('./s3-store.ts');
    const store = new S3Store(url);
    await store.open();
    return store;
  }
  if (/^docker:\/\//i.test(url)) {
    const { RegistryStore } = await import('./registry-store.ts');
    return RegistryStore.open(url);
  }
  const store = new FolderStore(folderOf(url), options);
  await store.open();
  return store;
}

function folderOf(url: string): string {
  const path = pathIn(url);
  if (path === '' || path.includes('\0')) throw fail('STORE_SCHEME', { url, why: 'this is no path' });
  return resolve(path);
}

function pathIn(url: string): string {
  const scheme = /^([a-z][a-z0-9+.-]*):\/\//i.exec(url)?.[1]?.toLowerCase();
  if (scheme === undefined && !url.startsWith('file:')) return url;
  if (scheme !== undefined && scheme !== 'file') {
    const why = `nothing is stored at "${scheme}://"; folders are (a local disk, 3FS, any POSIX mount), s3:// and docker://`;
    throw fail('STORE_SCHEME', { url, why });
  }
  try {
    return fileURLToPath(url);
  } catch (error) {
    throw fail('STORE_SCHEME', { url, why: messageOf(error) }, error);
  }
}
