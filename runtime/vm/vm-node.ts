/** Sandboxes of a node that are virtual machines: made, and found again by a process that comes after a killed one. */
import { failPoint, messageOf } from '#base';
import type { AgentSandboxParts } from '../node/agent-sandbox.ts';
import type { CreateOptions } from '../node/create-sandbox.ts';
import { createVm } from './create-vm.ts';
import { serveDisks } from './disk/upper-disk.ts';
import type { RunningVm } from './vm-driver.ts';
import { sandboxVmDriver } from './vm-drivers.ts';
import { forgetSnapshot, hasSnapshot } from './vm-pausing.ts';
import { vmPlaces } from './vm-places.ts';
import { VmSandbox } from './vm-sandbox.ts';
import type { WarmPool } from './warm-pool/warm-pool.ts';

/** @param agent Path of dsec-agent. @throws RUNTIME_*, VM_*, MOUNT_*, DISK_*; then whoever calls undoes it */
export async function launchVm(
  parts: AgentSandboxParts,
  options: CreateOptions,
  agent: string,
  release: () => void,
  pool?: WarmPool,
): Promise<VmSandbox> {
  const { record, places, folders, network } = parts;
  const driver = sandboxVmDriver(record.vm!.driver);
  const { vm, disks, told } = await createVm({ record, options, places, folders, network, driver, agent, pool });
  failPoint('create-launched');
  const machine = vmPlaces(folders.runDir, record.id);
  const own = { ...parts, driver, machine, vm, disks, ...told, release };
  const { moment } = options;
  if (moment === undefined) return new VmSandbox(own);
  // Its commands have stood still since then.
  const resident = { ...record.resident!, stoodMs: Math.round(moment.stoodMs + Date.now() - moment.atMs) };
  return new VmSandbox({ ...own, record: { ...record, resident } });
}

/** One that a process before this one had, to be taken up; undefined: it has gone. */
export async function findVm(parts: AgentSandboxParts, release: () => void): Promise<VmSandbox | undefined> {
  const { record, places, folders, network, onNote } = parts;
  try {
    const driver = sandboxVmDriver(record.vm!.driver);
    const machine = vmPlaces(folders.runDir, record.id);
    const isPaused = record.resident?.pausedAt !== undefined && hasSnapshot(places.folder);
    let vm: RunningVm | undefined;
    let sweeping: Promise<void> | undefined;
    if (!isPaused) {
      vm = await driver.find(machine.folder);
      if (vm === undefined) return undefined;
      // Its disk may have changed since.
      forgetSnapshot(places.folder);
    } else {
      // Beside a whole snapshot it was to end, or had not begun to run again.
      const swept = driver.sweep(machine.folder);
      // One that is killed waits for its disks to close, where those are of this host.
      if (driver.features.nbd) await swept;
      else sweeping = swept;
      swept.catch(() => {});
    }
    const disks = await serveDisks(places.folder, machine, driver.features.nbd);
    await sweeping;
    const { id, name, network: facts } = record;
    if (facts?.mode === 'policy') await network.connectTap({ id, name, network: facts });
    return new VmSandbox({ ...parts, driver, machine, vm, disks, release });
  } catch (error) {
    onNote?.(`${record.name} cannot be taken up, and is ended: ${messageOf(error)}`);
    return undefined;
  }
}
