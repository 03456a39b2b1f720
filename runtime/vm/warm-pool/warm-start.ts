/**
 * A machine out of a template: its memory is the template's, its drives and its network are its own, and it is told that it is another one now before it
 * is told anything else. From then on it is as one that has just booted.
 */
import { failPoint } from '#base';
import { fail } from '../../errors.ts';
import { GuestLink } from '../guest/guest-link.ts';
import { guestWork } from '../guest/guest-order.ts';
import type { RunningVm, VmSpec } from '../vm-driver.ts';
import type { SandboxVmDriver } from '../vm-drivers.ts';
import type { Template } from './template-folder.ts';

const RESCAN = '/sys/bus/pci/rescan';

/** @throws VM_START, VM_SNAPSHOT_DAMAGED, VM_GUEST_SILENT, VM_TEMPLATE; then nothing of it runs */
export async function startWarm(driver: SandboxVmDriver, spec: VmSpec, template: Template): Promise<RunningVm> {
  // Reported pages are punched out of the memory's file, which has to be its own for that; else all share the template's.
  const memory = spec.balloon?.freePageReporting === true ? 'copied' : 'private';
  const vm = await driver.restore(spec, template.snapshotFolder, { memory });
  try {
    failPoint('vm-warm-restored');
    await greet(vm);
    return vm;
  } catch (error) {
    await vm.kill();
    throw error;
  }
}

async function greet(vm: RunningVm): Promise<void> {
  const refuse = (reason: string) => fail('VM_TEMPLATE', { reason });
  let broken: (problem: string) => void = () => {};
  const nonsense = new Promise<never>((_resolve, reject) => {
    broken = (problem) => reject(refuse(`its guest broke the protocol: ${problem}`));
  });
  nonsense.catch(() => {});
  const gone = vm.ended.then(({ detail }) => {
    throw refuse(`its machine has ended: ${detail}`);
  });
  const link = new GuestLink(vm.agentSocket!, { started() {}, failed() {}, ended() {}, frame() {}, broken });
  try {
    await vm.cont();
    // Before anything in it asks for random numbers.
    const told = [guestWork.entropy(), guestWork.clock(), guestWork.write(RESCAN, '1')].map((work) => link.work(work));
    await Promise.race([Promise.all(told), gone, nonsense]);
  } finally {
    link.close();
    gone.catch(() => {});
  }
}
