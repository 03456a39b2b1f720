/** Files of a sandbox that are open for writing: whoever reads them meanwhile may find them half written. */
import { lstatSync, readdirSync, readFileSync, readlinkSync } from 'node:fs';

export interface OpenFile {
  /** Inside the sandbox. */
  readonly path: string;
  /** Of the program that has it open. */
  readonly program: string;
}

const MAX_LOOKED_AT = 20_000;

/** Of those in its upper. `pids`: processes that stand still. Each path once, sorted. */
export function openForWriting(upper: string, pids: readonly number[]): OpenFile[] {
  const found = new Map<string, OpenFile>();
  let looked = 0;
  for (const pid of pids) {
    for (const fd of entriesOf(`/proc/${pid}/fd`)) {
      if (looked++ > MAX_LOOKED_AT) break;
      const path = writablePath(pid, fd, upper);
      if (path !== undefined && !found.has(path)) found.set(path, { path, program: nameOf(pid) });
    }
  }
  return [...found.values()].sort((a, b) => (a.path < b.path ? -1 : 1));
}

function writablePath(pid: number, fd: string, upper: string): string | undefined {
  try {
    const link = `/proc/${pid}/fd/${fd}`;
    const path = readlinkSync(link);
    if (!path.startsWith('/') || path.endsWith(' (deleted)')) return undefined;
    const flags = Number.parseInt(
      /^flags:\s+([0-7]+)$/m.exec(readFileSync(`/proc/${pid}/fdinfo/${fd}`, 'latin1'))![1]!,
      8,
    );
    const O_ACCMODE = 3;
    const O_RDONLY = 0;
    if ((flags & O_ACCMODE) === O_RDONLY) return undefined;
    // Whoever opened it for writing has copied it there; what is elsewhere (/dev/shm) is not of the changes.
    return lstatSync(`${upper}${path}`).isFile() ? path : undefined;
  } catch {
    // It has gone.
    return undefined;
  }
}

function entriesOf(path: string): string[] {
  try {
    return readdirSync(path);
  } catch {
    return [];
  }
}

function nameOf(pid: number): string {
  try {
    return readFileSync(`/proc/${pid}/comm`, 'utf8').trim();
  } catch {
    return 'a process that has gone';
  }
}
