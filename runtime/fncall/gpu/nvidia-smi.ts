/**
 * The graphics processors of this machine, as nvidia-smi tells them: whole cards, and the instances of those that are divided (MIG). Nothing
 * is remembered: cards and instances come and go.
 */
import { execFile } from 'node:child_process';
import { promisify } from 'node:util';
import { messageOf, systemCode } from '#base';
import { fail } from '../../errors.ts';

export interface Gpu {
  /** `GPU-...`; of an instance `MIG-...`. What CUDA_VISIBLE_DEVICES takes. */
  readonly uuid: string;
  readonly name: string;
  /** Of the card, as /dev/nvidiaN has it. */
  readonly index: number;
  /** Such as `1g.10gb`, of an instance. */
  readonly profile: string | undefined;
  readonly memoryMib: number | undefined;
}

const run = promisify(execFile);
const PATIENCE_MS = 20_000;

/** Instances in place of a card that is divided. Empty where there is no driver. @throws RUNTIME_GPU */
export async function listGpus(program = 'nvidia-smi'): Promise<Gpu[]> {
  const ask = async (...args: string[]) => (await run(program, args, { timeout: PATIENCE_MS })).stdout;
  try {
    return parseGpus(await ask('-L'), await ask('--query-gpu=index,memory.total', '--format=csv,noheader,nounits'));
  } catch (error) {
    if (systemCode(error) === 'ENOENT') return [];
    throw fail('RUNTIME_GPU', { reason: messageOf(error).trim() }, error);
  }
}

/** @throws RUNTIME_GPU */
export function parseGpus(list: string, memory: string): Gpu[] {
  const totals = new Map(
    memory.split('\n').flatMap((line) => {
      const [index, mib] = line.split(',').map((part) => part.trim());
      return index !== undefined && /^\d+$/.test(index)
        ? [[Number(index), /^\d+$/.test(mib ?? '') ? Number(mib) : undefined]]
        : [];
    }),
  );
  const found: Gpu[] = [];
  let card: Gpu | undefined;
  let divided = false;
  const close = () => {
    if (card !== undefined && !divided) found.push(card);
  };
  for (const line of list.split('\n')) {
    const whole = /^GPU (\d+): (.+) \(UUID: (GPU-[0-9a-f-]+)\)\s*$/.exec(line);
    const part = /^\s+MIG (\S+)\s+Device\s+\d+: \(UUID: (MIG-[0-9A-Za-z/-]+)\)\s*$/.exec(line);
    if (whole !== null) {
      close();
      const index = Number(whole[1]);
      card = { uuid: whole[3]!, name: whole[2]!, index, profile: undefined, memoryMib: totals.get(index) };
      divided = false;
    } else if (part !== null && card !== undefined) {
      divided = true;
      const gigabytes = /\.(\d+)gb/.exec(part[1]!)?.[1];
      const memoryMib = gigabytes === undefined ? undefined : Number(gigabytes) * 1024;
      found.push({ ...card, uuid: part[2]!, profile: part[1], memoryMib });
    } else if (line.trim() !== '') throw fail('RUNTIME_GPU', { reason: `nvidia-smi -L says: ${line.trim()}` });
  }
  close();
  return found;
}
