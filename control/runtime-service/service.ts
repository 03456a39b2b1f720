/**
 * `dsec serve runtime`: a process that stays, so that `dsec run` has neither Node to start nor code to load. The door and the
 * launcher are one small program (runtime/agent); this process mounts, looks up, keeps records, and undoes.
 *
 * - A client that dies takes its sandbox with it, as a `dsec run` that is killed does.
 * - The launcher dies: its sandboxes end, their clients are told, everything is undone here, and another launcher takes its place.
 * - This process dies: the launcher ends the sandboxes; what is left the next command finds and removes.
 *
 * Beside them are the sandboxes that stay (`dsec sandbox create`): those are the keeper's, and outlive this process.
 */
import { mkdirSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { setTimeout as delay } from 'node:timers/promises';
import type { FastifyInstance } from 'fastify';
import { messageOf } from '#base';
import { defaultStoreUrl } from '#imagesvc';
import { type FileLock, tryLock } from '#linux';
import {
  type AgentBinary,
  findAgent,
  type ResidentLauncher,
  reclaimSandboxes,
  runtimeFolders,
  SandboxNode,
  type ServiceClient,
  startResidentLauncher,
} from '#runtime';
import { fail } from '../errors.ts';
import { FnCallHost, type GpusOfTasks } from '../fncall/fncall-host.ts';
import { fncallRoutes } from '../fncall/fncall-routes.ts';
import { runForClient } from './client-command.ts';
import { sandboxSocket } from './sandbox-client.ts';
import { sandboxApp } from './sandbox-routes.ts';
import { type ServiceSelf, servableCommand } from './servable.ts';
import { serviceSocket } from './service-state.ts';

export interface RuntimeServiceOptions {
  readonly self: ServiceSelf;
  /** Told what is worth a line in a log. */
  readonly note: (text: string) => void;
  /** Of images of tasks whose store is not named; this user's by default. */
  readonly storeUrl?: string;
  /** Which graphics processors pools of tasks may have: an edge gives whole cards to sandboxes. */
  readonly gpusOfTasks?: GpusOfTasks;
}

/** A launcher that cannot even be started is tried again, but not in a circle. */
const RESTART_PAUSE_MS = 500;

export class RuntimeService {
  readonly socket: string;
  private readonly options: RuntimeServiceOptions;
  private readonly agent: AgentBinary;
  private readonly lock: FileLock;
  private readonly working = new Map<Promise<void>, AbortController>();
  private launcher: ResidentLauncher | undefined;
  private node: SandboxNode | undefined;
  private app: FastifyInstance | undefined;
  private tasks: FnCallHost | undefined;
  private reclaiming: Promise<void> | undefined;
  private ending = false;
  private isStale = false;

  private constructor(options: RuntimeServiceOptions, agent: AgentBinary, socket: string, lock: FileLock) {
    this.options = options;
    this.agent = agent;
    this.socket = socket;
    this.lock = lock;
  }

  /** @throws SERVE_NEEDS_ROOT, SERVE_NO_LAUNCHER, SERVE_RUNS_ALREADY, RUNTIME_LAUNCHER_GONE */
  static async start(options: RuntimeServiceOptions): Promise<RuntimeService> {
    if (process.geteuid?.() !== 0) throw fail('SERVE_NEEDS_ROOT');
    const agent = findAgent();
    if (agent === undefined) throw fail('SERVE_NO_LAUNCHER');
    const { runDir } = runtimeFolders();
    mkdirSync(runDir, { recursive: true, mode: 0o755 });
    const socket = serviceSocket(runDir);
    const lock = tryLock(`${socket}.lock`);
    if (lock === undefined) throw runsAlready(socket);
    // For whoever comes after.
    writeFileSync(lock.path, `${process.pid}\n`);
    const service = new RuntimeService(options, agent, socket, lock);
    try {
      await service.openNode(runDir);
      await service.open();
      service.reclaiming = service.reclaim();
      void service.fncall.restore();
    } catch (error) {
      await service.closeNode();
      lock.release();
      throw error;
    }
    return service;
  }

  /** What processes that were killed have left. It may take seconds, and keeps nobody waiting. */
  private async reclaim(): Promise<void> {
    const { problems } = await reclaimSandboxes().catch((error) => ({ problems: [messageOf(error)] }));
    for (const problem of problems) this.options.note(problem);
  }

  /** How many clients are being served. */
  get busy(): number {
    return this.working.size;
  }

  /** Those that stay; whoever has the service may ask for them here. */
  get sandboxes(): SandboxNode {
    return this.node!;
  }

  /** Whoever has the service may ask for them here. */
  get fncall(): FnCallHost {
    return this.tasks!;
  }

  private async openNode(runDir: string): Promise<void> {
    this.node = await SandboxNode.open({
      agent: this.agent,
      onNote: this.options.note,
      vmPool: process.env.DSEC_VM_POOL !== 'off',
    });
    const socket = sandboxSocket(runDir);
    // Whoever left it holds no lock any more.
    rmSync(socket, { force: true });
    this.app = await sandboxApp(this.node);
    const { storeUrl = defaultStoreUrl(), note, gpusOfTasks } = this.options;
    this.tasks = new FnCallHost({ storeUrl, note, gpusOfTasks });
    fncallRoutes(this.app, this.tasks);
    const mask = process.umask(0o177);
    try {
      await this.app.listen({ path: socket });
    } finally {
      process.umask(mask);
    }
  }

  /** The sandboxes that stay do so. */
  private async closeNode(): Promise<void> {
    await this.app?.close();
    await this.tasks?.close();
    await this.node?.close();
  }

  private async open(): Promise<void> {
    const launcher = await startResidentLauncher(this.agent, this.socket, (client) => {
      // In a later turn: see `isFresh`.
      setImmediate(() => this.serve(client));
    });
    this.launcher = launcher;
    launcher.closed.then(() => this.reopen());
  }

  private async reopen(): Promise<void> {
    while (!this.ending) {
      this.options.note('the launcher has ended; its sandboxes ended with it; another one is started');
      try {
        return await this.open();
      } catch (error) {
        this.options.note(messageOf(error));
        await delay(RESTART_PAUSE_MS);
      }
    }
  }

  /** Once: what it declines from then on looks as if it were not there. */
  private sayWhenStale(): void {
    if (this.isStale || this.options.self.isFresh()) return;
    this.isStale = true;
    this.options.note(
      'the sources have changed since this service began: commands are run by processes of their own, which takes longer, until it is started again; sandboxes that stay outlive that',
    );
  }

  private serve(client: ServiceClient): void {
    const { node } = this;
    this.sayWhenStale();
    const args = this.ending ? undefined : servableCommand(client.greeting, this.options.self);
    if (args === undefined || node === undefined) {
      client.decline();
      return;
    }
    const stop = new AbortController();
    const work = runForClient(client, args, this.options.self, node, stop.signal)
      .catch((error: unknown) => this.options.note(messageOf(error)))
      .finally(() => this.working.delete(work));
    this.working.set(work, stop);
  }

  /** No new clients; those that are served have `drainMs` to end, then their sandboxes are ended. */
  async close(drainMs: number): Promise<void> {
    this.ending = true;
    rmSync(this.socket, { force: true });
    this.launcher?.closeListener();
    const all = () => Promise.all([...this.working.keys()]);
    await Promise.race([all(), delay(drainMs, undefined, { ref: false })]);
    for (const stop of this.working.values()) stop.abort();
    await all();
    await this.reclaiming;
    await this.closeNode();
    await this.launcher?.close();
    // While it is held: a lock on a nameless file would keep nobody out.
    rmSync(this.lock.path, { force: true });
    this.lock.release();
  }
}

/** Its lock says which process it is, but for a moment at its start, and where an older version holds it. */
function runsAlready(socket: string): Error {
  const pid = readFileSync(`${socket}.lock`, 'utf8').trim();
  const known = pid === '' ? { process: '', way: '' } : { process: `, process ${pid}`, way: `: kill ${pid}` };
  return fail('SERVE_RUNS_ALREADY', { socket, ...known });
}
