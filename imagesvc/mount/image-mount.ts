/**
 * `dsec mount`, `umount` and `mounts`: an image's layers as one tree at a folder.
 *
 * mountImage, in order:
 *   1. prepareLayer (erofs-mount.ts) for each layer: find its files, prove them. Nothing is locked or mounted yet.
 *   2. withMountTable: the node's lock, and whatever earlier crashes have left is put right.
 *   3. a `mounting` record; from here on a crash is undone by the next command.
 *   4. mountErofs for each layer that is not mounted yet, at its place in the run folder. Where the kernel has no EROFS for
 *      it, showLayer has had the layer server show it before, and that is bound there.
 *   5. one layer and no upper: a bind mount of it; else composeOverlay. Made detached; its mount id goes into the record.
 *   6. attached at the target; the record says `mounted`.
 * A failure after 3 undoes it all before the error is thrown.
 */
import { closeSync, fstatSync, realpathSync, statSync } from 'node:fs';
import { join, resolve } from 'node:path';
import { type Digest, failPoint, isDsecError, messageOf, nodePath, systemCode, textOf as textOfBytes } from '#base';
import {
  attachMount,
  createBind,
  kernelHas,
  mountIdOf,
  mountIdOfFd,
  processIdentity,
  splitDevice,
  umountInPool,
} from '#linux';
import type { ErofsLayer, Image } from '../catalog/image.ts';
import type { DataServerPrograms } from '../data-server/data-server.ts';
import { fail } from '../errors.ts';
import { showLayer } from '../layer-server/show-layer.ts';
import type { BlobStore } from '../store/blob-store.ts';
import { type BlobFiles, storeBlobFiles } from './blob-files.ts';
import { BACKINGS, type Backing, mountErofs, type PreparedLayer, prepareLayer } from './erofs-mount.ts';
import type { IdMapping } from './mapped-overlay.ts';
import { type LazyLayer, type MountRecord, mountSource, newMountId, readRecords } from './mount-record.ts';
import { areRemembered, type MountTable, type ReclaimReport, textOf, withMountTable } from './mount-table.ts';
import { usersOf } from './mount-users.ts';
import { type NodeFolders, nodeFolders } from './node-folders.ts';
import { type ComposedMount, composeOverlay, MAX_LOWER_LAYERS } from './overlay-mount.ts';
import { READ_AHEAD_KIB, withErofsReadAhead } from './read-ahead.ts';
import { refusal } from './refusal.ts';
import { adoptRootAttributes, checkUpperUnused, makeUpperFolders, type UpperFolders } from './upper-folder.ts';

export interface MountOptions extends Partial<NodeFolders> {
  /** Where the layers' blobs are. Not needed when `files` is given. */
  readonly store?: BlobStore;
  /** In place of the store's own files. */
  readonly files?: BlobFiles;
  /** Its layers are mounted; or `layers`, bottom first, composed from several images. With both, `image` is but a name. */
  readonly image?: Image;
  readonly layers?: readonly ErofsLayer[];
  /** An existing folder. */
  readonly target: string;
  /** Makes the mount writable: changes go there. Made when it is missing. */
  readonly upper?: string;
  /** `<upper>.work` by default. */
  readonly work?: string;
  /**
   * Unmounting it, and fsync and syncfs in it, do not write the upper out, which for those two would be all of its file system: whoever
   * wants what is in there to outlast a crash of the machine sees to it. The work folder is good for one mount.
   */
  readonly volatile?: boolean;
  /** $DSEC_MOUNT_WITH, else `auto`. */
  readonly backing?: Backing;
  /** In place of this program's own processes. */
  readonly programs?: DataServerPrograms;
  /** Owners are shifted into a sandbox's range; asked for when all else is ready. Needs an upper. */
  readonly mapping?: () => Promise<IdMapping>;
  /** `mount2` composes without the new mount API (for tests). */
  readonly overlayApi?: 'auto' | 'mount2';
}

export interface Mounted {
  readonly id: string;
  /** As it was resolved. */
  readonly target: string;
  /** Metadata digests, bottom first. */
  readonly layers: readonly Digest[];
  readonly upper?: string;
  readonly work?: string;
}

/**
 * Mounts an image. Nothing is left behind when it fails.
 * @throws MOUNT_* errors
 */
export async function mountImage(options: MountOptions): Promise<Mounted> {
  let opened: Promise<IdMapping> | undefined;
  const mapping = options.mapping;
  const once =
    mapping === undefined
      ? undefined
      : () => {
          opened ??= mapping();
          return opened;
        };
  try {
    return await mountWith({ ...options, mapping: once });
  } finally {
    await opened?.then(
      ({ userNamespace }) => closeSync(userNamespace),
      () => {},
    );
  }
}

async function mountWith(options: MountOptions): Promise<Mounted> {
  const { runDir, cacheDir } = nodeFolders(options);
  const layers = distinctLayers(options);
  requireRoot();
  const target = resolveTarget(options.target);
  if (layers.length > MAX_LOWER_LAYERS) {
    throw fail('MOUNT_TOO_MANY_LAYERS', { target, layers: layers.length, limit: MAX_LOWER_LAYERS });
  }
  const files = options.files ?? (options.store && storeBlobFiles(options.store));
  if (files === undefined) throw new TypeError('mountImage needs a store or files');

  const prepared: PreparedLayer[] = [];
  const backing = options.backing ?? backingFromEnvironment();
  const again = await mountStanding(layers, target, { ...options, runDir, backing });
  if (again !== undefined) return again;
  try {
    for (const layer of layers) prepared.push(await prepareLayer(layer, files, cacheDir));
    const mapping = await options.mapping?.();
    const mountNow = () =>
      withMountTable(runDir, (table) => mountPrepared(table, prepared, target, { ...options, backing }, mapping));
    const show = async () => {
      for (const layer of prepared) layer.tree = await showLayer(layer, { ...options, runDir, cacheDir });
    };
    if (backing === 'reader' || (backing === 'auto' && !kernelHas('erofs'))) await show();
    try {
      return await mountNow();
    } catch (error) {
      // An EROFS that does not know how the layer is written, or that can read from nothing here, is as good as none.
      if (backing !== 'auto' || prepared[0]?.tree !== undefined || !lacksErofs(error)) throw error;
      await show();
      return await mountNow();
    }
  } finally {
    for (const layer of prepared) layer.close();
  }
}

/** Where all layers are mounted already, and stay: only the tree is to be made. Undefined where not. */
async function mountStanding(
  layers: readonly ErofsLayer[],
  target: string,
  options: MountOptions & { readonly runDir: string },
): Promise<Mounted | undefined> {
  const digests = layers.map((layer) => layer.meta.digest);
  if (!areRemembered(options.runDir, digests)) return undefined;
  const mapping = await options.mapping?.();
  return withMountTable(options.runDir, (table) =>
    digests.every((digest) => table.isStanding(digest))
      ? mountPrepared(
          table,
          layers.map((layer) => ({ layer })),
          target,
          options,
          mapping,
        )
      : undefined,
  );
}

/** For tests, and for whoever has a reason: how layers are read. @throws MOUNT_WITH */
function backingFromEnvironment(): Backing {
  const wanted = process.env.DSEC_MOUNT_WITH || 'auto';
  const known = BACKINGS.find((backing) => backing === wanted);
  if (known === undefined) throw fail('MOUNT_WITH', { wanted, known: BACKINGS.join(', ') });
  return known;
}

/** Of a layer that is there twice the topmost stays: it decides whatever the lower one could, and OverlayFS takes a folder once. */
function distinctLayers(options: MountOptions): ErofsLayer[] {
  const layers = options.layers ?? options.image?.layers ?? [];
  if (layers.length === 0) throw fail('MOUNT_NO_LAYERS', { image: options.image?.name ?? 'the image' });
  const topmost = new Map<Digest, ErofsLayer>();
  for (const layer of [...layers].reverse()) {
    if (!topmost.has(layer.meta.digest)) topmost.set(layer.meta.digest, layer);
  }
  return [...topmost.values()].reverse();
}

function requireRoot(): void {
  if (process.geteuid?.() !== 0) throw fail('MOUNT_NOT_ROOT', {});
}

function resolveTarget(path: string): string {
  const absolute = resolve(path);
  let target: string;
  try {
    target = realPath(absolute);
  } catch (error) {
    throw fail('MOUNT_TARGET_MISSING', { target: absolute, reason: messageOf(error) }, error);
  }
  if (!statSync(nodePath(target)).isDirectory()) throw fail('MOUNT_TARGET_NOT_DIRECTORY', { target });
  return target;
}

/** Byte for byte: a folder's name need not be UTF-8. */
function realPath(path: string): string {
  return textOfBytes(realpathSync.native(nodePath(path), 'buffer'));
}

/** One that is mounted needs no more than its name. */
type MountableLayer =
  | PreparedLayer
  | { readonly layer: ErofsLayer; readonly lazy?: undefined; readonly tree?: undefined };

function isPrepared(layer: MountableLayer): layer is PreparedLayer {
  return 'meta' in layer;
}

function mountPrepared(
  table: MountTable,
  prepared: readonly MountableLayer[],
  target: string,
  options: MountOptions,
  mapping?: IdMapping,
): Mounted {
  const taken = table.ownRecords.find((record) => record.target === target);
  if (taken !== undefined) throw fail('MOUNT_TARGET_TAKEN', { target, id: taken.id });
  const upper = options.upper === undefined ? undefined : makeUpperFolders(options.upper, options.work);
  const record: MountRecord = {
    id: newMountId(),
    target,
    image: options.image && { name: options.image.name, manifest: options.image.manifestDigest },
    layers: prepared.map(({ layer }) => layer.meta.digest),
    lazy: lazyLayers(table, prepared),
    upper: upper?.upper,
    work: upper?.work,
    owner: processIdentity()!,
    namespace: table.namespace,
    createdAt: new Date().toISOString(),
    state: 'mounting',
  };
  try {
    if (upper !== undefined) checkUpperUnused(upper, table.records);
    table.write(record);
    failPoint('mount-recorded');
    mountLayers(table, prepared, options.backing);
    failPoint('mount-layers');
    if (upper?.fresh) adoptRootAttributes(upper.upper, table.layerPath(record.layers.at(-1)!));
    const composed = compose(table, record, upper, options, mapping);
    const attached = attach(table, record, composed);
    failPoint('mount-attached');
    table.write({ ...attached, state: 'mounted' });
    failPoint('mount-mounted');
  } catch (error) {
    table.undo(table.records.find(({ id }) => id === record.id) ?? record);
    upper?.unmake();
    throw error;
  }
  return { id: record.id, target, layers: record.layers, upper: record.upper, work: record.work };
}

/**
 * A layer that is mounted already is read as whoever mounted it has it read, and only records tell: so each record that
 * names it says what the others say.
 */
function lazyLayers(table: MountTable, prepared: readonly MountableLayer[]): LazyLayer[] | undefined {
  const known = table.ownRecords.flatMap((record) => record.lazy ?? []);
  const found = prepared.flatMap(({ layer, lazy, tree }) => {
    const { digest } = layer.meta;
    if (table.isMounted(digest)) return distinctServers(known.filter((one) => one.layer === digest));
    const shown = tree && { layer: digest, server: tree.server, served: true, reader: true, blobs: [] };
    // The reader reads what the data server serves, in any case.
    const below = lazy && tree ? { ...lazy, served: true } : lazy;
    return [below, shown].filter((one) => one !== undefined);
  });
  return found.length === 0 ? undefined : found;
}

function lacksErofs(error: unknown): boolean {
  return isDsecError(error, 'MOUNT_FEATURE_MISSING') || isDsecError(error, 'LINUX_LOOP_UNAVAILABLE');
}

function distinctServers(known: readonly LazyLayer[]): LazyLayer[] {
  return [...new Map(known.map((one) => [one.server, one])).values()];
}

function mountLayers(table: MountTable, prepared: readonly MountableLayer[], backing: Backing | undefined): void {
  for (const layer of prepared) {
    const { digest } = layer.layer.meta;
    if (table.isMounted(digest)) continue;
    if (!isPrepared(layer)) throw new Error(`layer ${digest} was unmounted under the table's lock`);
    const folder = table.makeLayerFolder(digest);
    failPoint('mount-layer-folder');
    if (layer.directIo && layer.tree === undefined)
      withErofsReadAhead(folder, READ_AHEAD_KIB, () => mountErofs(layer, folder, backing));
    else mountErofs(layer, folder, backing);
    table.layerMounted(digest);
    failPoint('mount-layer');
  }
}

function compose(
  table: MountTable,
  record: MountRecord,
  upper: UpperFolders | undefined,
  { volatile, overlayApi }: MountOptions,
  mapping: IdMapping | undefined,
): ComposedMount {
  const lowers = record.layers.map((layer) => table.layerPath(layer)).reverse();
  if (lowers.length === 1 && upper === undefined) {
    try {
      return { kind: 'detached', mount: createBind(lowers[0]!, { readOnly: true }) };
    } catch (error) {
      throw refusal(error, 'the layer', record.target);
    }
  }
  const source = mountSource(record.id);
  const spec = { lowers, upper: upper?.upper, work: upper?.work, volatile, source };
  const shifted = mapping && { ...mapping, stage: join(table.runDir, 'shifted') };
  return composeOverlay({ ...spec, mapping: shifted }, record.target, overlayApi);
}

/** The record as it stands once the mount is attached. */
function attach(table: MountTable, record: MountRecord, composed: ComposedMount): MountRecord {
  if (composed.kind === 'direct') {
    failPoint('mount-composed');
    // Until its id is known it is found again by its source, `dsec:<id>`.
    composed.attach();
    table.mountsChanged();
    const row = table.rowOf(record);
    return row === undefined ? record : { ...record, mountId: row.mountId, device: row.device };
  }
  const { fd } = composed.mount;
  let identified: MountRecord;
  try {
    failPoint('mount-composed');
    const { major, minor } = splitDevice(fstatSync(fd).dev);
    identified = { ...record, mountId: mountIdOfFd(fd), device: `${major}:${minor}` };
    // An OverlayFS is found by its source until the record says that it is mounted; a bind mount shows none of ours.
    if (record.upper === undefined && record.layers.length === 1) table.write(identified);
    failPoint('mount-identified');
  } catch (error) {
    closeSync(fd);
    throw error;
  }
  try {
    attachMount(composed.mount, record.target);
  } catch (error) {
    throw refusal(error, 'the image', record.target);
  }
  return identified;
}

/**
 * Unmounts what `mountImage` mounted, by its target or id, and the layers that nothing else uses. The upper stays.
 * `lazy`: out of sight at once, gone when its last user is.
 * @throws MOUNT_NOT_FOUND, MOUNT_BUSY, MOUNT_NOT_ROOT
 */
export async function unmount(
  targetOrId: string,
  options: Partial<NodeFolders> & { readonly lazy?: boolean } = {},
): Promise<MountRecord> {
  requireRoot();
  const { runDir } = nodeFolders(options);
  return withMountTable(runDir, async (table) => {
    const record = findRecord(table, targetOrId);
    const row = table.rowOf(record);
    if (row !== undefined) {
      const path = textOf(row.mountPoint);
      if (mountIdOf(path) !== row.mountId) {
        throw fail('MOUNT_BUSY', { target: path, users: 'another mount lies on top of it' });
      }
      await detachTarget(path, options.lazy ?? false);
    }
    failPoint('umount-detached');
    table.remove(record.id);
    failPoint('umount-removed');
    table.releaseLayers(record.layers);
    return record;
  });
}

function findRecord(table: MountTable, targetOrId: string): MountRecord {
  const byId = table.ownRecords.find((record) => record.id === targetOrId);
  if (byId !== undefined) return byId;
  const absolute = resolve(targetOrId);
  let real = absolute;
  try {
    real = realPath(absolute);
  } catch {
    // Then it can be a record's target only as it was written.
  }
  const found = table.ownRecords.find((record) => record.target === real || record.target === absolute);
  if (found === undefined) throw fail('MOUNT_NOT_FOUND', { target: targetOrId });
  return found;
}

async function detachTarget(path: string, lazy: boolean): Promise<void> {
  try {
    await umountInPool(path, { lazy });
  } catch (error) {
    if (systemCode(error) !== 'EBUSY') throw refusal(error, 'unmounting', path);
    const users = usersOf(statSync(nodePath(path)).dev);
    const named = users.length === 0 ? 'a mount below it, or a process in another namespace' : users.join(', ');
    throw fail('MOUNT_BUSY', { target: path, users: named }, error);
  }
}

/** What is mounted on this node, oldest first. As root, what crashes have left is put right first. */
export async function listMounts(options: Partial<NodeFolders> = {}): Promise<MountRecord[]> {
  const { runDir } = nodeFolders(options);
  if (statSync(runDir, { throwIfNoEntry: false }) === undefined) return [];
  if (process.geteuid?.() === 0) return withMountTable(runDir, (table) => [...table.records], { afresh: true });
  const folder = resolve(runDir, 'mounts');
  if (statSync(folder, { throwIfNoEntry: false }) === undefined) return [];
  return readRecords(folder).records.filter((record) => record.state === 'mounted');
}

/** Puts right what crashes have left; every other command does it too. */
export async function reclaimMounts(options: Partial<NodeFolders> = {}): Promise<ReclaimReport> {
  requireRoot();
  const { runDir } = nodeFolders(options);
  if (statSync(runDir, { throwIfNoEntry: false }) === undefined) return { undone: [], dropped: [], released: [] };
  return withMountTable(runDir, (_table, reclaimed) => reclaimed, { afresh: true });
}
