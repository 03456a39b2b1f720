/**
 * Where a data server keeps what is its own. One server a store and node, named by a digest of the store's URL:
 *
 *     <run>/data/lock            taken by whoever starts or reclaims a server
 *     <run>/data/<id>/state.json who serves, written before each effect; `sock`, the control socket; `log`
 *     <run>/data/<id>/mnt/       the FUSE mount: one file a blob
 *     <run>/data/<id>/blobs/     what is known of each blob (blob-registry.ts), or of each layer (layer-registry.ts)
 *     <cache>/chunks/<id>/       the chunk cache, which outlives the server and the boot
 */
import { createHash } from 'node:crypto';
import { readdirSync, readFileSync, renameSync, rmdirSync, rmSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import type { ProcessIdentity } from '#linux';

export interface DataFolders {
  readonly id: string;
  readonly folder: string;
  readonly state: string;
  readonly socket: string;
  readonly log: string;
  readonly mountPoint: string;
  readonly blobs: string;
}

/** In place of a store's URL: the layer server (layer-server/), of which a run folder has one, for layers of all stores. */
export const LAYERS = 'dsec:layers';

export function dataServerId(storeUrl: string, runDir = ''): string {
  const served = storeUrl === LAYERS ? `${LAYERS}:${runDir}` : storeUrl;
  return createHash('sha256').update(served).digest('hex').slice(0, 16);
}

export function dataFolders(runDir: string, id: string): DataFolders {
  return foldersIn(join(runDir, 'data', id), id);
}

export function foldersIn(folder: string, id: string): DataFolders {
  return {
    id,
    folder,
    state: join(folder, 'state.json'),
    socket: join(folder, 'sock'),
    log: join(folder, 'log'),
    mountPoint: join(folder, 'mnt'),
    blobs: join(folder, 'blobs'),
  };
}

export function chunksFolder(cacheDir: string, id: string): string {
  return join(cacheDir, 'chunks', id);
}

/** What the kernel's mount table shows as the mount's source. */
export function mountSourceOf(id: string): string {
  return `dsec-data:${id}`;
}

/** `<run>/data/<id>/state.json` */
export interface DataServerState {
  readonly id: string;
  readonly storeUrl: string;
  readonly cacheDir: string;
  readonly transport: 'raw' | 'native';
  /** Whether requests outlive a server. */
  readonly canResend: boolean;
  /** Mount namespace of the mount. */
  readonly namespace: string;
  readonly supervisor: ProcessIdentity;
  readonly server?: ProcessIdentity;
}

export function writeState(folders: DataFolders, state: DataServerState): void {
  const fresh = `${folders.state}.tmp`;
  writeFileSync(fresh, `${JSON.stringify(state, null, 1)}\n`, { mode: 0o600 });
  renameSync(fresh, folders.state);
}

/** Undefined when there is none, or it is damaged. */
export function readState(folders: DataFolders): DataServerState | undefined {
  try {
    const state = JSON.parse(readFileSync(folders.state, 'utf8')) as Partial<DataServerState>;
    const whole = state.id === folders.id && typeof state.storeUrl === 'string' && state.supervisor !== undefined;
    return whole ? (state as DataServerState) : undefined;
  } catch {
    return undefined;
  }
}

/** All but the log, which stays for whoever asks why. What is still mounted is not looked into. */
export function removeTraces(folders: DataFolders): void {
  try {
    rmdirSync(folders.mountPoint);
  } catch {
    // Not there, or still mounted.
  }
  for (const path of [folders.state, folders.socket, folders.blobs]) rmSync(path, { recursive: true, force: true });
}

export function dataServerIds(runDir: string): string[] {
  try {
    return readdirSync(join(runDir, 'data')).filter((name) => /^[0-9a-f]{16}$/.test(name));
  } catch {
    return [];
  }
}
