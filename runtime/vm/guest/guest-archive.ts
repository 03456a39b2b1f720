/**
 * The first root of a guest: dsec-agent as /init and the kernel's modules, as a cpio archive that the kernel unpacks. The same for all sandboxes of a
 * kernel; what a sandbox is, its guest is told over the link. Made once, and kept: a snapshot is resumed with the archive that it booted with.
 */
import { execFileSync } from 'node:child_process';
import { createHash } from 'node:crypto';
import { existsSync, mkdirSync, mkdtempSync, readFileSync, renameSync, rmSync, writeFileSync } from 'node:fs';
import { basename, join } from 'node:path';
import { messageOf } from '#base';
import { fail } from '../../errors.ts';
import type { GuestKernel } from './guest-kernel.ts';

/** Before the guest is told anything: what its port needs. */
const FIRST = ['virtio_mmio'];
/** Loaded where the machine has such a device: under Firecracker. */
const VSOCK = ['vmw_vsock_virtio_transport'];
/** By what a guest may need; checksums of both file systems come first, for nothing loads them for us. */
const SUMS = ['crc32c-intel', 'crc32c_generic'];
const PARTS = {
  always: ['virtio_blk', ...SUMS, 'erofs', 'ext4', 'overlay'],
  network: ['virtio_net'],
  pmem: ['virtio_pmem', 'nd_pmem'],
  balloon: ['virtio_balloon'],
} as const;

export type GuestPart = keyof typeof PARTS;
export const ALL_PARTS: readonly GuestPart[] = ['network', 'pmem', 'balloon'];

export interface GuestArchive {
  readonly path: string;
  /** Names of modules for a guest with these parts, in the order to load them. */
  modulesFor(parts: readonly GuestPart[]): string[];
}

/** @param folder Archives are kept there. @throws RUNTIME_GUEST_KERNEL */
export function guestArchive(kernel: GuestKernel, agent: string, folder: string): GuestArchive {
  const modules = new Modules(kernel);
  const first = modules.order(FIRST);
  const vsock = modules.order(VSOCK);
  const all = modules.order([...FIRST, ...VSOCK, ...Object.values(PARTS).flat()]);
  const program = readFileSync(agent);
  const key = createHash('sha256').update(program).update(all.join()).digest('hex').slice(0, 16);
  const path = join(folder, `guest-${kernel.version}-${key}.cpio`);
  if (!existsSync(path)) make(path, folder, program, modules, all, { order: first, 'vsock-order': vsock });
  return { path, modulesFor: (parts) => modules.order(['always' as const, ...parts].flatMap((part) => PARTS[part])) };
}

function make(
  path: string,
  folder: string,
  program: Buffer,
  modules: Modules,
  all: readonly string[],
  lists: Readonly<Record<string, readonly string[]>>,
): void {
  mkdirSync(folder, { recursive: true, mode: 0o755 });
  const entries = [
    entry('dev', 0o040755, NOTHING),
    // Where the kernel opens it for the first program.
    entry('dev/console', 0o020600, NOTHING, [5, 1]),
    entry('init', 0o100755, program),
    entry('modules', 0o040755, NOTHING),
    ...Object.entries(lists).map(([name, list]) =>
      entry(`modules/${name}`, 0o100644, Buffer.from(`${list.join('\n')}\n`)),
    ),
    ...all.map((name) => entry(`modules/${name}`, 0o100644, modules.read(name))),
    entry('TRAILER!!!', 0, NOTHING),
  ];
  const work = mkdtempSync(join(folder, '.new-'));
  try {
    writeFileSync(join(work, 'archive'), Buffer.concat(entries));
    renameSync(join(work, 'archive'), path);
  } finally {
    rmSync(work, { recursive: true, force: true });
  }
}

const NOTHING = Buffer.alloc(0);

/** Of the "newc" format: numbers in hexadecimal, name and content each filled up to four bytes. */
function entry(name: string, mode: number, content: Buffer, device: readonly [number, number] = [0, 0]): Buffer {
  const hex = (value: number) => value.toString(16).padStart(8, '0');
  const fields = [0, mode, 0, 0, 1, 0, content.length, 0, 0, ...device, name.length + 1, 0];
  const head = Buffer.from(`070701${fields.map(hex).join('')}${name}\0`, 'latin1');
  const filled = (bytes: Buffer) => Buffer.concat([bytes, Buffer.alloc(-bytes.length & 3)]);
  return Buffer.concat([filled(head), filled(content)]);
}

/** The modules of a kernel, by name, with what each needs (modules.dep, which depmod has written). */
class Modules {
  private readonly folder: string;
  private readonly needs = new Map<string, { readonly path: string; readonly needs: readonly string[] }>();

  constructor({ version, base }: GuestKernel) {
    this.folder = join(base, 'lib/modules', version);
    let text: string;
    try {
      text = readFileSync(join(this.folder, 'modules.dep'), 'utf8');
    } catch (error) {
      throw fail('RUNTIME_GUEST_KERNEL', { problem: messageOf(error) }, error);
    }
    for (const line of text.split('\n')) {
      const [path, needs] = line.split(':') as [string, string?];
      if (needs === undefined) continue;
      this.needs.set(nameOf(path), { path, needs: needs.split(' ').filter(Boolean).map(nameOf).reverse() });
    }
  }

  /** With what they need before them. What is built into the kernel has no file, and needs none. */
  order(wanted: readonly string[]): string[] {
    const order = new Set<string>();
    const add = (name: string) => {
      const found = this.needs.get(name);
      if (found === undefined || order.has(name)) return;
      for (const one of found.needs) add(one);
      order.add(name);
    };
    for (const name of wanted) add(nameOf(name));
    return [...order];
  }

  read(name: string): Buffer {
    const path = join(this.folder, this.needs.get(name)!.path);
    const tool = path.endsWith('.xz') ? 'xz' : path.endsWith('.zst') ? 'zstd' : undefined;
    try {
      if (tool === undefined) return readFileSync(path);
      return execFileSync(tool, ['-dc', path], { maxBuffer: 2 ** 28, stdio: ['ignore', 'pipe', 'pipe'] });
    } catch (error) {
      throw fail('RUNTIME_GUEST_KERNEL', { problem: messageOf(error) }, error);
    }
  }
}

/** As the kernel writes them. */
function nameOf(path: string): string {
  return basename(path)
    .replace(/\.ko(\.xz|\.zst|\.gz)?$/, '')
    .replaceAll('-', '_');
}
