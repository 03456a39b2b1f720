/** A small guest for benchmarks of machines: the lab's kernel, busybox, a shell on the serial console, and nothing else. */
import { chmodSync, copyFileSync, mkdirSync, mkdtempSync, readFileSync, symlinkSync, writeFileSync } from 'node:fs';
import { basename, join } from 'node:path';
import { setTimeout as delay } from 'node:timers/promises';
import { openQemuDriver, type RunningVm, type VmSpec } from '#runtime';
import { archiveOf } from './lab/initrd.mjs';
import { labKernel, must } from './lab/kernel.mjs';

const MODULES = ['virtio_mmio', 'virtio_console', 'virtio_balloon', 'virtio_rng'];

/** @returns Path of the archive. */
export function shellArchive(folder: string): string {
  const kernel = labKernel();
  const root = mkdtempSync(join(folder, 'initrd-'));
  for (const name of ['bin', 'dev', 'proc', 'sys', 'mods', 'tmp']) mkdirSync(join(root, name));
  copyFileSync('/bin/busybox', join(root, 'bin/busybox'));
  symlinkSync('busybox', join(root, 'bin/sh'));
  const order: string[] = [];
  for (const module of MODULES) {
    const shown = must('/sbin/modprobe', [
      '-d',
      kernel.base,
      '-S',
      kernel.version,
      '--show-depends',
      module,
    ]).toString();
    for (const path of shown.matchAll(/^insmod (\S+)/gm)) {
      const name = basename(path[1]!).replace(/\.xz$/, '');
      if (order.includes(name)) continue;
      order.push(name);
      writeFileSync(
        join(root, 'mods', name),
        path[1]!.endsWith('.xz') ? must('xz', ['-dc', path[1]!]) : readFileSync(path[1]!),
      );
    }
  }
  writeFileSync(
    join(root, 'init'),
    `#!/bin/sh
/bin/busybox mount -t proc proc /proc; /bin/busybox mount -t sysfs sys /sys; /bin/busybox mount -t devtmpfs dev /dev
/bin/busybox mount -t tmpfs -o size=90% tmpfs /tmp; /bin/busybox --install -s /bin
export PATH=/bin
for module in ${order.join(' ')}; do insmod /mods/$module; done
stty -echo < /dev/console
echo guest-is-ready
exec setsid sh -c 'exec sh < /dev/ttyS0 > /dev/ttyS0 2>&1'
`,
  );
  chmodSync(join(root, 'init'), 0o755);
  const path = join(folder, 'initrd');
  writeFileSync(path, archiveOf(root));
  return path;
}

export function shellSpec(folder: string, id: string, initrd: string, memoryMib: number): VmSpec {
  const place = join(folder, id);
  mkdirSync(place, { mode: 0o700 });
  const { clockArguments } = openQemuDriver();
  return {
    id,
    folder: place,
    boot: {
      kernel: labKernel().image,
      initrd,
      commandLine: `console=ttyS0 quiet panic=-1 mitigations=off nokaslr ${clockArguments}`,
    },
    cpus: 1,
    memoryBytes: memoryMib * 2 ** 20,
    memoryFile: `/dev/shm/dsec-bench-${process.pid}-${id}`,
    drives: [],
  };
}

/** Emulated, on a machine that has other work. */
const ANSWERS_MS = 300_000;

let marks = 0;

/** Resolves when the shell has done it. */
export async function shell(vm: RunningVm, command: string): Promise<void> {
  const mark = `end-${++marks}`;
  vm.console.write(Buffer.from(`${command}; echo ${mark}\n`));
  await said(vm, mark);
}

export async function said(vm: RunningVm, text: string): Promise<void> {
  const until = performance.now() + ANSWERS_MS;
  for (;;) {
    const recent = vm.console.recent();
    if (recent.includes(text)) return;
    if (performance.now() > until)
      throw new Error(`the guest has not said ${text}, but: ${recent.toString().slice(-500)}`);
    await delay(2);
  }
}
