/**
 * The lab's kernel: Debian's 6.12, unpacked outside the checkout, never installed. It has what machines for development often lack:
 * ublk, NBD, loop, vhost, AppArmor, cgroup v2. What is in the cache is taken as it is; else apt is asked for the newest.
 */
import { spawnSync } from 'node:child_process';
import { accessSync, constants, existsSync, mkdirSync, mkdtempSync, readdirSync, renameSync, rmSync } from 'node:fs';
import { homedir } from 'node:os';
import { delimiter, join } from 'node:path';

/** Its dependency is the newest kernel of the series. */
const META_PACKAGE = 'linux-image-6.12-amd64';

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

/** @throws LabUnavailable when a tool is missing or the kernel cannot be had. @returns {LabKernel} */
export function labKernel() {
  if (process.arch !== 'x64') throw new LabUnavailable(`the lab is for x64; this is ${process.arch}`);
  const missing = Object.entries(TOOLS).filter(([tool]) => findTool(tool) === undefined);
  if (missing.length > 0) {
    const packages = [...new Set(missing.map(([, name]) => name))].join(' ');
    throw new LabUnavailable(
      `the lab needs ${missing.map(([tool]) => tool).join(', ')}: apt-get install --no-install-recommends ${packages}`,
    );
  }
  return cached() ?? fetched();
}

/** The newest in the cache. @returns {LabKernel | undefined} */
function cached() {
  const folder = join(labCache, 'kernels');
  const versions = existsSync(folder) ? readdirSync(folder).filter((name) => !name.startsWith('.')) : [];
  const version = versions.sort(new Intl.Collator('en', { numeric: true }).compare).at(-1);
  return version === undefined ? undefined : kernelIn(join(folder, version), version);
}

/** @param {string} base @param {string} version @returns {LabKernel} */
function kernelIn(base, version) {
  return { version, base, image: join(base, 'boot', `vmlinuz-${version}`) };
}

/** @returns {LabKernel} */
function fetched() {
  const known = () => {
    const depends = spawnSync('apt-cache', ['depends', META_PACKAGE], { encoding: 'utf8' });
    return /Depends: (linux-image-\S+)/.exec(depends.stdout ?? '')?.[1];
  };
  let name = known();
  if (name === undefined && process.getuid?.() === 0) {
    // No package lists yet, or old ones.
    spawnSync('apt-get', ['update', '-q'], { stdio: ['ignore', 2, 2] });
    name = known();
  }
  if (name === undefined) {
    throw new LabUnavailable(`apt does not know ${META_PACKAGE}: apt-get update, or the lists of Debian 12 (bookworm)`);
  }
  const version = name.slice('linux-image-'.length);
  const kernels = join(labCache, 'kernels');
  mkdirSync(kernels, { recursive: true });
  const staging = mkdtempSync(join(kernels, '.fetch-'));
  try {
    process.stderr.write(`lab: fetching ${name} (about 110 MB, once) into ${labCache}\n`);
    const download = spawnSync('apt-get', ['download', '-q', name], { cwd: staging, stdio: ['ignore', 2, 2] });
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
