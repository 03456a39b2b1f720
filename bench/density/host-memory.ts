/**
 * What guests cost this machine in memory, each page once: the processes by their proportional share (PSS), with the guests' memory in it; the page cache of
 * the files behind their layers and disks by what the kernel holds of those, not by who has mapped it.
 */
import { existsSync, readFileSync } from 'node:fs';
import { cachedBytes } from '#linux';

export interface HostMemory {
  /** Of the guests: their memory as far as this machine holds it. */
  readonly guests: number;
  /** Of the processes, without the guests' memory: their code, their heaps, translated code where they are emulated. */
  readonly processes: number;
  readonly layerCache: number;
  readonly diskCache: number;
}

export interface MeasuredFiles {
  /** Files that are the guests' memory. */
  readonly memory: readonly string[];
  readonly layers: readonly string[];
  readonly disks: readonly string[];
}

export function hostMemory(pids: readonly number[], files: MeasuredFiles): HostMemory {
  const bytesOf = (path: string) => (existsSync(path) ? (cachedBytes(path) ?? 0) : 0);
  const sum = (paths: readonly string[]) => paths.reduce((all, path) => all + bytesOf(path), 0);
  const counted = new Set([...files.memory, ...files.layers]);
  let processes = 0;
  for (const pid of pids) processes += ownPss(pid, counted);
  return { guests: sum(files.memory), processes, layerCache: sum(files.layers), diskCache: sum(files.disks) };
}

export function totalBytes({ guests, processes, layerCache, diskCache }: HostMemory): number {
  return guests + processes + layerCache + diskCache;
}

/** PSS of a process without its mappings of the files that are counted as files. Of one that has ended: nothing. */
function ownPss(pid: number, without: ReadonlySet<string>): number {
  let text: string;
  try {
    text = readFileSync(`/proc/${pid}/smaps`, 'latin1');
  } catch {
    return 0;
  }
  return parsePss(text, without);
}

export function parsePss(smaps: string, without: ReadonlySet<string>): number {
  let bytes = 0;
  let counts = true;
  for (const line of smaps.split('\n')) {
    const mapping = /^[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ \d+\s*(.*)$/.exec(line);
    if (mapping !== null) counts = !without.has(mapping[1]!.replace(/ \(deleted\)$/, ''));
    else if (counts && line.startsWith('Pss:')) bytes += Number(/\d+/.exec(line)![0]) * 1024;
  }
  return bytes;
}
