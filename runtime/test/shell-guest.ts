/**
 * A small guest for tests of machines: Debian's kernel, busybox, a shell on the serial console. Nothing of an agent: what is tested with it is the
 * machine alone.
 */
import { execFileSync } from 'node:child_process';
import {
  chmodSync,
  copyFileSync,
  existsSync,
  mkdirSync,
  mkdtempSync,
  readdirSync,
  symlinkSync,
  writeFileSync,
} from 'node:fs';
import { homedir } from 'node:os';
import { join } from 'node:path';
import { setTimeout as delay } from 'node:timers/promises';
import { findGuestKernel, type GuestKernel } from '../vm/guest/guest-kernel.ts';
import { findQemu } from '../vm/qemu/accelerator.ts';
import { openQemuDriver } from '../vm/qemu/qemu-driver.ts';
import type { RunningVm, VmSpec } from '../vm/vm-driver.ts';

const MODULES = ['virtio_mmio', 'virtio_pci', 'virtio_console', 'virtio_blk', 'virtio_balloon', 'virtio_rng'];
const WAIT_MS = 240_000;

/** Undefined: this machine has one for tests. */
export function shellGuestMissing(): string | undefined {
  if (process.arch !== 'x64') return `the guest is for x64; this is ${process.arch}`;
  if (findQemu() === undefined) return 'qemu-system-x86_64 is not installed';
  for (const tool of ['/bin/busybox', '/usr/bin/cpio', '/usr/bin/xz'])
    if (!existsSync(tool)) return `${tool} is missing`;
  return testKernel() === undefined ? 'no guest kernel: dsec vm kernel, or npm run test:lab once' : undefined;
}

/** That of the product, else the newest of the lab. */
export function testKernel(): GuestKernel | undefined {
  const found = findGuestKernel(process.env.DSEC_STATE ?? '/var/lib/dsec');
  if (found !== undefined) return found;
  const folder = join(process.env.DSEC_LAB_CACHE ?? join(homedir(), '.cache/dsec/lab'), 'kernels');
  const version = (existsSync(folder) ? readdirSync(folder) : []).find((name) => name.startsWith('6.12.'));
  if (version === undefined) return undefined;
  const base = join(folder, version);
  return { version, base, image: join(base, 'boot', `vmlinuz-${version}`) };
}

/** @param more Modules. @returns Path of the archive. */
export function shellArchive(
  folder: string,
  { more = [], setup = '' }: { more?: readonly string[]; setup?: string } = {},
): string {
  const { base, version } = testKernel()!;
  const root = mkdtempSync(join(folder, 'initrd-'));
  for (const name of ['bin', 'dev', 'proc', 'sys', 'mods', 'tmp']) mkdirSync(join(root, name));
  copyFileSync('/bin/busybox', join(root, 'bin/busybox'));
  symlinkSync('busybox', join(root, 'bin/sh'));
  const order: string[] = [];
  for (const module of [...MODULES, ...more]) {
    const args = ['-d', base, '-S', version, '--show-depends', module];
    for (const line of execFileSync('/sbin/modprobe', args, { encoding: 'utf8' }).split('\n')) {
      const path = /^insmod (\S+)/.exec(line)?.[1];
      const name = path?.split('/').at(-1)?.replace(/\.xz$/, '');
      if (path === undefined || name === undefined || order.includes(name)) continue;
      order.push(name);
      writeFileSync(join(root, 'mods', name), execFileSync('xz', ['-dcf', path], { maxBuffer: 2 ** 28 }));
    }
  }
  writeFileSync(
    join(root, 'init'),
    `#!/bin/sh
/bin/busybox mount -t proc proc /proc; /bin/busybox mount -t sysfs sys /sys; /bin/busybox mount -t devtmpfs dev /dev
/bin/busybox mount -t tmpfs tmpfs /tmp; /bin/busybox --install -s /bin
export PATH=/bin
for module in ${order.join(' ')}; do insmod /mods/$module; done
${setup}
stty -echo < /dev/console
echo guest-is-ready
exec setsid sh -c 'exec sh < /dev/ttyS0 > /dev/ttyS0 2>&1'
`,
  );
  chmodSync(join(root, 'init'), 0o755);
  const names = execFileSync('find', ['.'], { cwd: root });
  const path = join(folder, 'initrd');
  const archive = execFileSync('cpio', ['-o', '-H', 'newc', '--quiet', '--owner=0:0'], {
    cwd: root,
    input: names,
    maxBuffer: 2 ** 28,
  });
  writeFileSync(path, archive);
  return path;
}

export function shellSpec(folder: string, id: string, initrd: string): VmSpec {
  const place = join(folder, id);
  mkdirSync(place, { mode: 0o700 });
  const { clockArguments } = openQemuDriver();
  return {
    id,
    folder: place,
    boot: {
      kernel: testKernel()!.image,
      initrd,
      commandLine: `console=ttyS0 quiet panic=-1 mitigations=off nokaslr ${clockArguments}`,
    },
    cpus: 1,
    memoryBytes: 128 * 2 ** 20,
    memoryFile: `/dev/shm/dsec-test-${process.pid}-${id}`,
    drives: [],
    ports: [{ name: 'dsec.test', socket: join(place, 'agent.sock') }],
    balloon: { freePageReporting: true },
  };
}

export async function said(vm: RunningVm, text: string | RegExp): Promise<string> {
  const until = performance.now() + WAIT_MS;
  for (;;) {
    const all = vm.console.recent().toString('latin1');
    if (typeof text === 'string' ? all.includes(text) : text.test(all)) return all;
    if (performance.now() > until) throw new Error(`the guest has not said ${text}, but: ${all.slice(-2000)}`);
    await delay(20);
  }
}

let marks = 0;

/** What a command writes, on the console. */
export async function shell(vm: RunningVm, command: string): Promise<string> {
  const mark = `mark-${++marks}`;
  vm.console.write(Buffer.from(`echo begin-${mark}; ${command}; echo end-${mark}\n`));
  const all = await said(vm, `end-${mark}`);
  return all.slice(all.lastIndexOf(`begin-${mark}`) + `begin-${mark}`.length, all.lastIndexOf(`end-${mark}`)).trim();
}
