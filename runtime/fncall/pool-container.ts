/**
 * One container of a pool: made as a sandbox is (record before effect, mount, our own launcher), with the program that takes tasks as its first
 * process (runtime/agent/src/task.rs). It lives no longer than this process: its launcher ends it when we are gone, and what is left then
 * the next command finds by its record.
 *
 * `start` resolves when the first task can come. After each task it is either ready again or has ended: whoever has it asks `ready`.
 */
import { type ChildProcess, spawn } from 'node:child_process';
import { mkdirSync } from 'node:fs';
import type { Duplex, Readable } from 'node:stream';
import { messageOf } from '#base';
import { blobFilesFor, mountImage } from '#imagesvc';
import { processIdentity } from '#linux';
import type { AgentBinary } from '../backend/agent-binary.ts';
import { FrameParser, frameBytes } from '../backend/agent-wire.ts';
import type { LaunchSpec } from '../backend/backend.ts';
import { launchOrder, preparation } from '../backend/launch-order.ts';
import { LauncherChannel } from '../backend/launcher-channel.ts';
import { MOUNT_POINTS } from '../backend/oci-spec.ts';
import { OWN_BACKEND, openOwnBackend } from '../backend/own-backend.ts';
import { readFrames } from '../backend/socket-frames.ts';
import { userNamespaceOf } from '../backend/user-namespace.ts';
import { composeLayers } from '../compose/compose-layers.ts';
import { fail } from '../errors.ts';
import { makeLockFolder } from '../node/create-sandbox.ts';
import { dismantle, releaseAndForget, removeFolder } from '../sandbox/end-sandbox.ts';
import { makeMountPoints, missingMountPoints } from '../sandbox/mount-points.ts';
import { makeDirectoryInRoot } from '../sandbox/root-path.ts';
import { asItsRoot, mappingOf, takeIds, withOrWithoutIds } from '../sandbox/sandbox-ids.ts';
import { imageReference, randomSandboxName, type SandboxRecord, writeRecord } from '../sandbox/sandbox-record.ts';
import { lockName } from '../sandbox/sandboxes.ts';
import { type SandboxFolders, sandboxFolders } from '../sandbox/state-folders.ts';
import { type ContainerGroups, containerGroups, giveGroups } from './container-groups.ts';
import { taskOci, taskPlan } from './container-plan.ts';
import { GPU_LIBRARIES } from './gpu/gpu-devices.ts';
import type { GpuHolder } from './gpu/gpu-scheduler.ts';
import type { HeldGpu } from './gpu/node-gpus.ts';
import type { ContainerSpec, PoolEnvironment } from './pool-spec.ts';
import { PRIVATE_FOLDERS, type TaskFile } from './task.ts';
import {
  configureBytes,
  filePayloads,
  readFailure,
  readFetched,
  readNotRun,
  readStep,
  readText,
  type StepReport,
  TASK_FRAME,
  type TaskOrder,
  taskBytes,
} from './task-wire.ts';

/** Until the first task can come: what is to be imported is. */
const FIRST_READY_MS = 240_000;

/** What came of a task, as the container tells it. */
export interface RawResult {
  readonly steps: readonly StepReport[];
  readonly notRun: ReturnType<typeof readNotRun> | undefined;
  readonly files: readonly TaskFile[];
  readonly fetchProblem: string;
}

/** The container has ended, for reasons of its own, before anything of the task ran: another one may have it. */
export interface NotBegun {
  readonly notBegun: string;
}

/** @throws RUNTIME_FNCALL_CONTAINER, RUNTIME_GPU*, RUNTIME_*, MOUNT_*, STORE_*, the signal's reason */
export async function startContainer(
  spec: ContainerSpec,
  holder: GpuHolder,
  signal: AbortSignal,
): Promise<PoolContainer> {
  const { gpu: wanted } = spec.options;
  const gpu = wanted === undefined ? undefined : await spec.gpus?.take(wanted, holder, signal);
  try {
    return await withOrWithoutIds(spec.folders, spec.options.userns, (userns) =>
      begin({ ...spec, options: { ...spec.options, userns } }, gpu),
    );
  } catch (error) {
    gpu?.release();
    throw error;
  }
}

async function begin(spec: ContainerSpec, gpu: HeldGpu | undefined): Promise<PoolContainer> {
  const { environment, options, folders } = spec;
  const name = `fncall-${randomSandboxName().slice(-8)}`;
  const places = sandboxFolders(folders, name);
  makeLockFolder(places);
  const lock = await lockName(name, places, 'run');
  let record: SandboxRecord | undefined;
  const undo = async () => {
    if (record !== undefined) await dismantle(record, places, folders, openOwnBackend(undefined));
    await removeFolder(places);
    releaseAndForget(lock);
  };
  const end = () =>
    undo().catch((error: unknown) => {
      // What is left is whoever's can have the lock, by its record.
      lock.release();
      throw error;
    });
  let child: Launcher | undefined;
  try {
    const idBase = await takeIds(name, folders, options.userns, 'none');
    if (options.python !== undefined && idBase === undefined) {
      throw fail('RUNTIME_FNCALL_UNAVAILABLE', {
        reason: 'an interpreter that waits would be root of this machine: there are no user namespaces for it',
      });
    }
    mkdirSync(places.folder, { recursive: true, mode: 0o700 });
    record = { ...recordOf(name, environment, idBase), pool: spec.pool };
    writeRecord(places.record, record, false);
    mkdirSync(places.root, { mode: 0o755 });
    const groups = containerGroups(record.id, options, gpu?.devices);
    child = new Launcher(spec.agent);
    await launch(spec, record, places, groups, child, gpu);
    const container = new PoolContainer(name, groups, child, end, gpu);
    const plan = await taskPlan(spec, groups, container.gpuEnv);
    child.socket.write(frameBytes(TASK_FRAME.configure, 0, configureBytes(plan)));
    await within(container.ready(), FIRST_READY_MS, `it was not ready after ${FIRST_READY_MS / 1000} s`);
    return container;
  } catch (error) {
    await child?.close();
    await end().catch(() => {});
    throw child?.explained(error) ?? error;
  }
}

function recordOf(
  name: string,
  { store, base, workspace, toolkits = [] }: PoolEnvironment,
  idBase?: number,
): SandboxRecord {
  return {
    version: 1,
    name,
    id: `${name}-${randomSandboxName().slice(-8)}`,
    state: 'running',
    keep: false,
    createdAt: new Date().toISOString(),
    backend: OWN_BACKEND,
    store: store.url,
    base: imageReference(base),
    workspace: workspace && imageReference(workspace),
    toolkits: toolkits.map(imageReference),
    owner: processIdentity()!,
    idBase,
    mountPoints: [],
  };
}

async function launch(
  { environment, folders }: ContainerSpec,
  { id, idBase, name }: SandboxRecord,
  places: SandboxFolders,
  groups: ContainerGroups,
  child: Launcher,
  { devices = [], libraries = [] }: Partial<HeldGpu> = {},
): Promise<void> {
  const { store, base, workspace, toolkits = [] } = environment;
  const { runDir, cacheDir } = folders;
  const launched = child.channel.prepare(preparation({ id, network: 'none', idBase }, 'own', groups.groups));
  const mapping = mappingOf(idBase, async () => userNamespaceOf(await launched.prepared));
  const images = [base, ...(workspace === undefined ? [] : [workspace]), ...toolkits];
  const files = blobFilesFor({ store, runDir, cacheDir, prefetch: images });
  const { upper, work, root: target } = places;
  const layers = composeLayers(environment);
  await mountImage({ runDir, cacheDir, files, image: base, layers, target, upper, work, volatile: true, mapping });
  const points = MOUNT_POINTS.map((path) => ({ path, kind: 'folder' as const }));
  asItsRoot(idBase, () => {
    makeMountPoints(target, missingMountPoints(target, points));
    for (const { path } of PRIVATE_FOLDERS) if (!path.startsWith('/dev/')) makeDirectoryInRoot(target, path);
    if (libraries.length === 0) return;
    makeDirectoryInRoot(target, GPU_LIBRARIES);
    const files = libraries.map((one) => ({ path: one.target, kind: 'file' as const }));
    makeMountPoints(target, missingMountPoints(target, files));
  });
  const spec: LaunchSpec = {
    id,
    network: 'none',
    idBase,
    folder: places.bundle,
    root: target,
    hostname: name,
    binds: libraries.map((one) => ({ ...one, exec: true })),
    devices,
    process: { args: ['dsec-agent'], env: [], cwd: '/', uid: 0, gid: 0, additionalGids: [], terminal: false },
    stdio: 'inherit',
    firstProcess: 'agent',
  };
  launched.order(launchOrder(spec, taskOci(spec), 'task'));
  await launched.started;
  giveGroups(groups, idBase);
}

/** A launcher of its own: its end is the container's, and its standard output is what tasks come over. */
class Launcher {
  readonly channel: LauncherChannel;
  readonly socket: Duplex;
  private readonly child: ChildProcess;
  private readonly gone: Promise<void>;
  private said = '';

  constructor(agent: AgentBinary) {
    this.child = spawn(agent.path, ['launch'], {
      cwd: '/',
      env: {},
      stdio: ['ignore', 'pipe', 'pipe', 'pipe'],
      detached: true,
    });
    this.gone = new Promise((resolve) => {
      this.child.once('error', () => resolve());
      this.child.once('exit', () => resolve());
    });
    const [, socket, errors, control] = this.child.stdio;
    this.socket = socket as unknown as Duplex;
    (errors as Readable).on('data', (bytes: Buffer) => {
      this.said = `${this.said}${bytes}`.slice(-2000);
    });
    this.channel = new LauncherChannel(control as unknown as Duplex);
  }

  async close(): Promise<void> {
    this.channel.close();
    await this.gone;
    this.socket.destroy();
  }

  /** With what was written to its standard error: an import that failed, say. */
  explained(error: unknown): unknown {
    const said = this.said.trim();
    return said === ''
      ? undefined
      : fail('RUNTIME_FNCALL_CONTAINER', { reason: `${messageOf(error)}: ${said}` }, error);
  }
}

interface Waiting {
  /** A program of the task may have run. */
  begun: boolean;
  readonly steps: StepReport[];
  notRun: ReturnType<typeof readNotRun> | undefined;
  readonly files: Map<string, Buffer[]>;
  resolve(result: RawResult | NotBegun): void;
  reject(error: Error): void;
}

export class PoolContainer {
  readonly name: string;
  readonly groups: ContainerGroups;
  /** `NAME=VALUE`: its graphics processor, and where the libraries for it are. */
  readonly gpuEnv: readonly string[];
  /** How many it has done. */
  tasks = 0;
  private readonly gpu: HeldGpu | undefined;
  private readonly launcher: Launcher;
  private readonly undo: () => Promise<void>;
  private waiting: Waiting | undefined;
  private next = settled<void>();
  private problem: string | undefined;
  private closing: Promise<void> | undefined;
  /** Told once, when no task can come any more. */
  onLost: () => void = () => {};

  constructor(
    name: string,
    groups: ContainerGroups,
    launcher: Launcher,
    undo: () => Promise<void>,
    gpu: HeldGpu | undefined,
  ) {
    this.gpu = gpu;
    const libraries = (gpu?.libraries.length ?? 0) > 0 ? { LD_LIBRARY_PATH: GPU_LIBRARIES } : {};
    this.gpuEnv = Object.entries({ ...gpu?.env, ...libraries }).map(([key, value]) => `${key}=${value}`);
    this.name = name;
    this.groups = groups;
    this.launcher = launcher;
    this.undo = undo;
    readFrames(
      launcher.socket,
      new FrameParser(),
      ({ kind, payload }) => this.receive(kind, payload),
      (reason) => this.lost(reason),
    );
  }

  /** Whether calls of another pool should have its graphics processor. */
  get isGpuWanted(): boolean {
    return this.gpu?.isWanted() === true;
  }

  /** A call has it, or is about to. */
  setInUse(inUse: boolean): void {
    this.gpu?.setInUse(inUse);
  }

  get isLost(): boolean {
    return this.problem !== undefined;
  }

  /** Resolves when the next task can come; rejects when none can, and then it has to be closed. */
  ready(): Promise<void> {
    return this.next.promise;
  }

  /** Once at a time, when it is ready. @throws RUNTIME_FNCALL_CONTAINER: it has begun, and nobody knows what became of it */
  run(order: TaskOrder, files: readonly TaskFile[]): Promise<RawResult | NotBegun> {
    // `next` stays as it is then: no other one will come.
    if (this.problem !== undefined) return Promise.resolve({ notBegun: this.problem });
    this.tasks++;
    this.next = settled();
    return new Promise((resolve, reject) => {
      this.waiting = { begun: false, steps: [], notRun: undefined, files: new Map(), resolve, reject };
      const parts: Buffer[] = [];
      for (const { path, mode, content } of files) {
        for (const payload of filePayloads(path, mode ?? 0o644, content))
          parts.push(frameBytes(TASK_FRAME.file, 0, payload));
      }
      parts.push(frameBytes(TASK_FRAME.task, 0, taskBytes(order)));
      this.launcher.socket.write(parts.length === 1 ? parts[0]! : Buffer.concat(parts));
    });
  }

  /** Ends it, whatever it does, and takes everything of it away. */
  close(): Promise<void> {
    this.gpu?.leave();
    this.closing ??= (async () => {
      await this.launcher.close();
      this.lost('it was given up');
      // Whoever has the card next has it alone: after all of this one has gone.
      await this.undo().finally(() => this.gpu?.release());
    })();
    return this.closing;
  }

  private receive(kind: number, payload: Buffer): void {
    const { waiting } = this;
    switch (kind) {
      case TASK_FRAME.hello:
        return;
      case TASK_FRAME.ready:
        this.next.resolve();
        return;
      case TASK_FRAME.begun:
        if (waiting !== undefined) waiting.begun = true;
        return;
      case TASK_FRAME.stepDone:
        waiting?.steps.push(readStep(payload));
        return;
      case TASK_FRAME.stepNotRun:
        if (waiting !== undefined) waiting.notRun = readNotRun(payload);
        return;
      case TASK_FRAME.fetched: {
        const { part, path, bytes } = readFetched(payload);
        // By bytes: two names that are no UTF-8 may look the same.
        const key = path.toString('latin1');
        if (part === 'taken back') waiting?.files.delete(key);
        else if (part === 'first') waiting?.files.set(key, [bytes]);
        else waiting?.files.get(key)?.push(bytes);
        return;
      }
      case TASK_FRAME.end: {
        this.waiting = undefined;
        const files = [...(waiting?.files ?? [])].map(([path, parts]) => ({
          path: Buffer.from(path, 'latin1').toString(),
          content: Buffer.concat(parts),
        }));
        waiting?.resolve({ steps: waiting.steps, notRun: waiting.notRun, files, fetchProblem: readText(payload) });
        return;
      }
      case TASK_FRAME.cleaned: {
        const trace = readText(payload);
        if (trace !== '') this.lost(trace);
        return;
      }
      case TASK_FRAME.failed:
        this.lost(readFailure(payload));
        return;
      default:
        if (waiting !== undefined) waiting.begun = true;
        throw fail('RUNTIME_AGENT_PROTOCOL', { problem: `a frame of type ${kind}` });
    }
  }

  private lost(reason: string): void {
    const isNew = this.problem === undefined;
    this.problem ??= reason;
    const error = fail('RUNTIME_FNCALL_CONTAINER', { reason: this.problem });
    // What it said before its end has been read, unless we ended it: a socket keeps it, and whoever cannot write to one has not given it the task whole.
    const isProven = this.closing === undefined && this.waiting?.begun === false;
    if (isProven) this.waiting?.resolve({ notBegun: this.problem });
    else this.waiting?.reject(error);
    this.waiting = undefined;
    this.next.reject(error);
    // It may have been ready before.
    this.next = settled();
    this.next.reject(error);
    if (isNew) this.onLost();
  }
}

/** What comes later than `ms` comes to nobody. @throws RUNTIME_FNCALL_CONTAINER */
export async function within<T>(work: Promise<T>, ms: number, reason: string): Promise<T> {
  let timer: NodeJS.Timeout | undefined;
  const late = new Promise<never>((_, reject) => {
    timer = setTimeout(() => reject(fail('RUNTIME_FNCALL_CONTAINER', { reason })), ms);
  });
  try {
    return await Promise.race([work, late]);
  } finally {
    clearTimeout(timer);
  }
}

/** A promise and its two ends. Nobody has to listen to it. */
function settled<T>(): { promise: Promise<T>; resolve(value: T): void; reject(error: Error): void } {
  let resolve!: (value: T) => void;
  let reject!: (error: Error) => void;
  const promise = new Promise<T>((yes, no) => {
    resolve = yes;
    reject = no;
  });
  promise.catch(() => {});
  return { promise, resolve, reject };
}
