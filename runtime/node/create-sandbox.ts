/**
 * A sandbox that stays, from its name to its agent: the keeper's lock, the record, the mount, the launch. The record is there before any
 * effect; whoever finds it without a sandbox undoes the rest.
 */
import { mkdirSync } from 'node:fs';
import { dirname } from 'node:path';
import { failPoint } from '#base';
import { type BlobStore, blobFilesFor, type Image, mountImage, type OciConfig, readConfig } from '#imagesvc';
import { processIdentity } from '#linux';
import type { OpenStoreLayer } from '#ublk-daemon';
import type { KeeperChannel } from '../aether/keeper-channel.ts';
import type { DeviceNode } from '../backend/device-rules.ts';
import { MOUNT_POINTS } from '../backend/oci-spec.ts';
import { OWN_BACKEND } from '../backend/own-backend.ts';
import { sandboxCgroups } from '../backend/sandbox-cgroups.ts';
import type { UsernsMode } from '../backend/user-namespace.ts';
import { composeLayers } from '../compose/compose-layers.ts';
import { sandboxDevice } from '../disk/block-device.ts';
import { makeDisk, planDisk } from '../disk/sandbox-disk.ts';
import { fail } from '../errors.ts';
import type { NetworkOptions } from '../network/network-facts.ts';
import { environmentOf } from '../sandbox/environment.ts';
import { makeMountPoints, missingMountPoints } from '../sandbox/mount-points.ts';
import { makeDirectoryInRoot } from '../sandbox/root-path.ts';
import { asItsRoot, mappingOf } from '../sandbox/sandbox-ids.ts';
import {
  imageReference,
  type ResidentFacts,
  randomSandboxName,
  type SandboxRecord,
  type SandboxTag,
  writeRecord,
} from '../sandbox/sandbox-record.ts';
import type { RuntimeFolders, SandboxFolders } from '../sandbox/state-folders.ts';
import { lookUpUser } from '../sandbox/user-lookup.ts';
import { type AllLimits, checkedLimits } from '../sandbox-api/limits.ts';
import type { MemoryOptions } from '../sandbox-api/memory-options.ts';
import type { IdleAction, ServiceClass } from '../sandbox-api/sandbox.ts';
import type { Moment } from '../vm/fork/moment.ts';
import type { MachineWish } from '../vm/full/machine-facts.ts';
import { vmFacts } from '../vm/machine-facts.ts';
import { MICROVM } from '../vm/vm-backend.ts';
import { sandboxVmDriver } from '../vm/vm-drivers.ts';
import { networkFiles } from './network-files.ts';
import { residentLaunch } from './resident-launch.ts';

export interface CreateOptions extends AllLimits {
  readonly store: BlobStore;
  readonly base: Image;
  readonly workspace?: Image;
  /** Topmost last. */
  readonly toolkits?: readonly Image[];
  /** A random one by default. */
  readonly name?: string;
  /** Asked again with the same one, the same sandbox is the answer. */
  readonly requestId?: string;
  /** Kept with it, for whoever made it; means nothing here. */
  readonly tag?: SandboxTag;
  /** Of this machine, in its /dev: of a container by our own launcher. */
  readonly devices?: readonly DeviceNode[];
  /** `NAME=VALUE`: what commands have unless they say otherwise. */
  readonly env?: readonly string[];
  readonly user?: string;
  readonly workdir?: string;
  /** It ends after so long, whoever else has died. */
  readonly ttlMs?: number;
  /** What becomes of it when nobody has used it for so long: it ends by default. */
  readonly idleMs?: number;
  readonly idleAction?: IdleAction;
  /** However it ends, it goes with all that it changed. */
  readonly removeAtEnd?: boolean;
  /** `ls` by default. */
  readonly class?: ServiceClass;
  /** `private` where that can be, by default. */
  readonly userns?: UsernsMode;
  /** `none`, loopback alone, by default. */
  readonly network?: NetworkOptions;
  readonly lazy?: boolean;
  readonly prefetch?: boolean;
  readonly onTraceProblem?: (text: string) => void;
  /** `dsec`, `crun` or `runc`; our own by default. */
  readonly runtime?: string;
  /** What it lives in: `container` by default. */
  readonly backend?: string;
  /** Of the backend `microvm`. */
  readonly memory?: MemoryOptions;
  /** A disk of its own at /var/lib/docker, of the backend `microvm`. */
  readonly dockerDiskBytes?: number;
  /** Of the backend `vm`. */
  readonly machine?: MachineWish;
  /** Of the backend `vm`: it begins with a copy of this disk, which lies on that of its image (FullVmSandbox.copyDisk). */
  readonly machineDisk?: string;
  /** It goes on where another one was then: with its memory, and disks as they were. It stands still until `goOn`. */
  readonly moment?: Moment;
  /** Reads layers of a disk image, verified. */
  readonly openStoreLayer?: OpenStoreLayer;
}

const DEFAULT_PIDS = 4096;

/** What its image says commands have, with what was asked for. */
function defaultsOf(config: OciConfig['config'], name: string, options: CreateOptions): ResidentFacts['defaults'] {
  const wanted = options.workdir ?? config?.WorkingDir ?? '';
  const image = config?.Env ?? [];
  const given = options.env ?? [];
  const env = environmentOf({ image, given, host: {}, home: '/', hostname: name, terminal: false });
  // HOME is each command's own, by its user, unless somebody has said it.
  const said = [...image, ...given].some((entry) => entry.startsWith('HOME='));
  return {
    env: said ? env : env.filter((one) => !one.startsWith('HOME=')),
    user: options.user ?? config?.User ?? '',
    cwd: wanted.startsWith('/') ? wanted : `/${wanted}`,
  };
}

/** @throws RUNTIME_LIMIT, RUNTIME_LIMIT_UNAVAILABLE, RUNTIME_ENV */
export async function residentRecord(name: string, options: CreateOptions, stateDir: string): Promise<SandboxRecord> {
  const { store, base, workspace, toolkits = [], requestId, ttlMs } = options;
  const { config } = await readConfig(store, base);
  const limits = checkedLimits({ ...options, pids: options.pids ?? DEFAULT_PIDS });
  const isVm = options.backend === MICROVM;
  const now = Date.now();
  return {
    version: 1,
    name,
    id: `${name}-${randomSandboxName().slice(-8)}`,
    state: 'running',
    keep: true,
    createdAt: new Date(now).toISOString(),
    backend: isVm ? MICROVM : (options.runtime ?? OWN_BACKEND),
    store: store.url,
    base: imageReference(base),
    workspace: workspace && imageReference(workspace),
    toolkits: toolkits.map(imageReference),
    owner: processIdentity()!,
    userns: options.userns,
    mountPoints: options.moment?.mountPoints ?? [],
    limits,
    disk: isVm ? undefined : planDisk(limits, stateDir),
    vm: isVm
      ? (options.moment?.vm ??
        vmFacts(sandboxVmDriver(), limits, { ...options, lazy: options.lazy === true || !isLocal(store) }))
      : undefined,
    network: options.network?.mode === 'host' ? { mode: 'host' } : undefined,
    resident: {
      requestId,
      tag: options.tag,
      defaults: defaultsOf(config, name, options),
      expiresAt: ttlMs === undefined ? undefined : new Date(now + ttlMs).toISOString(),
      idleMs: options.idleMs,
      idleAction: options.idleAction,
      removeAtEnd: options.removeAtEnd === true ? true : undefined,
      class: options.class,
    },
  };
}

function isLocal(store: BlobStore): boolean {
  return store.url.startsWith('file:');
}

/** Mounts and launches what is on record. Returns the record as it is then; whoever calls undoes it when this fails. */
export async function launchResident(
  record: SandboxRecord,
  keeper: KeeperChannel,
  keptId: number,
  options: CreateOptions,
  places: SandboxFolders,
  folders: RuntimeFolders,
  agent: string,
): Promise<SandboxRecord> {
  const { store, base, lazy } = options;
  const { runDir, cacheDir } = folders;
  const { upper, work, root: target } = places;
  mkdirSync(target, { mode: 0o755 });
  // Our own launcher leaves nothing there.
  if (record.backend !== OWN_BACKEND) mkdirSync(places.bundle, { mode: 0o755 });
  const layers = composeLayers(options);
  const { resident, limits = {} } = record;
  await makeDisk(record.disk, places, limits);
  const { devices } = options;
  const device = sandboxDevice(limits, places);
  const serviceClass = resident?.class;
  const groups = sandboxCgroups(record.id, undefined, { limits, device, devices, agent: true, serviceClass });
  const { idBase } = record;
  const network = record.network?.mode === 'host' ? 'host' : 'none';
  const spec = { id: record.id, network, idBase } as const;
  const launch = residentLaunch({ backend: record.backend, keeper, keptId, spec, groups, runDir, agent });
  launch.begin();
  const mapping = mappingOf(idBase, (ids) => launch.userNamespace(ids));
  const images = [base, ...(options.workspace === undefined ? [] : [options.workspace]), ...(options.toolkits ?? [])];
  const prefetch = options.prefetch === false ? [] : images;
  const files = blobFilesFor({ store, lazy, runDir, cacheDir, prefetch, onTraceProblem: options.onTraceProblem });
  await mountImage({ runDir, cacheDir, files, image: base, layers, target, upper, work, volatile: true, mapping });
  failPoint('create-mounted');
  const shown = networkFiles(record.network, runDir, target);
  const folderPoints = MOUNT_POINTS.map((path) => ({ path, kind: 'folder' as const }));
  const missing = [...missingMountPoints(target, folderPoints), ...shown.missing];
  const { user, cwd } = resident!.defaults;
  // An unknown user is told now, not by the first command.
  lookUpUser(target, user);
  let noted = record;
  if (missing.length > 0) {
    noted = { ...record, mountPoints: missing.map(({ path }) => path) };
    writeRecord(places.record, noted, false);
  }
  asItsRoot(idBase, () => {
    makeMountPoints(target, missing);
    makeDirectoryInRoot(target, cwd);
  });
  const lifetimeMs = resident?.expiresAt === undefined ? 0 : Math.max(1, Date.parse(resident.expiresAt) - Date.now());
  launch.launch(
    {
      ...spec,
      folder: places.bundle,
      root: target,
      hostname: record.name,
      binds: shown.binds(),
      devices,
      process: { args: ['dsec-agent'], env: [], cwd: '/', uid: 0, gid: 0, additionalGids: [], terminal: false },
      stdio: 'inherit',
      firstProcess: 'agent',
      serviceClass,
    },
    lifetimeMs,
  );
  return noted;
}

/** Of the lock, where the keeper makes it. */
export function makeLockFolder(places: SandboxFolders): void {
  mkdirSync(dirname(places.lock), { recursive: true, mode: 0o700 });
}

export function refuseWithoutRoot(): void {
  if (process.geteuid?.() !== 0) throw fail('RUNTIME_NEEDS_ROOT');
}
