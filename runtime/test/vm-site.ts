/** What tests of sandboxes in virtual machines need: QEMU, and a kernel that was fetched before (`dsec vm kernel`, or the kernel lab's). */
import { existsSync, readdirSync } from 'node:fs';
import { homedir } from 'node:os';
import { join } from 'node:path';
import { findAgent } from '../backend/agent-binary.ts';
import type { CreateOptions } from '../node/create-sandbox.ts';
import type { NodeSandbox } from '../node/node-sandbox.ts';
import { findGuestKernel, KERNEL_SERIES } from '../vm/guest/guest-kernel.ts';
import { findQemu } from '../vm/qemu/accelerator.ts';
import { ResidentSite } from './resident-fixture.ts';
import { canRun } from './sandbox-fixture.ts';

/** Small and quick to boot where it is emulated. */
export const SMALL_VM: Partial<CreateOptions> = {
  backend: 'microvm',
  cpus: 1,
  memoryBytes: 192 << 20,
  diskBytes: 256 << 20,
  memory: { pmem: false, reporting: false, damon: false },
};

/** Sets $DSEC_VM_KERNEL where it is not set. */
export function canRunVms(): boolean {
  if (!canRun() || findAgent() === undefined) return false;
  if (findQemu() === undefined) {
    console.log('skipped: qemu-system-x86_64 is not installed');
    return false;
  }
  const lab = join(process.env.DSEC_LAB_CACHE ?? join(homedir(), '.cache/dsec/lab'), 'kernels');
  const places = [lab, '/var/lib/dsec/vm/kernels'].filter((folder) => existsSync(folder));
  process.env.DSEC_VM_KERNEL ??= places
    .flatMap((folder) => readdirSync(folder).map((name) => join(folder, name)))
    .filter((path) => path.includes(`/${KERNEL_SERIES}.`))
    .sort()
    .at(-1);
  if (findGuestKernel('/nowhere') !== undefined) return true;
  console.log('skipped: there is no kernel for guests (`dsec vm kernel` fetches one)');
  return false;
}

export function createVm(all: ResidentSite, options: Partial<CreateOptions> = {}): Promise<NodeSandbox> {
  return all.create({ ...SMALL_VM, ...options });
}

export { ResidentSite };
