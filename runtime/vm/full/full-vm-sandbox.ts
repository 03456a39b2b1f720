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
import { setTimeout as delay } from 'node:timers/promises';
import { failPoint, messageOf } from '#base';
import type { KeeperChannel } from '../../aether/keeper-channel.ts';
import type { KeptCommand } from '../../aether/kept-command.ts';
import { endCgroups } from '../../backend/cgroup-cleanup.ts';
import { fail } from '../../errors.ts';
import { removeTapOf } from '../../network/sandbox-link.ts';
import { AgentSandbox, type AgentSandboxParts, endNow } from '../../node/agent-sandbox.ts';
import { featuresOf } from '../../sandbox-api/backend-table.ts';
import { type Capability, unsupportedWithoutAgent } from '../../sandbox-api/capabilities.ts';
import type { ExecSpec } from '../../sandbox-api/exec.ts';
import type { SandboxFiles } from '../../sandbox-api/files.ts';
import type { AllLimits } from '../../sandbox-api/limits.ts';
import type { PauseReport, SandboxEnd } from '../../sandbox-api/sandbox.ts';
import type { ShellSession } from '../../sandbox-api/shell.ts';
import type { SandboxUsage } from '../../sandbox-api/usage.ts';
import type { FileWatch } from '../../sandbox-api/watch.ts';
import { type Moment, machineOf, newMomentFolder, removeMoments } from '../fork/moment.ts';
import { makeMachineGroups } from '../machine-groups.ts';
import { machineSockets } from '../qemu/arguments.ts';
import type { QemuDriver } from '../qemu/qemu-driver.ts';
import { linkSnapshot, readSnapshot } from '../snapshot/snapshot-folder.ts';
import type { RunningVm, VmConsole, VmPort, VmSpec } from '../vm-driver.ts';
import { askForAddress, CABLE_PULLED_MS, guestTime, pullCable, putCableIn } from './after-fork.ts';
import { type ClipboardContent, type ClipboardType, checkedContent, type Selection } from './clipboard-file.ts';
import { copyOut, diskCopyOf, diskPath, machineFolder, removeCopies } from './disk-copy.ts';
import { GUEST_AGENT_PORT, GuestAgent } from './guest-agent.ts';
import { CLIPBOARD_PORT, GuestClipboard } from './guest-clipboard.ts';
import { guestCommand } from './guest-command.ts';
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
  private clipboard: GuestClipboard | undefined;
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

  /** Its disk is there. One of a moment stands still until `goOn`. @throws VM_START, VM_UNSUPPORTED, VM_SNAPSHOT_DAMAGED */
  async begin(moment?: Moment): Promise<void> {
    if (moment !== undefined) this.hold();
    try {
      // It may have been ended while its disk was made.
      this.refuseEnded();
      mkdirSync(this.folder, { recursive: true, mode: 0o700 });
      const cgroups = makeMachineGroups(this.record.id, this.record.limits ?? {}, this.record.resident?.class);
      const spec = await this.spec(cgroups);
      const vm =
        moment === undefined
          ? await this.own.driver().start(spec)
          : await this.own.driver().restore(spec, machineOf(moment.folder), { memory: 'private' });
      if (this.end !== undefined) await vm.kill();
      this.refuseEnded();
      this.adopt(vm);
      failPoint('machine-started');
      if (moment === undefined) this.note({}, { machine: { ...this.machine, ready: true } });
      this.noteReady.resolve();
    } catch (error) {
      this.giveUp(error as Error);
      throw error;
    }
  }

  override async markReady(): Promise<void> {
    this.refuseEnded();
    if (!this.isHeld || this.machine.ready === true) return;
    this.note({}, { machine: { ...this.machine, ready: true } });
  }

  override goOn(): Promise<void> {
    return this.inTurn(async () => {
      await this.markReady();
      if (!this.isHeld) return;
      const vm = this.running();
      const isNetworked = this.record.network?.mode === 'policy';
      if (isNetworked) await pullCable(vm);
      await vm.cont();
      this.letGo();
      this.settleIn(vm, isNetworked).catch((error) => this.parts.onNote?.(`${this.name}: ${messageOf(error)}`));
    });
  }

  /** Nobody waits for it: its system takes its time, and may have no agent. */
  private async settleIn(vm: RunningVm, isNetworked: boolean): Promise<void> {
    const { agent } = this;
    // Whatever becomes of that, its cable is put in.
    const isThere = agent === undefined ? Promise.resolve(false) : this.agentIsThere().catch(() => false);
    isThere.then((yes) => (yes ? agent?.ask(...guestTime()) : undefined)).catch(() => {});
    if (!isNetworked) return;
    await delay(CABLE_PULLED_MS, undefined, { ref: false });
    // Else it is paused or has ended: a resume puts it in.
    if (this.vm !== vm) return;
    await putCableIn(vm);
    if (agent !== undefined && (await isThere)) await askForAddress(agent);
  }

  /**
   * Its memory and its disk as they are at one moment. The machine stands still while both are stored, and goes on; of one that is paused what was
   * stored then is taken.
   */
  protected override takeMomentNow(): Promise<Moment> {
    return this.inTurn(async () => {
      this.refuseEnded();
      // Its forks could draw the same random numbers.
      if (this.machine.generationId !== true) throw this.unsupported('fork-memory');
      const folder = newMomentFolder(this.own.places.folder);
      const discard = async () => {
        this.own.driver().forgetSnapshot(machineOf(folder));
        await rm(folder, { recursive: true, force: true });
      };
      const paused = this.isPaused;
      const vm = paused ? undefined : this.running();
      try {
        mkdirSync(folder, { mode: 0o700 });
        await this.link.stand();
        if (vm === undefined)
          await linkSnapshot(await readSnapshot(this.statePath(this.machine.state!)), machineOf(folder));
        else await vm.snapshot(machineOf(folder));
        const atMs = Date.now();
        await copyOut(this.own.places.folder, diskCopyOf(folder));
        failPoint('moment-taken');
        const { ready: _ready, state: _state, ...machine } = this.machine;
        const { network, mountPoints } = this.record;
        const card = network?.mode === 'policy' ? (machine.cardOf ?? network.number) : undefined;
        return {
          folder,
          atMs,
          stoodMs: this.link.stoodMs(),
          machine: { ...machine, cardOf: card },
          mountPoints,
          discard,
        };
      } catch (error) {
        await discard().catch(() => {});
        throw error;
      } finally {
        if (vm !== undefined) {
          await vm.cont().catch(() => {});
          this.link.go();
        }
      }
    });
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
    await removeMoments(places.folder).catch(() => {});
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
    // It was being paused, or had just been resumed; a fork's cable may still be out.
    if ((await found.state()) === 'stopped') await found.cont();
    if (this.machine.cardOf !== undefined) await putCableIn(found);
  }

  override leave(): void {
    super.leave();
    this.agent?.close();
    this.clipboard?.close();
    this.vm?.detach?.();
  }

  /**
   * Its disk as it is at one moment, to `path`: that of a machine that was switched off just then, with its file systems at rest where an agent answers. The
   * machine stands still meanwhile, and goes on.
   */
  copyDisk(path: string): Promise<void> {
    return this.whenFree(() => this.inTurn(() => this.copyDiskNow(path)));
  }

  private async copyDiskNow(path: string): Promise<void> {
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

  /**
   * What is in a clipboard of its guest; undefined: nothing of this type.
   * @throws RUNTIME_UNSUPPORTED where no agent of SPICE has its port open, VM_CLIPBOARD
   */
  getClipboard(selection: Selection, type: ClipboardType): Promise<Buffer | undefined> {
    return this.withClipboard((clipboard) => clipboard.get(selection, type));
  }

  /** @throws as `getClipboard`, VM_INPUT */
  setClipboard(selection: Selection, content: ClipboardContent): Promise<void> {
    return this.withClipboard((clipboard) => clipboard.set(selection, checkedContent(content)));
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
    return this.whenFree(() => this.inTurn(() => this.pauseNow()));
  }

  private async pauseNow(): Promise<PauseReport> {
    this.refuseEnded();
    const since = this.record.resident!.pausedAt;
    if (since !== undefined) return { pausedAt: since, beforeBytes: 0, afterBytes: 0 };
    const vm = this.running();
    const beforeBytes = residentBytes(vm.pid);
    const before = this.machine.state;
    await this.clipboard?.keep();
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
  }

  resume(): Promise<void> {
    return this.inTurn(async () => {
      this.refuseEnded();
      const { pausedAt, stoodMs = 0 } = this.record.resident!;
      if (pausedAt === undefined) return;
      const cgroups = makeMachineGroups(this.record.id, this.record.limits ?? {}, this.record.resident?.class);
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
      if (this.machine.cardOf !== undefined) await putCableIn(vm);
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
    const { env: _env, cwd: _cwd, user: _user, ...plain } = spec;
    return this.withAgent('exec', async (agent) => {
      const args = await guestCommand({ id: this.name, agent, files: this.files }, spec);
      return this.link.start({ ...plain, args, shownArgs: spec.args });
    });
  }

  private agentIsThere(): Promise<boolean> {
    return this.isPortOpen(GUEST_AGENT_PORT);
  }

  /** By somebody in the guest. */
  private async isPortOpen(name: string): Promise<boolean> {
    const { qmp } = this.running();
    const label = `port${this.ports().findIndex((port) => port.name === name)}`;
    const devices = await qmp!.execute('query-chardev');
    return Array.isArray(devices) && devices.some((one) => one?.label === label && one['frontend-open'] === true);
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
      if (agent === undefined || !(await this.agentIsThere())) throw unsupportedWithoutAgent(FULL_VM, capability);
      return work(agent);
    });
  }

  private withClipboard<T>(work: (clipboard: GuestClipboard) => Promise<T>): Promise<T> {
    return this.use(async () => {
      const isThere = await this.isPortOpen(CLIPBOARD_PORT);
      if (this.clipboard === undefined || !isThere) throw unsupportedWithoutAgent(FULL_VM, 'clipboard');
      return work(this.clipboard);
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
    const { firmware, width, height, cpus, memoryBytes, generationId } = this.machine;
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
      ...(generationId === true ? { generationId } : {}),
      ...(network === undefined ? {} : { network }),
      ports: this.ports(),
      cgroups,
      ...(serviceClass === undefined ? {} : { serviceClass }),
    };
  }

  /** In the order that its guest has numbered them by. */
  private ports(): VmPort[] {
    const { agentPort, clipboardPort } = this.machine;
    return [
      ...(agentPort === true ? [{ name: GUEST_AGENT_PORT, socket: agentSocket(this.folder) }] : []),
      ...(clipboardPort === true ? [{ name: CLIPBOARD_PORT, socket: clipboardSocket(this.folder) }] : []),
    ];
  }

  /** Before its machine runs, and while it does. Its guest asks for its address itself. @throws RUNTIME_NETWORK */
  private async connectTap(): Promise<VmSpec['network']> {
    const { id, name, network } = this.record;
    if (network?.mode !== 'policy') return undefined;
    const { cardOf } = this.machine;
    const { tap, mac } = await this.own.network.connectTap({ id, name, network }, { asks: true, cardOf });
    return { tap, mac };
  }

  private statePath(state: number): string {
    return join(this.folder, `state-${state}`);
  }

  private adopt(vm: RunningVm): void {
    this.vm = vm;
    this.agent?.close();
    this.clipboard?.close();
    this.agent = vm.agentSocket === undefined ? undefined : new GuestAgent(vm.agentSocket, this.name);
    this.clipboard = this.openClipboard();
    const { agent, clipboard } = this;
    vm.ended.then(({ reason, detail }) => {
      agent?.close();
      clipboard?.close();
      if (this.vm === vm) this.vm = undefined;
      if (this.suspending) return;
      const known = this.knownEnd(false);
      const own = reason === 'guest' ? endNow('stopped', 'it switched itself off') : endNow('failed', detail);
      this.hasEnded(known ?? own);
    });
  }

  /** Before its guest moves: it does not see then that somebody else is at the other end. */
  private openClipboard(): GuestClipboard | undefined {
    if (this.machine.clipboardPort !== true) return undefined;
    const file = join(this.folder, 'clipboard.json');
    return new GuestClipboard({ id: this.name, socket: clipboardSocket(this.folder), file });
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

function clipboardSocket(folder: string): string {
  return join(folder, 'clipboard.sock');
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
