/**
 * Which disks are attached how: `table.json` in the daemon's state folder, replaced by renaming a synced file over it. What was written
 * is there after a crash; a table that cannot be read as a whole is refused, since a disk left out of it would be forgotten.
 */
import { readFile } from 'node:fs/promises';
import { dirname, join } from 'node:path';
import { failPoint, messageOf, systemCode } from '#base';
import { replaceFile, syncFolder } from '#linux';
import { fail } from '../errors.ts';
import { WAY_NAMES, type WayName, type WayRecord } from './way-out.ts';

const FORMAT = 'dsec-attached-disks';
const VERSION = 1;

export interface TableRow {
  /** What it is attached as: the name of a disk, or the path of a raw file. */
  readonly name: string;
  readonly kind: 'disk' | 'file';
  readonly readOnly: boolean;
  readonly way: WayName;
  /** As the caller asked for it. */
  readonly address?: string;
  readonly at: string;
  readonly record: WayRecord;
  readonly attachedAt: string;
}

export class DiskTable {
  readonly path: string;
  #writing: Promise<void> = Promise.resolve();

  constructor(folder: string) {
    this.path = join(folder, 'table.json');
  }

  /** @throws UBLKD_TABLE */
  async read(): Promise<TableRow[]> {
    let text: string;
    try {
      text = await readFile(this.path, 'utf8');
    } catch (error) {
      if (systemCode(error) === 'ENOENT') return [];
      throw fail('UBLKD_TABLE', { file: this.path, problem: messageOf(error) }, error);
    }
    const refuse = (problem: string) => fail('UBLKD_TABLE', { file: this.path, problem });
    let table: { format?: unknown; version?: unknown; disks?: unknown };
    try {
      table = JSON.parse(text);
    } catch (error) {
      throw fail('UBLKD_TABLE', { file: this.path, problem: messageOf(error) }, error);
    }
    if (table?.format !== FORMAT) throw refuse(`it is no ${FORMAT}`);
    if (table.version !== VERSION) throw refuse(`version ${JSON.stringify(table.version)}, known is ${VERSION}`);
    if (!Array.isArray(table.disks)) throw refuse('it has no disks');
    const names = new Set<string>();
    for (const [at, row] of table.disks.entries()) {
      const problem = problemOf(row);
      if (problem !== undefined) throw refuse(`disk ${at + 1}: ${problem}`);
      if (names.has(row.name)) throw refuse(`disk ${at + 1}: ${row.name} is there twice`);
      names.add(row.name);
    }
    return table.disks;
  }

  /** On the disk when it resolves. Calls follow each other. */
  write(rows: readonly TableRow[]): Promise<void> {
    const text = `${JSON.stringify({ format: FORMAT, version: VERSION, disks: rows }, undefined, 2)}\n`;
    const write = this.#writing.catch(() => {}).then(() => this.#replace(text));
    this.#writing = write;
    return write;
  }

  async #replace(text: string): Promise<void> {
    try {
      await replaceFile(this.path, text, { onWritten: () => failPoint('ublkd-table-written') });
      await syncFolder(dirname(this.path));
    } catch (error) {
      throw fail('UBLKD_TABLE_WRITE', { file: this.path, reason: messageOf(error) }, error);
    }
  }
}

function problemOf(row: Partial<Record<keyof TableRow, unknown>> | null): string | undefined {
  if (typeof row !== 'object' || row === null) return 'not an object';
  if (typeof row.name !== 'string' || row.name === '') return 'no name';
  if (row.kind !== 'disk' && row.kind !== 'file') return 'kind is neither disk nor file';
  if (typeof row.readOnly !== 'boolean') return 'readOnly is no boolean';
  if (!WAY_NAMES.includes(row.way as WayName)) return `way ${JSON.stringify(row.way)} is not known`;
  if (row.address !== undefined && typeof row.address !== 'string') return 'address is no text';
  if (typeof row.at !== 'string' || typeof row.attachedAt !== 'string') return 'at or attachedAt is missing';
  if (typeof row.record !== 'object' || row.record === null || Array.isArray(row.record)) return 'no record';
  const plain = Object.values(row.record).every((value) => ['string', 'number', 'boolean'].includes(typeof value));
  return plain ? undefined : 'its record has values that are neither text nor number';
}
