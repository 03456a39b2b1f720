/**
 * Templates on the disk: each a folder below $DSEC_STATE/vm/templates, named by its key, there when it is whole.
 *
 *     template.json    what it is, and the digests of the files of its snapshot; its time is when it was used last
 *     s-HEX/           the snapshot, of a machine whose guest waits for its order (snapshot/snapshot-folder.ts). No two have one name: whoever still reads
 *                      one that has gone does not find another in its place
 */
import { createHash } from 'node:crypto';
import { createReadStream, existsSync, readdirSync, readFileSync, rmSync, statSync, utimesSync } from 'node:fs';
import { join } from 'node:path';
import { pipeline } from 'node:stream/promises';
import { MEMORY, STATE, snapshotError } from '../snapshot/snapshot-folder.ts';
import type { TemplateShape } from './template-shape.ts';

export const TEMPLATE = 'template.json';
/** What a restore takes of a snapshot. */
const FILES = [STATE, MEMORY] as const;

export interface TemplateRecord extends TemplateShape {
  readonly version: 1;
  /** ISO 8601. */
  readonly made: string;
  /** Version of the kernel, as its file is called; for people. */
  readonly kernel: string;
  readonly bytes: number;
  /** Name of the snapshot's folder. */
  readonly snapshot: string;
  readonly digests: { readonly [file: string]: string };
}

export interface Template extends TemplateRecord {
  readonly folder: string;
  readonly snapshotFolder: string;
  readonly usedMs: number;
}

export function templatesFolder(stateDir: string): string {
  return join(stateDir, 'vm/templates');
}

/** Used last first. What is no template, or cannot be read as one, is none. */
export function listTemplates(stateDir: string): Template[] {
  const folder = templatesFolder(stateDir);
  const names = existsSync(folder) ? readdirSync(folder) : [];
  return names
    .flatMap((name) => readTemplate(stateDir, name) ?? [])
    .sort((a, b) => b.usedMs - a.usedMs || (a.key < b.key ? -1 : 1));
}

export function readTemplate(stateDir: string, key: string): Template | undefined {
  if (!/^[0-9a-f]{24}$/.test(key)) return undefined;
  const folder = join(templatesFolder(stateDir), key);
  try {
    const path = join(folder, TEMPLATE);
    const record = JSON.parse(readFileSync(path, 'utf8')) as TemplateRecord;
    if (record?.version !== 1 || record.key !== key || !/^s-[0-9a-f]+$/.test(record.snapshot)) return undefined;
    return { ...record, folder, snapshotFolder: join(folder, record.snapshot), usedMs: statSync(path).mtimeMs };
  } catch {
    return undefined;
  }
}

/** Its turn to go is later. */
export function noteUse({ folder }: Template): void {
  const now = new Date();
  try {
    utimesSync(join(folder, TEMPLATE), now, now);
  } catch {
    // It has gone meanwhile.
  }
}

/** Whoever is making a machine of it makes it without. First what says that it is one. */
export function removeTemplate(stateDir: string, key: string): void {
  const folder = join(templatesFolder(stateDir), key);
  rmSync(join(folder, TEMPLATE), { force: true });
  rmSync(folder, { recursive: true, force: true });
}

/** Digests of a snapshot's files, and how large they are. */
export async function snapshotDigests(snapshot: string): Promise<{ digests: Record<string, string>; bytes: number }> {
  const digests: Record<string, string> = {};
  let bytes = 0;
  for (const name of FILES) {
    const hash = createHash('sha256');
    await pipeline(createReadStream(join(snapshot, name), { highWaterMark: 1 << 20 }), hash);
    digests[name] = hash.digest('hex');
    bytes += statSync(join(snapshot, name)).size;
  }
  return { digests, bytes };
}

const proved = new Map<string, string>();

/** Each file is what it was made as: looked at once by a process, while the file is the same. @throws VM_SNAPSHOT_DAMAGED */
export async function proveTemplate(template: Template): Promise<void> {
  const path = template.snapshotFolder;
  try {
    const state = FILES.map((name) => {
      const { ino, size, mtimeMs, ctimeMs } = statSync(join(path, name));
      return [ino, size, mtimeMs, ctimeMs].join();
    }).join(' ');
    if (proved.get(path) === state) return;
    const { digests } = await snapshotDigests(path);
    for (const name of FILES) {
      if (digests[name] !== template.digests?.[name]) throw new Error(`${name} is not what it was made as`);
    }
    proved.set(path, state);
  } catch (error) {
    throw snapshotError(path, error);
  }
}
