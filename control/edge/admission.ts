/**
 * Whether an edge takes one more sandbox. Placement decides on figures that are seconds old; the edge knows better and has the last word:
 * it never promises more than it has, and under pressure it promises nothing.
 */
import { type Amounts, lacking } from '../placement/amounts.ts';
import type { Pressure } from './pressure.ts';

export interface AdmissionLimits {
  /** What it may promise in all; more processor time or memory than the machine has is its owner's decision. */
  readonly capacity: Amounts;
  /** Sandboxes of each backend that the machine has; others are refused here, and placed elsewhere. */
  readonly sandboxes: ReadonlyMap<string, number>;
  /** Left free of memory and disk, 0 to 1. */
  readonly memoryReserve: number;
  readonly diskReserve: number;
  /** Of the last ten seconds, 0 to 1: with more waiting than this nothing is taken. */
  readonly mostWaiting: { readonly cpu: number; readonly memory: number; readonly io: number };
}

export interface Holding {
  readonly reserved: Amounts;
  readonly sandboxes: ReadonlyMap<string, number>;
  readonly users: ReadonlyMap<string, number>;
  readonly heldBy: string | undefined;
  readonly draining: boolean;
}

export interface AdmissionRequest {
  readonly user: string;
  readonly backend: string;
  readonly amounts: Amounts;
  readonly alone: boolean;
}

/** Undefined: it may come. Else the reason, for people. */
export function refusal(
  request: AdmissionRequest,
  holding: Holding,
  pressure: Pressure,
  limits: AdmissionLimits,
): string | undefined {
  if (holding.draining) return 'the node is draining';
  const limit = limits.sandboxes.get(request.backend);
  if (limit === undefined) return `the node has no ${request.backend}`;
  if ((holding.sandboxes.get(request.backend) ?? 0) >= limit) return `the node takes ${limit} of ${request.backend}`;
  const short = lacking(limits.capacity, holding.reserved, request.amounts);
  if (short !== undefined) return `the node has promised what it has of ${short}`;
  if (holding.heldBy !== undefined && holding.heldBy !== request.user) return 'the node is held by another user';
  if (request.alone && [...holding.users].some(([user, count]) => user !== request.user && count > 0)) {
    return 'the node has sandboxes of other users';
  }
  return underPressure(pressure, limits);
}

function underPressure(pressure: Pressure, limits: AdmissionLimits): string | undefined {
  const memory = pressure.memoryAvailableBytes / pressure.memoryTotalBytes;
  if (memory < limits.memoryReserve) return `${percent(memory)} of memory is left`;
  const disk = pressure.diskFreeBytes / pressure.diskTotalBytes;
  if (disk < limits.diskReserve) return `${percent(disk)} of the disk is left`;
  for (const [what, most] of Object.entries(limits.mostWaiting)) {
    const waiting = pressure.waiting[what as keyof Pressure['waiting']];
    if (waiting !== undefined && waiting > most) return `work waits for ${what} ${percent(waiting)} of the time`;
  }
  return undefined;
}

function percent(share: number): string {
  return `${Math.round(share * 100)} %`;
}
