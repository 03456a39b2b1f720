/** What a sandbox uses now, and has used so far: its agent and all its commands. What counts up does so as long as it lives. */
import type { AllLimits } from './limits.ts';

export interface DiskUsage {
  readonly usedBytes: number;
  readonly usedInodes: number;
  readonly limitBytes?: number;
  readonly limitInodes?: number;
}

export interface SandboxUsage {
  /** Milliseconds since 1970: what counts up is as of then. */
  readonly atMs: number;
  /** Processor time so far. */
  readonly cpuUsec: number;
  /** Of that it had to wait for its limit. */
  readonly throttledUsec?: number;
  readonly memory: {
    /** Without file pages that the kernel would take first. */
    readonly usedBytes: number;
    /** With them. */
    readonly totalBytes: number;
    readonly swapBytes?: number;
    readonly peakBytes?: number;
    /** How often the kernel ended a process because memory ran out. */
    readonly outOfMemory: number;
  };
  /** Processes and threads. */
  readonly pids: number;
  /** What reached devices so far. */
  readonly io: {
    readonly readBytes: number;
    readonly writeBytes: number;
    readonly reads: number;
    readonly writes: number;
  };
  /** Where its disk is limited. */
  readonly disk?: DiskUsage;
  readonly limits: AllLimits;
}
