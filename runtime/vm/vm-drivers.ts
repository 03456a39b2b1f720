/** Which driver runs sandboxes as virtual machines on this node. Opened once: finding out what this machine can takes a moment. */
import { openQemuDriver, type QemuDriver } from './qemu/qemu-driver.ts';

export type SandboxVmDriver = Omit<QemuDriver, 'name'> & { readonly name: 'qemu' | 'firecracker' };

let opened: SandboxVmDriver | undefined;

/** @throws VM_UNSUPPORTED */
export function sandboxVmDriver(): SandboxVmDriver {
  opened ??= openQemuDriver();
  return opened;
}
