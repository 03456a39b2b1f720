/**
 * Where a disk is shown: a file, on which a file system is mounted whose root is a file. What a server that was killed has left there is
 * cleared away; anything else that is in the way is refused.
 *
 * Nothing here looks at the file itself while something is mounted on it: the question would go to its server, which may be this process.
 */
import { closeSync, lstatSync, openSync, realpathSync, rmSync } from 'node:fs';
import { stat } from 'node:fs/promises';
import { basename, dirname, join, resolve } from 'node:path';
import { messageOf, systemCode } from '#base';
import { listLoops, type MountRow, mountsAt } from '#linux';
import { fail } from '../../errors.ts';
import { carryOut } from './device-order.ts';
import { endHolders } from './fuse-holder.ts';

/** Disks that we serve, in the mount table. */
export const SOURCE_PREFIX = 'dsec-disk';

export interface MountPlace {
  readonly path: string;
  /** The file was made for this. */
  readonly made: boolean;
}

/** @throws FILE_PATH, FILE_TAKEN */
export async function prepareMountPlace(wanted: string): Promise<MountPlace> {
  const path = absolute(wanted);
  for (let tries = 0; ; tries++) {
    const row = mountsAt(path).at(-1);
    if (row === undefined) break;
    if (!isOurs(row)) throw fail('FILE_PATH', { path, problem: `${row.source} is mounted there` });
    if (tries > 8 || !(await isDead(path))) throw fail('FILE_TAKEN', { path, source: row.source });
    await clear(path);
  }
  try {
    const facts = lstatSync(path);
    if (!facts.isFile()) throw fail('FILE_PATH', { path, problem: 'it is not a regular file' });
    if (facts.size > 0)
      throw fail('FILE_PATH', { path, problem: `it holds ${facts.size} bytes, which would be hidden` });
    return { path, made: false };
  } catch (error) {
    if (systemCode(error) !== 'ENOENT') throw error;
  }
  try {
    closeSync(openSync(path, 'wx', 0o600));
  } catch (error) {
    throw fail('FILE_PATH', { path, problem: messageOf(error) }, error);
  }
  return { path, made: true };
}

export function leaveMountPlace({ path, made }: MountPlace): void {
  if (made && mountsAt(path).length === 0) rmSync(path, { force: true });
}

/** Takes away loop devices and a mount whose server is gone, held or not. */
export async function clear(path: string): Promise<void> {
  await endHolders(path);
  for (const loop of loopsOf(path)) await carryOut({ do: 'detach-loop', path: loop }, ['ENXIO', 'ENOENT']);
  await carryOut({ do: 'unmount', path, lazy: true }, ['EINVAL', 'ENOENT']);
}

/** Loop devices over the file, by whomever they were made. */
export function loopsOf(path: string): string[] {
  return listLoops()
    .filter(({ file }) => file === path)
    .map((loop) => loop.path);
}

export function isOurs({ source }: Pick<MountRow, 'source'>): boolean {
  return source.startsWith(SOURCE_PREFIX);
}

/** Whether the server of what is mounted there is gone. One that does not answer is not. */
export async function isDead(path: string): Promise<boolean> {
  const answer = stat(path).then(
    () => false,
    (error) => systemCode(error) === 'ENOTCONN',
  );
  let timer: NodeJS.Timeout | undefined;
  const silence = new Promise<boolean>((done) => {
    timer = setTimeout(() => done(false), 5000);
  });
  try {
    return await Promise.race([answer, silence]);
  } finally {
    clearTimeout(timer);
  }
}

/** Folders are what they are; the file itself is not asked. */
function absolute(wanted: string): string {
  const full = resolve(wanted);
  try {
    return join(realpathSync(dirname(full)), basename(full));
  } catch (error) {
    throw fail('FILE_PATH', { path: wanted, problem: messageOf(error) }, error);
  }
}
