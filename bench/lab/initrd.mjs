/**
 * The first root of the lab's kernel: busybox, the modules that reach the real root, and init. Built once for a kernel and an init,
 * kept in the cache beside it; the command of a run is appended as a second archive.
 */
import { spawnSync } from 'node:child_process';
import { createHash } from 'node:crypto';
import {
  chmodSync,
  copyFileSync,
  existsSync,
  mkdirSync,
  mkdtempSync,
  readFileSync,
  renameSync,
  rmSync,
  symlinkSync,
  writeFileSync,
} from 'node:fs';
import { basename, dirname, join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { findTool, labCache, must } from './kernel.mjs';

/** Reaches the host's files and the scratch disk; everything else is loaded from there. */
const MODULES = ['virtio_pci', 'virtio_console', 'virtio_blk', '9pnet_virtio', '9p', 'overlay', 'ext4'];

const initScript = join(dirname(fileURLToPath(import.meta.url)), 'init');

/** @param {import('./kernel.mjs').LabKernel} kernel @returns {string} */
export function initrdOf(kernel) {
  const busybox = /** @type {string} */ (findTool('busybox'));
  const key = createHash('sha256')
    .update(readFileSync(initScript))
    .update(readFileSync(busybox))
    .update(MODULES.join())
    .digest('hex')
    .slice(0, 16);
  const path = join(labCache, `initrd-${kernel.version}-${key}.img`);
  if (existsSync(path)) return path;
  const root = mkdtempSync(join(labCache, '.initrd-'));
  try {
    for (const name of ['bin', 'dev', 'proc', 'sys', 'lower', 'rw', 'newroot', 'mods', 'run'])
      mkdirSync(join(root, name));
    copyFileSync(busybox, join(root, 'bin/busybox'));
    chmodSync(join(root, 'bin/busybox'), 0o755);
    symlinkSync('busybox', join(root, 'bin/sh'));
    writeFileSync(join(root, 'mods/order'), modulesOf(kernel, join(root, 'mods')).join('\n'));
    copyFileSync(initScript, join(root, 'init'));
    chmodSync(join(root, 'init'), 0o755);
    writeFileSync(`${root}.img`, archiveOf(root));
    renameSync(`${root}.img`, path);
    return path;
  } finally {
    rmSync(root, { recursive: true, force: true });
    rmSync(`${root}.img`, { force: true });
  }
}

/**
 * Unpacks the modules into `into`, and answers their names in the order to load them.
 * @param {import('./kernel.mjs').LabKernel} kernel @param {string} into
 */
function modulesOf(kernel, into) {
  /** @type {Set<string>} */
  const order = new Set();
  for (const module of MODULES) {
    const args = ['-d', kernel.base, '-S', kernel.version, '--show-depends', module];
    // One that is built into the kernel has no file.
    const { stdout } = spawnSync('modprobe', args, { encoding: 'utf8' });
    for (const line of (stdout ?? '').split('\n')) {
      const path = /^insmod (\S+)/.exec(line)?.[1];
      if (path === undefined) continue;
      const name = basename(path).replace(/\.xz$/, '');
      if (order.has(name)) continue;
      order.add(name);
      const bytes = path.endsWith('.xz') ? must('xz', ['-dc', path]) : readFileSync(path);
      writeFileSync(join(into, name), bytes);
    }
  }
  return [...order];
}

/** A cpio archive of everything in `folder`. @param {string} folder @returns {Buffer} */
export function archiveOf(folder) {
  const names = must('find', ['.'], { cwd: folder }).toString();
  return must('cpio', ['-o', '-H', 'newc', '--quiet', '--owner=0:0'], { cwd: folder, input: names });
}
