/** What the API tells of sandboxes. Fields that it may add later are there too. */
import type { NetworkPolicy, SandboxLimits } from './run-args.ts';

export interface SandboxEnd {
  readonly reason: string;
  readonly detail: string;
  readonly at: string;
}

export interface SandboxView {
  /** `NAME.EDGE`. */
  readonly id: string;
  readonly name: string;
  readonly edge?: string;
  readonly state: 'running' | 'paused' | 'ended';
  readonly end?: SandboxEnd;
  readonly project?: string;
  readonly user?: string;
  readonly job?: string;
  readonly createdAt?: string;
  readonly expiresAt?: string;
  readonly limits?: SandboxLimits;
  readonly [more: string]: unknown;
}

export interface PauseReport {
  readonly pausedAt: string;
  readonly beforeBytes: number;
  readonly afterBytes: number;
  readonly reason?: string;
}

/** A number more than are limited; null takes a limit away. */
export type LimitChanges = { readonly [Limit in keyof SandboxLimits]?: number | null };

export interface SandboxUsage {
  readonly atMs: number;
  readonly cpuUsec: number;
  readonly throttledUsec?: number;
  readonly memory: {
    readonly usedBytes: number;
    readonly totalBytes: number;
    readonly swapBytes?: number;
    readonly peakBytes?: number;
    readonly outOfMemory: number;
  };
  readonly pids: number;
  readonly io: {
    readonly readBytes: number;
    readonly writeBytes: number;
    readonly reads: number;
    readonly writes: number;
  };
  readonly disk?: { readonly usedBytes: number; readonly usedInodes: number; readonly limitBytes?: number };
  readonly limits: SandboxLimits;
}

export interface NetworkView {
  readonly mode: string;
  readonly ipv4?: string;
  readonly ipv6?: string;
  readonly policy?: NetworkPolicy;
}

export interface PackedImage {
  readonly name: string;
  readonly digest: string;
  readonly [more: string]: unknown;
}
