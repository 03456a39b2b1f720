/**
 * A sandbox as a virtual machine, from its record to a machine whose guest is told what it is: the layers mounted here too (which proves their bytes, keeps
 * them from being collected, and holds whoever fetches them), the disk for its changes, control groups, its tap, the machine.
 */
import { mkdirSync, readFileSync } from 'node:fs';
import { join } from 'node:path';
import { failPoint } from '#base';
import { blobFilesFor, mountImage } from '#imagesvc';
import { copyCommands } from '../aether/copy-commands.ts';
import { composeLayers } from '../compose/compose-layers.ts';
import type { NodeNetwork } from '../network/node-network.ts';
import { guestMessages } from '../network/sandbox-link.ts';
import type { CreateOptions } from '../node/create-sandbox.ts';
import { networkFiles } from '../node/network-files.ts';
import type { SandboxRecord } from '../sandbox/sandbox-record.ts';
import type { RuntimeFolders, SandboxFolders } from '../sandbox/state-folders.ts';
import { lookUpUser } from '../sandbox/user-lookup.ts';
import {
  DEFAULT_DISK_BYTES,
  DOCKER_DISK,
  dockerDiskFolder,
  makeExt4Disk,
  makeForkedDisks,
  type ServedDisks,
  serveDisks,
  UPPER_DISK,
  upperDiskFolder,
} from './disk/upper-disk.ts';
import { type ForkIdentity, restoreMoment } from './fork/begin-fork.ts';
import { commandsOf } from './fork/moment.ts';
import { withDeviceNames } from './guest/device-names.ts';
import { ALL_PARTS, type GuestPart } from './guest/guest-archive.ts';
import { type GuestOrder, orderBytes } from './guest/guest-order.ts';
import { layerDrives } from './guest/layer-drives.ts';
import { memoryGuestWrites } from './guest-memory.ts';
import { machineBoot } from './machine-boot.ts';
import { makeMachineGroups } from './machine-groups.ts';
import type { RunningVm, VmDrive, VmSpec } from './vm-driver.ts';
import type { SandboxVmDriver } from './vm-drivers.ts';
import { AGENT_PORT, vmPlaces } from './vm-places.ts';
import type { WarmPool } from './warm-pool/warm-pool.ts';

/** Where Docker keeps what it has. */
const DOCKER_ROOT = '/var/lib/docker';

export interface MadeVm {
  readonly vm: RunningVm;
  readonly disks: ServedDisks;
  /** What its guest has yet to be told. */
  readonly told: { readonly order: Buffer } | { readonly fork: ForkIdentity };
}

export interface CreateVmParts {
  readonly record: SandboxRecord;
  readonly options: CreateOptions;
  readonly places: SandboxFolders;
  readonly folders: RuntimeFolders;
  readonly network: NodeNetwork;
  readonly driver: SandboxVmDriver;
  /** Path of dsec-agent. */
  readonly agent: string;
  /** Machines need not boot. */
  readonly pool?: WarmPool;
}

/** Whoever calls undoes it when this fails. @throws RUNTIME_*, VM_*, MOUNT_*, DISK_* */
export async function createVm(parts: CreateVmParts): Promise<MadeVm> {
  const { record, options, places, folders, network, driver, agent, pool } = parts;
  const { store, base, workspace, toolkits = [], lazy, moment } = options;
  const { runDir, cacheDir, stateDir } = folders;
  const facts = record.vm!;
  const machine = vmPlaces(runDir, record.id);
  mkdirSync(machine.folder, { recursive: true, mode: 0o700 });
  mkdirSync(places.root, { mode: 0o755 });
  mkdirSync(places.bundle, { mode: 0o700 });
  const layers = composeLayers(options);
  const images = [base, ...(workspace === undefined ? [] : [workspace]), ...toolkits];
  const prefetch = options.prefetch === false ? [] : images;
  const files = blobFilesFor({ store, lazy, runDir, cacheDir, prefetch, onTraceProblem: options.onTraceProblem });
  const hostUpper = { upper: join(places.bundle, 'upper'), work: join(places.bundle, 'work') };
  await mountImage({ runDir, cacheDir, files, image: base, layers, target: places.root, ...hostUpper, volatile: true });
  failPoint('create-mounted');
  // An unknown user is told now, not by the first command.
  lookUpUser(places.root, record.resident!.defaults.user);
  const shown = networkFiles(record.network, runDir, places.root);
  const shownFiles = shown.shown.map(({ source, target }) => ({ path: target, content: readFileSync(source, 'utf8') }));
  const drives = await layerDrives({ layers, files, cacheDir, pmem: facts.memory.pmem });
  const { dockerDiskBytes } = facts;
  if (moment === undefined) {
    await makeExt4Disk(stateDir, upperDiskFolder(places.folder), record.limits?.diskBytes ?? DEFAULT_DISK_BYTES);
    if (dockerDiskBytes !== undefined) await makeExt4Disk(stateDir, dockerDiskFolder(places.folder), dockerDiskBytes);
  } else {
    await copyCommands(commandsOf(moment.folder), places.commands);
    await makeForkedDisks(moment.folder, places.folder);
  }
  const disks = await serveDisks(places.folder, machine, driver.features.nbd);
  try {
    failPoint('vm-disk-served');
    const cgroups = makeMachineGroups(record.id, record.limits ?? {}, record.resident?.class);
    const link =
      record.network?.mode === 'policy'
        ? await network.connectTap(
            { id: record.id, name: record.name, network: record.network },
            { was: moment?.networkNumber },
          )
        : undefined;
    const driveOf = (id: string): VmDrive => ({
      id,
      source: disks.source(id),
      readOnly: false,
      transport: 'blk',
    });
    const own = [driveOf(UPPER_DISK), ...(dockerDiskBytes === undefined ? [] : [driveOf(DOCKER_DISK)])];
    const expiresAt = record.resident?.expiresAt;
    const lifetimeMs = expiresAt === undefined ? 0 : Math.max(1, Date.parse(expiresAt) - Date.now());
    const ownSpec = {
      id: record.id.slice(-64),
      folder: machine.folder,
      memoryFile: machine.memoryFile,
      drives: [...drives.drives, ...own],
      network: link && { tap: link.tap, mac: link.mac },
      ports: [{ name: AGENT_PORT, socket: machine.agentSocket }],
      cgroups,
      serviceClass: record.resident?.class,
    };
    if (moment !== undefined) {
      const vm = await restoreMoment(driver, moment, ownSpec);
      failPoint('vm-started');
      return { vm, disks, told: { fork: { hostname: record.name, network: link?.messages ?? [], lifetimeMs } } };
    }
    const { archive, spec: machineSpec } = machineBoot(stateDir, agent, driver, facts);
    const parts: GuestPart[] = [];
    if (link !== undefined) parts.push('network');
    if (facts.memory.pmem) parts.push('pmem');
    if (facts.memory.reporting) parts.push('balloon');
    const spec: VmSpec = { ...machineSpec, ...ownSpec };
    const told: GuestOrder = {
      modules: archive.modulesFor(parts),
      hostname: record.name,
      layers: drives.layers,
      upper: UPPER_DISK,
      disks: dockerDiskBytes === undefined ? [] : [{ device: DOCKER_DISK, kind: 'ext4', target: DOCKER_ROOT }],
      files: shownFiles,
      network: link?.messages ?? guestMessages(),
      limits: record.limits?.pids === undefined ? [] : [{ file: 'pids.max', value: String(record.limits.pids) }],
      writes: memoryGuestWrites(facts.memory, facts.memoryBytes),
      lifetimeMs,
    };
    const order = withDeviceNames(told, spec.drives, driver.features.serials);
    const ready = driver.features.lateDevices ? pool : undefined;
    const warm = await ready?.start(driver, spec, archive.modulesFor(ALL_PARTS));
    const vm = warm ?? (await driver.start(spec));
    failPoint('vm-started');
    // Those of a template are there.
    return { vm, disks, told: { order: orderBytes(warm === undefined ? order : { ...order, modules: [] }) } };
  } catch (error) {
    await disks.close().catch(() => {});
    throw error;
  }
}
