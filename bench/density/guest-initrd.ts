/** The first root of a guest of the density benchmark: busybox, the modules of its devices, guest-init.sh. As bench/lab/initrd.mjs makes the lab's. */
import { spawnSync } from 'node:child_process';
import { chmodSync, copyFileSync, mkdirSync, readFileSync, symlinkSync, writeFileSync } from 'node:fs';
import { basename, join } from 'node:path';
import type { GuestWrite } from '#runtime';
import { projectRoot } from '../dsec-command.ts';
import { archiveOf } from '../lab/initrd.mjs';
import { findTool, type LabKernel, must } from '../lab/kernel.mjs';

const MODULES = [
  ...['virtio_pci', 'virtio_mmio', 'virtio_blk', 'crc32c-intel', 'crc32c_generic', 'erofs', 'ext4'],
  ...['virtio_pmem', 'nd_pmem', 'virtio_balloon'],
];

/** @param folder An empty one, of this archive. @param writes Files that a guest writes when it is told to. */
export function guestInitrd(kernel: LabKernel, folder: string, writes: readonly GuestWrite[]): string {
  const root = join(folder, 'root');
  for (const name of ['bin', 'dev', 'proc', 'sys', 'mods']) mkdirSync(join(root, name), { recursive: true });
  copyFileSync(findTool('busybox')!, join(root, 'bin/busybox'));
  symlinkSync('busybox', join(root, 'bin/sh'));
  const order = new Set<string>();
  for (const module of MODULES) {
    const args = ['-d', kernel.base, '-S', kernel.version, '--show-depends', module];
    const { stdout } = spawnSync('modprobe', args, { encoding: 'utf8' });
    for (const [, path] of stdout.matchAll(/^insmod (\S+)/gm)) {
      const name = basename(path!).replace(/\.xz$/, '');
      if (order.has(name)) continue;
      order.add(name);
      writeFileSync(join(root, 'mods', name), path!.endsWith('.xz') ? must('xz', ['-dc', path!]) : readFileSync(path!));
    }
  }
  writeFileSync(join(root, 'mods/order'), [...order].join('\n'));
  writeFileSync(join(root, 'writes'), writes.map(({ path, value }) => `${path} ${value}\n`).join(''));
  copyFileSync(join(projectRoot(), 'bench/density/guest-init.sh'), join(root, 'init'));
  for (const name of ['init', 'bin/busybox']) chmodSync(join(root, name), 0o755);
  const archive = join(folder, 'initrd');
  writeFileSync(archive, archiveOf(root));
  return archive;
}
