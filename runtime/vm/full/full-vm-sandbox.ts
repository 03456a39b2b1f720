/**
 * A sandbox that is a whole machine with a disk of its own: any operating system, no agent of ours inside. What it is asked goes by its screen, its
 * keyboard and its serial console; commands and files by QEMU's guest agent where its system has that, else they fail with RUNTIME_UNSUPPORTED.
 *
 * Paused, its memory and devices are a snapshot in its folder, and no process is left. The order keeps disk and memory of one moment: a machine whose
 * record says `paused` never ran since the snapshot.
 */
import { existsSync, mkdirSync, readFileSync } from 'node:fs';
import { readdir, rm } from 'node:fs/promises';
import { connect } from 'node:net';
import { basename, join } from 'node:path';
import type { Duplex } from 'node:stream';
import { failPoint, messageOf } from '#base';
import type { KeeperChannel } from '../../aether/keeper-channel.ts';
import type { KeptCommand } from '../../aether/kept-command.ts';
import { endCgroups } from '../../backend/cgroup-cleanup.ts';
import { fail } from '../../errors.ts';
import { removeTapOf } from '../../network/sandbox-link.ts';
import { AgentSandbox, type AgentSandboxParts, endNow } from '../../node/agent-sandbox.ts';
import { featuresOf } from '../../sandbox-api/backend-table.ts';
import type { Capability } from '../../sandbox-api/capabilities.ts';
import type { ExecSpec } from '../../sandbox-api/exec.ts';
import type { SandboxFiles } from '../../sandbox-api/files.ts';
import type { AllLimits } from '../../sandbox-api/limits.ts';
import type { PauseReport, SandboxEnd } from '../../sandbox-api/sandbox.ts';
import type { ShellSession } from '../../sandbox-api/shell.ts';
import type { SandboxUsage } from '../../sandbox-api/usage.ts';
import type { FileWatch } from '../../sandbox-api/watch.ts';
import { makeMachineGroups } from '../machine-groups.ts';
import { machineSockets } from '../qemu/arguments.ts';
import type { QemuDriver } from '../qemu/qemu-driver.ts';
import { readSnapshot } from '../snapshot/snapshot-folder.ts';
import type { RunningVm, VmConsole, VmSpec } from '../vm-driver.ts';
import { copyOut, diskPath, machineFolder, removeCopies } from './disk-copy.ts';
import { GUEST_AGENT_PORT, GuestAgent } from './guest-agent.ts';
import { MachineCommands } from './machine-commands.ts';
import { type MachineFacts, VNC_PORT } from './machine-facts.ts';
import { machineFiles } from './machine-files.ts';
import { act, type ScreenAction, screenshot } from './screen.ts';

export const FULL_VM = 'vm';
export const FULL_VM_FEATURES: ReadonlySet<Capability> = featuresOf('vm');

/** Ticks of /proc/PID/stat. */
const TICK_USEC = 10_000;
const PAGE = 4096;

export interface FullVmParts extends AgentSandboxParts {
  readonly keeper: KeeperChannel;
  readonly keptId: number;
  readonly driver: () => QemuDriver;
}

export class FullVmSandbox extends AgentSandbox {
  private readonly own: FullVmParts;
  private readonly folder: string;
  private vm: RunningVm | undefined;
  /** Pauses and resumes, one after the other. */
  private turn: Promise<unknown> = Promise.resolve();
  /** Of the machine that runs. */
  private agent: GuestAgent | undefined;
  /** The machine's process goes, and the sandbox does not end with it. */
  private suspending = false;

  constructor(parts: FullVmParts) {
    const commands = new MachineCommands();
    super(parts, FULL_VM_FEATURES, commands, commands.trees);
    this.own = parts;
    const { link } = this;
    const hasEnded = () => this.end !== undefined;
    commands.attach({
      agent: () => (this.vm === undefined ? undefined : this.agent),
      receive: (kind, about, payload) => link.receive(kind, about, payload),
      refuse: (id, error) => link.get(id)?.refuse(error),
      lose: (id, reason) => {
        const error = fail('RUNTIME_SANDBOX_GONE', { name: `${this.name}, command ${id},`, reason });
        link.get(id)?.lose(error, reason);
      },
      get hasEnded() {
        return hasEnded();
      },
    });
    this.folder = machineFolder(parts.places.folder);
    const ignore = () => {};
    parts.keeper.listen(parts.keptId, {
      started: ignore,
      ended: ignore,
      failed: ignore,
      frame: ignore,
      lost: () => this.endAs(endNow('lost', 'the process that kept it has died')),
    });
  }

  /** Its disk is there. @throws VM_START, VM_UNSUPPORTED */
  async begin(): Promise<void> {
    try {
      // It may have been ended while its disk was made.
      this.refuseEnded();
      mkdirSync(this.folder, { recursive: true, mode: 0o700 });
      const cgroups = makeMachineGroups(this.record.id, this.record.limits ?? {});
      const vm = await this.own.driver().start(await this.spec(cgroups));
      if (this.end !== undefined) await vm.kill();
      this.refuseEnded();
      this.adopt(vm);
      failPoint('machine-started');
      this.note({}, { machine: { ...this.machine, ready: true } });
      this.noteReady.resolve();
    } catch (error) {
      this.giveUp(error as Error);
      throw error;
    }
  }

  /** It will never begin. */
  giveUp(error: Error): void {
    this.noteReady.reject(error);
    this.endAs(endNow('failed', messageOf(error)));
  }

  /** After a restart of the service. */
  async takeUp(): Promise<void> {
    this.noteReady.resolve();
    const { driver, places } = this.own;
    await removeCopies(places.folder).catch(() => {});
    if (this.isPaused) {
      await driver().sweep(this.folder);
      await this.connectTap();
      return this.link.reconcile();
    }
    const found = await driver().find(this.folder);
    if (found === undefined) return this.hasEnded(endNow('lost', 'its machine has ended while nobody looked'));
    this.adopt(found);
    this.thaw();
    await this.connectTap();
    await this.link.reconcile();
    // It was being paused, or had just been resumed.
    if ((await found.state()) === 'stopped') await found.cont();
  }

  override leave(): void {
    super.leave();
    this.agent?.close();
    this.vm?.detach?.();
  }

  /**
   * Its disk as it is at one moment, to `path`: that of a machine that was switched off just then, with its file systems at rest where an agent answers. The
   * machine stands still meanwhile, and goes on.
   */
  copyDisk(path: string): Promise<void> {
    return this.inTurn(async () => {
      this.refuseEnded();
      const copy = () => copyOut(this.own.places.folder, path);
      if (this.isPaused) return copy();
      const vm = this.running();
      const copyStill = async () => {
        try {
          await vm.stop();
          await copy();
        } finally {
          await vm.cont().catch(() => {});
        }
      };
      return this.agent !== undefined && (await this.agentIsThere()) ? this.agent.whileFrozen(copyStill) : copyStill();
    });
  }

  /** A path beside its disk: what is there goes with it. */
  besideDisk(name: string): string {
    return join(this.own.places.folder, name);
  }

  /** What it shows now, as PNG. A paused one is resumed. */
  screenshot(): Promise<Buffer> {
    return this.use(async () => screenshot(this.host()));
  }

  /** @throws VM_INPUT */
  act(actions: readonly ScreenAction[]): Promise<void> {
    return this.use(async () => act(this.host(), actions));
  }

  async console(): Promise<VmConsole> {
    return this.use(async () => this.running().console);
  }

  override async connect(port: number): Promise<Duplex> {
    if (port !== VNC_PORT) throw this.unsupported('ports');
    return new Promise((resolve, reject) => {
      // While somebody looks it is in use.
      this.use(async () => {
        const socket = connect(machineSockets(this.running().folder).vnc);
        const closed = new Promise<void>((close) => {
          socket.once('close', () => close());
        });
        socket.once('error', (error) => {
          reject(fail('RUNTIME_PORT_CLOSED', { port, name: this.name, reason: messageOf(error) }, error));
        });
        socket.once('connect', () => resolve(socket));
        await closed;
      }).catch(reject);
    });
  }

  pause(): Promise<PauseReport> {
    return this.inTurn(async () => {
      this.refuseEnded();
      const since = this.record.resident!.pausedAt;
      if (since !== undefined) return { pausedAt: since, beforeBytes: 0, afterBytes: 0 };
      const vm = this.running();
      const beforeBytes = residentBytes(vm.pid);
      const before = this.machine.state;
      const state = (before ?? 0) + 1;
      await this.link.stand();
      // Of a service that was killed before it had put it on record.
      await rm(this.statePath(state), { recursive: true, force: true });
      try {
        await vm.snapshot(this.statePath(state), before === undefined ? {} : { base: this.statePath(before) });
      } catch (error) {
        this.link.go();
        throw error;
      }
      failPoint('machine-saved');
      const pausedAt = new Date().toISOString();
      try {
        this.note({ pausedAt }, { machine: { ...this.machine, state } });
        this.refuseEnded();
      } catch (error) {
        // On a full disk, or it has ended. What nobody knows of is not there.
        await rm(this.statePath(state), { recursive: true, force: true });
        await vm.cont().catch(() => {});
        this.link.go();
        throw error;
      }
      this.suspending = true;
      this.vm = undefined;
      await vm.kill();
      failPoint('machine-paused');
      this.suspending = false;
      await this.removeOldStates();
      return { pausedAt, beforeBytes, afterBytes: 0 };
    });
  }

  resume(): Promise<void> {
    return this.inTurn(async () => {
      this.refuseEnded();
      const { pausedAt, stoodMs = 0 } = this.record.resident!;
      if (pausedAt === undefined) return;
      const cgroups = makeMachineGroups(this.record.id, this.record.limits ?? {});
      const vm = await this.own.driver().restore(await this.spec(cgroups), this.statePath(this.machine.state!));
      failPoint('machine-restored');
      const stood = Math.max(0, Date.now() - Date.parse(pausedAt));
      try {
        this.refuseEnded();
        // Before it moves: from here on the snapshot and its disk are of two moments.
        this.note({ pausedAt: undefined, stoodMs: stoodMs + stood });
      } catch (error) {
        // It has not run: it is paused as before, or has ended.
        await vm.kill().catch(() => {});
        throw error;
      }
      this.adopt(vm);
      this.thaw();
      await vm.cont();
      this.link.go();
    });
  }

  override get files(): SandboxFiles {
    return this.ownFiles;
  }
  private readonly ownFiles = machineFiles({
    withAgent: (work) => this.withAgent('files', work),
    unsupported: () => this.unsupported('files'),
  });

  override async exec(spec: ExecSpec): Promise<KeptCommand> {
    this.refuseEnded();
    if (spec.terminal !== undefined) throw this.unsupported('terminal');
    const { env = [], cwd, user } = spec;
    if (env.length > 0 || cwd !== undefined || user !== undefined) throw this.unsupported('environment');
    return this.withAgent('exec', () => super.exec(spec));
  }

  /** Somebody in the guest has its port open. */
  private async agentIsThere(): Promise<boolean> {
    const { qmp } = this.running();
    const devices = this.agent === undefined ? [] : await qmp!.execute('query-chardev');
    return Array.isArray(devices) && devices.some((one) => one?.label === 'port0' && one['frontend-open'] === true);
  }

  /** A service may have been killed while it was frozen. */
  private thaw(): void {
    this.agent?.thawIf(() => this.agentIsThere());
  }

  /** One whose machine was paused is resumed. @throws RUNTIME_UNSUPPORTED where no agent has its port open */
  private withAgent<T>(capability: Capability, work: (agent: GuestAgent) => Promise<T>): Promise<T> {
    return this.use(async () => {
      this.running();
      const { agent } = this;
      if (agent === undefined || !(await this.agentIsThere())) throw this.unsupported(capability);
      return work(agent);
    });
  }

  override async openShell(): Promise<ShellSession> {
    throw this.unsupported('sessions');
  }
  override async watch(): Promise<FileWatch> {
    throw this.unsupported('watch');
  }
  async whileStill<T>(): Promise<T> {
    throw this.unsupported('pack-diff');
  }
  async update(): Promise<AllLimits> {
    throw this.unsupported('update');
  }

  async usage(): Promise<SandboxUsage> {
    this.refuseEnded();
    const { pid } = this.vm ?? {};
    const resident = pid === undefined ? 0 : residentBytes(pid);
    return {
      atMs: Date.now(),
      cpuUsec: pid === undefined ? 0 : processorUsec(pid),
      memory: { usedBytes: resident, totalBytes: resident, outOfMemory: 0 },
      pids: pid === undefined ? 0 : 1,
      io: { readBytes: 0, writeBytes: 0, reads: 0, writes: 0 },
      limits: this.record.limits ?? {},
    };
  }

  protected get isPaused(): boolean {
    return this.record.resident!.pausedAt !== undefined;
  }

  protected wake(): void {
    this.resume().catch((error: Error) => this.link.refuse(error));
  }

  protected kill(): void {
    this.endAs(this.knownEnd(false) ?? endNow('killed', 'its machine was ended'));
  }

  protected async prepareStop(): Promise<void> {
    // Of one that is paused nobody waits for anything.
    await this.vm?.powerDown().catch(() => {});
  }

  protected hasProcesses(): boolean {
    return this.vm !== undefined;
  }

  protected whenEnded(): void {}

  protected async dismantle(): Promise<void> {
    const released = this.network.end().catch(() => {});
    await this.own.driver().sweep(this.folder);
    // Of a pause or a resume that was under way.
    await this.turn;
    await this.own.driver().sweep(this.folder);
    await released;
    const { id, network } = this.record;
    if (network?.mode === 'policy') removeTapOf(network.number, id, this.own.folders.runDir);
    await endCgroups(this.record.id);
    await rm(this.folder, { recursive: true, force: true });
  }

  protected release(): void {
    this.own.keeper.forget(this.own.keptId);
  }

  private get machine(): MachineFacts {
    return this.record.machine!;
  }

  /** @throws RUNTIME_SANDBOX_GONE */
  private running(): RunningVm {
    this.refuseEnded();
    if (this.vm === undefined)
      throw fail('RUNTIME_SANDBOX_GONE', { name: this.name, reason: 'its machine is being ended' });
    return this.vm;
  }

  private host() {
    const { folder, qmp } = this.running();
    return { folder, qmp: qmp! };
  }

  /** @param cgroups Files that its process enters them by. */
  private async spec(cgroups: readonly string[]): Promise<VmSpec> {
    const { firmware, width, height, cpus, memoryBytes, agentPort } = this.machine;
    const serviceClass = this.record.resident?.class;
    const network = await this.connectTap();
    return {
      id: this.record.id,
      folder: this.folder,
      boot: { firmware },
      cpus,
      memoryBytes,
      memoryFile: `/dev/shm/dsec-vm-${this.record.id}`,
      drives: [
        {
          id: 'root',
          source: { file: diskPath(this.own.places.folder), format: 'qcow2' },
          readOnly: false,
          transport: 'blk',
          bootable: true,
        },
      ],
      display: { width, height },
      ...(network === undefined ? {} : { network }),
      ...(agentPort === true ? { ports: [{ name: GUEST_AGENT_PORT, socket: agentSocket(this.folder) }] } : {}),
      cgroups,
      ...(serviceClass === undefined ? {} : { serviceClass }),
    };
  }

  /** Before its machine runs, and while it does. Its guest asks for its address itself. @throws RUNTIME_NETWORK */
  private async connectTap(): Promise<VmSpec['network']> {
    const { id, name, network } = this.record;
    if (network?.mode !== 'policy') return undefined;
    const { tap, mac } = await this.own.network.connectTap({ id, name, network }, { asks: true });
    return { tap, mac };
  }

  private statePath(state: number): string {
    return join(this.folder, `state-${state}`);
  }

  private adopt(vm: RunningVm): void {
    this.vm = vm;
    this.agent?.close();
    this.agent = vm.agentSocket === undefined ? undefined : new GuestAgent(vm.agentSocket, this.name);
    const { agent } = this;
    vm.ended.then(({ reason, detail }) => {
      agent?.close();
      if (this.vm === vm) this.vm = undefined;
      if (this.suspending) return;
      const known = this.knownEnd(false);
      const own = reason === 'guest' ? endNow('stopped', 'it switched itself off') : endNow('failed', detail);
      this.hasEnded(known ?? own);
    });
  }

  private endAs(end: SandboxEnd): void {
    this.suspending = true;
    this.hasEnded(end);
  }

  /** Those that the last one does not lie on. */
  private async removeOldStates(): Promise<void> {
    const { layerPaths } = await readSnapshot(this.statePath(this.machine.state!));
    const needed = new Set(layerPaths.map((path) => basename(join(path, '..'))));
    for (const name of await readdir(this.folder)) {
      if (/^state-\d+(\.part)?$/.test(name) && !needed.has(name)) {
        await rm(join(this.folder, name), { recursive: true, force: true });
      }
    }
  }

  private inTurn<T>(work: () => Promise<T>): Promise<T> {
    const done = this.turn.then(work, work);
    this.turn = done.catch(() => {});
    return done;
  }

  private unsupported(capability: Capability): Error {
    return fail('RUNTIME_UNSUPPORTED', { backend: FULL_VM, capability });
  }
}

function agentSocket(folder: string): string {
  return join(folder, 'agent.sock');
}

function residentBytes(pid: number): number {
  return Number(fieldsOf(`/proc/${pid}/statm`)[1] ?? 0) * PAGE;
}

function processorUsec(pid: number): number {
  const fields = fieldsOf(`/proc/${pid}/stat`).slice(-39);
  return (Number(fields[0] ?? 0) + Number(fields[1] ?? 0)) * TICK_USEC;
}

function fieldsOf(path: string): string[] {
  return existsSync(path) ? readFileSync(path, 'latin1').trim().split(' ') : [];
}
