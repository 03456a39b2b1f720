/**
 * Machines under Firecracker, for hosts where KVM runs. Root starts it by its jailer, each machine as a user of its own.
 *
 * A start: 1. the record, the jail with its files, the process (`qemu/machine-process.ts`, `jail.ts`); 2. its API answers; 3. what the spec asks for, request by
 * request (`requests.ts`), the last of which has its processors run. A restore asks for one thing: the snapshot.
 */
import { closeSync, existsSync, realpathSync, rmSync } from 'node:fs';
import { chmod, open, rename, rm } from 'node:fs/promises';
import { Socket } from 'node:net';
import { join } from 'node:path';
import { setTimeout as delay } from 'node:timers/promises';
import { isDsecError, messageOf } from '#base';
import { giveTap, makePipe } from '#linux';
import { fail } from '../../errors.ts';
import { endProcess, findProcess, readMachineRecord, startProcess } from '../qemu/machine-process.ts';
import { SerialConsole } from '../qemu/serial-console.ts';
import { restoreMemory } from '../snapshot/restore-snapshot.ts';
import { readSnapshot, type Snapshot, STATE } from '../snapshot/snapshot-folder.ts';
import type { RestoreOptions, VmDriver, VmFeatures, VmSpec } from '../vm-driver.ts';
import { FirecrackerApi } from './api-client.ts';
import { type FirecrackerPlaces, firecrackerState } from './find-firecracker.ts';
import { FirecrackerVm, lastWords } from './firecracker-vm.ts';
import {
  firecrackerArguments,
  instanceId,
  type JailerOptions,
  jailerCommand,
  makeRoot,
  removeRoot,
  rootOf,
} from './jail.ts';
import { elfKernel } from './kernel-image.ts';
import {
  API_SOCKET,
  type ApiRequest,
  checkSpec,
  describeRequest,
  inside,
  loadRequest,
  type PlacedFile,
  placedFiles,
  startRequests,
  VSOCK,
} from './requests.ts';
import { AGENT_VSOCK_PORT, connectVsock } from './vsock.ts';

export interface FirecrackerOptions extends FirecrackerPlaces {
  /** Of the jailer, for one machine; its user is one of its own unless it says another. */
  readonly jail?: (spec: VmSpec) => Partial<Omit<JailerOptions, 'jailer'>>;
}

const API_MS = 60_000;
/** Above what this machine and our containers give out. */
const FIRST_USER = 0x7000_0000;
const USERS = 0x0800_0000;
/** Beside a snapshot: its memory as a file that machines map privately. Firecracker never writes or punches it. */
const SHARED_MEMORY = 'memory.shared';

const FEATURES: VmFeatures = {
  accelerator: 'kvm',
  pmem: true,
  nbd: false,
  serials: false,
  lateDevices: false,
  snapshots: true,
  privateMemory: true,
  freePageReporting: true,
  display: false,
  firmware: false,
};

interface Programs {
  readonly binary: string;
  readonly jailer: string | undefined;
  readonly options: FirecrackerOptions;
}

/** @throws RUNTIME_UNSUPPORTED that names what is missing: /dev/kvm, the program, a version that is not refused */
export function openFirecrackerDriver(options: FirecrackerOptions = {}): VmDriver {
  const { missing, binary, jailer } = firecrackerState(options);
  if (missing !== undefined || binary === undefined) {
    throw fail('RUNTIME_UNSUPPORTED', { backend: 'firecracker', capability: `virtual machines here: ${missing}` });
  }
  // The jailer names things after what a link leads to.
  const programs: Programs = { binary: realpathSync(binary), jailer, options };
  return {
    name: 'firecracker',
    features: FEATURES,
    // KVM tells it.
    clockArguments: '',
    agentChannel: (folder) => () => connectVsock(join(rootOf(folder), VSOCK), AGENT_VSOCK_PORT),
    start: (spec) => start(programs, spec),
    restore: (spec, snapshot, wish) => restore(programs, spec, snapshot, wish),
    find: (folder) => find(programs, folder),
    sweep,
    forgetSnapshot: (snapshot) => rmSync(join(snapshot, SHARED_MEMORY), { force: true }),
  };
}

async function start(programs: Programs, spec: VmSpec): Promise<FirecrackerVm> {
  checkSpec(spec);
  const boot = 'kernel' in spec.boot ? { ...spec.boot, kernel: elfKernel(spec.boot.kernel, spec.id) } : spec.boot;
  return begin(programs, spec, placedFiles({ ...spec, boot }), startRequests(spec), undefined);
}

async function restore(
  programs: Programs,
  spec: VmSpec,
  folder: string,
  { memory = 'copied' }: RestoreOptions = {},
): Promise<FirecrackerVm> {
  checkSpec(spec);
  const snapshot = await readSnapshot(folder);
  const { memoryBytes } = snapshot.record;
  if (memoryBytes !== spec.memoryBytes) {
    throw fail('VM_SPEC', { id: spec.id, field: 'memoryBytes', problem: `the snapshot has ${memoryBytes}` });
  }
  const state = join(folder, STATE);
  if (!existsSync(state)) {
    throw fail('VM_SNAPSHOT_DAMAGED', { path: state, problem: 'the state of its devices is missing' });
  }
  const source = memory === 'private' ? await sharedMemory(snapshot) : spec.memoryFile;
  if (memory === 'copied') await fillMemory(source, snapshot, jailerFor(programs, spec));
  try {
    const files: PlacedFile[] = [
      ...placedFiles(spec).filter(({ name }) => name !== 'kernel' && name !== 'initrd'),
      { name: STATE, source: state, readOnly: true },
      { name: 'memory', source, readOnly: true },
    ];
    return await begin(
      programs,
      spec,
      files,
      [loadRequest(spec, inside('').replace(/\/$/, ''), inside('memory'))],
      folder,
    );
  } catch (error) {
    if (memory === 'copied') await rm(source, { force: true });
    throw error;
  }
}

async function begin(
  programs: Programs,
  spec: VmSpec,
  files: readonly PlacedFile[],
  requests: readonly ApiRequest[],
  countedFrom: string | undefined,
): Promise<FirecrackerVm> {
  // That one is not ours to end.
  if (findProcess(spec.folder) !== undefined) {
    throw fail('VM_START', { id: spec.id, reason: `${spec.folder} has one that runs` });
  }
  const jailer = jailerFor(programs, spec);
  const words =
    jailer === undefined
      ? [programs.binary, '--id', instanceId(spec.id), ...firecrackerArguments()]
      : jailerCommand(programs.binary, spec.folder, spec.id, jailer);
  const { readFd, writeFd } = makePipe();
  const serial = SerialConsole.over(
    new Socket({ fd: readFd, readable: true, writable: false }),
    join(spec.folder, 'console.log'),
  );
  try {
    // The jail is beside the record, at a fixed place: who finds the one takes the other away too.
    const prepare = () => {
      makeRoot(spec, programs.binary, files, jailer);
      if (jailer !== undefined && spec.network !== undefined) giveTap(spec.network.tap, jailer.uid);
    };
    const cwd = jailer === undefined ? rootOf(spec.folder) : '/';
    const process = startProcess(words[0]!, words.slice(1), spec, { cwd, output: writeFd, prepare });
    const api = new FirecrackerApi(join(rootOf(spec.folder), API_SOCKET), spec.id);
    await answers(api, spec, serial);
    for (const request of requests) await api.send(request);
    return new FirecrackerVm(spec, process.pid, api, { serial, jailer, countedFrom });
  } catch (error) {
    await endProcess(spec.folder);
    await serial.close();
    const words = lastWords(spec.folder);
    removeRoot(spec.folder);
    if (isDsecError(error, 'VM_SPEC')) throw error;
    const reason = isDsecError(error, 'VM_GONE') && words !== '' ? words : messageOf(error);
    throw isDsecError(error, 'VM_START') ? error : fail('VM_START', { id: spec.id, reason }, error);
  } finally {
    closeSync(writeFd);
  }
}

async function find(programs: Programs, folder: string): Promise<FirecrackerVm | undefined> {
  const record = readMachineRecord(folder);
  const pid = findProcess(folder);
  if (record === undefined || pid === undefined) {
    await sweep(folder);
    return undefined;
  }
  const spec = { ...record.spec, folder };
  const api = new FirecrackerApi(join(rootOf(folder), API_SOCKET), spec.id);
  return new FirecrackerVm(spec, pid, api, { jailer: jailerFor(programs, spec) });
}

/** Also of one that was killed half made. */
async function sweep(folder: string): Promise<void> {
  await endProcess(folder);
  removeRoot(folder);
}

async function answers(api: FirecrackerApi, { id, folder }: VmSpec, serial: SerialConsole): Promise<void> {
  const until = performance.now() + API_MS;
  for (let pause = 2; ; pause = Math.min(20, pause * 2)) {
    try {
      await api.send(describeRequest);
      return;
    } catch (error) {
      const gone = findProcess(folder) === undefined;
      if (!gone && isDsecError(error, 'VM_GONE') && performance.now() < until) {
        await delay(pause);
        continue;
      }
      // What it printed is on its way.
      if (gone) await delay(20);
      const said = serial.recent().toString('utf8').trim() || lastWords(folder);
      throw fail('VM_START', { id, reason: said === '' ? messageOf(error) : said }, error);
    }
  }
}

function jailerFor({ jailer, options }: Programs, spec: VmSpec): JailerOptions | undefined {
  if (jailer === undefined) return undefined;
  const user = userOf(spec.id);
  return { uid: user, gid: user, ...options.jail?.(spec), jailer };
}

/** The same for the same machine. Two may share one, rarely: the jail keeps them apart, and Firecracker's system call filter lets neither signal the other. */
function userOf(id: string): number {
  let hash = 0;
  for (const byte of Buffer.from(id)) hash = (hash * 31 + byte) % USERS;
  return FIRST_USER + hash;
}

/** For its owner alone: /dev/shm is open to all. */
async function fillMemory(path: string, snapshot: Snapshot, owner?: JailerOptions): Promise<void> {
  const file = await open(path, 'wx', 0o600);
  try {
    await file.truncate(snapshot.record.memoryBytes);
    if (owner !== undefined) await file.chown(owner.uid, owner.gid);
  } finally {
    await file.close();
  }
  try {
    await restoreMemory(snapshot, path);
  } catch (error) {
    await rm(path, { force: true });
    throw error;
  }
}

/** Made once, whole when it has its name. */
async function sharedMemory(snapshot: Snapshot): Promise<string> {
  const path = join(snapshot.folder, SHARED_MEMORY);
  if (existsSync(path)) return path;
  const staged = `${path}.${process.pid}.${performance.now()}`;
  await fillMemory(staged, snapshot);
  await chmod(staged, 0o644);
  await rename(staged, path);
  return path;
}
