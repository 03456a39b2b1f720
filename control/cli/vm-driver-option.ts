/** `--vm-driver`: what runs sandboxes as virtual machines, of the services that have sandboxes. */
import { useVmDriver, VM_DRIVER_WISHES } from '#runtime';
import { choice } from './choice.ts';

export const VM_DRIVER_HELP =
  'what runs virtual machines of --backend microvm: qemu, firecracker, or auto, which takes Firecracker where it is found, KVM works and its disks outlive the service (default: $DSEC_VM_DRIVER, else auto)';

/** @throws CLI_USAGE */
export function chooseVmDriver(text: string | undefined): void {
  if (text !== undefined) useVmDriver(choice('--vm-driver', text, VM_DRIVER_WISHES));
}
