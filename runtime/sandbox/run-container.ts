/**
 * `dsec run`: one command in a sandbox of its own, from composing its layers to the last of its traces.
 *
 * The order is that of README.md: lock, record, mount, look up (user, environment, folder, program), launch, wait, and all
 * of it back in reverse, whatever happened. The record is there before any effect, so a process that is killed anywhere in
 * here leaves only what `reclaimSandboxes` finds and ends.
 */
import { mkdirSync } from 'node:fs';
import type { Readable } from 'node:stream';
import { pipeline } from 'node:stream/promises';
import { failPoint, messageOf } from '#base';
import {
  type BlobStore,
  blobFilesFor,
  type ErofsLayer,
  type Image,
  mountImage,
  type OciConfig,
  readConfig,
} from '#imagesvc';
import { type FileLock, processIdentity } from '#linux';
import type { Backend, Exit, PreparationSpec, RunningSandbox } from '../backend/backend.ts';
import { chooseBackend } from '../backend/choose-backend.ts';
import { releaseRange } from '../backend/id-ranges.ts';
import { MOUNT_POINTS } from '../backend/oci-spec.ts';
import type { UsernsMode } from '../backend/user-namespace.ts';
import { composeLayers } from '../compose/compose-layers.ts';
import { sandboxDevice } from '../disk/block-device.ts';
import { makeDisk, planDisk } from '../disk/sandbox-disk.ts';
import { fail } from '../errors.ts';
import { type AllLimits, checkedLimits } from '../sandbox-api/limits.ts';
import { checkCommand, commandOf } from './command-lookup.ts';
import { dismantle, markKept, releaseAndForget, removeFolder } from './end-sandbox.ts';
import { environmentOf } from './environment.ts';
import { tellingOfFullDisk } from './full-disk.ts';
import { type MountPoint, makeMountPoints, missingMountPoints } from './mount-points.ts';
import { makeDirectoryInRoot, resolveInRoot } from './root-path.ts';
import { asItsRoot, mappingOf, takeIds, withOrWithoutIds } from './sandbox-ids.ts';
import {
  checkSandboxName,
  imageReference,
  randomSandboxName,
  readRecord,
  type SandboxRecord,
  writeRecord,
} from './sandbox-record.ts';
import { lockName, reclaimSandboxes, removeSandbox } from './sandboxes.ts';
import { forwardSignals, type TakeSignals } from './signal-forwarding.ts';
import { type RuntimeFolders, runtimeFolders, type SandboxFolders, sandboxFolders } from './state-folders.ts';
import { lookUpUser } from './user-lookup.ts';

/** Standard streams for programs: without callbacks the output is dropped. Slow callbacks are not waited for. */
export interface PipedStdio {
  readonly stdin?: Readable | Buffer | string;
  readonly onStdout?: (bytes: Buffer) => void;
  readonly onStderr?: (bytes: Buffer) => void;
}

/** Whoever the sandbox is run for, where that is not this process: a client of the runtime service. */
export interface Caller {
  readonly env: NodeJS.ProcessEnv;
  readonly stdinIsTerminal: boolean;
  readonly terminalSize?: { readonly rows: number; readonly columns: number };
}

export interface RunOptions extends AllLimits {
  readonly store: BlobStore;
  readonly base: Image;
  readonly workspace?: Image;
  /** Topmost last. */
  readonly toolkits?: readonly Image[];
  /** A random one by default. */
  readonly name?: string;
  /** The sandbox stays when its command has ended: its upper can be packed. */
  readonly keep?: boolean;
  /** A kept sandbox of the same name is removed first. */
  readonly replace?: boolean;
  /** Data is fetched when it is read; always so where the store is no folder. */
  readonly lazy?: boolean;
  /** What the images' traces say a start reads is fetched ahead; true by default, where data is fetched at all. */
  readonly prefetch?: boolean;
  /** Told of a trace that is of no use, for people. */
  readonly onTraceProblem?: (text: string) => void;
  /** The command runs. */
  readonly onStarted?: () => void;
  /** Empty: the image's Cmd. */
  readonly command: readonly string[];
  readonly entrypoint?: readonly string[];
  /** `NAME=VALUE`, or `NAME` to pass it on. */
  readonly env?: readonly string[];
  /** `name`, `uid`, `name:group`, `uid:gid`; the image's by default. */
  readonly user?: string;
  /** Made when it is missing; the image's by default, else `/`. */
  readonly workdir?: string;
  readonly terminal?: boolean;
  /** `none`, the default: a network of its own, with loopback alone. `host`: this machine's. */
  readonly network?: 'none' | 'host';
  /** `private` where that can be, by default; `host` with this machine's network. */
  readonly userns?: UsernsMode;
  /** `inherit`, the default: those of this process. */
  readonly stdio?: 'inherit' | PipedStdio;
  /** Aborting ends the sandbox with SIGKILL. */
  readonly signal?: AbortSignal;
  /** Who hands over INT, TERM, HUP and QUIT; this process's own handlers by default. */
  readonly takeSignals?: TakeSignals;
  /** This process by default. With a caller `takeSignals` hands over every signal. */
  readonly caller?: Caller;
  readonly folders?: Partial<RuntimeFolders>;
  /** `dsec`, `crun` or `runc`; the first of them that is there by default. */
  readonly runtime?: string;
  /** In place of all that. */
  readonly backend?: Backend;
}

export interface RunResult {
  /** 128 + n after signal n. */
  readonly exitCode: number;
  /** What ended it, where it was a signal sent to the sandbox: by us, or by `dsec sandbox stop`. */
  readonly signal?: NodeJS.Signals;
  /** Its limit on memory was reached, and the kernel ended a process of it. */
  readonly outOfMemory: boolean;
  readonly name: string;
  /** Of a kept sandbox. */
  readonly upper?: string;
  /** Of a kept sandbox: its record could not be written (a full disk, say). It is kept all the same. */
  readonly problem?: string;
  readonly layers: number;
  readonly timings: {
    /** Composing and mounting. */
    readonly mountMs: number;
    /** From the mount until the first process ran. */
    readonly startMs: number;
    /** From the call until the first byte of output; with piped streams, if there was any. */
    readonly firstOutputMs: number | undefined;
  };
}

/** @throws RUNTIME_* (126 and 127 as exit status where the command cannot be run), MOUNT_*, STORE_* */
export async function runContainer(options: RunOptions): Promise<RunResult> {
  if (process.geteuid?.() !== 0) throw fail('RUNTIME_NEEDS_ROOT');
  if (
    options.terminal === true &&
    (typeof options.stdio === 'object' || !(options.caller?.stdinIsTerminal ?? process.stdin.isTTY))
  ) {
    throw fail('RUNTIME_NO_TERMINAL');
  }
  const folders = runtimeFolders(options.folders);
  return tellingOfFullDisk(folders, () =>
    withOrWithoutIds(folders, options.userns, (userns) => runOnce({ ...options, userns }, folders)),
  );
}

async function runOnce(options: RunOptions, folders: RuntimeFolders): Promise<RunResult> {
  const calledAt = performance.now();
  const name = options.name === undefined ? randomSandboxName() : checkSandboxName(options.name);
  const backend = options.backend ?? chooseBackend(folders.runDir, options.runtime);
  const limits = checkedLimits(options);
  const disk = planDisk(limits, folders.stateDir);
  const layers = composeLayers(options);
  const config = await readConfig(options.store, options.base);
  const args = commandOf(options.base.name, config, options.command, options.entrypoint);

  await reclaimSandboxes(folders);
  const places = sandboxFolders(folders, name);
  const lock = await takeName(name, places, options, folders);
  const signals = forwardSignals(options.takeSignals, options.caller !== undefined);
  let kept = false;
  let idBase: number | undefined;
  let record: SandboxRecord | undefined;
  try {
    idBase = await takeIds(name, folders, options.userns, options.network ?? 'none');
    record = begin(name, places, options, backend, { idBase, limits, disk });
    const run = new Run(options, places, folders, backend, calledAt);
    const { result, finished } = await run.through(record, layers, config, args, signals.to);
    record = finished;
    await dismantle(record, places, folders, backend);
    failPoint('run-dismantled');
    kept = options.keep === true;
    const problem = kept ? recordKept(record, places, result.exitCode) : undefined;
    return { ...result, name, layers: layers.length, upper: kept ? places.upper : undefined, problem };
  } catch (error) {
    if (record !== undefined)
      await dismantle(readRecord(places.record) ?? record, places, folders, backend).catch(() => {});
    else if (idBase !== undefined) releaseRange(folders.stateDir, name, idBase);
    throw error;
  } finally {
    if (kept) lock.release();
    else await forgetSandbox(places, lock);
    // Last: a signal in the middle of cleaning up is for nobody any more.
    signals.stop();
  }
}

/** The command has done its work whatever becomes of the record: the next command tries again to write it. */
function recordKept(record: SandboxRecord, places: SandboxFolders, exitCode: number): string | undefined {
  try {
    markKept(record, places, exitCode);
    return undefined;
  } catch (error) {
    return messageOf(error);
  }
}

/** What cannot be removed now the next command finds without a record, or with one that says `running`. */
async function forgetSandbox(places: SandboxFolders, lock: FileLock): Promise<void> {
  try {
    await removeFolder(places);
    releaseAndForget(lock);
  } catch {
    lock.release();
  }
}

async function takeName(
  name: string,
  places: SandboxFolders,
  options: RunOptions,
  folders: RuntimeFolders,
): Promise<FileLock> {
  for (let replace = options.replace === true; ; replace = false) {
    const lock = await lockName(name, places, 'run');
    let existing: SandboxRecord | undefined;
    try {
      existing = readRecord(places.record);
    } catch (error) {
      lock.release();
      throw error;
    }
    if (existing === undefined) return lock;
    lock.release();
    if (!replace) {
      const remedy = `remove it with \`dsec sandbox rm ${name}\`, run with --replace`;
      throw fail('RUNTIME_SANDBOX_EXISTS', { name, how: 'was kept', remedy });
    }
    await removeSandbox(name, folders);
  }
}

/** The record, then the folders. */
function begin(
  name: string,
  places: SandboxFolders,
  options: RunOptions,
  backend: Backend,
  held: Pick<SandboxRecord, 'idBase' | 'limits' | 'disk'>,
): SandboxRecord {
  mkdirSync(places.folder, { recursive: true, mode: 0o700 });
  const record: SandboxRecord = {
    version: 1,
    name,
    id: `${name}-${randomSandboxName().slice(-8)}`,
    state: 'running',
    keep: options.keep === true,
    createdAt: new Date().toISOString(),
    backend: backend.name,
    store: options.store.url,
    base: imageReference(options.base),
    workspace: options.workspace && imageReference(options.workspace),
    toolkits: (options.toolkits ?? []).map(imageReference),
    owner: processIdentity()!,
    ...held,
    mountPoints: [],
  };
  writeRecord(places.record, record, record.keep);
  failPoint('run-recorded');
  mkdirSync(places.root, { mode: 0o755 });
  mkdirSync(places.bundle, { mode: 0o700 });
  return record;
}

function imagesOf({ base, workspace, toolkits = [] }: RunOptions): Image[] {
  return [base, ...(workspace === undefined ? [] : [workspace]), ...toolkits];
}

const HOST_NETWORK_FILES = ['/etc/resolv.conf', '/etc/hosts'];

class Run {
  private readonly options: RunOptions;
  private readonly places: SandboxFolders;
  private readonly folders: RuntimeFolders;
  private readonly backend: Backend;
  private readonly calledAt: number;
  private firstOutputAt: number | undefined;

  constructor(
    options: RunOptions,
    places: SandboxFolders,
    folders: RuntimeFolders,
    backend: Backend,
    calledAt: number,
  ) {
    this.options = options;
    this.places = places;
    this.folders = folders;
    this.backend = backend;
    this.calledAt = calledAt;
  }

  async through(
    record: SandboxRecord,
    layers: readonly ErofsLayer[],
    config: OciConfig,
    args: readonly string[],
    forwardTo: (sandbox: RunningSandbox) => void,
  ) {
    const { options, places } = this;
    options.signal?.throwIfAborted();
    const mountFrom = performance.now();
    const { store, base: image, lazy } = options;
    const { runDir, cacheDir } = this.folders;
    const { upper, work, root: target } = places;
    // What can be made without a root is made while that is mounted.
    const { idBase, limits = {} } = record;
    await makeDisk(record.disk, places, limits);
    const device = sandboxDevice(limits, places);
    const toPrepare: PreparationSpec = {
      id: record.id,
      limits,
      device,
      network: options.network ?? 'none',
      idBase,
      stdio: typeof options.stdio === 'object' ? 'pipe' : 'inherit',
      terminal: options.terminal === true,
    };
    this.backend.prepare?.(toPrepare);
    const mapping = mappingOf(idBase, (base) => this.backend.userNamespace({ ...toPrepare, idBase: base }));
    const prefetch = options.prefetch === false ? [] : imagesOf(options);
    const files = blobFilesFor({ store, lazy, runDir, cacheDir, prefetch, onTraceProblem: options.onTraceProblem });
    await mountImage({ runDir, cacheDir, files, image, layers, target, upper, work, mapping });
    const mountedAt = performance.now();
    failPoint('run-mounted');

    const finished = this.mountPoints(record);
    const process = await this.process(record, config, args);
    const sandbox = await this.launch(finished, process);
    const startedAt = performance.now();
    failPoint('run-launched');
    forwardTo(sandbox);
    options.onStarted?.();
    const exit = await this.wait(sandbox);
    failPoint('run-exited');
    const result = {
      exitCode: exit.code,
      signal: exit.signal,
      outOfMemory: exit.outOfMemory ?? false,
      timings: {
        mountMs: mountedAt - mountFrom,
        startMs: startedAt - mountedAt,
        firstOutputMs: this.firstOutputAt === undefined ? undefined : this.firstOutputAt - this.calledAt,
      },
    };
    return { result, finished };
  }

  /** Who, where and with what environment; everything that the mounted root has to answer. */
  private async process({ name, idBase }: SandboxRecord, config: OciConfig, args: readonly string[]) {
    const { options } = this;
    const { root } = this.places;
    const own = config.config ?? {};
    const user = lookUpUser(root, options.user ?? own.User ?? '');
    const wanted = options.workdir ?? own.WorkingDir ?? '';
    const cwd = wanted.startsWith('/') ? wanted : `/${wanted}`;
    asItsRoot(idBase, () => makeDirectoryInRoot(root, cwd));
    const terminal = options.terminal === true;
    const env = environmentOf({
      image: own.Env ?? [],
      given: options.env ?? [],
      host: options.caller?.env ?? process.env,
      home: user.home,
      hostname: name,
      terminal,
    });
    await checkCommand(root, args[0]!, env, cwd, user);
    const { uid, gid, additionalGids } = user;
    const streams = [process.stdout, process.stderr].find((stream) => stream.isTTY) ?? {};
    const { columns, rows }: { columns?: number; rows?: number } =
      options.caller === undefined ? streams : (options.caller.terminalSize ?? {});
    const terminalSize = terminal && columns && rows ? { columns, rows } : undefined;
    return { args, env, cwd, uid, gid, additionalGids, terminal, terminalSize };
  }

  /** The record names those that are made before they are. */
  private mountPoints(record: SandboxRecord): SandboxRecord {
    const { root } = this.places;
    const files = this.options.network === 'host' ? HOST_NETWORK_FILES : [];
    const wanted: MountPoint[] = [
      ...MOUNT_POINTS.map((path) => ({ path, kind: 'folder' as const })),
      ...files.map((path) => ({ path, kind: 'file' as const })),
    ];
    const missing = missingMountPoints(root, wanted);
    if (missing.length === 0) return record;
    const noted = { ...record, mountPoints: missing.map(({ path }) => path) };
    writeRecord(this.places.record, noted, false);
    asItsRoot(record.idBase, () => makeMountPoints(root, missing));
    failPoint('run-mount-points');
    return noted;
  }

  private launch(record: SandboxRecord, process: Parameters<Backend['launch']>[0]['process']): Promise<RunningSandbox> {
    const { root, bundle } = this.places;
    const network = this.options.network ?? 'none';
    const shown = network === 'host' ? HOST_NETWORK_FILES : [];
    const { limits = {} } = record;
    return this.backend.launch({
      id: record.id,
      limits,
      device: sandboxDevice(limits, this.places),
      folder: bundle,
      root,
      hostname: record.name,
      network,
      idBase: record.idBase,
      binds: shown
        .filter((path) => resolveInRoot(root, path)?.stat?.isFile() === true)
        .map((path) => ({ source: path, target: path })),
      process,
      stdio: typeof this.options.stdio === 'object' ? 'pipe' : 'inherit',
    });
  }

  private async wait(sandbox: RunningSandbox): Promise<Exit> {
    const { stdio, signal } = this.options;
    if (typeof stdio === 'object') this.connect(sandbox, stdio);
    const abort = () => sandbox.kill('SIGKILL');
    signal?.addEventListener('abort', abort, { once: true });
    if (signal?.aborted === true) abort();
    try {
      return await sandbox.wait();
    } finally {
      signal?.removeEventListener('abort', abort);
    }
  }

  private connect(sandbox: RunningSandbox, stdio: PipedStdio): void {
    const receive = (callback: ((bytes: Buffer) => void) | undefined) => (bytes: Buffer) => {
      this.firstOutputAt ??= performance.now();
      callback?.(bytes);
    };
    sandbox.stdout?.on('data', receive(stdio.onStdout));
    sandbox.stderr?.on('data', receive(stdio.onStderr));
    const { stdin } = stdio;
    if (sandbox.stdin === null) return;
    if (stdin === undefined || typeof stdin === 'string' || Buffer.isBuffer(stdin)) sandbox.stdin.end(stdin ?? '');
    // A command that reads only a part of its input is no failure of ours.
    else pipeline(stdin, sandbox.stdin).catch(() => {});
  }
}
