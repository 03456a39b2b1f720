/** What an edge knows of itself over a restart: its id, which is part of the ids of its sandboxes, and whether it drains. `<state>/edge/edge.json`. */
import { mkdirSync, readFileSync, renameSync, writeFileSync } from 'node:fs';
import { hostname } from 'node:os';
import { join } from 'node:path';
import { messageOf, systemCode } from '#base';
import { fail } from '../errors.ts';

export interface EdgeState {
  readonly id: string;
  readonly draining: boolean;
}

const ID = /^[a-z0-9-]{1,40}$/;

/** @throws EDGE_ID */
export function checkEdgeId(id: string): string {
  if (!ID.test(id)) throw fail('EDGE_ID', { id: JSON.stringify(id.slice(0, 100)), problem: 'it is no such name' });
  return id;
}

export class EdgeStateFile {
  private readonly folder: string;
  private value: EdgeState;

  private constructor(folder: string, value: EdgeState) {
    this.folder = folder;
    this.value = value;
  }

  /**
   * `id`: as given; else the one that it had, else the machine's name. Another one than it had is refused while there are sandboxes: their ids would change.
   * @throws EDGE_ID, EDGE_STATE
   */
  static open(folder: string, id: string | undefined, hasSandboxes: () => boolean): EdgeStateFile {
    const before = read(folder);
    if (id !== undefined) checkEdgeId(id);
    if (before !== undefined && id !== undefined && id !== before.id && hasSandboxes()) {
      throw fail('EDGE_ID', { id, problem: `this edge was ${before.id}, and has sandboxes with that in their ids` });
    }
    const chosen = id ?? before?.id ?? checkEdgeId(nameOfMachine());
    const file = new EdgeStateFile(folder, { id: chosen, draining: before?.draining ?? false });
    // On a full disk an edge that is started anew has its sandboxes all the same.
    if (before?.id !== chosen) file.write(file.value);
    return file;
  }

  get id(): string {
    return this.value.id;
  }
  get draining(): boolean {
    return this.value.draining;
  }

  /** @throws EDGE_STATE; then it is as it was */
  noteDraining(draining: boolean): void {
    this.write({ ...this.value, draining });
  }

  private write(value: EdgeState): void {
    const path = pathIn(this.folder);
    try {
      mkdirSync(this.folder, { recursive: true, mode: 0o700 });
      writeFileSync(`${path}.tmp`, `${JSON.stringify(value)}\n`, { mode: 0o600 });
      renameSync(`${path}.tmp`, path);
    } catch (error) {
      throw fail('EDGE_STATE', { path, problem: messageOf(error) }, error);
    }
    this.value = value;
  }
}

function pathIn(folder: string): string {
  return join(folder, 'edge.json');
}

function read(folder: string): EdgeState | undefined {
  const path = pathIn(folder);
  try {
    const { id, draining } = JSON.parse(readFileSync(path, 'utf8')) as Partial<EdgeState>;
    if (typeof id !== 'string' || !ID.test(id) || typeof draining !== 'boolean') throw new Error('a field is missing');
    return { id, draining };
  } catch (error) {
    if (systemCode(error) === 'ENOENT') return undefined;
    throw fail('EDGE_STATE', { path, problem: messageOf(error) }, error);
  }
}

function nameOfMachine(): string {
  const name = hostname().toLowerCase().split('.')[0]!;
  return name.replace(/[^a-z0-9-]/g, '-').slice(0, 40);
}
