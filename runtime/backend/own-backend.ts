/**
 * Sandboxes by a launcher of our own (runtime/agent): the same isolation as an OCI runtime gives, from the same specification, in
 * a fraction of the time, and with an exact exit status.
 *
 * A launcher is either one that lives as long as the sandbox, with this process's standard streams, or the resident one of the
 * service, which launches for its clients. It dies with this process, and its sandboxes with it. What is left then are the
 * control groups, empty or not, and `remove` needs no more than the id for those.
 */
import { type ChildProcess, spawn } from 'node:child_process';
import { closeSync, constants as constantsOfFiles, openSync, rmSync, writeSync } from 'node:fs';
import { constants } from 'node:os';
import type { Duplex } from 'node:stream';
import { isDsecError, messageOf } from '#base';
import { type ProcessIdentity, processIdentity } from '#linux';
import { outOfMemoryCount } from '../aether/command-group.ts';
import { fail } from '../errors.ts';
import type { AgentBinary } from './agent-binary.ts';
import { MAX_PAYLOAD_BYTES } from './agent-wire.ts';
import type { Backend, BackendCapabilities, Exit, LaunchSpec, PreparationSpec, RunningSandbox } from './backend.ts';
import { cgroupsOf, endCgroups, isInCgroups } from './cgroup-cleanup.ts';
import { firstProcessOf, pidFileOf, reasonFileOf, reasonOfEnd, signalFirstProcess } from './first-process.ts';
import { launchOrder, preparation, STAGE_EXEC } from './launch-order.ts';
import { type Launched, LauncherChannel, LaunchFailure } from './launcher-channel.ts';
import { signalNumber } from './signal-effect.ts';
import { makeStdioPipes, type StdioPipes } from './stdio-pipes.ts';
import { userNamespaceOf } from './user-namespace.ts';

export const OWN_BACKEND = 'dsec';

/** A launcher that is there already, and which of its clients' standard streams the sandbox gets. */
export interface ResidentLauncher {
  readonly channel: LauncherChannel;
  readonly client: number;
}

/** `agent` undefined: what can be done without it, `signal` and `remove`, still works. */
export function openOwnBackend(agent: AgentBinary | undefined, resident?: ResidentLauncher): Backend {
  return new OwnBackend(agent, resident);
}

class OwnBackend implements Backend {
  readonly name = OWN_BACKEND;
  readonly capabilities: BackendCapabilities = { exactSignals: true, terminal: true, hostNetwork: true };
  private readonly agent: AgentBinary | undefined;
  private readonly resident: ResidentLauncher | undefined;
  /** Prepared or ordered, and not known to run: by id. */
  private readonly begun = new Map<string, Begun>();

  constructor(agent: AgentBinary | undefined, resident: ResidentLauncher | undefined) {
    this.agent = agent;
    this.resident = resident;
  }

  prepare(spec: PreparationSpec): void {
    if (!this.begun.has(spec.id)) this.begun.set(spec.id, this.begin(spec));
  }

  /** That of the process that is to become the sandbox. */
  async userNamespace(spec: PreparationSpec): Promise<number> {
    this.prepare(spec);
    const { launched } = this.begun.get(spec.id)!;
    try {
      return userNamespaceOf(await launched.prepared);
    } catch (error) {
      throw launchError(error);
    }
  }

  async launch(spec: LaunchSpec): Promise<RunningSandbox> {
    rmSync(reasonFileOf(spec.folder), { force: true });
    notePid(spec.folder, 0);
    const { terminal } = spec.process;
    const begun = this.begun.get(spec.id) ?? this.begin({ ...spec, terminal });
    this.begun.set(spec.id, begun);
    const { launched, pipes } = begun;
    const order = launchOrder(spec);
    // The launcher would end the connection, and with it the sandboxes of others.
    if (order.length > MAX_PAYLOAD_BYTES) {
      const reason = `arguments and environment take ${order.length} bytes; Linux takes some two million`;
      throw fail('RUNTIME_START_FAILED', { runtime: OWN_BACKEND, reason });
    }
    launched.order(order);
    let pid: number;
    try {
      pid = await launched.started;
    } catch (error) {
      throw startError(error, spec);
    }
    notePid(spec.folder, pid);
    this.begun.delete(spec.id);
    const ended = launched.ended.then((status) => exitOfStatus(status, spec));
    return new OwnSandbox(spec.folder, pid, ended, pipes, begun.close);
  }

  /** @throws RUNTIME_NO_LAUNCHER */
  private begin(spec: PreparationSpec): Begun {
    const { resident } = this;
    if (resident !== undefined) {
      const launched = resident.channel.prepare(preparation(spec, { client: resident.client }));
      return { launched, pipes: undefined, close: async () => {} };
    }
    if (this.agent === undefined) throw fail('RUNTIME_NO_LAUNCHER');
    const prepared = preparation(spec, 'own');
    const pipes = spec.stdio === 'pipe' ? makeStdioPipes() : undefined;
    const streams = pipes === undefined ? (['inherit', 'inherit', 'inherit'] as const) : pipes.childFds;
    // A session of its own, so that Ctrl-C at our terminal reaches the sandbox once, through us. With a terminal the launcher
    // is the one who reads from it, and has to be in the foreground.
    const child = spawn(this.agent.path, ['launch'], {
      cwd: '/',
      env: {},
      stdio: [...streams, 'pipe'],
      detached: !spec.terminal,
    });
    pipes?.closeChildEnds();
    const exited = goneOf(child);
    const socket = child.stdio?.[3] as Duplex | null | undefined;
    if (socket === null || socket === undefined) {
      for (const stream of pipes === undefined ? [] : [pipes.stdin, pipes.stdout, pipes.stderr]) stream.destroy();
      throw fail('RUNTIME_START_FAILED', { runtime: OWN_BACKEND, reason: 'no process could be made for its launcher' });
    }
    const channel = new LauncherChannel(socket);
    const close = async () => {
      channel.close();
      await exited;
    };
    return { launched: channel.prepare(prepared), pipes, close };
  }

  signal(id: string, folder: string, signal: NodeJS.Signals): boolean {
    const identity = firstProcessOf(folder);
    // The number in the file may be another process's by now.
    if (identity === undefined || !isInCgroups(id, identity.pid)) return false;
    return signalFirstProcess(folder, identity, signal);
  }

  async remove(id: string): Promise<void> {
    const begun = this.begun.get(id);
    if (begun !== undefined) {
      this.begun.delete(id);
      begun.launched.cancel();
      // However it ends: then its launcher has nothing of it any more.
      await begun.launched.ended.catch(() => {});
      const { pipes } = begun;
      for (const stream of pipes === undefined ? [] : [pipes.stdin, pipes.stdout, pipes.stderr]) stream.destroy();
      await begun.close();
    }
    await endCgroups(id);
  }
}

/**
 * For whoever wants to send it a signal from another process. Written over in place: the command may have filled the disk by the time
 * that we know its number.
 */
function notePid(folder: string, pid: number): void {
  const fd = openSync(pidFileOf(folder), constantsOfFiles.O_WRONLY | constantsOfFiles.O_CREAT, 0o600);
  try {
    writeSync(fd, `${String(pid).padStart(10, '0')}\n`, 0);
  } finally {
    closeSync(fd);
  }
}

/** A sandbox whose command does not run yet. */
interface Begun {
  readonly launched: Launched;
  readonly pipes: StdioPipes | undefined;
  /** Ends a launcher that has no other sandbox. */
  close(): Promise<void>;
}

class OwnSandbox implements RunningSandbox {
  readonly stdin;
  readonly stdout;
  readonly stderr;
  private readonly folder: string;
  private readonly ended: Promise<Exit>;
  private readonly identity: ProcessIdentity | undefined;

  constructor(
    folder: string,
    pid: number,
    ended: Promise<Exit>,
    pipes: StdioPipes | undefined,
    close: () => Promise<void>,
  ) {
    this.folder = folder;
    this.identity = processIdentity(pid);
    this.stdin = pipes?.stdin ?? null;
    this.stdout = pipes?.stdout ?? null;
    this.stderr = pipes?.stderr ?? null;
    // Whoever writes to a command that has ended learns it from `wait`.
    pipes?.stdin.on('error', () => {});
    const drained = pipes === undefined ? [] : [closed(pipes.stdout), closed(pipes.stderr)];
    this.ended = ended.finally(async () => {
      pipes?.stdin.destroy();
      await close();
      await Promise.all(drained);
    });
    this.ended.catch(() => {});
  }

  wait(): Promise<Exit> {
    return this.ended;
  }

  kill(signal: NodeJS.Signals): void {
    if (this.identity !== undefined) signalFirstProcess(this.folder, this.identity, signal);
  }
}

/** `status` as waitpid has it. */
function exitOfStatus(status: number, { id, folder, limits }: LaunchSpec): Exit {
  // The launcher leaves groups with a limit on memory to us.
  const outOfMemory = limits?.memoryBytes !== undefined && outOfMemoryCount(cgroupsOf(id)) > 0;
  return { ...exitOf(status, folder), outOfMemory };
}

function exitOf(status: number, folder: string): Exit {
  const number = status & 0x7f;
  if (number === 0) return { code: (status >> 8) & 0xff };
  const asked = number === constants.signals.SIGKILL ? reasonOfEnd(folder) : undefined;
  if (asked !== undefined) return { code: 128 + signalNumber(asked), signal: asked };
  return { code: 128 + number, signal: signalNamed(number) };
}

function signalNamed(number: number): NodeJS.Signals | undefined {
  const found = Object.entries(constants.signals).find(([, value]) => value === number);
  return found?.[0] as NodeJS.Signals | undefined;
}

function launchError(error: unknown): unknown {
  if (isDsecError(error)) return error;
  return fail('RUNTIME_START_FAILED', { runtime: OWN_BACKEND, reason: messageOf(error) }, error);
}

function startError(error: unknown, spec: LaunchSpec): unknown {
  if (!(error instanceof LaunchFailure)) return launchError(error);
  const command = spec.process.args[0]!;
  if (error.stage === STAGE_EXEC) {
    if (error.code === 'ENOENT' || error.code === 'ENOTDIR') {
      return fail('RUNTIME_COMMAND_NOT_FOUND', { command, reason: error.message }, error);
    }
    if (['EACCES', 'ENOEXEC', 'EISDIR', 'ELIBBAD', 'ELOOP', 'ETXTBSY', 'EPERM'].includes(error.code)) {
      return fail('RUNTIME_COMMAND_NOT_EXECUTABLE', { command, path: command, reason: error.message }, error);
    }
  }
  return launchError(error);
}

/** Also when it could not be started at all: then its socket closes too. */
function goneOf(child: ChildProcess): Promise<void> {
  return new Promise((resolve) => {
    child.once('error', () => resolve());
    child.once('exit', () => resolve());
  });
}

function closed(stream: StdioPipes['stdout']): Promise<void> {
  return new Promise((resolve) => {
    stream.once('close', () => resolve());
    stream.once('error', () => resolve());
  });
}
