/**
 * Which driver runs sandboxes as virtual machines on this node. `auto` takes Firecracker where it is found, KVM runs a processor and its disks outlive
 * this process, else QEMU. Found out once for each process. A sandbox keeps the driver that it was made with.
 */
import { ownDeviceObstacle } from '#ublk-daemon';
import { fail } from '../errors.ts';
import { firecrackerState } from './firecracker/find-firecracker.ts';
import { openFirecrackerDriver } from './firecracker/firecracker-driver.ts';
import { openQemuDriver } from './qemu/qemu-driver.ts';
import type { VmDriver } from './vm-driver.ts';

export type SandboxVmDriver = VmDriver;

export const VM_DRIVER_WISHES = ['auto', 'qemu', 'firecracker'] as const;
export type VmDriverWish = (typeof VM_DRIVER_WISHES)[number];

export interface VmDriverChoice {
  readonly name: VmDriver['name'];
  /** For people. */
  readonly why: string;
}

let wished: VmDriverWish | undefined;
let chosen: VmDriverChoice | undefined;
const opened = new Map<VmDriver['name'], VmDriver>();

/** Of whoever runs sandboxes here; goes before $DSEC_VM_DRIVER. */
export function useVmDriver(wish: VmDriverWish): void {
  wished = wish;
  chosen = undefined;
}

/** It may take a moment: programs and KVM are tried. @throws RUNTIME_VM_DRIVER for a $DSEC_VM_DRIVER that is none */
export function chooseVmDriver(): VmDriverChoice {
  chosen ??= choose(wishNow());
  return chosen;
}

/** At once; undefined: it has yet to be tried. @throws RUNTIME_VM_DRIVER for a $DSEC_VM_DRIVER that is none */
export function knownVmDriver(): VmDriverChoice | undefined {
  return wishNow() === 'auto' ? chosen : chooseVmDriver();
}

function wishNow(): VmDriverWish {
  return wished ?? wishOf(process.env.DSEC_VM_DRIVER);
}

function wishOf(text: string | undefined): VmDriverWish {
  if (text === undefined || text === '') return 'auto';
  const wish = VM_DRIVER_WISHES.find((one) => one === text);
  if (wish === undefined) throw fail('RUNTIME_VM_DRIVER', { text });
  return wish;
}

function choose(wish: VmDriverWish): VmDriverChoice {
  if (wish !== 'auto') return { name: wish, why: 'it was asked for (--vm-driver, $DSEC_VM_DRIVER)' };
  const { missing } = firecrackerState();
  if (missing !== undefined) return { name: 'qemu', why: `no Firecracker: ${missing}` };
  // They are ours to serve, and a guest must not lose them with this process.
  const obstacle = ownDeviceObstacle();
  if (obstacle !== undefined) return { name: 'qemu', why: `no Firecracker, for its disks: ${obstacle}` };
  return { name: 'firecracker', why: 'it is found, and KVM runs a processor' };
}

/** @param name Of a sandbox that is there; else what new ones get. @throws VM_UNSUPPORTED, RUNTIME_UNSUPPORTED that name what is missing */
export function sandboxVmDriver(name: VmDriver['name'] = chooseVmDriver().name): SandboxVmDriver {
  let driver = opened.get(name);
  if (driver === undefined) {
    driver = name === 'qemu' ? openQemuDriver() : openFirecrackerDriver();
    opened.set(name, driver);
  }
  return driver;
}
