/** A machine that runs under Firecracker: what `start`, `restore` and `find` of the driver give. */
import { readFileSync } from 'node:fs';
import { join } from 'node:path';
import { fail } from '../../errors.ts';
import { endProcess, forgetProcess, processGone } from '../qemu/machine-process.ts';
import type { SerialConsole } from '../qemu/serial-console.ts';
import type { RunningVm, SnapshotFacts, VmConsole, VmEnd, VmSpec, VmState } from '../vm-driver.ts';
import type { FirecrackerApi } from './api-client.ts';
import { type JailerOptions, logOf, removeRoot, rootOf } from './jail.ts';
import {
  type ApiRequest,
  balloonRequest,
  describeRequest,
  pauseRequest,
  powerButton,
  resumeRequest,
  VSOCK,
} from './requests.ts';
import { takeFirecrackerSnapshot } from './take-snapshot.ts';
import { AGENT_VSOCK_PORT } from './vsock.ts';

const MIB = 2 ** 20;
/** Firecracker's last words when its guest asked for a reset. */
const DONE = /exiting successfully|exit_code=0\b/;
const LAST_WORDS = 4096;

export class FirecrackerVm implements RunningVm {
  readonly folder: string;
  readonly pid: number;
  readonly agentSocket: string | undefined;
  readonly agentVsockPort = AGENT_VSOCK_PORT;
  readonly console: VmConsole;
  readonly ended: Promise<VmEnd>;
  readonly spec: VmSpec;
  readonly jailer: JailerOptions | undefined;
  /** The snapshot that its pages are counted from; undefined: no one knows of any. */
  countedFrom: string | undefined;
  private readonly api: FirecrackerApi;
  private readonly serial: SerialConsole | undefined;
  private killing = false;
  private gone: VmEnd | undefined;

  constructor(
    spec: VmSpec,
    pid: number,
    api: FirecrackerApi,
    { serial, jailer, countedFrom }: { serial?: SerialConsole; jailer?: JailerOptions; countedFrom?: string },
  ) {
    this.spec = spec;
    this.folder = spec.folder;
    this.pid = pid;
    this.api = api;
    this.serial = serial;
    this.jailer = jailer;
    this.countedFrom = countedFrom;
    this.agentSocket = (spec.ports?.length ?? 0) > 0 ? join(rootOf(spec.folder), VSOCK) : undefined;
    this.console = consoleOf(spec.folder, serial);
    this.ended = processGone(spec.folder).then(() => this.finish());
  }

  async state(): Promise<VmState> {
    const facts = await this.ask(describeRequest);
    const { state } = (typeof facts === 'object' && facts !== null ? facts : {}) as { state?: unknown };
    return state === 'Running' ? 'running' : 'stopped';
  }

  async stop(): Promise<void> {
    await this.ask(pauseRequest);
  }

  async cont(): Promise<void> {
    await this.ask(resumeRequest);
  }

  snapshot(
    folder: string,
    options: { readonly base?: string; readonly signal?: AbortSignal } = {},
  ): Promise<SnapshotFacts> {
    return takeFirecrackerSnapshot(this, folder, options);
  }

  async powerDown(): Promise<void> {
    await this.ask(powerButton);
  }

  async kill(): Promise<void> {
    this.killing = true;
    await endProcess(this.folder);
    await this.ended;
  }

  async setBalloon(memoryBytes: number): Promise<void> {
    if (this.spec.balloon === undefined) {
      throw fail('VM_UNSUPPORTED', { driver: 'firecracker', what: 'a balloon: the machine was started without' });
    }
    await this.ask(balloonRequest(Math.max(0, Math.floor((this.spec.memoryBytes - memoryBytes) / MIB))));
  }

  /** @throws VM_GONE, VM_FIRECRACKER_API */
  async ask(request: ApiRequest): Promise<unknown> {
    if (this.gone !== undefined) throw fail('VM_GONE', { id: this.spec.id, reason: this.gone.detail });
    return this.api.send(request);
  }

  private async finish(): Promise<VmEnd> {
    const words = lastWords(this.folder);
    await this.serial?.close();
    removeRoot(this.folder);
    forgetProcess(this.folder);
    if (this.killing) this.gone = { reason: 'killed', detail: 'it was killed' };
    else if (DONE.test(words)) this.gone = { reason: 'guest', detail: 'the guest asked for a reset' };
    else this.gone = { reason: 'crashed', detail: words === '' ? 'its process has gone' : words };
    return this.gone;
  }
}

/** The last line of its log. */
export function lastWords(folder: string): string {
  try {
    const text = readFileSync(logOf(folder), 'utf8').slice(-LAST_WORDS).trim();
    return text.slice(text.lastIndexOf('\n') + 1);
  } catch {
    return '';
  }
}

/** What it prints goes to a pipe of whoever started it; who finds it has what was kept of that. */
function consoleOf(folder: string, serial: SerialConsole | undefined): VmConsole {
  return {
    recent: () => serial?.recent() ?? readLog(folder),
    follow: (listener) => serial?.follow(listener) ?? (() => {}),
    write: async () => {
      throw fail('VM_UNSUPPORTED', { driver: 'firecracker', what: 'input for the serial console' });
    },
  };
}

function readLog(folder: string): Buffer {
  try {
    return readFileSync(join(folder, 'console.log'));
  } catch {
    return Buffer.alloc(0);
  }
}
