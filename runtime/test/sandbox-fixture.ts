/**
 * A store with small images made by mkfs.erofs, folders of its own for state, run and cache, and a process of its own to
 * run sandboxes in where a test kills it or needs its real standard streams.
 */
import { type ChildProcess, execFileSync, spawn } from 'node:child_process';
import * as fs from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { setTimeout as delay } from 'node:timers/promises';
import { digestOf } from '#base';
import {
  type BlobStore,
  EROFS_TYPE,
  type Image,
  type ImageKind,
  type OciConfig,
  openStore,
  publishImage,
} from '#imagesvc';
import { readMountInfo, umount } from '#linux';
import { cgroupsOf } from '../backend/cgroup-cleanup.ts';
import { backendNamed } from '../backend/choose-backend.ts';
import {
  listSandboxes,
  type RunOptions,
  type RunResult,
  type RuntimeFolders,
  runContainer,
  runtimeFolders,
} from '../index.ts';

export function canRun(): boolean {
  if (process.getuid?.() !== 0) return false;
  const missing = ['crun', 'mkfs.erofs', 'busybox'].filter((tool) => {
    try {
      execFileSync('sh', ['-c', `command -v ${tool}`], { stdio: 'ignore' });
      return false;
    } catch {
      return true;
    }
  });
  if (missing.length > 0) console.log(`skipped: ${missing.join(', ')} not installed`);
  return missing.length === 0;
}

export interface Ran extends RunResult {
  readonly stdout: Buffer;
  readonly stderr: string;
}

/** What a child process is told to do: see sandbox-child.ts. */
export interface ChildOrder
  extends Omit<
    RunOptions,
    'store' | 'base' | 'workspace' | 'toolkits' | 'stdio' | 'signal' | 'takeSignals' | 'backend'
  > {
  readonly storeUrl: string;
  readonly image: string;
  readonly folders: RuntimeFolders;
}

export class Site {
  readonly root = fs.realpathSync(fs.mkdtempSync(join(tmpdir(), 'dsec-run-')));
  readonly folders = runtimeFolders({
    stateDir: join(this.root, 'state'),
    runDir: join(this.root, 'run'),
    cacheDir: join(this.root, 'cache'),
  });
  readonly storeUrl = `file://${this.root}/store`;
  store!: BlobStore;
  private count = 0;

  async open(): Promise<this> {
    this.store = await openStore(this.storeUrl);
    return this;
  }

  /** One image, a layer for each `layers` function (which fills a folder), on top of `on`. */
  async image(
    name: string,
    layers: readonly ((folder: string) => void)[],
    config: OciConfig['config'] = {},
    options: { kind?: ImageKind; on?: Image } = {},
  ): Promise<Image> {
    const made = [];
    for (const fill of layers) {
      const folder = join(this.root, `tree${this.count}`);
      const file = join(this.root, `layer${this.count}`);
      fs.mkdirSync(folder, { mode: 0o755 });
      fs.chmodSync(folder, 0o755);
      fill(folder);
      const uuid = `00000000-0000-0000-0000-${String(this.count++).padStart(12, '0')}`;
      execFileSync('mkfs.erofs', ['-T0', '-U', uuid, file, folder], { stdio: 'pipe' });
      const bytes = fs.readFileSync(file);
      await this.store.put(bytes);
      made.push({ meta: { mediaType: EROFS_TYPE, digest: digestOf(bytes), size: bytes.length }, devices: [] });
      fs.rmSync(folder, { recursive: true });
      fs.rmSync(file);
    }
    return publishImage(this.store, {
      name,
      kind: options.kind ?? 'base',
      layers: [...(options.on?.layers ?? []), ...made],
      ownLayers: made.length,
      base: options.on?.manifestDigest,
      config: Buffer.from(
        JSON.stringify({ architecture: 'amd64', os: 'linux', config, rootfs: { type: 'layers', diff_ids: [] } }),
      ),
    });
  }

  /** Runs in this process, streams piped. */
  async run(
    base: Image,
    command: readonly string[],
    options: Partial<RunOptions> & { stdin?: Buffer | string } = {},
  ): Promise<Ran> {
    const stdout: Buffer[] = [];
    const stderr: Buffer[] = [];
    const { stdin, ...rest } = options;
    const result = await runContainer({
      store: this.store,
      base,
      command,
      folders: this.folders,
      stdio: {
        stdin,
        onStdout: (bytes) => stdout.push(Buffer.from(bytes)),
        onStderr: (bytes) => stderr.push(Buffer.from(bytes)),
      },
      ...rest,
    });
    return { ...result, stdout: Buffer.concat(stdout), stderr: Buffer.concat(stderr).toString() };
  }

  /** Runs in a process of its own, standard streams inherited from it. */
  spawn(
    order: Omit<ChildOrder, 'storeUrl' | 'folders'>,
    env: NodeJS.ProcessEnv = {},
    wrap = (argv: string[]) => argv,
  ): Spawned {
    const whole: ChildOrder = { ...order, storeUrl: this.storeUrl, folders: this.folders };
    const script = new URL('./sandbox-child.ts', import.meta.url).pathname;
    const [program, ...args] = wrap([process.execPath, '--import', 'tsx', script, JSON.stringify(whole)]);
    const child = spawn(program!, args, {
      stdio: ['pipe', 'pipe', 'pipe'],
      env: { ...process.env, ...env },
    });
    return new Spawned(child);
  }

  /** Everything a run must not leave. */
  leftovers(): { mounts: string[]; sandboxes: string[]; cgroups: string[]; folders: string[]; runtime: string[] } {
    const list = (path: string) =>
      fs.existsSync(path) ? fs.readdirSync(path).filter((name) => !name.startsWith('.')) : [];
    const { stateDir, runDir } = this.folders;
    return {
      mounts: readMountInfo()
        .map((row) => row.mountPoint)
        .filter((path) => path.startsWith(`${this.root}/`)),
      sandboxes: listSandboxes(this.folders).map((record) => record.name),
      cgroups: listSandboxes(this.folders).flatMap((record) => cgroupsOf(record.id)),
      folders: list(join(stateDir, 'sandboxes')),
      runtime: [...list(join(runDir, 'crun')), ...list(join(runDir, 'runc'))],
    };
  }

  /** Also ends what a failed test has left running. */
  async remove(): Promise<void> {
    for (const { id, backend } of listSandboxes(this.folders)) {
      await backendNamed(backend, this.folders.runDir).remove(id);
    }
    const mounts = readMountInfo().map((row) => row.mountPoint);
    for (const path of mounts.filter((point) => point.startsWith(`${this.root}/`)).reverse())
      umount(path, { lazy: true });
    fs.rmSync(this.root, { recursive: true, force: true });
  }
}

export const NOTHING = { mounts: [], sandboxes: [], cgroups: [], folders: [], runtime: [] };

export class Spawned {
  readonly child: ChildProcess;
  readonly ended: Promise<{ code: number | null; signal: NodeJS.Signals | null }>;
  /** The same, once all its output was read. */
  readonly finished: Spawned['ended'];
  private out = Buffer.alloc(0);
  private err = '';
  private readonly waiting: (() => void)[] = [];

  constructor(child: ChildProcess) {
    this.child = child;
    const changed = () => {
      for (const wake of this.waiting.splice(0)) wake();
    };
    child.stdout!.on('data', (bytes: Buffer) => {
      this.out = Buffer.concat([this.out, bytes]);
      changed();
    });
    child.stderr!.on('data', (bytes: Buffer) => {
      this.err += bytes.toString();
    });
    this.finished = inTime(
      () => `has not finished; it wrote "${this.out}" "${this.err}"\n${processTree(child.pid)}`,
      new Promise((resolve) => child.once('close', (code, signal) => resolve({ code, signal }))),
    );
    this.finished.catch(() => {});
    // `exit`, not `close`: what a killed one leaves behind holds its streams.
    this.ended = new Promise((resolve) => {
      child.once('exit', (code, signal) => {
        changed();
        resolve({ code, signal });
      });
    });
  }

  get stdout(): Buffer {
    return this.out;
  }

  get stderr(): string {
    return this.err;
  }

  /** Until a process below it is `program`: a shell that is to become it has handlers of its own until then. */
  async runs(program: string): Promise<void> {
    while (!processTree(this.child.pid).includes(`{${program}}`)) {
      if (this.child.exitCode !== null || this.child.signalCode !== null) {
        throw new Error(`ended before it ran "${program}": ${this.out} ${this.err}`);
      }
      await delay(5);
    }
  }

  /** Until the output has `text`, or the process has ended. */
  async sees(text: string): Promise<void> {
    while (!this.out.includes(text)) {
      if (this.child.exitCode !== null || this.child.signalCode !== null) {
        throw new Error(`ended before it wrote "${text}": ${this.out} ${this.err}`);
      }
      await new Promise<void>((resolve) => this.waiting.push(resolve));
    }
  }
}

const IN_TIME_MS = 50_000;

/** A test that hangs must say where. */
function inTime<T>(state: () => string, promise: Promise<T>): Promise<T> {
  let timer: NodeJS.Timeout | undefined;
  const late = new Promise<never>((_resolve, reject) => {
    timer = setTimeout(() => reject(new Error(state())), IN_TIME_MS);
  });
  return Promise.race([promise, late]).finally(() => clearTimeout(timer));
}

/** A line for each process below `pid`, itself first: what it is, where it waits, its signal masks. */
function processTree(pid: number | undefined, indent = ''): string {
  if (pid === undefined) return '';
  const read = (name: string) => {
    try {
      return fs.readFileSync(`/proc/${pid}/${name}`, 'latin1').replaceAll('\0', ' ').trim();
    } catch {
      return '?';
    }
  };
  const masks = read('status').match(/^(State|SigPnd|ShdPnd|SigBlk|SigIgn|SigCgt):.*$/gm) ?? [];
  const line = `${indent}${pid} {${read('comm')}} ${read('cmdline').slice(0, 200)} [${read('wchan')}] ${masks.join(' ')}`;
  const children = read(`task/${pid}/children`).split(' ').map(Number).filter(Boolean);
  return [line, ...children.map((child) => processTree(child, `${indent}  `))].join('\n');
}

/** A root with busybox and its usual names. */
export function busybox(folder: string): void {
  fs.mkdirSync(join(folder, 'bin'));
  fs.copyFileSync('/bin/busybox', join(folder, 'bin/busybox'));
  fs.chmodSync(join(folder, 'bin/busybox'), 0o755);
  const names = [
    'sh',
    'cat',
    'id',
    'ls',
    'env',
    'pwd',
    'echo',
    'sleep',
    'true',
    'false',
    'kill',
    'rm',
    'mkdir',
    'tty',
    'stty',
    'wc',
    'ip',
    'mount',
    'hostname',
    'touch',
    'grep',
    'stat',
    'dd',
    'mkfifo',
    'chmod',
    'ln',
    'mv',
    'unshare',
  ];
  for (const name of names) fs.symlinkSync('busybox', join(folder, 'bin', name));
  fs.mkdirSync(join(folder, 'etc'));
  fs.writeFileSync(
    join(folder, 'etc/passwd'),
    'root:x:0:0:root:/root:/bin/sh\nagent:x:1000:1001:Agent:/home/agent:/bin/sh\n1234:x:77:78::/odd:/bin/sh\nbroken\n',
  );
  fs.writeFileSync(
    join(folder, 'etc/group'),
    'root:x:0:\nagents:x:1001:\nextra:x:2000:agent,other\nmore:x:2001:other, agent\n',
  );
}
