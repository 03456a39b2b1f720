/**
 * Where a sandbox's virtual machine is on this node. All of it follows from the sandbox's id, so that whoever ends it needs no more. The paths are short:
 * addresses of sockets end at 107 bytes. The run folder goes with a reboot, as machines do.
 */
import { createHash } from 'node:crypto';
import { join } from 'node:path';

export interface VmPlaces {
  /** The driver's, with the sockets. */
  readonly folder: string;
  readonly agentSocket: string;
  readonly diskSocket: string;
  readonly memoryFile: string;
}

export const AGENT_PORT = 'dsec.agent';

export function vmPlaces(runDir: string, id: string): VmPlaces {
  const mark = createHash('sha256').update(`${runDir}\0${id}`).digest('hex').slice(0, 16);
  const folder = join(runDir, 'vm', mark);
  return {
    folder,
    agentSocket: join(folder, 'agent.sock'),
    diskSocket: join(folder, 'disk.sock'),
    memoryFile: `/dev/shm/dsec-vm-${mark}`,
  };
}
