/**
 * The kernel of guests: Debian's, unpacked from its package and never installed. What is unpacked is taken as it is; `dsec vm kernel` fetches one. Its
 * modules have what a sandbox needs (EROFS, OverlayFS, ext4, virtio), and it is the same on every node, whatever that runs itself.
 */
import { spawn, spawnSync } from 'node:child_process';
import { existsSync, mkdirSync, mkdtempSync, readdirSync, renameSync, rmSync } from 'node:fs';
import { basename, join, resolve } from 'node:path';
import { messageOf } from '#base';
import { fail } from '../../errors.ts';

export interface GuestKernel {
  readonly version: string;
  readonly image: string;
  /** The folder that holds lib/modules/<version>. */
  readonly base: string;
}

/** EROFS from files and DAX, free page reporting and DAMON: the first of Debian's with all of it. */
export const KERNEL_SERIES = '6.12';

export function kernelsFolder(stateDir: string): string {
  return join(stateDir, 'vm/kernels');
}

/** $DSEC_VM_KERNEL (a folder with boot/vmlinuz-* and lib/modules), else the newest that was fetched. @throws RUNTIME_GUEST_KERNEL */
export function guestKernel(stateDir: string): GuestKernel {
  const found = findGuestKernel(stateDir);
  if (found === undefined)
    throw fail('RUNTIME_GUEST_KERNEL', { problem: `there is none in ${kernelsFolder(stateDir)}` });
  return found;
}

export function findGuestKernel(stateDir: string): GuestKernel | undefined {
  const given = process.env.DSEC_VM_KERNEL;
  if (given !== undefined && given !== '') return kernelIn(resolve(given));
  const folder = kernelsFolder(stateDir);
  const newest = namesIn(folder)
    .filter((name) => !name.startsWith('.'))
    .sort(new Intl.Collator('en', { numeric: true }).compare)
    .at(-1);
  return newest === undefined ? undefined : kernelIn(join(folder, newest));
}

function kernelIn(base: string): GuestKernel | undefined {
  const version = namesIn(join(base, 'lib/modules'))[0];
  const image = namesIn(join(base, 'boot')).find((name) => name === `vmlinuz-${version}`);
  if (version === undefined || image === undefined) return undefined;
  return { version, base, image: join(base, 'boot', image) };
}

function namesIn(folder: string): string[] {
  return existsSync(folder) ? readdirSync(folder) : [];
}

/** Asks apt for the newest of the series and unpacks it. @throws RUNTIME_GUEST_KERNEL_FETCH */
export async function fetchGuestKernel(
  stateDir: string,
  { series = KERNEL_SERIES, signal }: { readonly series?: string; readonly signal?: AbortSignal } = {},
): Promise<GuestKernel> {
  const name = newestPackage(series);
  const version = name.slice('linux-image-'.length);
  const folder = kernelsFolder(stateDir);
  const place = join(folder, version);
  if (existsSync(place)) return kernelIn(place)!;
  let work: string;
  try {
    mkdirSync(folder, { recursive: true, mode: 0o755 });
    work = mkdtempSync(join(folder, '.new-'));
  } catch (error) {
    throw fail('RUNTIME_GUEST_KERNEL_FETCH', { problem: messageOf(error) }, error);
  }
  try {
    await run('apt-get', ['download', '-q', name], work, signal);
    const archive = namesIn(work).find((file) => file.endsWith('.deb'));
    if (archive === undefined) throw fetchFailure(`apt-get has fetched no ${name}`);
    const tree = join(work, 'tree');
    await run('dpkg-deb', ['-x', join(work, archive), tree], work, signal);
    // Debian 12 has lib/, later ones usr/lib/.
    if (!existsSync(join(tree, 'lib/modules'))) renameSync(join(tree, 'usr/lib'), join(tree, 'lib'));
    await run('depmod', ['-b', tree, version], work, signal);
    if (kernelIn(tree) === undefined) throw fetchFailure(`${basename(archive)} holds no kernel`);
    if (!existsSync(place)) renameSync(tree, place);
    return kernelIn(place)!;
  } finally {
    rmSync(work, { recursive: true, force: true });
  }
}

function newestPackage(series: string): string {
  if (!/^\d+\.\d+$/.test(series))
    throw fetchFailure(`${series} is no series of kernels: two numbers, like ${KERNEL_SERIES}`);
  const { stdout, error } = spawnSync('apt-cache', ['pkgnames', `linux-image-${series}.`], { encoding: 'utf8' });
  if (error !== undefined)
    throw fetchFailure('there is no apt here: unpack a kernel of Debian, and name the folder in $DSEC_VM_KERNEL');
  const architecture = process.arch === 'arm64' ? 'arm64' : 'amd64';
  const known = new RegExp(`^linux-image-[\\d.]+\\+deb\\d+-${architecture}$`);
  const names = stdout.split('\n').filter((name) => known.test(name));
  const newest = names.sort(new Intl.Collator('en', { numeric: true }).compare).at(-1);
  if (newest !== undefined) return newest;
  throw fetchFailure(`apt knows no linux-image-${series}.*-${architecture}; Debian 12 has it in its backports`);
}

function fetchFailure(problem: string): Error {
  return fail('RUNTIME_GUEST_KERNEL_FETCH', { problem });
}

async function run(program: string, args: readonly string[], cwd: string, signal?: AbortSignal): Promise<void> {
  const child = spawn(program, args, { cwd, signal, stdio: ['ignore', 'ignore', 'pipe'] });
  let said = '';
  child.stderr.setEncoding('utf8').on('data', (text) => {
    said = (said + text).slice(-2000);
  });
  const code = await new Promise<number | null>((done) => {
    child.once('error', (error) => {
      said = error.message;
      done(null);
    });
    child.once('close', done);
  });
  signal?.throwIfAborted();
  if (code !== 0) throw fetchFailure(`${program} ${args[0]}: ${said.trim() || `status ${code}`}`);
}
