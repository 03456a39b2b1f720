/** What a sandbox's machine boots: the guests' kernel, their archive, and words for the kernel; the same for all of one size. */
import { join } from 'node:path';
import { elfKernel } from './firecracker/kernel-image.ts';
import { type GuestArchive, guestArchive } from './guest/guest-archive.ts';
import { guestKernel } from './guest/guest-kernel.ts';
import { memoryKernelArguments } from './guest-memory.ts';
import type { VmFacts } from './machine-facts.ts';
import type { VmSpec } from './vm-driver.ts';
import type { SandboxVmDriver } from './vm-drivers.ts';

/** What every guest's kernel does without: it boots in half the time. */
const KERNEL_ARGUMENTS = [
  'console=ttyS0 quiet loglevel=3 panic=-1 reboot=t mitigations=off nokaslr',
  'lsm=capability audit=0 cryptomgr.notests rcupdate.rcu_expedited=1 8250.nr_uarts=1',
];

export interface MachineBoot {
  readonly archive: GuestArchive;
  readonly spec: Pick<VmSpec, 'boot' | 'cpus' | 'memoryBytes' | 'balloon'>;
}

/** @param agent Path of dsec-agent. @throws RUNTIME_GUEST_KERNEL, VM_SPEC */
export function machineBoot(
  stateDir: string,
  agent: string,
  driver: SandboxVmDriver,
  { memory, cpus, memoryBytes }: Pick<VmFacts, 'memory' | 'cpus' | 'memoryBytes'>,
): MachineBoot {
  const kernel = guestKernel(stateDir);
  const archive = guestArchive(kernel, agent, join(stateDir, 'vm/archives'));
  const commandLine = [
    ...KERNEL_ARGUMENTS,
    driver.clockArguments,
    // QEMU's microvm has no power button, nor has Firecracker: a reset ends it.
    ...(memory.pmem && driver.name === 'qemu' ? ['dsec.end=off'] : []),
    ...memoryKernelArguments(memory),
  ];
  const boot = {
    kernel: elfKernel(kernel.image, 'guest'),
    initrd: archive.path,
    commandLine: commandLine.join(' ').trim(),
  };
  return {
    archive,
    spec: { boot, cpus, memoryBytes, balloon: memory.reporting ? { freePageReporting: true } : undefined },
  };
}
