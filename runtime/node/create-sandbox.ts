/**
 * A sandbox that stays, from its name to its agent: the keeper's lock, the record, the mount, the launch. The record is there before any
 * effect; whoever finds it without a sandbox undoes the rest.
 */
import { mkdirSync } from 'node:fs';
import { dirname } from 'node:path';
import { failPoint } from '#base';
import { type BlobStore, blobFilesFor, type Image, mountImage, readConfig } from '#imagesvc';
import { processIdentity, readMountInfo } from '#linux';
import type { KeeperChannel } from '../aether/keeper-channel.ts';
import { launchOrder, preparation } from '../backend/launch-order.ts';
import { MOUNT_POINTS } from '../backend/oci-spec.ts';
import { OWN_BACKEND } from '../backend/own-backend.ts';
import { sandboxCgroups } from '../backend/sandbox-cgroups.ts';
import { composeLayers } from '../compose/compose-layers.ts';
import { fail } from '../errors.ts';
import { environmentOf } from '../sandbox/environment.ts';
import { makeMountPoints, missingMountPoints } from '../sandbox/mount-points.ts';
import { makeDirectoryInRoot } from '../sandbox/root-path.ts';
import { imageReference, randomSandboxName, type SandboxRecord, writeRecord } from '../sandbox/sandbox-record.ts';
import type { RuntimeFolders, SandboxFolders } from '../sandbox/state-folders.ts';
import { lookUpUser } from '../sandbox/user-lookup.ts';

export interface CreateOptions {
  readonly store: BlobStore;
  readonly base: Image;
  readonly workspace?: Image;
  /** Topmost last. */
  readonly toolkits?: readonly Image[];
  /** A random one by default. */
  readonly name?: string;
  /** Asked again with the same one, the same sandbox is the answer. */
  readonly requestId?: string;
  /** `NAME=VALUE`: what commands have unless they say otherwise. */
  readonly env?: readonly string[];
  readonly user?: string;
  readonly workdir?: string;
  /** It ends after so long, whoever else has died. */
  readonly ttlMs?: number;
  readonly memoryBytes?: number;
  /** Processes and threads; 4096 by default. */
  readonly pids?: number;
  readonly lazy?: boolean;
  readonly prefetch?: boolean;
  readonly onTraceProblem?: (text: string) => void;
  /** Our own by default; others have no sandboxes that stay yet. */
  readonly runtime?: string;
}

const DEFAULT_PIDS = 4096;

export function residentRecord(name: string, options: CreateOptions): SandboxRecord {
  const { store, base, workspace, toolkits = [], requestId, ttlMs, memoryBytes, pids = DEFAULT_PIDS } = options;
  const now = Date.now();
  return {
    version: 1,
    name,
    id: `${name}-${randomSandboxName().slice(-8)}`,
    state: 'running',
    keep: true,
    createdAt: new Date(now).toISOString(),
    backend: OWN_BACKEND,
    store: store.url,
    base: imageReference(base),
    workspace: workspace && imageReference(workspace),
    toolkits: toolkits.map(imageReference),
    owner: processIdentity()!,
    mountPoints: [],
    resident: {
      requestId,
      defaults: { env: options.env ?? [], user: options.user ?? '', cwd: options.workdir ?? '/' },
      expiresAt: ttlMs === undefined ? undefined : new Date(now + ttlMs).toISOString(),
      memoryBytes,
      pids,
    },
  };
}

/** Mounts and launches what is on record. Returns the record as it is then; whoever calls undoes it when this fails. */
export async function launchResident(
  record: SandboxRecord,
  keeper: KeeperChannel,
  keptId: number,
  options: CreateOptions,
  places: SandboxFolders,
  folders: RuntimeFolders,
): Promise<SandboxRecord> {
  const { store, base, lazy } = options;
  const { runDir, cacheDir } = folders;
  const { upper, work, root: target } = places;
  for (const folder of [places.root, places.bundle]) mkdirSync(folder, { recursive: true, mode: 0o755 });
  const layers = composeLayers(options);
  const config = (await readConfig(store, base)).config ?? {};
  const { resident } = record;
  const groups = sandboxCgroups(record.id, readMountInfo(), resident);
  keeper.prepare(keptId, preparation({ id: record.id, network: 'none' }, 'own', groups));
  const images = [base, ...(options.workspace === undefined ? [] : [options.workspace]), ...(options.toolkits ?? [])];
  const prefetch = options.prefetch === false ? [] : images;
  const files = blobFilesFor({ store, lazy, runDir, cacheDir, prefetch, onTraceProblem: options.onTraceProblem });
  await mountImage({ runDir, cacheDir, files, image: base, layers, target, upper, work });
  failPoint('create-mounted');
  const missing = missingMountPoints(
    target,
    MOUNT_POINTS.map((path) => ({ path, kind: 'folder' as const })),
  );
  const user = options.user ?? config.User ?? '';
  // An unknown user is told now, not by the first command.
  const { home } = lookUpUser(target, user);
  const wanted = options.workdir ?? config.WorkingDir ?? '';
  const cwd = wanted.startsWith('/') ? wanted : `/${wanted}`;
  const env = environmentOf({
    image: config.Env ?? [],
    given: options.env ?? [],
    host: {},
    home,
    hostname: record.name,
    terminal: false,
  });
  // HOME is each command's own, by its user, unless somebody has said it.
  const said = [...(config.Env ?? []), ...(options.env ?? [])].some((entry) => entry.startsWith('HOME='));
  const noted: SandboxRecord = {
    ...record,
    mountPoints: missing.map(({ path }) => path),
    resident: { ...resident, defaults: { env: said ? env : env.filter((one) => !one.startsWith('HOME=')), user, cwd } },
  };
  writeRecord(places.record, noted, true);
  makeMountPoints(target, missing);
  makeDirectoryInRoot(target, cwd);
  const order = launchOrder(
    {
      id: record.id,
      folder: places.bundle,
      root: target,
      hostname: record.name,
      network: 'none',
      binds: [],
      process: { args: ['dsec-agent'], env: [], cwd: '/', uid: 0, gid: 0, additionalGids: [], terminal: false },
      stdio: 'inherit',
    },
    undefined,
    { lifetimeMs: resident?.expiresAt === undefined ? 0 : Math.max(1, Date.parse(resident.expiresAt) - Date.now()) },
  );
  keeper.launch(keptId, order);
  return noted;
}

/** Of the lock, where the keeper makes it. */
export function makeLockFolder(places: SandboxFolders): void {
  mkdirSync(dirname(places.lock), { recursive: true, mode: 0o700 });
}

export function refuseWithoutRoot(): void {
  if (process.geteuid?.() !== 0) throw fail('RUNTIME_NEEDS_ROOT');
}
