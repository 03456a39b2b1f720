/**
 * User namespaces from outside: whether this machine can give sandboxes one, and one to shift the owners of mounts by.
 *
 * Tried once per boot and state folder, and remembered in the run folder: a namespace in which /proc and /sys can be mounted (a machine that is itself
 * a container may not), the state folder's file system seen with shifted owners, and an OverlayFS that takes layers one by one.
 */
import { execFile, spawn } from 'node:child_process';
import { once } from 'node:events';
import { closeSync, existsSync, mkdirSync, openSync, readFileSync, renameSync, statSync, writeFileSync } from 'node:fs';
import { dirname, join } from 'node:path';
import { promisify } from 'node:util';
import { messageOf } from '#base';
import { atLeast, bootId, kernelHas, mappedClone } from '#linux';
import { fail } from '../errors.ts';
import { type IdExtent, idExtents, PROBE_BASE } from './id-ranges.ts';

export const USERNS_MODES = ['private', 'host'] as const;
/** `private`: the sandbox's root is nobody outside. `host`: it is root, as far as the other walls let it. */
export type UsernsMode = (typeof USERNS_MODES)[number];

export interface UsernsFolders {
  readonly runDir: string;
  readonly stateDir: string;
}

export interface UsernsSupport {
  /** Undefined: it can. */
  readonly lacks?: string;
}

const execFileAsync = promisify(execFile);

/**
 * Whether a sandbox gets one: where it can, unless somebody says otherwise. With this machine's network it has none: its root would have no
 * rights over what it is to use.
 * @throws RUNTIME_USERNS when one is asked for that cannot be
 */
export async function usesUserNamespace(
  folders: UsernsFolders,
  asked: UsernsMode | undefined = modeFromEnvironment(),
  network: 'none' | 'host' = 'none',
): Promise<boolean> {
  if (asked === 'host') return false;
  const lacks =
    network === 'host' ? 'with --network host it would have no rights over it' : (await usernsSupport(folders)).lacks;
  if (lacks === undefined) return true;
  if (asked === 'private') throw fail('RUNTIME_USERNS', { reason: lacks });
  return false;
}

function modeFromEnvironment(): UsernsMode | undefined {
  return USERNS_MODES.find((mode) => mode === process.env.DSEC_USERNS);
}

let known: { readonly key: string; readonly support: UsernsSupport } | undefined;

export async function usernsSupport({ runDir, stateDir }: UsernsFolders): Promise<UsernsSupport> {
  if (process.geteuid?.() !== 0) return { lacks: 'it takes root' };
  if (process.env.DSEC_MOUNT_WITH === 'reader' || !kernelHas('erofs')) {
    return { lacks: 'layers are shown by our reader behind FUSE, which cannot shift owners' };
  }
  // It may not be there yet.
  const folder = existingFolder(stateDir);
  const key = keyOf(folder);
  if (known?.key === key) return known.support;
  const file = join(runDir, 'userns.json');
  const found = remembered(file, key) ?? { lacks: await tried(folder) };
  remember(file, key, found);
  return found;
}

/** What only a creation could find out. */
export function noteLack({ runDir, stateDir }: UsernsFolders, reason: string): void {
  remember(join(runDir, 'userns.json'), keyOf(existingFolder(stateDir)), { lacks: reason });
}

function existingFolder(path: string): string {
  return existsSync(path) ? path : existingFolder(dirname(path));
}

function keyOf(folder: string): string {
  return `${bootId()} ${statSync(folder).dev}`;
}

function remembered(file: string, key: string): UsernsSupport | undefined {
  try {
    const value = JSON.parse(readFileSync(file, 'utf8')) as { key?: string; lacks?: string };
    return value.key === key ? { lacks: value.lacks } : undefined;
  } catch {
    return undefined;
  }
}

function remember(file: string, key: string, support: UsernsSupport): void {
  known = { key, support };
  try {
    mkdirSync(join(file, '..'), { recursive: true, mode: 0o755 });
    writeFileSync(`${file}.${process.pid}`, JSON.stringify({ key, ...support }), { mode: 0o600 });
    renameSync(`${file}.${process.pid}`, file);
  } catch {
    // Tried again next time.
  }
}

async function tried(stateDir: string): Promise<string | undefined> {
  if (!atLeast(6, 5)) return 'OverlayFS takes shifted layers from Linux 6.5 on';
  try {
    const mounts = 'mount -t proc proc /proc && mount -t sysfs sysfs /sys';
    await execFileAsync('unshare', [
      ...['--user', '--map-root-user', '--mount', '--net', '--pid', '--fork', '--kill-child'],
      ...['sh', '-c', mounts],
    ]);
    const userNamespace = await openUserNamespace(idExtents(PROBE_BASE));
    try {
      closeSync(mappedClone(stateDir, userNamespace));
    } catch (error) {
      return `the file system of ${stateDir} cannot shift owners: ${messageOf(error)}`;
    } finally {
      closeSync(userNamespace);
    }
    return undefined;
  } catch (error) {
    return `the kernel refuses one: ${messageOf(error).replace(/\s+/g, ' ').trim()}`;
  }
}

/** Descriptor of a namespace with this map, held by nobody else. For launchers that make their own when the root is there already. */
export async function openUserNamespace(extents: readonly IdExtent[]): Promise<number> {
  const holder = spawn('unshare', ['--user', '--kill-child', 'cat'], { stdio: ['pipe', 'pipe', 'pipe'] });
  const failed = once(holder, 'error').then(([error]) => {
    throw error;
  });
  const gone = once(holder, 'exit').then(() => {
    throw new Error('unshare --user ended');
  });
  for (const promise of [failed, gone]) promise.catch(() => {});
  holder.stdin.on('error', () => {});
  try {
    // When cat answers, the namespace is there.
    holder.stdin.write('?');
    await Promise.race([once(holder.stdout, 'data'), failed, gone]);
    const map = extents.map(({ inside, outside, count }) => `${inside} ${outside} ${count}\n`).join('');
    for (const file of ['uid_map', 'gid_map']) writeFileSync(`/proc/${holder.pid}/${file}`, map);
    return openSync(`/proc/${holder.pid}/ns/user`, 'r');
  } finally {
    holder.kill('SIGKILL');
  }
}

/** Of a process that waits in it. */
export function userNamespaceOf(pid: number): number {
  return openSync(`/proc/${pid}/ns/user`, 'r');
}
