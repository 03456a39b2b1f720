/**
 * Where a node keeps what is its own: its mount table (gone after a reboot, best on a tmpfs) and its caches (may be
 * deleted at any time, cost time only). Both belong to root alone.
 */
import { resolve } from 'node:path';

export interface NodeFolders {
  /** Mount table, locks, layer mounts: $DSEC_RUN, else /run/dsec. */
  readonly runDir: string;
  /** Copies and proofs: $DSEC_CACHE, else /var/lib/dsec/cache. */
  readonly cacheDir: string;
}

export function nodeFolders(given: Partial<NodeFolders> = {}): NodeFolders {
  return {
    runDir: resolve(given.runDir || process.env.DSEC_RUN || '/run/dsec'),
    cacheDir: resolve(given.cacheDir || process.env.DSEC_CACHE || '/var/lib/dsec/cache'),
  };
}
