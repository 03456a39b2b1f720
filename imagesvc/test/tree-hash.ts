/** Hashes of a whole tree, from the disk and not from the page cache, in a process of its own: reading may block. */
import { type ChildProcess, spawn } from 'node:child_process';
import { fileURLToPath } from 'node:url';

const HASHER = fileURLToPath(new URL('./tree-hasher.mjs', import.meta.url));

export interface Hashed {
  readonly rounds: number;
  readonly files: number;
  /** The different ones that it saw. */
  readonly hashes: readonly string[];
  readonly errors: readonly string[];
}

/** `rounds` times over. */
export const hash = (tree: string, rounds = 1): Promise<Hashed> => hashing({ tree, rounds, until: '/nowhere' });

/** Again and again until `until` is there. The process is added to `children`, for a test that fails. */
export const hashUntil = (tree: string, until: string, children: ChildProcess[]): Promise<Hashed> =>
  hashing({ tree, until }, children);

function hashing(order: object, children: ChildProcess[] = []): Promise<Hashed> {
  const child = spawn(process.execPath, [HASHER, JSON.stringify(order)], { stdio: ['ignore', 'pipe', 'inherit'] });
  children.push(child);
  return new Promise((resolve, reject) => {
    let text = '';
    child.stdout.setEncoding('utf8').on('data', (more: string) => {
      text += more;
    });
    child.once('error', reject);
    child.once('close', () => {
      if (text === '') reject(new Error('the hasher died'));
      else resolve(JSON.parse(text) as Hashed);
    });
  });
}
