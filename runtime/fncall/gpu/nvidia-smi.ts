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
  /** Of the card. */
  readonly index: number;
  /** Of an instance's card. */
  readonly cardUuid?: string;
  /** Such as `1g.10gb`, of an instance. */
  readonly profile: string | undefined;
  readonly memoryMib: number | undefined;
  /** Which one it is; undefined of a whole card, or where that is not said. */
  readonly instance?: { readonly gpuInstance: number; readonly computeInstance: number } | undefined;
}

const run = promisify(execFile);
const PATIENCE_MS = 20_000;
/** Of a card. Drivers from before there were divided cards know no mode. */
const FIELDS = 'index,memory.total';
const MODE = 'mig.mode.current';

/** Instances in place of a card that is divided. Empty where there is no driver. @throws RUNTIME_GPU */
export async function listGpus(program = 'nvidia-smi'): Promise<Gpu[]> {
  const ask = async (...args: string[]) => (await run(program, args, { timeout: PATIENCE_MS })).stdout;
  try {
    const list = await ask('-L');
    const tell = (fields: string) => ask(`--query-gpu=${fields}`, '--format=csv,noheader,nounits');
    const cards = await tell(`${FIELDS},${MODE}`).catch((error: unknown) => {
      if (typeof (error as { code?: unknown }).code === 'number') return tell(FIELDS);
      throw error;
    });
    // Long, and only of use where a card is divided.
    return parseGpus(list, cards, /^\s+MIG /m.test(list) ? await ask('-q', '-x') : '');
  } catch (error) {
    if (systemCode(error) === 'ENOENT') return [];
    throw fail('RUNTIME_GPU', { reason: messageOf(error).trim() }, error);
  }
}

/**
 * What `nvidia-smi -L` says, with a line `INDEX, MIB, MODE` or `INDEX, MIB` for each card, and of instances what `-q -x` says. A card whose mode is Enabled is divided, and
 * none as a whole, also while it has no instances.
 * @throws RUNTIME_GPU
 */
export function parseGpus(list: string, cards: string, details = ''): Gpu[] {
  const instances = parseInstances(details);
  const known = new Map(
    cards.split('\n').flatMap((line) => {
      const [index = '', mib = '', mode] = line.split(',').map((part) => part.trim());
      const memoryMib = /^\d+$/.test(mib) ? Number(mib) : undefined;
      return /^\d+$/.test(index) ? [[Number(index), { memoryMib, isDivided: mode === 'Enabled' }] as const] : [];
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
    const part = /^\s+MIG (\S+)\s+Device\s+(\d+): \(UUID: (MIG-[0-9A-Za-z/-]+)\)\s*$/.exec(line);
    if (whole !== null) {
      close();
      const index = Number(whole[1]);
      const [, , name, uuid] = whole as unknown as [string, string, string, string];
      const { memoryMib, isDivided = false } = known.get(index) ?? {};
      card = { uuid, name, index, profile: undefined, memoryMib };
      divided = isDivided;
    } else if (part !== null && card !== undefined) {
      divided = true;
      const gigabytes = /\.(\d+)gb/.exec(part[1]!)?.[1];
      const memoryMib = gigabytes === undefined ? undefined : Number(gigabytes) * 1024;
      const uuid = part[3]!;
      // Older drivers have it in the name.
      const named = /\/(\d+)\/(\d+)$/.exec(uuid);
      const instance =
        named === null
          ? instances.get(`${card.uuid} ${part[2]}`)
          : { gpuInstance: Number(named[1]), computeInstance: Number(named[2]) };
      found.push({ ...card, uuid, cardUuid: card.uuid, profile: part[1], memoryMib, instance });
    } else if (line.trim() !== '') throw fail('RUNTIME_GPU', { reason: `nvidia-smi -L says: ${line.trim()}` });
  }
  close();
  return found;
}

/** By the card's UUID and the number that `nvidia-smi -L` gives an instance. */
function parseInstances(xml: string): ReadonlyMap<string, NonNullable<Gpu['instance']>> {
  const found = new Map<string, NonNullable<Gpu['instance']>>();
  for (const [, card] of xml.matchAll(/<gpu id="[^"]*">([\s\S]*?)<\/gpu>/g)) {
    const uuid = /<uuid>(GPU-[^<]+)<\/uuid>/.exec(card!)?.[1];
    for (const [, device] of card!.matchAll(/<mig_device>([\s\S]*?)<\/mig_device>/g)) {
      const number = (name: string) => Number(new RegExp(`<${name}>(\\d+)</${name}>`).exec(device!)?.[1]);
      const instance = { gpuInstance: number('gpu_instance_id'), computeInstance: number('compute_instance_id') };
      if (Object.values(instance).every(Number.isInteger)) found.set(`${uuid} ${number('index')}`, instance);
    }
  }
  return found;
}
