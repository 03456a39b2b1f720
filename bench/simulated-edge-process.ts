/** Starts processes of simulated edges (simulated-edges.ts), and tells where they listen and what they have cost. */
import { type ChildProcess, spawn } from 'node:child_process';
import { once } from 'node:events';
import { readFileSync } from 'node:fs';
import { createInterface } from 'node:readline';
import { processEntry } from '#base';

export interface SimulatedEdgesOrder {
  readonly names: readonly string[];
  readonly token: string;
  /** Sandboxes that each of them takes. */
  readonly sandboxes: number;
  /** What else it promises: without a bound where nothing is said. */
  readonly capacity?: { readonly cpuMilli?: number; readonly memoryBytes?: number; readonly diskBytes?: number };
  readonly createMs?: number;
  readonly labels?: readonly string[];
  readonly host?: string;
}

export interface SimulatedEdges {
  readonly pids: readonly number[];
  readonly edges: readonly { readonly edge: string; readonly url: string }[];
  /** Of all its processes: processor time so far, and memory now. */
  usage(): { readonly cpuSeconds: number; readonly residentBytes: number };
  close(): Promise<void>;
}

/** `processes` of them share the edges of `order`. */
export async function startSimulatedEdges(
  order: SimulatedEdgesOrder,
  processes = 1,
  nodeOptions: readonly string[] = [],
): Promise<SimulatedEdges> {
  const children: ChildProcess[] = [];
  const close = async () => {
    await Promise.all(
      children.map(async (child) => {
        if (child.exitCode !== null || child.signalCode !== null) return;
        const ended = once(child, 'exit');
        child.stdin!.end();
        await ended;
      }),
    );
  };
  try {
    const parts = Array.from({ length: processes }, (_, part) =>
      order.names.filter((_name, k) => k % processes === part),
    );
    const edges = await Promise.all(parts.map((names) => startOne({ ...order, names }, children, nodeOptions)));
    const pids = children.map(({ pid }) => pid!);
    return { pids, edges: edges.flat(), close, usage: () => usageOf(pids) };
  } catch (error) {
    await close();
    throw error;
  }
}

async function startOne(order: SimulatedEdgesOrder, children: ChildProcess[], nodeOptions: readonly string[]) {
  const entry = processEntry('simulated-edges', new URL('./simulated-edges.ts', import.meta.url));
  const child = spawn(process.execPath, [...nodeOptions, ...entry, JSON.stringify(order)], {
    stdio: ['pipe', 'pipe', 'inherit'],
  });
  children.push(child);
  child.stdin!.on('error', () => {});
  const gone = once(child, 'exit').then(([code]) => {
    throw new Error(`simulated edges ended with ${code}`);
  });
  gone.catch(() => {});
  const lines = createInterface({ input: child.stdout! });
  const [line] = (await Promise.race([once(lines, 'line'), gone])) as [string];
  return JSON.parse(line) as { edge: string; url: string }[];
}

const TICKS_A_SECOND = 100;
const PAGE_BYTES = 4096;

function usageOf(pids: readonly number[]) {
  let cpuSeconds = 0;
  let residentBytes = 0;
  for (const pid of pids) {
    try {
      const stat = readFileSync(`/proc/${pid}/stat`, 'latin1');
      const fields = stat.slice(stat.lastIndexOf(')') + 2).split(' ');
      cpuSeconds += (Number(fields[11]) + Number(fields[12])) / TICKS_A_SECOND;
      residentBytes += Number(readFileSync(`/proc/${pid}/statm`, 'latin1').split(' ')[1]) * PAGE_BYTES;
    } catch {
      // It has ended.
    }
  }
  return { cpuSeconds, residentBytes };
}
