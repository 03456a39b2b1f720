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
import { closeSync, mkdirSync, readdirSync, readFileSync, readlinkSync, utimesSync } from 'node:fs';
import { dirname } from 'node:path';
import { setTimeout as delay } from 'node:timers/promises';
import { messageOf, parseDigest, systemCode } from '#base';
import {
  isAlive,
  type MountRow,
  mountsAt,
  type ProcessIdentity,
  processIdentity,
  readMountInfo,
  takeDescriptor,
  umount,
} from '#linux';
import { fail } from '../errors.ts';
import { BlobRegistry } from './blob-registry.ts';
import { type ControlRequest, serveControl } from './control.ts';
import {
  chunksFolder,
  type DataFolders,
  type DataServerState,
  dataFolders,
  mountSourceOf,
  removeTraces,
  writeState,
} from './data-folders.ts';
import { connectFuse, resend } from './raw-transport.ts';
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
  readonly threads?: number;
  readonly memoryBytes?: number;
  readonly capacityBytes?: number;
  /** A serving process whose supervisor is gone: the descriptor is taken from it. */
  readonly adopt?: { readonly server: ProcessIdentity; readonly canResend: boolean };
}

/** Servers in a row that died before they served: then it is no accident. */
const FAILED_STARTS = 12;
const SERVER_FD = 3;

interface Pending {
  readonly message: ToServer;
  resolve(value: unknown): void;
  reject(error: Error): void;
}

export class Supervisor {
  readonly #config: SupervisorConfig;
  readonly #folders: DataFolders;
  readonly #registry: BlobRegistry;
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
  #lastUseMs = performance.now();
  readonly #pending = new Map<number, Pending>();
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
    this.#registry = new BlobRegistry(this.#folders.blobs);
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
      const control = await serveControl(this.#folders.socket, (request) => this.#answer(request));
      void this.ended.then(() => control.close());
    } catch (error) {
      this.#stopping = true;
      this.#child?.kill('SIGKILL');
      this.#unmount({ lazy: true });
      this.#remove();
      throw error;
    }
    const timer = setInterval(() => this.#expire(), Math.max(100, this.#config.idleMs / 2));
    void this.ended.then(() => clearInterval(timer));
  }

  #mount(): void {
    const { mountPoint, id } = this.#folders;
    mkdirSync(mountPoint, { recursive: true, mode: 0o700 });
    const { transport } = this.#config;
    if (transport !== 'native') {
      try {
        const { fd, agreed } = connectFuse(mountPoint, mountSourceOf(id));
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
    if (canResend) resend(this.#fd);
    log(`took over the mount from process ${server.pid}`);
  }

  #startServer(): void {
    if (this.#stopping) return;
    const { id, runDir, cacheDir, storeUrl, threads, memoryBytes, capacityBytes } = this.#config;
    const config: ServerConfig = {
      storeUrl,
      transport: this.#transport,
      mountPoint: this.#folders.mountPoint,
      blobs: this.#folders.blobs,
      chunks: chunksFolder(cacheDir, id),
      runDir,
      id,
      threads,
      memoryBytes,
      capacityBytes,
    };
    const child = spawn(process.execPath, [...this.#server, JSON.stringify(config)], {
      stdio: ['ignore', 'inherit', 'inherit', this.#fd ?? 'ignore', 'ipc'],
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
      this.#onFirst?.resolve();
      return;
    }
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
    if (!ready && ++this.#failedStarts >= FAILED_STARTS) return this.#giveUp('its servers die before they serve');
    if (this.#fd === undefined) {
      // A native mount is dead with its server. What was opened on it stays so; what comes next works.
      this.#unmount({ lazy: true });
    } else if (this.#canResend) {
      resend(this.#fd);
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

  #ask(message: { op: 'add'; blob: ReturnType<BlobRegistry['add']> } | { op: 'stats' }): Promise<unknown> {
    const id = this.#nextId++;
    return new Promise((resolve, reject) => {
      const full = { ...message, id } as ToServer;
      this.#pending.set(id, { message: full, resolve, reject });
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
        return this.#ask({ op: 'add', blob: this.#registry.add(digest, sizeBytes, chunkDigests) });
      }
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
          blobs: this.#registry.blobs.length,
          mountPoint: this.#folders.mountPoint,
        };
      case 'stats':
        return this.#ask({ op: 'stats' });
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
    if (this.#stopping) return;
    if (!force) {
      try {
        umount(this.#folders.mountPoint);
      } catch (error) {
        if (systemCode(error) === 'EBUSY') throw fail('DATA_IN_USE', { store: this.#config.storeUrl });
      }
    } else this.#unmount({ lazy: true });
    this.#endServer();
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
    if (mountedElsewhere(mountSourceOf(this.#folders.id))) return;
    try {
      umount(this.#folders.mountPoint, { expire: true });
    } catch (error) {
      // EAGAIN: unused now, looked at again next time; EBUSY: in use.
      if (['EAGAIN', 'EBUSY'].includes(systemCode(error) ?? '')) return;
      log(`unmounting: ${messageOf(error)}`);
    }
    log('unused: ending');
    this.#endServer();
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

/**
 * Whether another mount namespace shows the file system in a mount of its own. Copies that follow ours (services of systemd
 * have them) do not count: unmounting reaches them, and fails while one of them is in use.
 */
function mountedElsewhere(source: string): boolean {
  const seen = new Set([readlinkSync('/proc/self/ns/mnt')]);
  const group = readMountInfo()
    .find((row) => row.source === source)
    ?.propagation.find((one) => one.startsWith('shared:'))
    ?.slice('shared:'.length);
  const follows = ({ propagation }: MountRow) =>
    group !== undefined && (propagation.includes(`shared:${group}`) || propagation.includes(`master:${group}`));
  for (const pid of readdirSync('/proc')) {
    if (!/^\d+$/.test(pid)) continue;
    try {
      const namespace = readlinkSync(`/proc/${pid}/ns/mnt`);
      if (seen.has(namespace)) continue;
      seen.add(namespace);
      if (readMountInfo(Number(pid)).some((row) => row.source === source && !follows(row))) return true;
    } catch {
      // Ended meanwhile.
    }
  }
  return false;
}

/** Requests that the kernel has no answer to; 1 when it does not say. */
function waiting(mountPoint: string): number {
  try {
    const connection = mountsAt(mountPoint).at(-1)?.device.split(':')[1];
    return Number(readFileSync(`/sys/fs/fuse/connections/${connection}/waiting`, 'latin1'));
  } catch {
    return 1;
  }
}

function log(text: string): void {
  process.stderr.write(`${new Date().toISOString()} supervisor ${process.pid}: ${text}\n`);
}
