/** Restores a machine and waits to be killed: for vm-qemu.test.ts. */
import { openQemuDriver } from '../vm/qemu/qemu-driver.ts';
import type { VmSpec } from '../vm/vm-driver.ts';
import { shell } from './shell-guest.ts';

const { spec, snapshot } = JSON.parse(process.env.ORDER!) as { spec: VmSpec; snapshot: string };
const vm = await openQemuDriver().restore(spec, snapshot);
await vm.cont();
await shell(vm, 'echo before > /tmp/said');
process.stdout.write('ready\n');
setInterval(() => {}, 1000);
