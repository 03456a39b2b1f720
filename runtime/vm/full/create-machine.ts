/** A full machine as it is asked for, checked, put on record, and begun. */
import { processIdentity } from '#linux';
import { fail } from '../../errors.ts';
import type { CreateOptions } from '../../node/create-sandbox.ts';
import { imageReference, randomSandboxName, type SandboxRecord } from '../../sandbox/sandbox-record.ts';
import { type RuntimeFolders, sandboxFolders } from '../../sandbox/state-folders.ts';
import { MACHINE_SIZES } from '../../sandbox-api/backends.ts';
import { checkedLimits } from '../../sandbox-api/limits.ts';
import { baseDisk, overlayDisk } from './base-disk.ts';
import { copyIn, diskCopyOf, diskPath } from './disk-copy.ts';
import { FULL_VM, type FullVmSandbox } from './full-vm-sandbox.ts';
import { type MachineFacts, type MachineWish, SCREEN } from './machine-facts.ts';

const MEMORY_STEP = 2 * 1024 * 1024;

/** @throws RUNTIME_LIMIT, VM_SPEC */
export function machineRecord(name: string, options: CreateOptions): SandboxRecord {
  const { store, base, requestId, ttlMs } = options;
  const limits = checkedLimits({ cpus: options.cpus, memoryBytes: options.memoryBytes });
  const now = Date.now();
  return {
    version: 1,
    name,
    id: `${name}-${randomSandboxName().slice(-8)}`,
    state: 'running',
    keep: true,
    createdAt: new Date(now).toISOString(),
    backend: FULL_VM,
    store: store.url,
    base: imageReference(base),
    toolkits: [],
    owner: processIdentity()!,
    mountPoints: [],
    limits,
    machine: options.moment?.machine ?? factsOf(name, options),
    resident: {
      requestId,
      tag: options.tag,
      defaults: { env: [], user: '', cwd: '/' },
      expiresAt: ttlMs === undefined ? undefined : new Date(now + ttlMs).toISOString(),
      idleMs: options.idleMs,
      idleAction: options.idleAction,
      class: options.class,
    },
  };
}

/** What it is made of, of what was asked for. @throws VM_SPEC */
function factsOf(name: string, options: CreateOptions): MachineFacts {
  const wish: MachineWish = options.machine ?? {};
  const { firmware = 'bios', width = SCREEN.width, height = SCREEN.height } = wish;
  for (const [field, value] of Object.entries({ width, height })) {
    if (!Number.isInteger(value) || value < SCREEN.least || value > SCREEN.most) {
      throw fail('VM_SPEC', { id: name, field, problem: `between ${SCREEN.least} and ${SCREEN.most} pixels` });
    }
  }
  const memory = options.memoryBytes ?? MACHINE_SIZES.vm.memoryBytes;
  return {
    firmware,
    width,
    height,
    cpus: Math.max(1, Math.ceil(options.cpus ?? MACHINE_SIZES.vm.cpus)),
    agentPort: true,
    clipboardPort: true,
    generationId: true,
    memoryBytes: Math.max(16, Math.floor(memory / MEMORY_STEP)) * MEMORY_STEP,
  };
}

/** Its disk, then the machine. @throws VM_*, DISK_* */
export async function beginMachine(
  sandbox: FullVmSandbox,
  { store, base, openStoreLayer, machineDisk, moment }: CreateOptions,
  folders: RuntimeFolders,
): Promise<void> {
  const { folder } = sandboxFolders(folders, sandbox.name);
  try {
    const disk = await baseDisk(store, base, folders.cacheDir, openStoreLayer);
    const copy = moment === undefined ? machineDisk : diskCopyOf(moment.folder);
    if (copy === undefined) await overlayDisk(disk, diskPath(folder), sandbox.name);
    else await copyIn(copy, folder);
  } catch (error) {
    sandbox.giveUp(error as Error);
    throw error;
  }
  await sandbox.begin(moment);
}
