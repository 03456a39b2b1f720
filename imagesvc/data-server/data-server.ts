/**
 * The data server of a store, as commands use it: started in the background when none runs, asked to show blobs, listed,
 * stopped; and what is to be done about one that has died.
 *
 * One server a store and node. `<run>/data/lock` is held by whoever starts or reclaims one.
 */
import { spawn } from 'node:child_process';
import { closeSync, mkdirSync, openSync, readFileSync, realpathSync } from 'node:fs';
import { join } from 'node:path';
import { type Digest, hexOf, isDsecError, messageOf, processEntry, systemCode } from '#base';
import type { ByteRange, StoredBlob } from '#chunk-cache';
import { bootId, isAlive, lock, readMountInfo, umount } from '#linux';
import { fail } from '../errors.ts';
import type { LayerFiles } from '../layer-server/layer-facts.ts';
import { type MountRecord, readRecords } from '../mount/mount-record.ts';
import { textOf, withMountTable } from '../mount/mount-table.ts';
import { type NodeFolders, nodeFolders } from '../mount/node-folders.ts';
import type { RecordedReads } from '../trace/trace-from-reads.ts';
import { askControl, type ControlRequest } from './control.ts';
import {
  type DataFolders,
  type DataServerState,
  dataFolders,
  dataServerId,
  dataServerIds,
  LAYERS,
  mountSourceOf,
  readState,
  removeTraces,
} from './data-folders.ts';
import type { AddedBlob, ChunkReport, ServerConfig, ServerStats } from './server-messages.ts';
import type { SupervisorConfig } from './supervisor.ts';
import type { SupervisorMessage } from './supervisor-process.ts';

/** Command lines for Node. */
export interface DataServerPrograms {
  readonly supervisor: readonly string[];
  readonly server: readonly string[];
  /** Of the layer server. */
  readonly layers?: readonly string[];
}

export interface DataServerOptions extends Partial<NodeFolders> {
  /** In place of this program's own processes. */
  readonly programs?: DataServerPrograms;
  readonly transport?: 'auto' | 'raw' | 'native';
  /** It ends after nothing has used it for this long: five minutes. */
  readonly idleMs?: number;
  /** A server whose supervisor has died starts another one after this long: a minute. */
  readonly orphanMs?: number;
  readonly threads?: number;
  readonly memoryBytes?: number;
  readonly capacityBytes?: number;
  /** Notes every read, for `recorded`: for a server that is started for a trace. */
  readonly record?: boolean;
}

export interface DataServerStatus {
  readonly store: string;
  readonly version: string;
  readonly transport: 'raw' | 'native';
  readonly canResend: boolean;
  readonly ready: boolean;
  readonly supervisor: number;
  readonly server?: number;
  readonly restarts: number;
  readonly blobs: number;
  readonly mountPoint: string;
}

const IDLE_MS = 5 * 60_000;
/** Two seconds: making a sandbox under load takes part of one. */
const IN_USE_TRIES = 40;
const IN_USE_PAUSE_MS = 50;
const ORPHAN_MS = 60_000;
const START_TIMEOUT_MS = 60_000;
const LOG_TAIL_BYTES = 600;
/** Files that were never proved on this node are hashed. */
const ADD_LAYER_TIMEOUT_MS = 30 * 60_000;

/** A running server. */
export class DataServer {
  readonly id: string;
  readonly storeUrl: string;
  readonly #folders: DataFolders;

  constructor(storeUrl: string, folders: DataFolders) {
    this.id = folders.id;
    this.storeUrl = storeUrl;
    this.#folders = folders;
  }

  /** Where its blobs are, `<hex>` each. */
  get mountPoint(): string {
    return this.#folders.mountPoint;
  }

  /** The blob can be opened when this returns. @throws DATA_BLOB_CONFLICT, DATA_CONTROL */
  async add(digest: Digest, sizeBytes: number, chunkDigests: Buffer): Promise<AddedBlob> {
    const request = { op: 'add', digest, sizeBytes, chunkDigests: chunkDigests.toString('base64') } as const;
    return (await this.#ask(request)) as AddedBlob;
  }

  /** Of the layer server: where the layer's tree is when this returns. @throws DATA_CONTROL */
  async addLayer(layer: LayerFiles): Promise<string> {
    await this.#ask({ op: 'add-layer', layer }, ADD_LAYER_TIMEOUT_MS);
    return join(this.mountPoint, hexOf(layer.meta.digest));
  }

  /** What its cache has on disk. */
  async cached(): Promise<StoredBlob[]> {
    return (await this.#ask({ op: 'cached' })) as StoredBlob[];
  }

  /** Takes blobs out of its cache, but for those that a mount names; those that went. */
  async forget(digests: readonly Digest[]): Promise<Digest[]> {
    return (await this.#ask({ op: 'forget', digests })) as Digest[];
  }

  async status(): Promise<DataServerStatus> {
    return (await this.#ask({ op: 'status' }, 5000)) as DataServerStatus;
  }

  async stats(): Promise<ServerStats> {
    return (await this.#ask({ op: 'stats' })) as ServerStats;
  }

  /** Begins to fetch ranges of a blob that was added, in this order, behind whatever readers ask for. */
  async prefetch(digest: Digest, ranges: readonly ByteRange[]): Promise<void> {
    await this.#ask({ op: 'prefetch', digest, ranges });
  }

  /** What the cache has of a blob, a byte a chunk (`chunkFacts`); undefined when the server does not show the blob. */
  async chunks(digest: Digest): Promise<Buffer | undefined> {
    const { chunks } = (await this.#ask({ op: 'chunks', digest })) as ChunkReport;
    return chunks === undefined ? undefined : Buffer.from(chunks, 'base64');
  }

  /** What was read, in order, since it started: of a server with `record`. */
  async recorded(): Promise<RecordedReads> {
    return (await this.#ask({ op: 'recorded' })) as RecordedReads;
  }

  /** @throws DATA_IN_USE unless `force`: mounts that use it then read errors */
  async stop(options: { force?: boolean } = {}): Promise<void> {
    const supervisor = readState(this.#folders)?.supervisor;
    await this.#askToStop(options.force);
    for (let i = 0; i < 500 && readState(this.#folders) !== undefined; i++) await pause(10);
    // What it has open is in use until it ends; that of layers may have somebody to serve whom no table shows.
    for (let i = 0; i < 200 && supervisor !== undefined && isAlive(supervisor); i++) await pause(10);
  }

  /**
   * A mount that is gone here lives on for a moment in the namespace of a sandbox that is just being made, and in whoever
   * reads its file at this time: in use is what stays so.
   */
  async #askToStop(force: boolean | undefined): Promise<void> {
    for (let tries = 1; ; tries++) {
      try {
        await this.#ask({ op: 'stop', force });
        return;
      } catch (error) {
        if (!isDsecError(error, 'DATA_IN_USE') || tries === IN_USE_TRIES) throw error;
      }
      await pause(IN_USE_PAUSE_MS);
    }
  }

  /** Puts the serving code of this program in place of what serves now. Readers wait a moment. */
  async replace(server: readonly string[] = serverCommand(this.storeUrl)): Promise<void> {
    const { restarts } = await this.status();
    await this.#ask({ op: 'replace', server, version: version() });
    for (let i = 0; i < 1000; i++) {
      const status = await this.status();
      if (status.restarts > restarts && status.ready) return;
      await pause(10);
    }
    throw fail('DATA_CONTROL', {
      store: this.storeUrl,
      reason: 'the new server does not serve',
      log: this.#folders.log,
    });
  }

  async #ask(request: ControlRequest, timeoutMs?: number): Promise<unknown> {
    const { storeUrl: store } = this;
    const { socket, log } = this.#folders;
    let reply: Awaited<ReturnType<typeof askControl>>;
    try {
      reply = await askControl(socket, request, timeoutMs);
    } catch (error) {
      throw fail('DATA_CONTROL', { store, reason: messageOf(error), log }, error);
    }
    if (reply.ok) return reply.value;
    if (reply.code === 'DATA_IN_USE') throw fail('DATA_IN_USE', { store });
    throw fail('DATA_CONTROL', { store, reason: reply.message, log });
  }
}

/**
 * The server of the store, started when there is none. One of another version is replaced by this program's.
 * @throws DATA_NOT_ROOT, DATA_FUSE_UNAVAILABLE, DATA_START_FAILED
 */
export async function ensureDataServer(storeUrl: string, options: DataServerOptions = {}): Promise<DataServer> {
  if (process.geteuid?.() !== 0) throw fail('DATA_NOT_ROOT', {});
  mkdirSync(nodeFolders(options).runDir, { recursive: true, mode: 0o755 });
  const { runDir, cacheDir } = resolvedFolders(options);
  const folders = dataFolders(runDir, dataServerId(storeUrl, runDir));
  const held = await lock(join(runDir, 'data', 'lock'), { timeoutMs: START_TIMEOUT_MS });
  try {
    const server = new DataServer(storeUrl, folders);
    const running = await runningStatus(server, folders);
    if (running !== undefined) {
      if (running.version !== version() && running.canResend) await server.replace();
      return server;
    }
    await reclaimOne(runDir, folders);
    const state = readState(folders);
    // An orphan that serves on is adopted, and its mounts live on.
    if (state !== undefined && serves(state)) await startSupervisor(state, folders, runDir, options, true);
    else await startSupervisor({ storeUrl, cacheDir }, folders, runDir, options, false);
    return server;
  } finally {
    held.release();
  }
}

async function runningStatus(server: DataServer, folders: DataFolders): Promise<DataServerStatus | undefined> {
  const state = readState(folders);
  if (state === undefined || !isAlive(state.supervisor)) return undefined;
  for (let tries = 0; ; tries++) {
    try {
      return await server.status();
    } catch (error) {
      // It may be about to end, having been unused for long.
      if (!isAlive(state.supervisor) || readState(folders) === undefined) return undefined;
      if (tries > 100) throw error;
      await pause(50);
    }
  }
}

/** The server that runs for the store, or undefined. */
export async function findDataServer(
  storeUrl: string,
  options: Partial<NodeFolders> = {},
): Promise<DataServer | undefined> {
  const { runDir } = resolvedFolders(options);
  const folders = dataFolders(runDir, dataServerId(storeUrl, runDir));
  const server = new DataServer(storeUrl, folders);
  return (await runningStatus(server, folders)) === undefined ? undefined : server;
}

function serverCommand(storeUrl: string, programs?: DataServerPrograms): readonly string[] {
  if (storeUrl === LAYERS) {
    const layers = processEntry(
      'layer-server-process',
      new URL('../layer-server/layer-server-process.ts', import.meta.url),
    );
    return programs?.layers ?? layers;
  }
  if (programs !== undefined) return programs.server;
  return processEntry('data-server-process', new URL('./server-process.ts', import.meta.url));
}

/** Each build of the program is one. */
function version(): string {
  return import.meta.url;
}

async function startSupervisor(
  { storeUrl, cacheDir, server, canResend }: Pick<DataServerState, 'storeUrl' | 'cacheDir'> & Partial<DataServerState>,
  folders: DataFolders,
  runDir: string,
  options: DataServerOptions,
  adopt: boolean,
): Promise<void> {
  mkdirSync(folders.folder, { recursive: true, mode: 0o700 });
  const config: SupervisorConfig = {
    id: folders.id,
    runDir,
    cacheDir,
    storeUrl,
    server: serverCommand(storeUrl, options.programs),
    version: version(),
    transport: storeUrl === LAYERS ? 'raw' : (options.transport ?? 'auto'),
    idleMs: options.idleMs ?? IDLE_MS,
    orphanMs: options.orphanMs ?? ORPHAN_MS,
    threads: options.threads,
    memoryBytes: options.memoryBytes,
    capacityBytes: options.capacityBytes,
    record: options.record,
    adopt: adopt ? { server: server!, canResend: canResend ?? false } : undefined,
  };
  const entry =
    options.programs?.supervisor ??
    processEntry('data-supervisor', new URL('./supervisor-process.ts', import.meta.url));
  const log = openSync(folders.log, 'w', 0o600);
  try {
    // In the root folder and a session of its own: it outlives the command and keeps no file system busy.
    const child = spawn(process.execPath, [...entry, JSON.stringify(config)], {
      detached: true,
      cwd: '/',
      stdio: ['ignore', log, log, 'ipc'],
    });
    await new Promise<void>((started, failed) => {
      const failure = (reason: string) => {
        failed(
          fail('DATA_START_FAILED', { store: storeUrl, reason: `${reason}${logTail(folders.log)}`, log: folders.log }),
        );
      };
      const timer = setTimeout(() => {
        child.kill('SIGKILL');
        failure(`it did not serve within ${START_TIMEOUT_MS / 1000} s`);
      }, START_TIMEOUT_MS);
      child.once('error', (error) => failure(error.message));
      child.once('exit', (code, signal) => failure(`it ended with ${signal ?? `status ${code}`}`));
      child.once('message', (message: SupervisorMessage) => {
        clearTimeout(timer);
        child.removeAllListeners('exit');
        if (message.event === 'ready') started();
        else if (message.code === 'DATA_FUSE_UNAVAILABLE') failed(fail(message.code, { reason: message.message }));
        else failure(message.message);
      });
    });
    if (child.connected) child.disconnect();
    child.unref();
  } finally {
    closeSync(log);
  }
}

function logTail(path: string): string {
  try {
    const text = readFileSync(path, 'utf8').trim();
    return text === '' ? '' : `: ${text.slice(-LOG_TAIL_BYTES)}`;
  } catch {
    return '';
  }
}

export interface DataServerRow {
  readonly id: string;
  readonly storeUrl: string;
  /** `serving`; `orphaned`: its supervisor is gone, it serves on; `dead`: what reads through its mount gets errors. */
  readonly state: 'serving' | 'orphaned' | 'dead';
  readonly mountPoint: string;
  readonly supervisor: number;
  readonly server?: number;
  /** Ids of the mounts that read through it. */
  readonly mounts: readonly string[];
}

/** Changes nothing. */
export function listDataServers(options: Partial<NodeFolders> = {}): DataServerRow[] {
  const { runDir } = resolvedFolders(options);
  return dataServerIds(runDir).flatMap((id) => {
    const folders = dataFolders(runDir, id);
    const state = readState(folders);
    return state === undefined ? [] : [rowOf(state, folders, runDir)];
  });
}

function rowOf(state: DataServerState, folders: DataFolders, runDir: string): DataServerRow {
  return {
    id: state.id,
    storeUrl: state.storeUrl,
    state: isAlive(state.supervisor) ? 'serving' : serves(state) ? 'orphaned' : 'dead',
    mountPoint: folders.mountPoint,
    supervisor: state.supervisor.pid,
    server: state.server?.pid,
    mounts: usersOf(state.id, recordsOf(runDir)).map(({ id }) => id),
  };
}

/** A server without its supervisor. A native mount does not outlive its supervisor in a way that could be taken over. */
function serves(state: DataServerState): boolean {
  return state.transport === 'raw' && state.server !== undefined && !isAlive(state.supervisor) && isAlive(state.server);
}

function recordsOf(runDir: string): readonly MountRecord[] {
  try {
    return readRecords(join(runDir, 'mounts')).records;
  } catch {
    return [];
  }
}

/** Mounts with a layer that is read through the server's mount. */
function usersOf(id: string, records: readonly MountRecord[]): MountRecord[] {
  return records.filter((record) => record.lazy?.some((layer) => layer.server === id && layer.served));
}

export interface DataReclaimReport {
  /** Servers that had lost their supervisor and have a new one. */
  readonly adopted: readonly DataServerRow[];
  /** Servers that were dead, with what was mounted through them: all of it is unmounted. */
  readonly removed: readonly DataServerRow[];
}

/**
 * Puts right what dead data servers have left: one that serves on without a supervisor gets a new one; a dead one's mount,
 * and the image mounts that read through it (they could only read errors), are unmounted.
 */
export async function reclaimDataServers(options: DataServerOptions = {}): Promise<DataReclaimReport> {
  const adopted: DataServerRow[] = [];
  const removed: DataServerRow[] = [];
  const { runDir } = resolvedFolders(options);
  if (process.geteuid?.() !== 0 || dataServerIds(runDir).length === 0) return { adopted, removed };
  const held = await lock(join(runDir, 'data', 'lock'), { timeoutMs: START_TIMEOUT_MS });
  try {
    for (const id of dataServerIds(runDir)) {
      const folders = dataFolders(runDir, id);
      const state = readState(folders);
      if (state !== undefined && isAlive(state.supervisor)) continue;
      if (state !== undefined && serves(state)) {
        const row = rowOf(state, folders, runDir);
        await startSupervisor(state, folders, runDir, options, true);
        adopted.push(row);
      } else {
        const row = await reclaimOne(runDir, folders);
        if (row !== undefined) removed.push(row);
      }
    }
    return { adopted, removed };
  } finally {
    held.release();
  }
}

/** Of this very process, a server without its supervisor: starts one, which takes the mount over and ends this process. */
export async function adoptOrphan({ runDir, id, ...options }: ServerConfig): Promise<void> {
  const held = await lock(join(runDir, 'data', 'lock'), { timeoutMs: START_TIMEOUT_MS });
  try {
    const folders = dataFolders(runDir, id);
    const state = readState(folders);
    if (state === undefined || state.server?.pid !== process.pid || !serves(state)) return;
    const { idleMs, orphanMs, threads, memoryBytes, capacityBytes, record } = options;
    const same = { idleMs, orphanMs, threads, memoryBytes, capacityBytes, record };
    await startSupervisor(state, folders, runDir, same, true);
  } finally {
    held.release();
  }
}

/** Of a server that is dead: undefined when it is not, or when there was nothing. */
async function reclaimOne(runDir: string, folders: DataFolders): Promise<DataServerRow | undefined> {
  const state = readState(folders);
  if (state !== undefined && (isAlive(state.supervisor) || serves(state))) return undefined;
  // A native server without its supervisor, or one that is on its way out.
  if (state?.server !== undefined && isAlive(state.server)) process.kill(state.server.pid, 'SIGKILL');
  const row = state === undefined ? undefined : rowOf(state, folders, runDir);
  if (row !== undefined && row.mounts.length > 0) {
    await withMountTable(runDir, (table) => {
      for (const record of usersOf(row.id, table.ownRecords)) table.undo(record);
    });
  }
  const source = mountSourceOf(folders.id);
  const rows = readMountInfo().filter(
    (mounted) => mounted.source === source && textOf(mounted.mountPoint) === folders.mountPoint,
  );
  for (const _ of rows) umountLazily(folders.mountPoint);
  removeTraces(folders);
  return state?.supervisor.bootId === bootId() ? row : undefined;
}

function umountLazily(path: string): void {
  try {
    umount(path, { lazy: true });
  } catch (error) {
    if (!['EINVAL', 'ENOENT'].includes(systemCode(error) ?? '')) throw error;
  }
}

/** Ends all servers of the node that nothing uses; with `force` all. For tests and shutdown. */
export async function stopDataServers(options: Partial<NodeFolders> & { force?: boolean } = {}): Promise<void> {
  const { runDir } = resolvedFolders(options);
  // The layer server first: it reads what the others show.
  const rows = listDataServers(options).sort((a, b) => Number(b.storeUrl === LAYERS) - Number(a.storeUrl === LAYERS));
  for (const row of rows) {
    if (row.state !== 'serving') continue;
    await new DataServer(row.storeUrl, dataFolders(runDir, row.id)).stop({ force: options.force });
  }
}

/** As the kernel shows mount points: symlinks resolved. */
function resolvedFolders(options: Partial<NodeFolders>): NodeFolders {
  const folders = nodeFolders(options);
  try {
    return { ...folders, runDir: realpathSync(folders.runDir) };
  } catch {
    // Not there yet: nothing is in it.
    return folders;
  }
}

function pause(ms: number): Promise<void> {
  return new Promise((done) => setTimeout(done, ms));
}
