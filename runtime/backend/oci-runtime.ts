/**
 * Sandboxes by an OCI runtime: crun, else runc. `run` in the foreground is one process that creates, starts, waits and
 * deletes, three times as fast as the four commands; its standard streams are the sandbox's, and with a terminal it
 * copies between ours and the sandbox's own.
 *
 * The runtime's process dies with ours (parent-death signal); the sandbox itself does not, and is ended by `remove`, which
 * needs nothing but the id: the runtime's state folder first, then whatever is still in the sandbox's cgroups.
 */
import { type ChildProcess, execFile, spawn } from 'node:child_process';
import {
  existsSync,
  type FSWatcher,
  mkdirSync,
  readFileSync,
  rmSync,
  statfsSync,
  statSync,
  watch,
  writeFileSync,
} from 'node:fs';
import { join } from 'node:path';
import { promisify } from 'node:util';
import { messageOf } from '#base';
import type { ProcessIdentity } from '#linux';
import { fail } from '../errors.ts';
import type { Backend, BackendCapabilities, Exit, LaunchSpec, RunningSandbox } from './backend.ts';
import { cgroupsOf, endCgroups, isInCgroups } from './cgroup-cleanup.ts';
import { firstProcessOf, pidFileOf, reasonOfEnd, signalFirstProcess } from './first-process.ts';
import { idExtents } from './id-ranges.ts';
import { lendStdio } from './lent-stdio.ts';
import { type LimitGroups, makeLimitGroups, RUNTIME_GROUP } from './limit-groups.ts';
import { type OciSpec, ociSpec } from './oci-spec.ts';
import { forLibseccomp } from './seccomp-patterns.ts';
import { signalNumber } from './signal-effect.ts';
import { makeStdioPipes, type StdioPipes } from './stdio-pipes.ts';
import { openUserNamespace } from './user-namespace.ts';

const execFileAsync = promisify(execFile);

export type OciRuntimeName = 'crun' | 'runc';

/** sbin is not in everybody's PATH, and Debian's runc is there. */
const SYSTEM_FOLDERS = ['/usr/local/bin', '/usr/local/sbin', '/usr/bin', '/usr/sbin', '/bin', '/sbin'];

export interface OciRuntimeChoice {
  readonly name: OciRuntimeName;
  readonly path: string;
}

/** crun, else runc; `only` (or DSEC_OCI_RUNTIME) asks for one. @throws RUNTIME_NO_OCI_RUNTIME */
export function findOciRuntime(only = process.env.DSEC_OCI_RUNTIME): OciRuntimeChoice {
  const folders = [
    ...(process.env.PATH ?? '').split(':').filter((folder) => folder.startsWith('/')),
    ...SYSTEM_FOLDERS,
  ];
  for (const name of ['crun', 'runc'] as const) {
    if (only !== undefined && only !== '' && only !== name) continue;
    const path = folders.map((folder) => join(folder, name)).find(isExecutable);
    if (path !== undefined) return { name, path };
  }
  throw fail('RUNTIME_NO_OCI_RUNTIME');
}

function isExecutable(path: string): boolean {
  const stat = statSync(path, { throwIfNoEntry: false });
  return stat?.isFile() === true && (stat.mode & 0o111) !== 0;
}

const TMPFS_MAGIC = 0x01021994;
const CGROUP2_MAGIC = 0x63677270;

/**
 * Whether cgroups are hybrid: v1 controllers, with a v2 tree beside them at `unified`. crun refuses that. Where the v2
 * tree carries no controllers, it works in a mount namespace of its own in which that tree is hidden.
 */
export function cgroupsAreHybrid(root = '/sys/fs/cgroup'): boolean {
  try {
    return statfsSync(root).type === TMPFS_MAGIC && statfsSync(join(root, 'unified')).type === CGROUP2_MAGIC;
  } catch {
    return false;
  }
}

const HIDE_UNIFIED = 'mount -t tmpfs -o size=4k,mode=755 none /sys/fs/cgroup/unified';
/** $1: the root, $2: where, $3: the agent, if any. */
const SHOW_ROOT =
  'mount -t tmpfs -o size=64k,mode=755 none "$2" && mkdir "$2/root" && mount --bind "$1" "$2/root" && ' +
  'if [ -n "$3" ]; then touch "$2/agent" && mount --bind "$3" "$2/agent"; fi';

/** Where the agent is inside. */
const AGENT = '/dev/dsec-agent';

/** A folder that a user who is nobody outside can get to, for the runtime's own view of root and agent: they may lie below folders of root's. */
const OPEN_FOLDERS = ['/mnt', '/media', '/srv', '/opt'];

function openFolder(): string {
  return OPEN_FOLDERS.find((folder) => existsSync(folder)) ?? '/tmp';
}

interface Shown {
  readonly root: string;
  readonly at: string;
  readonly agent?: string;
}

const LOG = 'runtime.log';

export function openOciBackend(runDir: string, choice: OciRuntimeChoice = findOciRuntime()): OciBackend {
  return new OciBackend(join(runDir, choice.name), choice);
}

export class OciBackend implements Backend {
  readonly name: string;
  readonly capabilities: BackendCapabilities = { exactSignals: false, terminal: true, hostNetwork: true };
  private readonly stateRoot: string;
  private readonly hides: boolean;
  private readonly command: readonly string[];

  constructor(stateRoot: string, choice: OciRuntimeChoice) {
    this.name = choice.name;
    this.stateRoot = stateRoot;
    this.hides = choice.name === 'crun' && cgroupsAreHybrid();
    const manager = choice.name === 'crun' ? ['--cgroup-manager=cgroupfs'] : [];
    this.command = [choice.path, '--root', stateRoot, ...manager];
  }

  /** `shown`: what the runtime shall see at another place. */
  private commandLine(args: readonly string[], shown?: Shown): string[] {
    const steps = [...(this.hides ? [HIDE_UNIFIED] : []), ...(shown === undefined ? [] : [SHOW_ROOT])];
    if (steps.length === 0) return [...this.command, ...args];
    const script = [...steps, 'shift 3', 'exec "$@"'].join(' && ');
    const namespace = ['unshare', '--mount', '--propagation', 'slave', 'sh', '-c', script, 'sh'];
    return [...namespace, shown?.root ?? '', shown?.at ?? '', shown?.agent ?? '', ...this.command, ...args];
  }

  /**
   * For a sandbox that stays: its first process is the agent, shown read-only inside, and descriptor 3 its channel. The command ends when the
   * agent runs. Writes the bundle.
   */
  residentCommand(
    spec: LaunchSpec,
    { agent, lifetimeMs, leaf }: { readonly agent: string; readonly lifetimeMs: number; readonly leaf?: string },
  ): { args: string[]; pidFile: string } {
    mkdirSync(this.stateRoot, { recursive: true, mode: 0o700 });
    const [log, pidFile] = [join(spec.folder, LOG), pidFileOf(spec.folder)];
    for (const path of [log, pidFile]) rmSync(path, { force: true });
    const at = spec.idBase === undefined ? undefined : openFolder();
    const binds = [...spec.binds, { source: at === undefined ? agent : join(at, 'agent'), target: AGENT, exec: true }];
    const args = [AGENT, 'agent', '3', String(lifetimeMs)];
    const group = leaf === undefined ? '' : `/${leaf}`;
    this.writeConfig(spec, this.configOf({ ...spec, binds, process: { ...spec.process, args } }, at, group));
    const run = ['run', '--detach', '--preserve-fds', '1', '--bundle', spec.folder, '--pid-file', pidFile, spec.id];
    const shown = at === undefined ? undefined : { root: spec.root, at, agent };
    return { args: this.commandLine(['--log', log, '--log-format', 'json', ...run], shown), pidFile };
  }

  /** What it complained of in this bundle. */
  problemIn(folder: string): string | undefined {
    return lastError(join(folder, LOG));
  }

  private configOf(spec: LaunchSpec, at: string | undefined, group = ''): OciSpec {
    const oci = ociSpec({ ...spec, root: at === undefined ? spec.root : join(at, 'root') }, group);
    return { ...oci, linux: { ...oci.linux, seccomp: forLibseccomp(oci.linux.seccomp) } };
  }

  private writeConfig(spec: LaunchSpec, config: OciSpec): void {
    writeFileSync(join(spec.folder, 'config.json'), JSON.stringify(config), { mode: 0o600 });
  }

  /** The runtime makes its own later; this one has the same map. */
  userNamespace({ idBase }: { readonly idBase: number }): Promise<number> {
    return openUserNamespace(idExtents(idBase));
  }

  async launch(spec: LaunchSpec): Promise<RunningSandbox> {
    mkdirSync(this.stateRoot, { recursive: true, mode: 0o700 });
    const log = join(spec.folder, LOG);
    const pidFile = pidFileOf(spec.folder);
    for (const path of [log, pidFile]) rmSync(path, { force: true });
    const at = spec.idBase === undefined ? undefined : openFolder();
    const groups = makeLimitGroups(spec.id, spec);
    this.writeConfig(spec, this.configOf(spec, at, groups === undefined ? '' : `/${RUNTIME_GROUP}`));
    const pipes = spec.stdio === 'pipe' ? makeStdioPipes() : undefined;
    const [program, ...args] = [
      ...['setpriv', '--pdeathsig', 'KILL'],
      ...this.commandLine(
        ['--log', log, '--log-format', 'json', 'run', '--bundle', spec.folder, '--pid-file', pidFile, spec.id],
        at === undefined ? undefined : { root: spec.root, at },
      ),
    ];
    const lent = pipes === undefined ? lendStdio() : undefined;
    const started = pidFileWritten(spec.folder, pidFile);
    // A session of its own, so that Ctrl-C at our terminal reaches the sandbox once, through us. With a terminal the
    // runtime has to be in the foreground, and turns Ctrl-C into a byte.
    const child = spawn(program!, args, {
      cwd: '/',
      stdio: [...(pipes?.childFds ?? lent!.fds)],
      detached: !spec.process.terminal,
    });
    pipes?.closeChildEnds();
    lent?.closeOwn();
    const exited = exitOf(child, program!).finally(() => lent?.giveBack());
    exited.catch(() => {});
    const running = new OciSandbox(this.name, exited, pipes, log, spec.folder, groups);
    let first: 'started' | 'exited';
    try {
      first = await Promise.race([
        started.promise.then(() => 'started' as const),
        exited.then(() => 'exited' as const),
      ]);
    } finally {
      started.stop();
    }
    // Gone without a pid: it never ran, or was too quick for the watcher.
    if (first === 'exited' && !existsSync(pidFile)) {
      for (const stream of pipes === undefined ? [] : [pipes.stdin, pipes.stdout, pipes.stderr]) stream.destroy();
      throw fail('RUNTIME_START_FAILED', { runtime: this.name, reason: lastError(log) ?? 'it gave no reason' });
    }
    running.noteStarted();
    return running;
  }

  signal(id: string, folder: string, signal: NodeJS.Signals): boolean {
    const identity = firstProcessOf(folder);
    // The number in the file may be another process's by now.
    if (identity === undefined || !isInCgroups(id, identity.pid)) return false;
    return signalFirstProcess(folder, identity, signal);
  }

  async remove(id: string): Promise<void> {
    const state = join(this.stateRoot, id);
    if (existsSync(state)) {
      const [program, ...args] = this.commandLine(['delete', '--force', id]);
      // Half-made state may be beyond the runtime's own means; what follows is not.
      await execFileAsync(program!, args, { cwd: '/' }).catch(() => {});
    }
    if (cgroupsOf(id).length > 0) await endCgroups(id);
    rmSync(state, { recursive: true, force: true });
  }
}

class OciSandbox implements RunningSandbox {
  readonly stdin;
  readonly stdout;
  readonly stderr;
  private readonly runtime: string;
  private readonly log: string;
  private readonly folder: string;
  private readonly ended: Promise<Exit>;
  private identity: ProcessIdentity | undefined;

  constructor(
    runtime: string,
    exited: Promise<{ code: number | null; signal: NodeJS.Signals | null }>,
    pipes: StdioPipes | undefined,
    log: string,
    folder: string,
    groups: LimitGroups | undefined,
  ) {
    this.runtime = runtime;
    this.log = log;
    this.folder = folder;
    this.stdin = pipes?.stdin ?? null;
    this.stdout = pipes?.stdout ?? null;
    this.stderr = pipes?.stderr ?? null;
    // Whoever writes to a command that has ended learns it from `wait`.
    pipes?.stdin.on('error', () => {});
    const drained = pipes === undefined ? [] : [closed(pipes.stdout), closed(pipes.stderr)];
    this.ended = exited.then(async ({ code, signal }) => {
      pipes?.stdin.destroy();
      await Promise.all(drained);
      const outOfMemory = groups?.ranOutOfMemory() ?? false;
      return { ...this.exit(code, signal), outOfMemory };
    });
    this.ended.catch(() => {});
  }

  noteStarted(): void {
    this.identity = firstProcessOf(this.folder);
  }

  wait(): Promise<Exit> {
    return this.ended;
  }

  kill(signal: NodeJS.Signals): void {
    // Straight to the first process: what a runtime does with the signals it gets differs.
    if (this.identity !== undefined) signalFirstProcess(this.folder, this.identity, signal);
  }

  private exit(code: number | null, signal: NodeJS.Signals | null): Exit {
    if (code === null) {
      throw fail('RUNTIME_START_FAILED', {
        runtime: this.runtime,
        reason: `it was ended by ${signal}; the exit status is lost`,
      });
    }
    const reason = code === 0 ? undefined : lastError(this.log);
    // With a complaint: it was ended before the command took the place of the runtime's own first process.
    const asked = code === KILLED || reason !== undefined ? reasonOfEnd(this.folder) : undefined;
    if (asked !== undefined) return { code: 128 + signalNumber(asked), signal: asked };
    // After the pid was written only exec can still fail; a complaint while cleaning up says nothing about the command.
    if (reason !== undefined && /exec|executable|format error|chdir|not found|permission denied/i.test(reason)) {
      if (/no such file|not found/i.test(reason)) {
        throw fail('RUNTIME_COMMAND_NOT_FOUND', { command: 'the command', reason });
      }
      if (/permission denied|format error/i.test(reason)) {
        throw fail('RUNTIME_COMMAND_NOT_EXECUTABLE', { command: 'the command', path: 'PATH', reason });
      }
      throw fail('RUNTIME_START_FAILED', { runtime: this.runtime, reason });
    }
    return { code };
  }
}

/** How a runtime tells an end by SIGKILL. */
const KILLED = 128 + signalNumber('SIGKILL');

function exitOf(child: ChildProcess, program: string): Promise<{ code: number | null; signal: NodeJS.Signals | null }> {
  return new Promise((resolve, reject) => {
    child.once('error', (error) => {
      reject(fail('RUNTIME_START_FAILED', { runtime: program, reason: messageOf(error) }, error));
    });
    child.once('exit', (code, signal) => resolve({ code, signal }));
  });
}

function closed(stream: StdioPipes['stdout']): Promise<void> {
  return new Promise((resolve) => {
    stream.once('close', () => resolve());
    stream.once('error', () => resolve());
  });
}

function pidFileWritten(folder: string, pidFile: string): { promise: Promise<void>; stop(): void } {
  let check = () => {};
  const promise = new Promise<void>((resolve) => {
    check = () => {
      if ((statSync(pidFile, { throwIfNoEntry: false })?.size ?? 0) > 0) resolve();
    };
  });
  // inotify instances are limited: without one we only learn a little later that it has started.
  const timer = setInterval(check, 50);
  let watcher: FSWatcher | undefined;
  try {
    watcher = watch(folder, { persistent: false }, check);
    watcher.on('error', () => {});
  } catch {
    watcher = undefined;
  }
  const stop = () => {
    clearInterval(timer);
    watcher?.close();
  };
  return { promise, stop };
}

/** Message of the last error in the runtime's log (JSON lines). */
function lastError(log: string): string | undefined {
  if (!existsSync(log)) return undefined;
  let found: string | undefined;
  for (const line of readFileSync(log, 'utf8').split('\n')) {
    try {
      const { level, msg } = JSON.parse(line) as { level?: unknown; msg?: unknown };
      if ((level === 'error' || level === 'fatal') && typeof msg === 'string') found = msg;
    } catch {
      // Not a whole line.
    }
  }
  return found;
}
