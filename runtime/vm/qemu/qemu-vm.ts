/** A machine that runs under QEMU: what `start`, `restore` and `find` of the driver give. */
import { join } from 'node:path';
import { fail } from '../../errors.ts';
import { takeSnapshot } from '../snapshot/take-snapshot.ts';
import type { RunningVm, SnapshotFacts, VmEnd, VmSpec, VmState } from '../vm-driver.ts';
import { endProcess, forgetProcess, type MachineProcess, processGone } from './machine-process.ts';
import { isObject, type Monitor, type MonitorEvent } from './monitor.ts';
import type { SerialConsole } from './serial-console.ts';

/** Of the events that say why it ends. */
const BY_GUEST = /^guest-(shutdown|reset|panic)$/;

export class QemuVm implements RunningVm {
  readonly folder: string;
  readonly pid: number;
  readonly agentSocket: string | undefined;
  readonly console: SerialConsole;
  readonly ended: Promise<VmEnd>;
  readonly qmp: Monitor;
  readonly spec: VmSpec;
  private readonly process: MachineProcess;
  private shutdown: string | undefined;
  private killing = false;
  private detached = false;
  private gone: VmEnd | undefined;
  /** Its memory is pages of a snapshot's file until they are written (`restore` with `private`). */
  readonly privateMemory: boolean;

  constructor(
    spec: VmSpec,
    process: MachineProcess,
    monitor: Monitor,
    serial: SerialConsole,
    { privateMemory = false } = {},
  ) {
    this.folder = spec.folder;
    this.pid = process.pid;
    this.spec = spec;
    this.process = process;
    this.agentSocket = spec.ports?.[0]?.socket;
    this.console = serial;
    this.qmp = monitor;
    this.privateMemory = privateMemory;
    monitor.onEvent((event) => this.note(event));
    this.ended = monitor.closed.then(() => this.finish());
  }

  async state(): Promise<VmState> {
    const status = await this.ask('query-status');
    return isObject(status) && status.running === true ? 'running' : 'stopped';
  }

  async stop(): Promise<void> {
    await this.ask('stop');
  }

  async cont(): Promise<void> {
    await this.ask('cont');
  }

  snapshot(
    folder: string,
    options: { readonly base?: string; readonly signal?: AbortSignal } = {},
  ): Promise<SnapshotFacts> {
    return takeSnapshot(this, folder, options);
  }

  async powerDown(): Promise<void> {
    await this.ask('system_powerdown');
  }

  async kill(): Promise<void> {
    this.killing = true;
    await endProcess(this.folder);
    await this.ended;
  }

  detach(): void {
    this.detached = true;
    this.qmp.close();
    void this.console.close();
  }

  async setBalloon(memoryBytes: number): Promise<void> {
    await this.ask('balloon', { value: memoryBytes });
  }

  /** @throws VM_GONE, VM_MONITOR */
  async ask(command: string, args?: object): Promise<unknown> {
    if (this.gone !== undefined) throw fail('VM_GONE', { id: this.spec.id, reason: this.gone.detail });
    return this.qmp.execute(command, args);
  }

  private note({ name, data }: MonitorEvent): void {
    if (name === 'SHUTDOWN') this.shutdown = typeof data.reason === 'string' ? data.reason : 'unknown';
  }

  private async finish(): Promise<VmEnd> {
    if (this.detached) return new Promise(() => {});
    // A monitor that talks nonsense, or was cut off, is that of a machine that nobody controls any more.
    if (this.shutdown === undefined) await endProcess(this.folder);
    await processGone(this.folder);
    await this.console.close();
    forgetProcess(this.folder);
    this.gone = this.endOf();
    return this.gone;
  }

  private endOf(): VmEnd {
    const said = this.process.complaints();
    if (this.killing) return { reason: 'killed', detail: 'it was killed' };
    if (this.shutdown !== undefined && BY_GUEST.test(this.shutdown)) {
      return { reason: 'guest', detail: this.shutdown };
    }
    return { reason: 'crashed', detail: said === '' ? (this.shutdown ?? 'its process has gone') : said };
  }
}

export function consoleLogPath(folder: string): string {
  return join(folder, 'console.log');
}
