/**
 * The disks that this node has attached: who is served how, durably. `dsec serve ublkd` is this behind HTTP.
 *
 * - Attaching is told when the table has it; asking again gives the same. What a crash left between a device and the table is swept.
 * - A daemon that follows opens every disk of the table and takes its device over. A disk that cannot be opened stays in the table, and in
 *   the list with its reason; its device waits. Attaching it again tries again.
 * - Detaching is out of the table first, so that a crash in the middle ends it.
 * - One daemon a state folder, and a run folder.
 */
import { createHash } from 'node:crypto';
import { chmodSync, mkdirSync, realpathSync, rmSync } from 'node:fs';
import { rmdir } from 'node:fs/promises';
import { basename, join, resolve } from 'node:path';
import { setTimeout as delay } from 'node:timers/promises';
import { isDsecError, messageOf, systemCode } from '#base';
import { type FileLock, tryLock } from '#linux';
import { diskFolder, disksFolder } from '../disks.ts';
import { fail } from '../errors.ts';
import type { OpenStoreLayer } from '../layer/store-layer.ts';
import { AttachedDisk, type OpenSource, openSource } from './attached-disk.ts';
import { DiskTable, type TableRow } from './disk-table.ts';
import { type Attachment, AUTO_ORDER, WAYS_OUT, type WayName, type WayOptions, type WayOut } from './way-out.ts';

export interface DaemonOptions {
  /** The table, and the lock of the one who owns it. */
  readonly stateDir: string;
  /** Sockets and mount points. */
  readonly runDir: string;
  /** Told what is worth a line in a log. */
  readonly log: DaemonLog;
  readonly disksRoot?: string;
  readonly openStoreLayer?: OpenStoreLayer;
  /** How long detaching is waited for before it goes on by itself; 15 s. */
  readonly detachMs?: number;
}

export type DaemonLog = (level: 'info' | 'warn' | 'error', text: string, facts: Record<string, unknown>) => void;

export interface AttachWish {
  /** The name of a disk, or the absolute path of a raw file. */
  readonly name: string;
  readonly kind: 'disk' | 'file';
  readonly readOnly?: boolean;
  readonly way?: WayName | 'auto';
  readonly address?: string;
}

export type DiskState = 'attached' | 'failed' | 'detaching';

export interface DiskView {
  readonly name: string;
  readonly kind: 'disk' | 'file';
  readonly state: DiskState;
  readonly way: WayName;
  readonly at: string;
  readonly readOnly: boolean;
  readonly attachedAt: string;
  readonly sizeBytes?: number;
  /** Why it is not served. */
  readonly problem?: string;
  /** What is being done with it. */
  readonly working: readonly string[];
}

interface Entry {
  row: TableRow;
  state: DiskState;
  problem?: string;
  disk?: AttachedDisk;
}

/** What a target that does not answer may cost whoever detaches. */
const GRACE_MS = 5000;
const DETACH_MS = 15_000;
/** A daemon that was killed holds its disks until the kernel is done with it. */
const PREDECESSOR_MS = 20_000;
const SAVE_AGAIN_MS = 5000;

export class DiskDaemon {
  readonly disksRoot: string;
  readonly #options: DaemonOptions;
  readonly #table: DiskTable;
  readonly #locks: readonly FileLock[];
  readonly #mark: number;
  readonly #entries = new Map<string, Entry>();
  /** Attaching and detaching of one disk: one after the other. */
  readonly #turns = new Map<string, Promise<unknown>>();
  #unsaved: string | undefined;
  #saveAgain: NodeJS.Timeout | undefined;
  #ending = false;

  /** @throws UBLKD_RUNS_ALREADY, UBLKD_TABLE */
  static async start(options: DaemonOptions): Promise<DiskDaemon> {
    const locks: FileLock[] = [];
    try {
      for (const folder of [options.stateDir, options.runDir]) {
        mkdirSync(folder, { recursive: true, mode: 0o700 });
        chmodSync(folder, 0o700);
        const lock = join(folder, 'lock');
        const held = tryLock(lock);
        if (held === undefined) throw fail('UBLKD_RUNS_ALREADY', { lock });
        locks.push(held);
      }
      const daemon = new DiskDaemon(options, locks);
      await daemon.#recover();
      return daemon;
    } catch (error) {
      for (const held of locks) held.release();
      throw error;
    }
  }

  private constructor(options: DaemonOptions, locks: readonly FileLock[]) {
    this.#options = options;
    this.#locks = locks;
    this.disksRoot = options.disksRoot ?? disksFolder();
    this.#table = new DiskTable(options.stateDir);
    this.#mark = createHash('sha256').update(realpathSync(options.stateDir)).digest().readUInt32LE(0);
  }

  get size(): number {
    return this.#entries.size;
  }

  /** Why the table on the disk is not what it should be; undefined: it is. */
  get unsaved(): string | undefined {
    return this.#unsaved;
  }

  list(): DiskView[] {
    return [...this.#entries.values()].map(viewOf).sort((a, b) => (a.name < b.name ? -1 : 1));
  }

  view(name: string): DiskView {
    return viewOf(this.#entry(name));
  }

  /** The disk while it is served. @throws UBLKD_NOT_ATTACHED, UBLKD_FAILED, UBLKD_WORKING */
  attached(name: string): AttachedDisk {
    const { state, disk, problem = '' } = this.#entry(name);
    if (state === 'detaching') throw fail('UBLKD_WORKING', { name, what: 'it is being detached' });
    if (disk === undefined || state === 'failed') throw fail('UBLKD_FAILED', { name, problem });
    return disk;
  }

  /** Those that are served, for figures. */
  *served(): Generator<AttachedDisk> {
    for (const { disk } of this.#entries.values()) if (disk !== undefined) yield disk;
  }

  /** @throws UBLKD_ATTACHED where it is attached in another way, UBLKD_WAY, and what opening it throws */
  async attach(wish: AttachWish): Promise<{ disk: DiskView; created: boolean }> {
    const name = wish.kind === 'file' ? realFile(wish.name) : wish.name;
    // Throws what is no name.
    if (wish.kind === 'disk') diskFolder(name, this.disksRoot);
    return this.#inTurn(name, async () => {
      this.#refuseEnding();
      const found = this.#entries.get(name);
      if (found !== undefined) {
        if (found.state === 'detaching') throw fail('UBLKD_WORKING', { name, what: 'it is being detached' });
        refuseOther(found.row, wish);
        if (found.state === 'attached') return { disk: viewOf(found), created: false };
        await this.#end(found);
        await this.#takeOver(found);
        await this.#save();
        return { disk: viewOf(found), created: true };
      }
      const { kind, readOnly = false, address } = wish;
      const way = await chooseWay(wish);
      const source = await openSource({ name, kind, readOnly }, this.#sourceOptions);
      let attachment: Attachment;
      try {
        attachment = await way.attach(source.target, this.#wayOptions({ name, kind, readOnly, address }));
      } catch (error) {
        await source.target.close().catch(() => {});
        throw error;
      }
      const { at, record } = attachment;
      const attachedAt = new Date().toISOString();
      const row: TableRow = { name, kind, readOnly, way: way.name, address, at, record, attachedAt };
      const entry: Entry = { row, state: 'attached' };
      this.#entries.set(name, entry);
      this.#serve(entry, source, attachment);
      try {
        await this.#save();
      } catch (error) {
        entry.state = 'detaching';
        await this.#end(entry).catch((late: unknown) => this.#remain(entry, late));
        if (entry.disk === undefined) this.#entries.delete(name);
        throw error;
      }
      this.#options.log('info', 'attached', { disk: name, at, way: way.name });
      return { disk: viewOf(entry), created: true };
    });
  }

  /**
   * Gives `detaching` where a target does not answer in time: then it goes on by itself, and is in the list until it is done.
   * @throws UBLKD_IN_USE, UBLKD_WORKING unless `force`; UBLKD_NOT_ATTACHED
   */
  async detach(given: string, { force = false } = {}): Promise<{ name: string; state: 'detached' | 'detaching' }> {
    // By whatever path, the turn is that of the disk.
    const name = this.#nameOf(given);
    return this.#inTurn(name, async () => {
      const entry = this.#entry(name);
      const { disk, state } = entry;
      if (state === 'detaching') return { name, state };
      if (!force && disk !== undefined) {
        const [what] = disk.working;
        if (what !== undefined) throw fail('UBLKD_WORKING', { name, what });
        const users = await disk.attachment.usedBy();
        if (users !== undefined) throw fail('UBLKD_IN_USE', { name, users });
      }
      entry.state = 'detaching';
      // A full state folder is no reason to keep a disk attached.
      await this.#save().catch(() => {});
      const done = this.#end(entry).finally(() => {
        if (entry.disk !== undefined) return;
        this.#entries.delete(name);
        this.#options.log('info', 'detached', { disk: name, at: entry.row.at });
      });
      // Nobody may be waiting for it any more.
      done.catch((error: unknown) => this.#remain(entry, error));
      return (await isDone(done, this.#detachMs)) ? { name, state: 'detached' } : { name, state: 'detaching' };
    });
  }

  /**
   * Ends. Devices that can wait for the next daemon are left to it, and all disks stay in the table, so that a restart is not seen by who uses
   * them; `detach`: nothing is left, and the table is empty.
   */
  async close({ detach = false } = {}): Promise<void> {
    if (this.#ending) return;
    this.#ending = true;
    // One that waits for a store that is away would be waited for as long.
    await isDone(Promise.allSettled(this.#turns.values()), this.#detachMs);
    clearTimeout(this.#saveAgain);
    const entries = [...this.#entries.values()];
    if (detach) for (const entry of entries) entry.state = 'detaching';
    if (detach || this.#unsaved !== undefined) await this.#save().catch(() => {});
    clearTimeout(this.#saveAgain);
    await Promise.allSettled(
      entries.map(async (entry) => {
        const ended = detach ? this.#end(entry) : this.#leave(entry);
        await isDone(ended, this.#detachMs).catch((error: unknown) => {
          this.#options.log('error', messageOf(error), { disk: entry.row.name });
        });
      }),
    );
    // While it is held: a lock on a nameless file would keep nobody out.
    const [, run] = this.#locks;
    if (run !== undefined) rmSync(run.path, { force: true });
    for (const held of this.#locks) held.release();
    await rmdir(this.#options.runDir).catch(() => {});
  }

  async #recover(): Promise<void> {
    const rows = await this.#table.read();
    for (const row of rows) this.#entries.set(row.name, { row, state: 'failed', problem: 'it was not tried yet' });
    await this.#sweep();
    await Promise.all(
      [...this.#entries.values()].map((entry) =>
        this.#takeOver(entry).then(
          () => this.#options.log('info', 'taken over', { disk: entry.row.name, at: entry.row.at }),
          () => {},
        ),
      ),
    );
    if (rows.length > 0) await this.#save().catch(() => {});
  }

  /** Opens the disk of a row, and serves it where it was. */
  async #takeOver(entry: Entry): Promise<void> {
    const { row } = entry;
    try {
      const way = wayNamed(row.way);
      const source = await this.#openAgain(row);
      try {
        const attachment = await way.recover(row.record, source.target, this.#wayOptions(row));
        entry.row = { ...row, at: attachment.at, record: attachment.record };
        entry.state = 'attached';
        entry.problem = undefined;
        this.#serve(entry, source, attachment);
      } catch (error) {
        await source.target.close().catch(() => {});
        throw error;
      }
    } catch (error) {
      entry.state = 'failed';
      entry.problem = isDsecError(error) ? `${error.message} (${error.code})` : messageOf(error);
      this.#options.log('error', 'not taken over', { disk: row.name, at: row.at, problem: entry.problem });
      throw error;
    }
  }

  async #openAgain(row: TableRow): Promise<OpenSource> {
    for (const until = Date.now() + PREDECESSOR_MS; ; await delay(50)) {
      try {
        return await openSource(row, this.#sourceOptions);
      } catch (error) {
        const code = isDsecError(error) ? error.code : undefined;
        if ((code !== 'DISK_BUSY' && code !== 'TARGET_BUSY') || Date.now() > until) throw error;
      }
    }
  }

  #serve(entry: Entry, source: OpenSource, attachment: Attachment): void {
    const disk = new AttachedDisk(entry.row.name, source, attachment);
    entry.disk = disk;
    attachment.failed?.catch((error: unknown) => {
      if (entry.disk !== disk || entry.state !== 'attached') return;
      entry.state = 'failed';
      entry.problem = messageOf(error);
      this.#options.log('error', 'no longer served', {
        disk: entry.row.name,
        at: entry.row.at,
        problem: entry.problem,
      });
    });
  }

  /** Nothing of it is served or open any more; what is left of a device that nobody serves goes, too. */
  async #end(entry: Entry): Promise<void> {
    const { disk } = entry;
    if (disk === undefined) {
      if (entry.state === 'detaching') {
        await WAYS_OUT[entry.row.way]?.forget?.(entry.row.record);
        await this.#sweep();
      }
      return;
    }
    disk.stop();
    try {
      await disk.attachment.detach(GRACE_MS);
    } catch (error) {
      // The kernel has not let go of it, so it is served and open still.
      if (systemCode(error) === 'UBLK_TIMEOUT') throw error;
      await this.#closed(entry, disk);
      throw error;
    }
    await this.#closed(entry, disk);
  }

  async #closed(entry: Entry, { source }: AttachedDisk): Promise<void> {
    try {
      await source.target.close();
    } finally {
      entry.disk = undefined;
    }
  }

  /** It could not be detached: it is in the list and in the table as one that failed, and detaching it is tried again when it is asked for. */
  async #remain(entry: Entry, error: unknown): Promise<void> {
    if (entry.disk === undefined) return;
    entry.state = 'failed';
    entry.problem = messageOf(error);
    this.#options.log('error', 'not detached', { disk: entry.row.name, at: entry.row.at, problem: entry.problem });
    await this.#save().catch(() => {});
  }

  async #leave({ disk }: Entry): Promise<void> {
    if (disk === undefined) return;
    const { attachment, source } = disk;
    disk.stop();
    if (attachment.leave === undefined) await attachment.detach(GRACE_MS);
    else {
      source.target.hold();
      await attachment.leave();
    }
    await source.target.close();
  }

  async #sweep(): Promise<void> {
    const place = { runDir: this.#options.runDir, mark: this.#mark };
    for (const way of Object.values(WAYS_OUT)) {
      const records = this.#rows()
        .filter((row) => row.way === way.name)
        .map(({ record }) => record);
      try {
        for (const removed of (await way.sweep?.(records, place)) ?? []) {
          this.#options.log('warn', 'removed what a daemon that died has left', { path: removed });
        }
      } catch (error) {
        this.#options.log('error', messageOf(error), { way: way.name });
      }
    }
  }

  #rows(): TableRow[] {
    return [...this.#entries.values()].filter(({ state }) => state !== 'detaching').map(({ row }) => row);
  }

  /** What could not be written is tried again until it is. */
  async #save(): Promise<void> {
    clearTimeout(this.#saveAgain);
    try {
      await this.#table.write(this.#rows());
      this.#unsaved = undefined;
    } catch (error) {
      this.#unsaved = messageOf(error);
      this.#options.log('error', this.#unsaved, {});
      this.#saveAgain = setTimeout(() => this.#save().catch(() => {}), SAVE_AGAIN_MS).unref();
      throw error;
    }
  }

  #entry(name: string): Entry {
    const found = this.#entries.get(this.#nameOf(name));
    if (found === undefined) throw fail('UBLKD_NOT_ATTACHED', { name });
    return found;
  }

  #nameOf(given: string): string {
    return this.#entries.has(given) || !given.startsWith('/') ? given : realFile(given);
  }

  #refuseEnding(): void {
    if (this.#ending) throw fail('UBLKD_ENDING');
  }

  get #detachMs(): number {
    return this.#options.detachMs ?? DETACH_MS;
  }

  get #sourceOptions() {
    return { disksRoot: this.disksRoot, openStoreLayer: this.#options.openStoreLayer };
  }

  #wayOptions({ name, kind, readOnly, address }: Pick<TableRow, 'name' | 'kind' | 'readOnly' | 'address'>): WayOptions {
    const { runDir } = this.#options;
    const short = kind === 'disk' ? name : basename(name);
    return { name: short, label: labelOf(name, kind), readOnly, address, runDir, mark: this.#mark };
  }

  #inTurn<T>(name: string, work: () => Promise<T>): Promise<T> {
    this.#refuseEnding();
    const done = (this.#turns.get(name) ?? Promise.resolve()).then(work);
    const turn = done.catch(() => {});
    this.#turns.set(name, turn);
    turn.then(() => {
      if (this.#turns.get(name) === turn) this.#turns.delete(name);
    });
    return done;
  }
}

function viewOf({ row, state, problem, disk }: Entry): DiskView {
  const { name, kind, way, at, readOnly, attachedAt } = row;
  const sizeBytes = disk?.source.target.sizeBytes;
  return { name, kind, state, way, at, readOnly, attachedAt, sizeBytes, problem, working: [...(disk?.working ?? [])] };
}

/** The same file by whatever path. */
function realFile(path: string): string {
  try {
    return realpathSync(path);
  } catch (error) {
    // Opening it says what is wrong.
    if (systemCode(error) !== undefined) return resolve(path);
    throw error;
  }
}

function refuseOther(row: TableRow, { way = 'auto', readOnly, address }: AttachWish): void {
  const same =
    (way === 'auto' || way === row.way) &&
    (readOnly === undefined || readOnly === row.readOnly) &&
    (address === undefined || address === row.address || address === row.record.address || address === row.at);
  if (same) return;
  const how = `over ${row.way}${row.readOnly ? ', read-only' : ''}`;
  throw fail('UBLKD_ATTACHED', { name: row.name, how, at: row.at });
}

async function chooseWay({ way = 'auto', address }: AttachWish): Promise<WayOut> {
  const named = way === 'auto' && address !== undefined ? wayOfAddress(address) : way;
  if (named !== 'auto') {
    const chosen = wayNamed(named);
    const problem = await chosen.available();
    if (problem !== undefined) throw fail('UBLKD_WAY', { way: named, problem });
    return chosen;
  }
  for (const name of AUTO_ORDER) {
    const tried = WAYS_OUT[name];
    if (tried !== undefined && (await tried.available()) === undefined) return tried;
  }
  throw fail('UBLKD_WAY', { way, problem: 'none of them works' });
}

function wayOfAddress(address: string): WayName {
  if (/^(unix|tcp):/.test(address)) return 'nbd';
  return address.startsWith('/dev/ublkb') ? 'ublk' : 'file';
}

function wayNamed(name: WayName): WayOut {
  const way = WAYS_OUT[name];
  if (way === undefined) throw fail('UBLKD_WAY', { way: name, problem: 'this version does not have it' });
  return way;
}

/** Disk names are file names already; a path becomes one. */
function labelOf(name: string, kind: 'disk' | 'file'): string {
  if (kind === 'disk') return `disk-${name}`;
  const hash = createHash('sha256').update(name).digest('hex').slice(0, 12);
  return `file-${basename(name)
    .replace(/[^A-Za-z0-9._-]/g, '_')
    .slice(0, 40)}-${hash}`;
}

/** Whether it ends in time. What it throws later is nobody's any more. */
async function isDone(work: Promise<unknown>, limitMs: number): Promise<boolean> {
  const late = new AbortController();
  try {
    return await Promise.race([work.then(() => true), delay(limitMs, false, { signal: late.signal })]);
  } finally {
    late.abort();
    work.catch(() => {});
  }
}
