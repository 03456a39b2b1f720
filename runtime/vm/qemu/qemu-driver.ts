/**
 * Machines under QEMU: under KVM where it works, emulated elsewhere. README.md of this folder shows how it is used.
 *
 * A start: 1. the record and the process (`machine-process.ts`); 2. its monitor answers; 3. console and monitor are ours, and only then its processors run,
 * so that nothing the guest prints or does is missed. A restore has the state come over a socket between 2 and 3.
 */
import { closeSync, copyFileSync, existsSync, ftruncateSync, openSync } from 'node:fs';
import { rm } from 'node:fs/promises';
import { setTimeout as delay } from 'node:timers/promises';
import { messageOf, systemCode } from '#base';
import { fail } from '../../errors.ts';
import { socketChannel } from '../guest/open-channel.ts';
import { forgetPrivateMemory, privateMemory } from '../snapshot/private-memory.ts';
import { restoreMemory, sendState } from '../snapshot/restore-snapshot.ts';
import { readSnapshot } from '../snapshot/snapshot-folder.ts';
import type { RestoreOptions, RunningVm, VmDriver, VmFeatures, VmSpec } from '../vm-driver.ts';
import { type Accelerator, accelerator, clockArguments, findQemu } from './accelerator.ts';
import { firmwareVariables, machineArguments, machineSockets, OVMF } from './arguments.ts';
import { endProcess, findProcess, type MachineProcess, readMachineRecord, startProcess } from './machine-process.ts';
import { isObject, Monitor } from './monitor.ts';
import { consoleLogPath, QemuVm } from './qemu-vm.ts';
import { SerialConsole } from './serial-console.ts';

const MONITOR_MS = 60_000;
const RESTORE_MS = 300_000;
/** Memory of a file is not part of a state; `snapshot/` stores it. */
const CAPABILITIES = [{ capability: 'x-ignore-shared', state: true }];

export interface QemuDriver extends VmDriver {
  readonly name: 'qemu';
}

/** @throws VM_UNSUPPORTED where there is no QEMU */
export function openQemuDriver(): QemuDriver {
  const program = findQemu();
  if (program === undefined) {
    throw fail('VM_UNSUPPORTED', {
      driver: 'qemu',
      what: 'qemu-system-x86_64 is not installed (apt-get install qemu-system-x86)',
    });
  }
  const way = accelerator(program);
  const features: VmFeatures = {
    accelerator: way,
    pmem: true,
    nbd: true,
    serials: true,
    lateDevices: true,
    snapshots: true,
    privateMemory: true,
    freePageReporting: true,
    display: true,
    firmware: true,
  };
  return {
    name: 'qemu',
    features,
    clockArguments: clockArguments(way),
    agentChannel: (_folder, socket) => socketChannel(socket),
    start: (spec) => start(program, spec, way),
    restore: (spec, snapshot, options) => restore(program, spec, way, snapshot, options),
    find,
    sweep: endProcess,
    forgetSnapshot: forgetPrivateMemory,
  };
}

async function start(program: string, spec: VmSpec, way: Accelerator): Promise<QemuVm> {
  const args = machineArguments(spec, way);
  prepareFirmware(spec);
  return undoing(spec, async () => {
    const vm = await begin(program, args, spec, false);
    await vm.cont();
    return vm;
  });
}

async function restore(
  program: string,
  spec: VmSpec,
  way: Accelerator,
  folder: string,
  { memory = 'copied' }: RestoreOptions = {},
): Promise<QemuVm> {
  const snapshot = await readSnapshot(folder);
  const { memoryBytes } = snapshot.record;
  if (memoryBytes !== spec.memoryBytes) {
    throw fail('VM_SPEC', { id: spec.id, field: 'memoryBytes', problem: `the snapshot has ${memoryBytes}` });
  }
  const shared = memory === 'private' ? await privateMemory(snapshot) : undefined;
  const args = machineArguments(spec, way, shared === undefined ? {} : { privateMemory: shared });
  prepareFirmware(spec);
  return undoing(spec, async () => {
    const vm = await begin(program, args, spec, shared !== undefined);
    // QEMU has mapped the file by now, and reads nothing of it before the state comes.
    if (shared === undefined) await restoreMemory(snapshot, spec.memoryFile);
    const { migration } = machineSockets(spec.folder);
    await vm.ask('migrate-incoming', { uri: `unix:${migration}` });
    await sendState(snapshot, migration, vm.ended);
    await settled(vm);
    await rm(migration, { force: true });
    return vm;
  });
}

/** The state is in when it no longer waits for it. */
async function settled(vm: QemuVm): Promise<void> {
  const until = performance.now() + RESTORE_MS;
  for (let pause = 2; ; pause = Math.min(50, pause * 2)) {
    const status = await vm.ask('query-status');
    const name = isObject(status) ? status.status : undefined;
    if (name !== 'inmigrate') return;
    if (performance.now() > until)
      throw fail('VM_START', { id: vm.spec.id, reason: 'it does not take the state of the snapshot' });
    await delay(pause);
  }
}

async function find(folder: string): Promise<RunningVm | undefined> {
  const record = readMachineRecord(folder);
  const pid = findProcess(folder);
  if (record === undefined || pid === undefined) {
    await endProcess(folder);
    return undefined;
  }
  const process = { pid, complaints: () => '' };
  const spec = { ...record.spec, folder };
  return connectTo(spec, process, record.privateMemory);
}

async function begin(program: string, args: readonly string[], spec: VmSpec, privateMemory: boolean): Promise<QemuVm> {
  for (const path of Object.values(machineSockets(spec.folder))) await rm(path, { force: true });
  const process = startProcess(program, args, spec, privateMemory ? { privateMemory } : { prepare: makeMemory });
  return connectTo(spec, process, privateMemory);
}

async function connectTo(spec: VmSpec, process: MachineProcess, privateMemory: boolean): Promise<QemuVm> {
  const monitor = await connectMonitor(spec, process);
  const sockets = machineSockets(spec.folder);
  await monitor.execute('migrate-set-capabilities', { capabilities: CAPABILITIES });
  const serial = await SerialConsole.connect(sockets.console, consoleLogPath(spec.folder));
  return new QemuVm(spec, process, monitor, serial, { privateMemory });
}

async function connectMonitor(spec: VmSpec, process: MachineProcess): Promise<Monitor> {
  const until = performance.now() + MONITOR_MS;
  const path = machineSockets(spec.folder).monitor;
  for (let pause = 2; ; pause = Math.min(20, pause * 2)) {
    try {
      return await Monitor.connect(path, spec.id);
    } catch (error) {
      const early = ['ENOENT', 'ECONNREFUSED'].includes(systemCode(error) ?? '');
      const gone = findProcess(spec.folder) === undefined;
      if (!gone && early && performance.now() < until) {
        await delay(pause);
        continue;
      }
      const said = process.complaints();
      throw fail('VM_START', { id: spec.id, reason: said === '' ? messageOf(error) : said }, error);
    }
  }
}

/** Nothing of it runs when it fails. */
async function undoing<T>(spec: VmSpec, work: () => Promise<T>): Promise<T> {
  // That one is not ours to end.
  if (findProcess(spec.folder) !== undefined)
    throw fail('VM_START', { id: spec.id, reason: `${spec.folder} has one that runs` });
  try {
    return await work();
  } catch (error) {
    await endProcess(spec.folder);
    throw error;
  }
}

/** Sparse: what the guest has not touched takes no room. */
function makeMemory({ id, memoryFile, memoryBytes }: VmSpec): void {
  try {
    const file = openSync(memoryFile, 'wx', 0o600);
    try {
      ftruncateSync(file, memoryBytes);
    } finally {
      closeSync(file);
    }
  } catch (error) {
    throw fail('VM_START', { id, reason: `its memory, ${memoryFile}: ${messageOf(error)}` }, error);
  }
}

function prepareFirmware({ id, boot, folder }: VmSpec): void {
  if ('kernel' in boot || boot.firmware !== 'uefi' || existsSync(firmwareVariables(folder))) return;
  if (!existsSync(OVMF.code)) {
    throw fail('VM_UNSUPPORTED', {
      driver: 'qemu',
      what: `UEFI: ${OVMF.code} is missing (apt-get install ovmf), for machine ${id}`,
    });
  }
  copyFileSync(OVMF.variables, firmwareVariables(folder));
}
