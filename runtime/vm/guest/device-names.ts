/** By what name a guest finds its drives: the serial number of a blk drive, where the driver has those, else `vdX` by its place among them. */
import type { VmDrive } from '../vm-driver.ts';
import type { GuestOrder } from './guest-order.ts';

/** @param drives All of the machine, in its order. */
export function withDeviceNames<T extends Pick<GuestOrder, 'layers' | 'upper' | 'disks'>>(
  order: T,
  drives: readonly VmDrive[],
  serials: boolean,
): T {
  if (serials) return order;
  const names = new Map(drives.filter(({ transport }) => transport === 'blk').map(({ id }, at) => [id, letters(at)]));
  const nameOf = (id: string) => names.get(id) ?? id;
  return {
    ...order,
    layers: order.layers.map((layer) => ({ ...layer, devices: layer.devices.map(nameOf) })),
    upper: nameOf(order.upper),
    disks: order.disks?.map((disk) => ({ ...disk, device: nameOf(disk.device) })),
  };
}

/** vda, ..., vdz, vdaa, ...: as the kernel counts. */
function letters(at: number): string {
  let text = '';
  for (let rest = at; rest >= 0; rest = Math.floor(rest / 26) - 1) text = String.fromCharCode(97 + (rest % 26)) + text;
  return `vd${text}`;
}
