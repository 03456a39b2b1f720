/**
 * How hard the machine is pressed, as an edge measures it before it takes another sandbox: what is left of memory and disk, how busy the processors
 * are, and how much work waits (PSI), which tells of trouble before anything has run out.
 */
import { readFileSync, statfsSync } from 'node:fs';
import { join } from 'node:path';

export interface Pressure {
  /** 0 to 1 of all processors, since the measurement before. */
  readonly cpuBusy: number;
  readonly memoryTotalBytes: number;
  readonly memoryAvailableBytes: number;
  readonly diskTotalBytes: number;
  readonly diskFreeBytes: number;
  /** Share of the last ten seconds in which some task waited, 0 to 1; undefined where the kernel does not tell. */
  readonly waiting: {
    readonly cpu: number | undefined;
    readonly memory: number | undefined;
    readonly io: number | undefined;
  };
}

export interface PressureOptions {
  /** On the file system that uppers lie on. */
  readonly stateDir: string;
  /** For tests. */
  readonly procDir?: string;
}

/** Each call measures processor time since the one before; the first since the start of the machine. */
export class PressureGauge {
  private readonly options: PressureOptions;
  private before = { busy: 0, all: 0 };

  constructor(options: PressureOptions) {
    this.options = options;
  }

  measure(): Pressure {
    const { stateDir, procDir = '/proc' } = this.options;
    const times = processorTimes(readFileSync(join(procDir, 'stat'), 'latin1'));
    const all = times.all - this.before.all;
    const cpuBusy = all > 0 ? (times.busy - this.before.busy) / all : 0;
    this.before = times;
    const memory = memoryOf(readFileSync(join(procDir, 'meminfo'), 'latin1'));
    const disk = statfsSync(stateDir);
    const waiting = (what: string) => waitingShare(join(procDir, 'pressure', what));
    return {
      cpuBusy,
      memoryTotalBytes: memory.total,
      memoryAvailableBytes: memory.available,
      diskTotalBytes: disk.blocks * disk.bsize,
      diskFreeBytes: disk.bavail * disk.bsize,
      waiting: { cpu: waiting('cpu'), memory: waiting('memory'), io: waiting('io') },
    };
  }
}

/** In ticks of all processors. */
function processorTimes(stat: string): { busy: number; all: number } {
  const fields = /^cpu +(.*)$/m.exec(stat)?.[1]?.split(' ').map(Number) ?? [];
  // Time of guests is in user time already.
  const all = fields.slice(0, 8).reduce((sum, ticks) => sum + ticks, 0);
  const [idle = 0, waitingForDisks = 0] = fields.slice(3, 5);
  return { busy: all - idle - waitingForDisks, all };
}

function memoryOf(meminfo: string): { total: number; available: number } {
  const of = (name: string) => Number(new RegExp(`^${name}: +(\\d+) kB$`, 'm').exec(meminfo)?.[1] ?? 0) * 1024;
  return { total: of('MemTotal'), available: of('MemAvailable') };
}

function waitingShare(path: string): number | undefined {
  let text: string;
  try {
    text = readFileSync(path, 'latin1');
  } catch {
    return undefined; // a kernel without PSI, or one that was told not to
  }
  const percent = /^some avg10=([\d.]+)/m.exec(text)?.[1];
  return percent === undefined ? undefined : Number(percent) / 100;
}
