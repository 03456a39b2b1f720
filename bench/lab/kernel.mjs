/**
 * The lab's kernel: Debian's 6.12, unpacked outside the checkout, never installed. It has what machines for development often lack:
 * ublk, NBD, loop, vhost, AppArmor, cgroup v2. What is in the cache is taken as it is; else apt is asked for the newest of the series.
 * Another series is for what came later (`--kernel 6.18`): where this machine's lists lack it, the backports of the next Debian are asked,
 * in lists of the lab's own, so that this machine's stay as they are.
 */
import { spawnSync } from 'node:child_process';
import {
  accessSync,
  constants,
  existsSync,
  mkdirSync,
  mkdtempSync,
  readdirSync,
  renameSync,
  rmSync,
  writeFileSync,
} from 'node:fs';
import { homedir } from 'node:os';
import { delimiter, join } from 'node:path';

export const DEFAULT_SERIES = '6.12';
/** Where series are that this machine's own lists do not have. */
const NEWER_SUITE = 'trixie-backports';
const DEBIAN_KEYS = '/usr/share/keyrings/debian-archive-keyring.gpg';

/** What QEMU, the initrd and the scratch disk are made with, and the package of each. */
const TOOLS = {
  'qemu-system-x86_64': 'qemu-system-x86',
  cpio: 'cpio',
  xz: 'xz-utils',
  depmod: 'kmod',
  modprobe: 'kmod',
  busybox: 'busybox-static',
  'mkfs.ext4': 'e2fsprogs',
};

/** $DSEC_LAB_CACHE, else ~/.cache/dsec/lab. */
export const labCache = process.env.DSEC_LAB_CACHE ?? join(homedir(), '.cache/dsec/lab');

/**
 * @typedef {object} LabKernel
 * @property {string} version
 * @property {string} image The kernel itself.
 * @property {string} base The folder that holds lib/modules/<version>.
 */

/** The lab cannot run here; the message says why, and what to type. */
export class LabUnavailable extends Error {}

/** @param {string} name */
export function findTool(name) {
  for (const folder of [...(process.env.PATH ?? '').split(delimiter), '/usr/sbin', '/sbin']) {
    try {
      accessSync(join(folder, name), constants.X_OK);
      return join(folder, name);
    } catch {
      // Not here.
    }
  }
  return undefined;
}

/**
 * @param {string} [series] Like 6.18.
 * @throws LabUnavailable when a tool is missing or the kernel cannot be had.
 * @returns {LabKernel}
 */
export function labKernel(series = DEFAULT_SERIES) {
  if (process.arch !== 'x64') throw new LabUnavailable(`the lab is for x64; this is ${process.arch}`);
  if (!/^\d+\.\d+$/.test(series)) throw new LabUnavailable(`${series} is no series of kernels: two numbers, like 6.18`);
  const missing = Object.entries(TOOLS).filter(([tool]) => findTool(tool) === undefined);
  if (missing.length > 0) {
    const packages = [...new Set(missing.map(([, name]) => name))].join(' ');
    throw new LabUnavailable(
      `the lab needs ${missing.map(([tool]) => tool).join(', ')}: apt-get install --no-install-recommends ${packages}`,
    );
  }
  return cached(series) ?? fetched(series);
}

/** @param {readonly string[]} names */
const newest = (names) => [...names].sort(new Intl.Collator('en', { numeric: true }).compare).at(-1);

/** The newest in the cache. @param {string} series @returns {LabKernel | undefined} */
function cached(series) {
  const folder = join(labCache, 'kernels');
  const versions = existsSync(folder) ? readdirSync(folder).filter((name) => name.startsWith(`${series}.`)) : [];
  const version = newest(versions);
  return version === undefined ? undefined : kernelIn(join(folder, version), version);
}

/** @param {string} base @param {string} version @returns {LabKernel} */
function kernelIn(base, version) {
  return { version, base, image: join(base, 'boot', `vmlinuz-${version}`) };
}

/** The newest package of the series that apt knows. @param {string} series @param {NodeJS.ProcessEnv} [env] */
function known(series, env) {
  const { stdout } = spawnSync('apt-cache', ['pkgnames', `linux-image-${series}.`], { encoding: 'utf8', env });
  return newest((stdout ?? '').split('\n').filter((name) => /^linux-image-[\d.]+\+deb\d+-amd64$/.test(name)));
}

/** @param {NodeJS.ProcessEnv} [env] */
function updateLists(env) {
  return spawnSync('apt-get', ['update', '-q'], { stdio: ['ignore', 2, 2], env }).status === 0;
}

/**
 * The package, and the environment in which apt knows it.
 * @param {string} series
 * @returns {{ name: string, env?: NodeJS.ProcessEnv }}
 */
function packageOf(series) {
  let name = known(series);
  if (name === undefined && process.getuid?.() === 0 && updateLists()) name = known(series);
  if (name !== undefined) return { name };
  const env = newerLists();
  name = env && (known(series, env) ?? (updateLists(env) ? known(series, env) : undefined));
  if (name !== undefined) return { name, env };
  throw new LabUnavailable(
    `apt knows no linux-image-${series}.*-amd64, here or in ${NEWER_SUITE}: apt-get update, or the lists of Debian 12 (bookworm)`,
  );
}

/** An environment in which apt reads the newer suite of this machine's own mirror; nothing where it has none of Debian. */
function newerLists() {
  const { stdout } = spawnSync('apt-get', ['indextargets', '--format', '$(REPO_URI) $(LABEL)'], { encoding: 'utf8' });
  const mirror = (stdout ?? '').split('\n').find((line) => line.endsWith(' Debian'));
  if (mirror === undefined) return undefined;
  const folder = join(labCache, 'apt');
  for (const name of ['lists/partial', 'cache/archives/partial']) mkdirSync(join(folder, name), { recursive: true });
  const source = `deb [signed-by=${DEBIAN_KEYS}] ${mirror.split(' ')[0]} ${NEWER_SUITE} main\n`;
  writeFileSync(join(folder, 'sources.list'), source);
  const settings = {
    'Dir::Etc::sourcelist': join(folder, 'sources.list'),
    'Dir::Etc::sourceparts': '-',
    'Dir::State::lists': join(folder, 'lists'),
    'Dir::Cache': join(folder, 'cache'),
    'Acquire::Languages': 'none',
  };
  const file = join(folder, 'apt.conf');
  writeFileSync(
    file,
    Object.entries(settings)
      .map(([key, value]) => `${key} "${value}";\n`)
      .join(''),
  );
  return { ...process.env, APT_CONFIG: file };
}

/** @param {string} series @returns {LabKernel} */
function fetched(series) {
  const { name, env } = packageOf(series);
  const version = name.slice('linux-image-'.length);
  const kernels = join(labCache, 'kernels');
  mkdirSync(kernels, { recursive: true });
  const staging = mkdtempSync(join(kernels, '.fetch-'));
  try {
    process.stderr.write(`lab: fetching ${name} (100 to 200 MB, once) into ${labCache}\n`);
    const download = spawnSync('apt-get', ['download', '-q', name], { cwd: staging, stdio: ['ignore', 2, 2], env });
    const archive = readdirSync(staging).find((file) => file.endsWith('.deb'));
    if (download.status !== 0 || archive === undefined) throw new LabUnavailable(`${name} could not be fetched`);
    const unpacked = join(staging, 'tree');
    must('dpkg-deb', ['-x', join(staging, archive), unpacked]);
    // Debian 12 has lib/, newer ones usr/lib/.
    if (!existsSync(join(unpacked, 'lib/modules'))) renameSync(join(unpacked, 'usr/lib'), join(unpacked, 'lib'));
    must('depmod', ['-b', unpacked, version]);
    if (!existsSync(join(unpacked, 'boot', `vmlinuz-${version}`))) {
      throw new LabUnavailable(`${name} holds no boot/vmlinuz-${version}`);
    }
    try {
      renameSync(unpacked, join(kernels, version));
    } catch (error) {
      // Somebody else was first.
      if (!existsSync(join(kernels, version))) throw error;
    }
    return kernelIn(join(kernels, version), version);
  } finally {
    rmSync(staging, { recursive: true, force: true });
  }
}

/** What it printed. @param {string} command @param {string[]} args @param {{ cwd?: string, input?: string }} [options] @returns {Buffer} */
export function must(command, args, { cwd, input } = {}) {
  const done = spawnSync(command, args, {
    cwd,
    input: input === undefined ? undefined : Buffer.from(input),
    maxBuffer: 2 ** 29,
  });
  if (done.status !== 0) {
    throw new Error(
      `${command} ${args.join(' ')}: ${done.error?.message ?? (done.stderr.toString() || `status ${done.status}`)}`,
    );
  }
  return done.stdout;
}
