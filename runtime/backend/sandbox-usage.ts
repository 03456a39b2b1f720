/** What a sandbox uses, as its control groups tell, v1 and v2: its agent and all commands. Counters go on as long as the sandbox lives. */
import { readFileSync } from 'node:fs';
import type { SandboxUsage } from '../sandbox-api/usage.ts';
import { COMMANDS_GROUP } from './command-limits.ts';
import type { Hierarchy } from './sandbox-cgroups.ts';
import { groupFolder } from './sandbox-group.ts';

type Counted = Omit<SandboxUsage, 'limits' | 'disk'>;

/** Undefined when it has no groups any more. */
export function sandboxUsage(id: string, hierarchies: readonly Hierarchy[]): Counted | undefined {
  const folderWith = (controller: string) => {
    const found = hierarchies.find(({ controllers }) => controllers.includes(controller));
    return found && { version: found.version, folder: groupFolder(found.root, id) };
  };
  const [cpu, account, memory, pids, io] = ['cpu', 'cpuacct', 'memory', 'pids', 'blkio'].map(folderWith);
  const v2 = cpu?.version === 2 || memory?.version === 2;
  const folder = (cpu ?? memory ?? pids)?.folder;
  if (folder === undefined || read(`${folder}/cgroup.procs`) === undefined) return undefined;
  return {
    atMs: Date.now(),
    ...(v2 ? cpuV2(cpu?.folder) : cpuV1(account?.folder, cpu?.folder)),
    memory: memory?.version === 2 ? memoryV2(memory.folder) : memoryV1(memory?.folder),
    pids: numberIn(`${pids?.folder}/pids.current`) ?? 0,
    io: io?.version === 2 ? ioV2(io.folder) : ioV1(io?.folder),
  };
}

function cpuV1(account: string | undefined, cpu: string | undefined) {
  const throttledNs =
    valueIn(`${cpu}/${COMMANDS_GROUP}/cpu.stat`, 'throttled_time') ?? valueIn(`${cpu}/cpu.stat`, 'throttled_time');
  return {
    cpuUsec: Math.round((numberIn(`${account}/cpuacct.usage`) ?? 0) / 1000),
    throttledUsec: throttledNs === undefined ? undefined : Math.round(throttledNs / 1000),
  };
}

function cpuV2(folder: string | undefined) {
  return {
    cpuUsec: valueIn(`${folder}/cpu.stat`, 'usage_usec') ?? 0,
    throttledUsec: valueIn(`${folder}/${COMMANDS_GROUP}/cpu.stat`, 'throttled_usec'),
  };
}

function memoryV1(folder: string | undefined): Counted['memory'] {
  const totalBytes = numberIn(`${folder}/memory.usage_in_bytes`) ?? 0;
  const inactive = valueIn(`${folder}/memory.stat`, 'total_inactive_file') ?? 0;
  const kills = [folder, `${folder}/${COMMANDS_GROUP}`].map((one) => valueIn(`${one}/memory.oom_control`, 'oom_kill'));
  return {
    totalBytes,
    usedBytes: Math.max(0, totalBytes - inactive),
    swapBytes: valueIn(`${folder}/memory.stat`, 'total_swap'),
    peakBytes: numberIn(`${folder}/memory.max_usage_in_bytes`),
    outOfMemory: kills.reduce<number>((sum, count) => sum + (count ?? 0), 0),
  };
}

function memoryV2(folder: string): Counted['memory'] {
  const totalBytes = numberIn(`${folder}/memory.current`) ?? 0;
  const inactive = valueIn(`${folder}/memory.stat`, 'inactive_file') ?? 0;
  return {
    totalBytes,
    usedBytes: Math.max(0, totalBytes - inactive),
    swapBytes: numberIn(`${folder}/memory.swap.current`),
    peakBytes: numberIn(`${folder}/memory.peak`),
    outOfMemory: valueIn(`${folder}/memory.events`, 'oom_kill') ?? 0,
  };
}

function ioV1(folder: string | undefined): Counted['io'] {
  const sum = (file: string, kind: string) =>
    (read(`${folder}/blkio.throttle.${file}_recursive`) ?? '')
      .split('\n')
      .map((line) => /^\d+:\d+ (\w+) (\d+)$/.exec(line))
      .reduce((total, found) => total + (found?.[1] === kind ? Number(found[2]) : 0), 0);
  return {
    readBytes: sum('io_service_bytes', 'Read'),
    writeBytes: sum('io_service_bytes', 'Write'),
    reads: sum('io_serviced', 'Read'),
    writes: sum('io_serviced', 'Write'),
  };
}

function ioV2(folder: string): Counted['io'] {
  const text = read(`${folder}/io.stat`) ?? '';
  const sum = (key: string) =>
    [...text.matchAll(new RegExp(`\\b${key}=(\\d+)`, 'g'))].reduce((total, found) => total + Number(found[1]), 0);
  return { readBytes: sum('rbytes'), writeBytes: sum('wbytes'), reads: sum('rios'), writes: sum('wios') };
}

function numberIn(path: string): number | undefined {
  const text = read(path)?.trim();
  return text !== undefined && /^\d+$/.test(text) ? Number(text) : undefined;
}

function valueIn(path: string, key: string): number | undefined {
  const found = new RegExp(`^${key} (\\d+)$`, 'm').exec(read(path) ?? '')?.[1];
  return found === undefined ? undefined : Number(found);
}

function read(path: string): string | undefined {
  try {
    return readFileSync(path, 'latin1');
  } catch {
    return undefined;
  }
}
