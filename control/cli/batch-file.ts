/** The file of `convert --batch`: a source and a name a line. */
import { readFile } from 'node:fs/promises';
import { addAbortSignal } from 'node:stream';
import { text as textOf } from 'node:stream/consumers';
import { messageOf } from '#base';
import type { BatchItem } from '#imagesvc';
import { fail } from '../errors.ts';

/** `-` is stdin. @throws CLI_INPUT_UNREADABLE, CLI_BATCH_LINE */
export async function readBatchFile(path: string, signal: AbortSignal): Promise<BatchItem[]> {
  let text: string;
  try {
    // Not readFileSync(0): a user who waits at a terminal can still interrupt.
    text = path === '-' ? await textOf(addAbortSignal(signal, process.stdin)) : await readFile(path, 'utf8');
  } catch (error) {
    signal.throwIfAborted();
    throw fail('CLI_INPUT_UNREADABLE', { path, reason: messageOf(error) }, error);
  }
  return parseBatch(path, text);
}

/** The name is the last word: paths of sources may have blanks. */
export function parseBatch(file: string, text: string): BatchItem[] {
  const items: BatchItem[] = [];
  const lineOfName = new Map<string, number>();
  for (const [index, raw] of text.split('\n').entries()) {
    const line = raw.trim();
    if (line === '' || line.startsWith('#')) continue;
    const match = /^(.*\S)\s+(\S+)$/.exec(line);
    if (match === null) throw fail('CLI_BATCH_LINE', { file, line: index + 1, problem: `"${line}" has no name` });
    const [, source, name] = match as unknown as [string, string, string];
    const before = lineOfName.get(name);
    if (before !== undefined) {
      throw fail('CLI_BATCH_LINE', { file, line: index + 1, problem: `${name} is in line ${before} already` });
    }
    lineOfName.set(name, index + 1);
    items.push({ source, name });
  }
  return items;
}
