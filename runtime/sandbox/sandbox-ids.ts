/** The ids of a sandbox with a user namespace: taken when it begins, given back when nothing of it runs any more. */
import { existsSync } from 'node:fs';
import { isDsecError, messageOf } from '#base';
import type { IdMapping } from '#imagesvc';
import { tryLock, withFileSystemIds } from '#linux';
import { orphanedRanges, releaseRange, takeRange } from '../backend/id-ranges.ts';
import { noteLack, type UsernsMode, usesUserNamespace } from '../backend/user-namespace.ts';
import { releaseAndForget } from './end-sandbox.ts';
import { type RuntimeFolders, sandboxFolders } from './state-folders.ts';

/** Undefined: it has no user namespace. Under the lock on its name. @throws RUNTIME_USERNS, RUNTIME_NO_IDS */
export async function takeIds(
  name: string,
  folders: RuntimeFolders,
  asked: UsernsMode | undefined,
  network: 'none' | 'host',
): Promise<number | undefined> {
  const wanted = await usesUserNamespace(folders, asked, network);
  return wanted ? takeRange(folders.stateDir, name) : undefined;
}

/** Ranges of sandboxes that are not there: whoever was about to make them was killed. */
export function reclaimIds(folders: RuntimeFolders, names: readonly string[]): void {
  for (const { name, base } of orphanedRanges(folders.stateDir, new Set(names))) {
    const places = sandboxFolders(folders, name);
    const held = tryLock(places.lock);
    if (held === undefined) continue;
    const gone = !existsSync(places.folder);
    if (gone) releaseRange(folders.stateDir, name, base);
    if (gone) releaseAndForget(held);
    else held.release();
  }
}

/** What `work`, which must not wait, makes in the sandbox's root from outside belongs to the sandbox's root user. */
export function asItsRoot<T>(idBase: number | undefined, work: () => T): T {
  return idBase === undefined ? work() : withFileSystemIds(idBase, work);
}

/** For `mountImage`. `open`: a descriptor of the sandbox's user namespace. */
export function mappingOf(
  idBase: number | undefined,
  open: (idBase: number) => Promise<number>,
): (() => Promise<IdMapping>) | undefined {
  return idBase === undefined ? undefined : async () => ({ userNamespace: await open(idBase), owner: idBase });
}

/** Makes a sandbox; where only the attempt shows that owners cannot be shifted here, again without a user namespace, unless one was asked for. */
export async function withOrWithoutIds<T>(
  folders: RuntimeFolders,
  asked: UsernsMode | undefined,
  make: (asked: UsernsMode | undefined) => Promise<T>,
): Promise<T> {
  try {
    return await make(asked);
  } catch (error) {
    if (asked === 'private' || !isDsecError(error, 'MOUNT_ID_MAPPING')) throw error;
    noteLack(folders, messageOf(error));
    return make('host');
  }
}
