/**
 * A node's mounts: what is mounted where, and which EROFS layers are in use.
 *
 *     <run>/lock            held (flock) by whoever changes anything below
 *     <run>/mounts/<id>.json  one record a mount, written before its effect
 *     <run>/layers/<hex>/   mount point of the EROFS layer whose metadata has this digest; root only (images hold setuid
 *                           programs and devices)
 *
 * A layer is mounted once and shared: its users are the records that name it. Nothing else counts them, so no crash can
 * leave a wrong count. `reclaim` makes records and kernel agree again, and runs whenever the lock is taken:
 * - a `mounting` record seen by the holder of the lock belongs to a process that died or failed inside: it is undone;
 * - a `mounted` record whose mount is gone (a reboot, an umount by hand) is dropped;
 * - a layer that no record names is unmounted.
 * Loop devices need no care: they end with their mount (linux/loop.ts).
 *
 * Mounts are per mount namespace. Records of another one are left alone while any process lives in it.
 */
import { mkdirSync, readdirSync, readlinkSync, realpathSync, rmdirSync, rmSync } from 'node:fs';
import { join } from 'node:path';
import {
  type ByteString,
  bytesOf,
  type Digest,
  digestFromHex,
  fromText,
  hexOf,
  systemCode,
  textOf as textOfBytes,
} from '#base';
import { bootId, type MountRow, mountIdOf, readMountInfo, umount, withLock } from '#linux';
import { type MountRecord, mountSource, readRecords, removeRecord, writeRecord } from './mount-record.ts';

/** What had to be put right. */
export interface ReclaimReport {
  /** Ids of mounts that were not finished. */
  readonly undone: readonly string[];
  /** Ids of records whose mount was gone. */
  readonly dropped: readonly string[];
  /** Metadata digests of layers that nothing used. */
  readonly released: readonly Digest[];
}

/** How long a command waits for the others. A mount holds the lock for milliseconds; hashing happens outside it. */
const LOCK_TIMEOUT_MS = 120_000;

export class MountTable {
  readonly runDir: string;
  readonly namespace: string;
  readonly #mountsDir: string;
  readonly #layersDir: string;
  #records: MountRecord[] = [];
  /** The kernel's table, read once a command where it can be: it grows with every mount of the node. */
  #rows: MountRow[] | undefined;

  constructor(runDir: string) {
    this.runDir = runDir;
    this.namespace = ownNamespace();
    this.#mountsDir = join(runDir, 'mounts');
    this.#layersDir = join(runDir, 'layers');
  }

  /** Of this mount namespace and of others, oldest first. */
  get records(): readonly MountRecord[] {
    return this.#records;
  }

  /** Of this mount namespace. */
  get ownRecords(): readonly MountRecord[] {
    return this.#records.filter((record) => record.namespace === this.namespace);
  }

  write(record: MountRecord): void {
    writeRecord(this.#mountsDir, record);
    this.#records = [...this.#records.filter(({ id }) => id !== record.id), record];
  }

  remove(id: string): void {
    removeRecord(this.#mountsDir, id);
    this.#records = this.#records.filter((record) => record.id !== id);
  }

  layerPath(meta: Digest): string {
    return join(this.#layersDir, hexOf(meta));
  }

  /** Layers that are mounted in this namespace. */
  mountedLayers(): Set<Digest> {
    return new Set(this.#layerRows().map(({ layer }) => layer));
  }

  /** To be called after mounting anything. */
  mountsChanged(): void {
    this.#rows = undefined;
  }

  #kernelRows(): readonly MountRow[] {
    this.#rows ??= readMountInfo();
    return this.#rows;
  }

  /** Makes the mount point of a layer. */
  makeLayerFolder(meta: Digest): string {
    const path = this.layerPath(meta);
    mkdirSync(path, { recursive: true, mode: 0o700 });
    return path;
  }

  /** The mount that `record` tells of, as the kernel has it now; undefined when it has none. */
  rowOf(record: MountRecord): MountRow | undefined {
    const rows = this.#kernelRows();
    // Not by its path: the mount may have been moved. By its source only while no id is known: a bind mount of the target
    // that somebody made shows the same source.
    if (record.mountId !== undefined) {
      return rows.find((row) => row.mountId === record.mountId && row.device === record.device);
    }
    const source = fromText(mountSource(record.id));
    return rows.find((row) => row.type === 'overlay' && row.source === source);
  }

  /** Unmounts what an unfinished mount may have attached, forgets it, and releases its layers. */
  undo(record: MountRecord): void {
    this.mountsChanged();
    const row = this.rowOf(record);
    if (row !== undefined && !this.#detach(row)) return;
    this.remove(record.id);
    this.releaseLayers();
  }

  /** Reads the records and puts right what crashes and foreign hands have left. */
  reclaim(): ReclaimReport {
    mkdirSync(this.#mountsDir, { recursive: true, mode: 0o755 });
    mkdirSync(this.#layersDir, { recursive: true, mode: 0o700 });
    const { records, damaged, unfinished } = readRecords(this.#mountsDir);
    for (const name of [...damaged, ...unfinished]) rmSync(join(this.#mountsDir, name), { force: true });
    this.#records = records;

    const undone: string[] = [];
    const dropped: string[] = [];
    let others: Set<string> | undefined;
    for (const record of records) {
      // After a reboot ids mean other mounts, and the first namespace has the same number again.
      const thisBoot = record.owner.bootId === bootId();
      const own = thisBoot && record.namespace === this.namespace;
      if (thisBoot && !own) {
        others ??= liveNamespaces();
        if (others.has(record.namespace)) continue;
      }
      let row = own ? this.rowOf(record) : undefined;
      if (record.state === 'mounted' && own && row === undefined) {
        // Mounts that come and go while the table is read can hide a row (before Linux 5.8): look twice before forgetting.
        this.mountsChanged();
        row = this.rowOf(record);
      }
      if (record.state === 'mounted' && row !== undefined) continue;
      if (row !== undefined && !this.#detach(row)) continue;
      (record.state === 'mounting' ? undone : dropped).push(record.id);
      this.remove(record.id);
    }
    return { undone, dropped, released: this.releaseLayers() };
  }

  /** Unmounts the layers that no record names, and removes their folders. */
  releaseLayers(): Digest[] {
    const used = new Set(this.ownRecords.flatMap((record) => record.layers));
    const released: Digest[] = [];
    for (const { layer, row } of this.#layerRows().reverse()) {
      if (used.has(layer)) continue;
      if (this.#detach(row)) released.push(layer);
    }
    // Removing a folder takes away what is mounted on it in any namespace: only when nobody anywhere names the layer.
    const named = new Set(this.#records.flatMap((record) => record.layers));
    for (const name of readdirSync(this.#layersDir)) {
      if (named.has(digestFromHex(name))) continue;
      try {
        rmdirSync(join(this.#layersDir, name));
      } catch (error) {
        if (systemCode(error) === undefined) throw error;
      }
    }
    return released;
  }

  #layerRows(): { layer: Digest; row: MountRow }[] {
    const prefix = fromText(`${this.#layersDir}/`);
    const found: { layer: Digest; row: MountRow }[] = [];
    for (const row of this.#kernelRows()) {
      const name = row.mountPoint.startsWith(prefix) ? row.mountPoint.slice(prefix.length) : '';
      // The kernel's EROFS, or ours behind FUSE.
      if (/^[0-9a-f]{64}$/.test(name) && (row.type === 'erofs' || row.type === 'fuse'))
        found.push({ layer: digestFromHex(name), row });
    }
    return found;
  }

  /**
   * In use or not, it goes: an unfinished mount and an unused layer have no users to protect. False when another mount
   * lies on top, which is not ours to take away: a later command tries again.
   */
  #detach(row: MountRow): boolean {
    const path = textOf(row.mountPoint);
    try {
      if (mountIdOf(path) !== row.mountId) return false;
      umount(path);
    } catch (error) {
      if (systemCode(error) === 'EBUSY') umount(path, { lazy: true });
      else if (systemCode(error) !== 'EINVAL' && systemCode(error) !== 'ENOENT') throw error;
    }
    this.#rows = this.#rows?.filter((other) => other !== row);
    return true;
  }
}

/**
 * Takes the node's lock, reclaims, and works on the table. One process at a time.
 * @throws LINUX_LOCK_TIMEOUT
 */
export async function withMountTable<T>(
  runDir: string,
  work: (table: MountTable, reclaimed: ReclaimReport) => T | Promise<T>,
): Promise<T> {
  mkdirSync(runDir, { recursive: true, mode: 0o755 });
  // The kernel shows mount points with symlinks resolved (/var/run is one).
  const resolved = realpathSync(runDir);
  return withLock(
    join(resolved, 'lock'),
    () => {
      const table = new MountTable(resolved);
      return work(table, table.reclaim());
    },
    { timeoutMs: LOCK_TIMEOUT_MS },
  );
}

/** A mount point of ours as text: targets come from text. */
export function textOf(path: ByteString): string {
  return textOfBytes(bytesOf(path));
}

function ownNamespace(): string {
  return readlinkSync('/proc/self/ns/mnt');
}

/** Mount namespaces that some process lives in. */
function liveNamespaces(): Set<string> {
  const found = new Set<string>();
  for (const name of readdirSync('/proc')) {
    if (!/^\d+$/.test(name)) continue;
    try {
      found.add(readlinkSync(`/proc/${name}/ns/mnt`));
    } catch {
      // Ended meanwhile.
    }
  }
  return found;
}
