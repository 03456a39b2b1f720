/**
 * Holds the mount, so that the process that serves it may die.
 *
 * The supervisor opens /dev/fuse, mounts, and keeps the descriptor; a child of its own inherits it and serves. The child
 * dies: the supervisor waits until it is gone altogether (a thread of it that still reads would swallow what is resent), has
 * the kernel send again what was taken and not answered, and starts the next. Readers wait meanwhile. A new version is put in
 * place the same way. It serves nothing itself and knows little, so that nothing in it can fail.
 *
 * Ends when nothing has used the mount for a while (the kernel says so: MNT_EXPIRE), or when it is told to.
 */
import { type ChildProcess, spawn } from 'node:child_process';
import { closeSync, mkdirSync, readFileSync, readlinkSync, renameSync, rmSync, utimesSync } from 'node:fs';
import { dirname, join } from 'node:path';
import { setTimeout as delay } from 'node:timers/promises';
import { messageOf, parseDigest, systemCode } from '#base';
import { fuse, isAlive, type ProcessIdentity, processIdentity, takeDescriptor, tryLock, umount } from '#linux';
import { fail } from '../errors.ts';
import type { LayerFiles } from '../layer-server/layer-facts.ts';
import { LayerRegistry } from '../layer-server/layer-registry.ts';
import { LAYER_TREES } from '../layer-server/tree-protocol.ts';
import { AskedAhead } from './asked-ahead.ts';
import { BlobRegistry } from './blob-registry.ts';
import { type ControlRequest, serveControl } from './control.ts';
import {
  chunksFolder,
  type DataFolders,
  type DataServerState,
  dataFolders,
  foldersIn,
  LAYERS,
  mountSourceOf,
  removeTraces,
  writeState,
} from './data-folders.ts';
import { hasCopies, mountedElsewhere, waiting } from './mount-in-use.ts';
import { connectFuse } from './raw-transport.ts';
import type { FromServer, ServerConfig, ToServer } from './server-messages.ts';

export interface SupervisorConfig {
  readonly id: string;
  readonly runDir: string;
  readonly cacheDir: string;
  readonly storeUrl: string;
  /** Command line of the serving process, for this Node. */
  readonly server: readonly string[];
  readonly version: string;
  readonly transport: 'auto' | 'raw' | 'native';
  /** Ends after being unused for this long, or twice that. */
  readonly idleMs: number;
  /** See ServerConfig. */
  readonly orphanMs: number;
  readonly threads?: number;
  readonly memoryBytes?: number;
  readonly capacityBytes?: number;
  /** See ServerConfig. */
  readonly record?: boolean;
  /** A serving process whose supervisor is gone: the descriptor is taken from it. */
  readonly adopt?: { readonly server: ProcessIdentity; readonly canResend: boolean };
}

/** Servers in a row that died before they served: then it is no accident. */
const FAILED_STARTS = 12;
const SERVER_FD = 3;
/** Reads of files that may wait for a store take a thread each. */
const READS_AT_ONCE = '32';

type Unnumbered<T> = T extends unknown ? Omit<T, 'id'> : never;

interface Pending {
  readonly message: ToServer;
  resolve(value: unknown): void;
  reject(error: Error): void;
}

export class Supervisor {
  readonly #config: SupervisorConfig;
  #folders: DataFolders;
  readonly #registry: BlobRegistry | LayerRegistry;
  #server: readonly string[];
  #version: string;
  #fd: number | undefined;
  #transport: 'raw' | 'native' = 'raw';
  #canResend = false;
  #child: ChildProcess | undefined;
  #ready = false;
  #everReady = false;
  #failedStarts = 0;
  #restarts = 0;
  #stopping = false;
  /** Unmounted, and serving whoever is still there. */
  #fading = false;
  #control: { close(): void } | undefined;
  #timer: NodeJS.Timeout | undefined;
  #lastUseMs = performance.now();
  readonly #pending = new Map<number, Pending>();
  readonly #ahead = new AskedAhead();
  #nextId = 1;
  #onFirst: { resolve(): void; reject(error: Error): void } | undefined;
  #onEnd = () => {};
  /** When all is unmounted and removed. */
  readonly ended = new Promise<void>((resolve) => {
    this.#onEnd = resolve;
  });

  constructor(config: SupervisorConfig) {
    this.#config = config;
    this.#server = config.server;
    this.#version = config.version;
    this.#folders = dataFolders(config.runDir, config.id);
    mkdirSync(this.#folders.folder, { recursive: true, mode: 0o700 });
    const registry = config.storeUrl === LAYERS ? LayerRegistry : BlobRegistry;
    this.#registry = new registry(this.#folders.blobs);
  }

  /** Mounts (or adopts) and serves. @throws DATA_FUSE_UNAVAILABLE, DATA_START_FAILED; nothing is left then */
  async start(): Promise<void> {
    this.#writeState();
    try {
      if (this.#config.adopt === undefined) this.#mount();
      else await this.#adopt(this.#config.adopt);
      await new Promise<void>((resolve, reject) => {
        this.#onFirst = { resolve, reject };
        this.#startServer();
      });
      this.#control = await serveControl(this.#folders.socket, (request) => this.#answer(request));
      void this.ended.then(() => this.#control?.close());
    } catch (error) {
      this.#stopping = true;
      this.#child?.kill('SIGKILL');
      this.#unmount({ lazy: true });
      this.#remove();
      throw error;
    }
    this.#timer = setInterval(() => this.#expire(), Math.max(100, this.#config.idleMs / 2));
    void this.ended.then(() => clearInterval(this.#timer));
  }

  get #showsLayers(): boolean {
    return this.#config.storeUrl === LAYERS;
  }

  #mount(): void {
    const { mountPoint, id } = this.#folders;
    mkdirSync(mountPoint, { recursive: true, mode: 0o700 });
    const { transport } = this.#config;
    if (transport !== 'native') {
      try {
        const shape = this.#showsLayers ? LAYER_TREES : undefined;
        const { fd, agreed } = connectFuse(mountPoint, mountSourceOf(id), shape);
        this.#fd = fd;
        this.#canResend = agreed.canResend;
        this.#writeState();
        return;
      } catch (error) {
        if (transport === 'raw') throw error;
        log(`raw FUSE does not work here: ${messageOf(error)}; trying fuse-native`);
      }
    }
    // The server mounts by itself.
    this.#transport = 'native';
    this.#writeState();
  }

  async #adopt({ server, canResend }: { server: ProcessIdentity; canResend: boolean }): Promise<void> {
    this.#fd = takeDescriptor(server.pid, SERVER_FD);
    this.#canResend = canResend;
    await endProcess(server);
    if (canResend) fuse.resend(this.#fd);
    log(`took over the mount from process ${server.pid}`);
  }

  #startServer(): void {
    if (this.#stopping) return;
    const { id, runDir, cacheDir, storeUrl, threads, memoryBytes, capacityBytes, record, idleMs, orphanMs } =
      this.#config;
    const config: ServerConfig = {
      storeUrl,
      transport: this.#transport,
      mountPoint: this.#folders.mountPoint,
      blobs: this.#folders.blobs,
      chunks: chunksFolder(cacheDir, id),
      runDir,
      cacheDir,
      id,
      threads,
      memoryBytes,
      capacityBytes,
      record,
      idleMs,
      orphanMs,
    };
    const child = spawn(process.execPath, [...this.#server, JSON.stringify(config)], {
      stdio: ['ignore', 'inherit', 'inherit', this.#fd ?? 'ignore', 'ipc'],
      env: this.#showsLayers ? { ...process.env, UV_THREADPOOL_SIZE: READS_AT_ONCE } : process.env,
    });
    this.#child = child;
    this.#ready = false;
    child.on('message', (message: FromServer) => this.#hear(child, message));
    child.once('error', (error) => log(`the server does not start: ${error.message}`));
    child.once('exit', (code, signal) => void this.#serverEnded(child, code, signal));
    this.#writeState();
  }

  #hear(child: ChildProcess, message: FromServer): void {
    if (child !== this.#child) return;
    if (message.event === 'ready') {
      this.#ready = true;
      this.#everReady = true;
      this.#failedStarts = 0;
      for (const { message } of this.#pending.values()) child.send(message);
      for (const message of this.#ahead.forNextServer()) if (!this.#pending.has(message.id)) child.send(message);
      this.#onFirst?.resolve();
      return;
    }
    if (message.event === 'prefetched') {
      this.#ahead.over(message.id);
      return;
    }
    if (message.event === 'failed') this.#ahead.over(message.id);
    const pending = this.#pending.get(message.id);
    if (pending === undefined) return;
    this.#pending.delete(message.id);
    if (message.event === 'reply') pending.resolve(message.value);
    else pending.reject(new Error(message.message));
  }

  async #serverEnded(child: ChildProcess, code: number | null, signal: NodeJS.Signals | null): Promise<void> {
    if (child !== this.#child) return;
    this.#child = undefined;
    const ready = this.#ready;
    this.#ready = false;
    if (code === 0 || this.#stopping) return this.#finish();
    log(`the server (process ${child.pid}) ended: ${signal ?? `status ${code}`}`);
    if (!this.#everReady) {
      this.#onFirst?.reject(
        fail('DATA_START_FAILED', {
          store: this.#config.storeUrl,
          reason: `its process ended with ${signal ?? code}`,
          log: this.#folders.log,
        }),
      );
      return;
    }
    this.#restarts++;
    if (this.#fading) {
      try {
        fuse.resend(this.#fd!);
      } catch {
        return this.#finish();
      }
      return this.#startServer();
    }
    if (!ready && ++this.#failedStarts >= FAILED_STARTS) return this.#giveUp('its servers die before they serve');
    if (this.#fd === undefined) {
      // A native mount is dead with its server. What was opened on it stays so; what comes next works.
      this.#unmount({ lazy: true });
    } else if (this.#canResend) {
      fuse.resend(this.#fd);
    } else if (waiting(this.#folders.mountPoint) > 0) {
      return this.#giveUp('this kernel cannot send requests again (Linux 6.9 can), and some were lost');
    }
    if (!ready) await delay(Math.min(50 * 2 ** this.#failedStarts, 3000));
    this.#startServer();
  }

  /** Errors for the readers in place of a wait that nobody ends. */
  #giveUp(reason: string): void {
    log(`giving up: ${reason}`);
    this.#unmount({ lazy: true });
    this.#finish();
  }

  #ask(message: Unnumbered<ToServer>): Promise<unknown> {
    const id = this.#nextId++;
    return new Promise((resolve, reject) => {
      const full = { ...message, id } as ToServer;
      this.#pending.set(id, { message: full, resolve, reject });
      if (full.op === 'prefetch') this.#ahead.note(full);
      if (this.#ready) this.#child?.send(full);
    });
  }

  async #answer(request: ControlRequest): Promise<unknown> {
    switch (request.op) {
      case 'add': {
        this.#lastUseMs = performance.now();
        const digest = parseDigest(request.digest);
        const { sizeBytes } = request;
        const chunkDigests = Buffer.from(String(request.chunkDigests), 'base64');
        const chunks = Math.ceil(sizeBytes / (256 * 1024));
        if (digest === undefined || !Number.isSafeInteger(sizeBytes) || sizeBytes < 0) throw new Error('no such blob');
        if (chunkDigests.length !== chunks * 32) throw new Error('the chunk digests do not fit the size');
        if (!(this.#registry instanceof BlobRegistry)) throw new Error('this server shows layers');
        return this.#ask({ op: 'add', blob: this.#registry.add(digest, sizeBytes, chunkDigests) });
      }
      case 'add-layer':
        this.#lastUseMs = performance.now();
        if (!(this.#registry instanceof LayerRegistry)) throw new Error('this server shows blobs');
        return this.#ask({ op: 'add-layer', layer: this.#registry.add(request.layer as LayerFiles) });
      case 'status':
        return {
          store: this.#config.storeUrl,
          version: this.#version,
          transport: this.#transport,
          canResend: this.#canResend,
          ready: this.#ready,
          supervisor: process.pid,
          server: this.#child?.pid,
          restarts: this.#restarts,
          blobs: this.#registry instanceof BlobRegistry ? this.#registry.blobs.length : this.#registry.layers.length,
          mountPoint: this.#folders.mountPoint,
        };
      case 'forget': {
        const digests = Array.isArray(request.digests) ? request.digests.flatMap((one) => parseDigest(one) ?? []) : [];
        return this.#ask({ op: 'forget', digests });
      }
      case 'cached':
      case 'stats':
      case 'recorded':
        return this.#ask({ op: request.op });
      case 'prefetch':
      case 'chunks': {
        const digest = parseDigest(request.digest);
        if (digest === undefined) throw new Error('no such blob');
        if (request.op === 'chunks') return this.#ask({ op: 'chunks', digest });
        if (!Array.isArray(request.ranges)) throw new Error('no ranges');
        return this.#ask({ op: 'prefetch', digest, ranges: request.ranges });
      }
      case 'replace': {
        if (!this.#canResend) throw new Error('this kernel cannot send requests again: stop it and start it anew');
        this.#server = request.server;
        this.#version = request.version;
        this.#child?.kill('SIGKILL');
        return { replaced: true };
      }
      case 'stop':
        this.stop(request.force ?? false);
        return { stopped: true };
      default:
        throw new Error('no such operation');
    }
  }

  /** @throws DATA_IN_USE unless `force` */
  stop(force: boolean): void {
    if (this.#stopping || this.#fading) return;
    if (force) this.#unmount({ lazy: true });
    else this.#unmountUnused();
    // Whoever is left where no table shows it is served on.
    // The answer goes out first.
    if (this.#showsLayers && !force) setImmediate(() => this.#fadeOut());
    else this.#endServer();
  }

  #unmountUnused(): void {
    const inUse = () => fail('DATA_IN_USE', { store: this.#config.storeUrl });
    if (this.#hasCopies()) throw inUse();
    try {
      umount(this.#folders.mountPoint);
    } catch (error) {
      if (systemCode(error) === 'EBUSY') throw inUse();
    }
  }

  /** The layer server's mount is shown by others: each layer at its place. */
  #hasCopies(): boolean {
    return this.#showsLayers && hasCopies(mountSourceOf(this.#folders.id));
  }

  /** Threads that block in a read see the end of the mount; forced, there may be none yet. */
  #endServer(): void {
    this.#stopping = true;
    if (this.#child === undefined) this.#finish();
    else this.#child.kill('SIGKILL');
  }

  #expire(): void {
    keepBuild(this.#server[0]);
    if (this.#stopping || performance.now() - this.#lastUseMs < this.#config.idleMs) return;
    // Files that are open through another namespace's copy of the mount do not make ours busy.
    if (mountedElsewhere(mountSourceOf(this.#folders.id)) || this.#hasCopies()) return;
    // Whoever is starting a server sees this one there, or gone.
    const held = this.#showsLayers ? tryLock(join(this.#config.runDir, 'data', 'lock')) : undefined;
    if (this.#showsLayers && held === undefined) return;
    try {
      if (!this.#expireMount()) return;
      log('unused: ending');
      if (this.#showsLayers) this.#fadeOut();
      else this.#endServer();
    } finally {
      held?.release();
    }
  }

  /** False: it is in use, or was until now. */
  #expireMount(): boolean {
    try {
      umount(this.#folders.mountPoint, { expire: true });
    } catch (error) {
      // EAGAIN: unused now, looked at again next time; EBUSY: in use.
      if (['EAGAIN', 'EBUSY'].includes(systemCode(error) ?? '')) return false;
      log(`unmounting: ${messageOf(error)}`);
    }
    return true;
  }

  /**
   * OverlayFS holds the layers below it by mounts that no table shows, also when it was detached itself and somebody still
   * works in it. So the server ends by itself, when the kernel says that nobody is left; meanwhile it is out of the way of
   * the next one.
   */
  #fadeOut(): void {
    this.#fading = true;
    clearInterval(this.#timer);
    this.#control?.close();
    this.#control = undefined;
    const { folder, id } = this.#folders;
    const aside = join(dirname(folder), `.${id}.${process.pid}`);
    rmSync(this.#folders.state, { force: true });
    renameSync(folder, aside);
    this.#folders = foldersIn(aside, id);
  }

  #unmount(how: { lazy?: boolean }): void {
    try {
      umount(this.#folders.mountPoint, how);
    } catch (error) {
      if (!['EINVAL', 'ENOENT'].includes(systemCode(error) ?? '')) log(`unmounting: ${messageOf(error)}`);
    }
  }

  #finish(): void {
    this.#stopping = true;
    this.#unmount({ lazy: true });
    if (this.#fd !== undefined) closeSync(this.#fd);
    this.#fd = undefined;
    for (const { reject } of this.#pending.values()) reject(new Error('the data server ends'));
    this.#pending.clear();
    this.#remove();
    this.#onEnd();
  }

  #remove(): void {
    removeTraces(this.#folders);
    if (this.#fading) rmSync(this.#folders.folder, { recursive: true, force: true });
  }

  #writeState(): void {
    const child = this.#child?.pid;
    const state: DataServerState = {
      id: this.#folders.id,
      storeUrl: this.#config.storeUrl,
      cacheDir: this.#config.cacheDir,
      transport: this.#transport,
      canResend: this.#canResend,
      namespace: readlinkSync('/proc/self/ns/mnt'),
      supervisor: processIdentity()!,
      server: child === undefined ? this.#config.adopt?.server : processIdentity(child),
    };
    writeState(this.#folders, state);
  }
}

/** Kills exactly this process and waits until nothing of it runs. */
async function endProcess(identity: ProcessIdentity): Promise<void> {
  while (isAlive(identity)) {
    try {
      process.kill(identity.pid, 'SIGKILL');
    } catch {
      return;
    }
    await delay(5);
  }
  // A zombie may still have a thread on its way out.
  for (let i = 0; i < 200 && threadsOf(identity.pid) > 1; i++) await delay(5);
}

function threadsOf(pid: number): number {
  try {
    return Number(/^Threads:\s*(\d+)/m.exec(readFileSync(`/proc/${pid}/status`, 'latin1'))?.[1] ?? 0);
  } catch {
    return 0;
  }
}

/** A bundle that has not been used for a day is removed by the next build; the next server starts from ours. */
function keepBuild(program: string | undefined): void {
  if (program === undefined || !program.endsWith('/data-server-process.mjs')) return;
  try {
    utimesSync(dirname(program), new Date(), new Date());
  } catch {
    // A checkout that cannot be written is not cleaned up either.
  }
}

function log(text: string): void {
  process.stderr.write(`${new Date().toISOString()} supervisor ${process.pid}: ${text}\n`);
}
