/**
 * A disk while it is attached: what is open, how it is served, and the work that is done on it meanwhile.
 *
 * Snapshot, compaction and resizing follow each other. A layer or an image can be written at the same time as all but compaction, which
 * would have to wait for the end of it, and flushes with it: it is refused then.
 */
import { randomUUID } from 'node:crypto';
import { existsSync } from 'node:fs';
import { isDsecError, messageOf } from '#base';
import type { OpenDisk } from '../disk-folder.ts';
import { openNamedDisk } from '../disks.ts';
import { fail } from '../errors.ts';
import { exportQcow2, exportRaw } from '../export-disk.ts';
import type { CommitOptions, CommittedLayer } from '../layer/commit.ts';
import type { OpenStoreLayer } from '../layer/store-layer.ts';
import type { SealedUpper } from '../stacked-disk.ts';
import { openFileTarget } from '../target/file-target.ts';
import type { Compacted } from '../writable/upper.ts';
import { CountedTarget } from './counted-target.ts';
import type { TableRow } from './disk-table.ts';
import type { Attachment } from './way-out.ts';

export interface SourceOptions {
  readonly disksRoot: string;
  readonly openStoreLayer?: OpenStoreLayer;
}

/** A disk of `dsec disk create`, or a raw file, open and counted. */
export interface OpenSource {
  readonly target: CountedTarget;
  /** Of a named disk. */
  readonly opened?: OpenDisk;
}

export async function openSource(
  { name, kind, readOnly }: Pick<TableRow, 'name' | 'kind' | 'readOnly'>,
  { disksRoot, openStoreLayer }: SourceOptions,
): Promise<OpenSource> {
  if (kind === 'file') {
    try {
      return { target: new CountedTarget(await openFileTarget(name, { readOnly }), readOnly) };
    } catch (error) {
      throw isDsecError(error) ? error : fail('UBLKD_FILE', { file: name, reason: messageOf(error) }, error);
    }
  }
  const opened = await openNamedDisk(name, { root: disksRoot, openStoreLayer });
  return { opened, target: new CountedTarget(opened.disk, readOnly) };
}

export interface PackWish extends Pick<CommitOptions, 'zfile' | 'tar' | 'signal'> {
  /** Changes since that snapshot; by default since the disk was made. */
  readonly since?: string;
  /** The whole disk, without a parent. */
  readonly whole?: boolean;
  readonly output: string;
}

export class AttachedDisk {
  readonly name: string;
  readonly source: OpenSource;
  readonly attachment: Attachment;
  /** What is being done, for people. */
  readonly working = new Set<string>();
  readonly #stopped = new AbortController();
  #turn: Promise<unknown> = Promise.resolve();

  constructor(name: string, source: OpenSource, attachment: Attachment) {
    this.name = name;
    this.source = source;
    this.attachment = attachment;
  }

  async snapshot(point: string): Promise<SealedUpper> {
    const { snapshot } = this.#opened('snapshots');
    return this.#inTurn(`snapshot ${point} is being made`, () => snapshot(point));
  }

  async compact(): Promise<Compacted> {
    const { disk } = this.#opened('compaction');
    const writing = [...this.working].find((what) => what.endsWith(WRITING));
    if (writing !== undefined) throw fail('UBLKD_WORKING', { name: this.name, what: writing });
    return this.#inTurn(COMPACTING, () => disk.compact());
  }

  /** Writes what was changed as a layer, as of now, while the disk is used. */
  async packDiff({ output, since, whole, signal, ...options }: PackWish): Promise<CommittedLayer & { uuid: string }> {
    const { disk, facts } = this.#opened('layers');
    refuseExisting(output);
    const layers = whole === true ? 0 : since === undefined ? facts.baseLayers : this.#layersOf(since, facts);
    const uuid = randomUUID().toUpperCase();
    const wish = { ...options, uuid, quiet: this.source.target.readOnly, signal: this.#until(signal) };
    const made = await this.#writing(output, () => disk.commitAbove(layers, output, wish));
    return { ...made, uuid };
  }

  /** Writes what the disk holds now, as a raw file or as qcow2, while it is used. */
  async exportTo(format: 'raw' | 'qcow2', output: string, signal?: AbortSignal): Promise<{ sizeBytes: number }> {
    const { disk } = this.#opened('layers');
    refuseExisting(output);
    return this.#writing(output, async () => {
      const frozen = disk.frozen({ quiet: this.source.target.readOnly });
      try {
        await (format === 'raw' ? exportRaw : exportQcow2)(frozen, output, this.#until(signal));
        return { sizeBytes: frozen.sizeBytes };
      } finally {
        await frozen.close();
      }
    });
  }

  /**
   * Makes it larger. `told`: its clients see it now; else those that connect or open it again, and a ublk device when it is attached again.
   * @throws UBLKD_SHRINK where it would be smaller
   */
  async resize(sizeBytes: number): Promise<{ sizeBytes: number; told: boolean }> {
    const { resize, disk } = this.#opened('other size');
    return this.#inTurn('it is being resized', async () => {
      if (sizeBytes < disk.sizeBytes) throw fail('UBLKD_SHRINK', { name: this.name });
      await resize(sizeBytes);
      const told = (await this.attachment.resized?.()) ?? false;
      return { sizeBytes: disk.sizeBytes, told };
    });
  }

  /** Ends what writes layers and images, so that the disk can be closed. */
  stop(): void {
    this.#stopped.abort(fail('UBLKD_NOT_ATTACHED', { name: this.name }));
  }

  #until(signal?: AbortSignal): AbortSignal {
    return signal === undefined ? this.#stopped.signal : AbortSignal.any([signal, this.#stopped.signal]);
  }

  #layersOf(snapshot: string, { snapshots }: OpenDisk['facts']): number {
    const found = snapshots.find((one) => one.name === snapshot);
    if (found === undefined) throw fail('DISK_SNAPSHOT_MISSING', { name: this.name, snapshot });
    return found.layers;
  }

  #opened(what: string): OpenDisk {
    const { opened } = this.source;
    if (opened === undefined) throw fail('UBLKD_RAW', { name: this.name, what });
    return opened;
  }

  #writing<T>(output: string, work: () => Promise<T>): Promise<T> {
    if (this.working.has(COMPACTING)) throw fail('UBLKD_WORKING', { name: this.name, what: COMPACTING });
    return this.#noted(`${output}${WRITING}`, work);
  }

  #inTurn<T>(what: string, work: () => Promise<T>): Promise<T> {
    return this.#noted(what, () => {
      const done = this.#turn.then(work);
      this.#turn = done.catch(() => {});
      return done;
    });
  }

  async #noted<T>(what: string, work: () => Promise<T>): Promise<T> {
    if (this.working.has(what)) throw fail('UBLKD_WORKING', { name: this.name, what });
    this.working.add(what);
    try {
      return await work();
    } finally {
      this.working.delete(what);
    }
  }
}

const WRITING = ' is being written';
const COMPACTING = 'it is being compacted';

function refuseExisting(output: string): void {
  if (existsSync(output)) throw fail('DISK_OUTPUT_EXISTS', { path: output });
}
