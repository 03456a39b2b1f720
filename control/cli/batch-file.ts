/** The file of `convert --batch`: a source and a name a line. */
import { readFile } from 'node:fs/promises';
import { addAbortSignal } from 'node:stream';
import { text as textOf } from 'node:stream/consumers';
import type { BatchItem } from '#imagesvc';
import { fail } from '../errors.ts';
import { inputError } from './input-error.ts';

/** `-` is stdin. @throws CLI_INPUT_*, CLI_BATCH_LINE */
export async function readBatchFile(path: string, signal: AbortSignal): Promise<BatchItem[]> {
  let text: string;
  try {
    // Not readFileSync(0): a user who waits at a terminal can still interrupt.
    text = path === '-' ? await textOf(addAbortSignal(signal, process.stdin)) : await readFile(path, 'utf8');
  } catch (error) {
    signal.throwIfAborted();
    throw inputError(path, error);
  }
  return parseBatch(path, text);
}

/** Two words a line; a source with blanks stands in double quotes. */
export function parseBatch(file: string, text: string): BatchItem[] {
  const items: BatchItem[] = [];
  const lineOfName = new Map<string, number>();
  for (const [index, raw] of text.split('\n').entries()) {
    const line = raw.trim();
    if (line === '' || line.startsWith('#')) continue;
    const wrong = (problem: string) => fail('CLI_BATCH_LINE', { file, line: index + 1, problem });
    const words = /^(?:"([^"]+)"|(\S+))(?:\s+(\S+))?(?:\s+(\S.*))?$/.exec(line);
    const source = words?.[1] ?? words?.[2];
    const [name, more] = [words?.[3], words?.[4]];
    if (source === undefined || name === undefined) throw wrong(`"${line}" has no name`);
    if (more !== undefined) throw wrong(`"${more}" follows the name ${name}`);
    const before = lineOfName.get(name);
    if (before !== undefined) {
      throw wrong(`${name} is in line ${before} already`);
    }
    lineOfName.set(name, index + 1);
    items.push({ source, name });
  }
  return items;
}
