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
 *
 * A node may have thousands of mounts, so a process that stays does not read all of them for each one: it remembers the records
 * until another process has changed something (`<run>/changed-by` names who did so last), and the kernel's table until the kernel says
 * that it is another one.
 */
import { randomBytes } from 'node:crypto';
import {
  existsSync,
  mkdirSync,
  readdirSync,
  readFileSync,
  readlinkSync,
  realpathSync,
  rmdirSync,
  rmSync,
  writeFileSync,
} from 'node:fs';
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
import { bootId, type MountRow, MountWatch, mountIdOf, readMountInfo, umount, withLock } from '#linux';
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

/** What a process knows of a table after it has let go of the lock. */
interface TableMemory {
  records: MountRecord[];
  /** Layers that are mounted here, each with the id of its mount. */
  layers: Map<Digest, number>;
  /** Of the kernel's table as `layers` and `records` have it. */
  readonly watch: MountWatch;
}

const memories = new Map<string, TableMemory>();
/** Names this process in `changed-by`. */
const SELF = `${process.pid}-${randomBytes(8).toString('hex')}\n`;

export interface MountPlace {
  readonly mountId: number;
  readonly mountPoint: ByteString;
}

export class MountTable {
  readonly runDir: string;
  readonly namespace: string;
  readonly #mountsDir: string;
  readonly #layersDir: string;
  #records: MountRecord[] = [];
  #layers = new Map<Digest, number>();
  /** The kernel's table, read once a command where it can be: it grows with every mount of the node. */
  #rows: MountRow[] | undefined;
  /** On record that this process was the last to change anything. */
  #noted = false;

  constructor(runDir: string) {
    this.runDir = runDir;
    this.namespace = ownNamespace();
    this.#mountsDir = join(runDir, 'mounts');
    this.#layersDir = join(runDir, 'layers');
  }

  /** Goes on with what this process knew, where nobody has changed anything since. */
  recall({ records, layers, watch }: TableMemory): boolean {
    if (this.#changedBy() !== SELF || watch.changed()) return false;
    this.#noted = true;
    this.#records = records;
    this.#layers = layers;
    return true;
  }

  /** For the next time, while the lock is held. */
  remember(memory: TableMemory | undefined): TableMemory {
    const watch = memory?.watch ?? new MountWatch();
    watch.changed();
    return { records: this.#records, layers: this.#layers, watch };
  }

  #changedBy(): string {
    try {
      return readFileSync(join(this.runDir, 'changed-by'), 'latin1');
    } catch {
      return '';
    }
  }

  /** Before the first change: whoever remembers something else must read it again, even if we are killed now. */
  #note(): void {
    if (this.#noted) return;
    if (this.#changedBy() !== SELF) writeFileSync(join(this.runDir, 'changed-by'), SELF, { mode: 0o600 });
    this.#noted = true;
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
    this.#note();
    writeRecord(this.#mountsDir, record);
    this.#records = [...this.#records.filter(({ id }) => id !== record.id), record];
  }

  remove(id: string): void {
    this.#note();
    removeRecord(this.#mountsDir, id);
    this.#records = this.#records.filter((record) => record.id !== id);
  }

  layerPath(meta: Digest): string {
    return join(this.#layersDir, hexOf(meta));
  }

  /** In this namespace. */
  isMounted(layer: Digest): boolean {
    return this.#layers.has(layer);
  }

  /** Mounted from local files: nobody has to be running, or told, for it to be used once more. */
  isStanding(layer: Digest): boolean {
    return (
      this.#layers.has(layer) && !this.ownRecords.some((record) => record.lazy?.some((one) => one.layer === layer))
    );
  }

  /** To be called after a layer was mounted at its folder. */
  layerMounted(layer: Digest): void {
    this.#rows = undefined;
    this.#layers.set(layer, mountIdOf(this.layerPath(layer)));
  }

  /** To be called after mounting anything else. */
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
    this.#note();
    mkdirSync(path, { recursive: true, mode: 0o700 });
    return path;
  }

  /** The mount that `record` tells of, as the kernel has it now; undefined when it has none. */
  rowOf(record: MountRecord): (MountPlace & { readonly device?: string }) | undefined {
    // Where it was put, as a rule.
    if (this.#rows === undefined && record.mountId !== undefined && idAt(record.target) === record.mountId) {
      return { mountId: record.mountId, mountPoint: fromText(record.target) };
    }
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
    this.releaseLayers(record.layers);
  }

  /** Reads the records and puts right what crashes and foreign hands have left. */
  reclaim(): ReclaimReport {
    mkdirSync(this.#mountsDir, { recursive: true, mode: 0o755 });
    mkdirSync(this.#layersDir, { recursive: true, mode: 0o700 });
    const { records, damaged, unfinished } = readRecords(this.#mountsDir);
    for (const name of [...damaged, ...unfinished]) rmSync(join(this.#mountsDir, name), { force: true });
    this.#records = records;
    this.#rows = readMountInfo();
    this.#layers = new Map(this.#layerRows().map(({ layer, row }) => [layer, row.mountId]));

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
    return { undone, dropped, released: this.#releaseUnused() };
  }

  /** Of `layers`, unmounts those that no record names, and removes their folders. */
  releaseLayers(layers: readonly Digest[]): void {
    for (const layer of [...layers].reverse()) {
      if (this.#isNamed(layer, this.ownRecords)) continue;
      const mountId = this.#layers.get(layer);
      if (mountId !== undefined) this.#detachLayer(layer, mountId);
      this.#removeLayerFolder(layer);
    }
  }

  /** The same of all that there are. */
  #releaseUnused(): Digest[] {
    const released: Digest[] = [];
    const own = this.ownRecords;
    const used = new Set(own.flatMap((record) => record.layers));
    for (const { layer, row } of this.#layerRows().reverse()) {
      if (!used.has(layer) && this.#detachLayer(layer, row.mountId)) released.push(layer);
    }
    const named = new Set(this.#records.flatMap((record) => record.layers));
    for (const name of readdirSync(this.#layersDir)) {
      if (!named.has(digestFromHex(name))) this.#removeLayerFolder(digestFromHex(name));
    }
    return released;
  }

  #isNamed(layer: Digest, records: readonly MountRecord[]): boolean {
    return records.some((record) => record.layers.includes(layer));
  }

  #detachLayer(layer: Digest, mountId: number): boolean {
    if (!this.#detach({ mountId, mountPoint: fromText(this.layerPath(layer)) })) return false;
    this.#layers.delete(layer);
    return true;
  }

  /** Takes away what is mounted on it in any namespace: only when nobody anywhere names the layer. */
  #removeLayerFolder(layer: Digest): void {
    if (this.#isNamed(layer, this.#records)) return;
    this.#note();
    try {
      rmdirSync(this.layerPath(layer));
    } catch (error) {
      if (systemCode(error) === undefined) throw error;
    }
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
  #detach(row: MountPlace): boolean {
    const path = textOf(row.mountPoint);
    this.#note();
    try {
      if (mountIdOf(path) !== row.mountId) return false;
      umount(path);
    } catch (error) {
      if (systemCode(error) === 'EBUSY') umount(path, { lazy: true });
      else if (systemCode(error) !== 'EINVAL' && systemCode(error) !== 'ENOENT') throw error;
    }
    this.#rows = this.#rows?.filter((other) => other.mountId !== row.mountId);
    return true;
  }
}

/**
 * Takes the node's lock, reclaims, and works on the table. One process at a time.
 * @param options `afresh`: whatever this process remembers.
 * @throws LINUX_LOCK_TIMEOUT
 */
export async function withMountTable<T>(
  runDir: string,
  work: (table: MountTable, reclaimed: ReclaimReport) => T | Promise<T>,
  { afresh = false }: { readonly afresh?: boolean } = {},
): Promise<T> {
  mkdirSync(runDir, { recursive: true, mode: 0o755 });
  // The kernel shows mount points with symlinks resolved (/var/run is one).
  const resolved = realpathSync.native(runDir);
  return inTurn(resolved, () => withTable(resolved, work, afresh));
}

const turns = new Map<string, Promise<unknown>>();

/** Those of this process one after the other: the lock is waited for by asking again and again. */
function inTurn<T>(runDir: string, work: () => Promise<T>): Promise<T> {
  const before = turns.get(runDir);
  const mine = before === undefined ? work() : before.then(work, work);
  turns.set(runDir, mine);
  const done = () => {
    if (turns.get(runDir) === mine) turns.delete(runDir);
  };
  mine.then(done, done);
  return mine;
}

function withTable<T>(
  resolved: string,
  work: (table: MountTable, reclaimed: ReclaimReport) => T | Promise<T>,
  afresh: boolean,
): Promise<T> {
  return withLock(
    join(resolved, 'lock'),
    async () => {
      const memory = memories.get(resolved);
      // Of work that fails half way nothing is remembered.
      memories.delete(resolved);
      const table = new MountTable(resolved);
      try {
        const isKnown = !afresh && memory !== undefined && table.recall(memory);
        const result = await work(table, isKnown ? NOTHING : table.reclaim());
        memories.set(resolved, table.remember(memory));
        return result;
      } finally {
        if (!memories.has(resolved)) memory?.watch.close();
      }
    },
    { timeoutMs: LOCK_TIMEOUT_MS },
  );
}

/** Whether this process remembers all of `layers` as mounted: then a mount needs none of their files. To be asked again under the lock. */
export function areRemembered(runDir: string, layers: readonly Digest[]): boolean {
  if (memories.size === 0 || !existsSync(runDir)) return false;
  const memory = memories.get(realpathSync.native(runDir));
  return memory !== undefined && layers.every((layer) => memory.layers.has(layer));
}

const NOTHING: ReclaimReport = { undone: [], dropped: [], released: [] };

/** Undefined when nothing is there. */
function idAt(path: string): number | undefined {
  try {
    return mountIdOf(path);
  } catch {
    return undefined;
  }
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
