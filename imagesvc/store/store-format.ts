/**
 * `dsec-store.json` at a store's root says what the folder is and in which version of the layout. It is the first thing
 * written, and the first thing read: a store of a newer version, and a folder that is something else, are left alone.
 */
import { randomBytes } from 'node:crypto';
import { readdir, readFile, rename, rm } from 'node:fs/promises';
import { join } from 'node:path';
import { systemCode } from '#base';
import { syncFolder } from '#linux';
import { fail } from '../errors.ts';
import { writeNewFile } from './durable-file.ts';

export const FORMAT_FILE = 'dsec-store.json';
export const FORMAT_VERSION = 1;
/** What the file holds. */
export const FORMAT_TEXT = `${JSON.stringify({ format: 'dsec-store', version: FORMAT_VERSION })}\n`;
const TEMPORARY = `.${FORMAT_FILE}.`;

/** Whether a store is there. @throws STORE_VERSION, STORE_FOREIGN */
export async function checkFormat(root: string): Promise<'store' | 'nothing'> {
  let text: string;
  try {
    text = await readFile(join(root, FORMAT_FILE), 'utf8');
  } catch (error) {
    if (systemCode(error) !== 'ENOENT') throw error;
    return (await appeared(root)) ? checkFormat(root) : 'nothing';
  }
  formatVersion(text, root);
  return 'store';
}

/** The version that the file's text says. @throws STORE_VERSION, STORE_FOREIGN */
export function formatVersion(text: string, store: string): number {
  let version: unknown;
  try {
    const parsed = JSON.parse(text) as { format?: unknown; version?: unknown } | null;
    if (parsed?.format === 'dsec-store') version = parsed.version;
  } catch {
    // Not JSON: no version.
  }
  if (typeof version !== 'number' || !Number.isInteger(version) || version < 1) {
    throw fail('STORE_FOREIGN', { store, why: `its ${FORMAT_FILE} is damaged` });
  }
  if (version > FORMAT_VERSION) throw fail('STORE_VERSION', { store, version, known: FORMAT_VERSION });
  return version;
}

/**
 * Whether another process made the store since we looked. A folder with other people's files never becomes a store by a
 * typing mistake. @throws STORE_FOREIGN
 */
async function appeared(root: string): Promise<boolean> {
  try {
    const names = await readdir(root);
    const foreign = names.find((name) => name !== 'lost+found' && !name.startsWith(TEMPORARY));
    if (foreign === undefined) return false;
    // Listed again: what is foreign may have been made after the marker, and the first listing before it.
    if ((await readdir(root)).includes(FORMAT_FILE)) return true;
    throw fail('STORE_FOREIGN', { store: root, why: `it has no ${FORMAT_FILE} but holds other files ("${foreign}")` });
  } catch (error) {
    if (systemCode(error) === 'ENOENT') return false;
    throw error;
  }
}

/** Marks `root` (which exists) as a store. Several may do it at once. */
export async function writeFormat(root: string): Promise<void> {
  const temporary = join(root, `${TEMPORARY}${process.pid}-${randomBytes(6).toString('hex')}`);
  try {
    await writeNewFile(temporary, Buffer.from(FORMAT_TEXT), true);
    await rename(temporary, join(root, FORMAT_FILE));
  } finally {
    await rm(temporary, { force: true });
  }
  await syncFolder(root);
}
