/**
 * What a sandbox asks for, and what an edge can promise. An edge states what it is willing to promise: how far it promises more
 * processor time or memory than it has is its own business, so here every amount is hard.
 */

export const RESOURCES = ['cpuMilli', 'memoryBytes', 'diskBytes', 'gpus'] as const;
export type Resource = (typeof RESOURCES)[number];

/** `cpuMilli`: thousandths of a core. */
export type Amounts = Readonly<Record<Resource, number>>;

export const NOTHING: Amounts = { cpuMilli: 0, memoryBytes: 0, diskBytes: 0, gpus: 0 };

export function sum(a: Amounts, b: Amounts): Amounts {
  return {
    cpuMilli: a.cpuMilli + b.cpuMilli,
    memoryBytes: a.memoryBytes + b.memoryBytes,
    diskBytes: a.diskBytes + b.diskBytes,
    gpus: a.gpus + b.gpus,
  };
}

export function difference(a: Amounts, b: Amounts): Amounts {
  return {
    cpuMilli: a.cpuMilli - b.cpuMilli,
    memoryBytes: a.memoryBytes - b.memoryBytes,
    diskBytes: a.diskBytes - b.diskBytes,
    gpus: a.gpus - b.gpus,
  };
}

/** Of each resource the larger one. */
export function larger(a: Amounts, b: Amounts): Amounts {
  return {
    cpuMilli: Math.max(a.cpuMilli, b.cpuMilli),
    memoryBytes: Math.max(a.memoryBytes, b.memoryBytes),
    diskBytes: Math.max(a.diskBytes, b.diskBytes),
    gpus: Math.max(a.gpus, b.gpus),
  };
}

/** The first resource of which `capacity` has not enough for `used` and `more`. */
export function lacking(capacity: Amounts, used: Amounts, more: Amounts): Resource | undefined {
  return RESOURCES.find((resource) => more[resource] > 0 && used[resource] + more[resource] > capacity[resource]);
}

/** 0 to 1 and above; what there is none of counts as unused. */
export function share(used: number, capacity: number): number {
  return capacity > 0 ? used / capacity : 0;
}

/** Of the resource that is used most. */
export function dominantShare(used: Amounts, capacity: Amounts): number {
  return Math.max(...RESOURCES.map((resource) => share(used[resource], capacity[resource])));
}
