/**
 * What a machine's clipboards have, on the disk of this side: what was put there from here, which the guest asks for when somebody pastes, and what the guest
 * had offered before a pause. Whoever serves the machine next goes on with it. A file that cannot be read is none.
 */
import { isUtf8 } from 'node:buffer';
import { readFileSync } from 'node:fs';
import { rename, rm, writeFile } from 'node:fs/promises';
import { dirname } from 'node:path';
import { messageOf } from '#base';
import { fail } from '../../errors.ts';
import { isObject } from '../qemu/monitor.ts';
import { isPng } from './screen.ts';

export const CLIPBOARD_TYPES = ['text/plain', 'image/png'] as const;
export type ClipboardType = (typeof CLIPBOARD_TYPES)[number];

/** `primary`: what is selected, pasted by the middle button; X11 has it. */
export const SELECTIONS = ['clipboard', 'primary'] as const;
export type Selection = (typeof SELECTIONS)[number];

/** Of one content. */
export const MOST_CLIPBOARD_BYTES = 4 << 20;

export interface ClipboardContent {
  readonly type: ClipboardType;
  /** Text in UTF-8, with lines that end with LF. */
  readonly bytes: Buffer;
}

export interface KeptContent extends ClipboardContent {
  /** The guest's: it is shown, not offered to it again. */
  readonly isGuests: boolean;
}

export type KeptContents = Map<Selection, KeptContent>;

/** @throws VM_INPUT */
export function checkedContent({ type, bytes }: ClipboardContent): ClipboardContent {
  const refuse = (problem: string) => fail('VM_INPUT', { problem: `clipboard: ${problem}` });
  if (bytes.length > MOST_CLIPBOARD_BYTES) throw refuse(`${bytes.length} bytes, more than ${MOST_CLIPBOARD_BYTES}`);
  if (type === 'text/plain' && !isUtf8(bytes)) throw refuse('this is no text in UTF-8');
  if (type === 'image/png' && !isPng(bytes)) throw refuse('this is no PNG');
  return { type, bytes };
}

export function readClipboard(path: string): KeptContents {
  const kept: KeptContents = new Map();
  try {
    const said: unknown = JSON.parse(readFileSync(path, 'utf8'));
    for (const selection of SELECTIONS) {
      const one = isObject(said) ? said[selection] : undefined;
      if (!isObject(one) || typeof one.base64 !== 'string') continue;
      const type = CLIPBOARD_TYPES.find((known) => known === one.type);
      const bytes = Buffer.from(one.base64, 'base64');
      if (type !== undefined) kept.set(selection, { type, bytes, isGuests: one.isGuests === true });
    }
  } catch {
    kept.clear();
  }
  return kept;
}

/** All of it, or what was there before. @throws RUNTIME_RECORD_WRITE */
export async function writeClipboard(path: string, kept: KeptContents): Promise<void> {
  if (kept.size === 0) return rm(path, { force: true });
  const entries = [...kept].map(([selection, { type, bytes, isGuests }]) => [
    selection,
    { type, isGuests, base64: bytes.toString('base64') },
  ]);
  const part = `${path}.part`;
  try {
    await writeFile(part, JSON.stringify(Object.fromEntries(entries)), { mode: 0o600 });
    await rename(part, path);
  } catch (error) {
    await rm(part, { force: true }).catch(() => {});
    throw fail('RUNTIME_RECORD_WRITE', { path, folder: dirname(path), reason: messageOf(error) }, error);
  }
}
