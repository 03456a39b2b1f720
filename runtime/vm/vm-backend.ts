/** What ends a sandbox's virtual machine by its id alone, whoever started it, from any state: for those who undo what a killed service has left. */
import { rm } from 'node:fs/promises';
import { endOwnDevices } from '#ublk-daemon';
import type { Backend } from '../backend/backend.ts';
import { endCgroups } from '../backend/cgroup-cleanup.ts';
import { fail } from '../errors.ts';
import { removeRoot } from './firecracker/jail.ts';
import { endProcess } from './qemu/machine-process.ts';
import { vmPlaces } from './vm-places.ts';

export const MICROVM = 'microvm';

export function vmBackend(runDir: string): Backend {
  const unsupported = () => fail('RUNTIME_UNSUPPORTED', { backend: MICROVM, capability: 'one command (`dsec run`)' });
  return {
    name: MICROVM,
    capabilities: { exactSignals: true, terminal: true, hostNetwork: false },
    userNamespace: () => Promise.reject(unsupported()),
    launch: () => Promise.reject(unsupported()),
    signal: () => false,
    async remove(id) {
      const { folder, memoryFile } = vmPlaces(runDir, id);
      // Killed, it waits for its disks to close: they end before it does.
      const ended = endProcess(folder);
      await Promise.all([ended, endOwnDevices(folder)]);
      removeRoot(folder);
      await endCgroups(id);
      await rm(memoryFile, { force: true });
      await rm(folder, { recursive: true, force: true });
    },
  };
}
