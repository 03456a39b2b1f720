/** Amounts of the four resources that quotas count, and the columns they are kept in. */
import { fail } from '../errors.ts';
import { RESOURCES, type Resource, type ResourceAmounts } from './iam.ts';

export const COLUMNS: Readonly<Record<Resource, string>> = {
  sandboxes: 'sandboxes',
  cpuMilli: 'cpu_milli',
  memoryBytes: 'memory_bytes',
  diskBytes: 'disk_bytes',
};

/** Where no limit is set. Sums stay exact up to here, so it is one. */
export const UNLIMITED = Number.MAX_SAFE_INTEGER;

export type Row = Readonly<Record<string, number | string | null>>;

/** `used_` and the like, for SELECT. */
export function columns(prefix = ''): string {
  return RESOURCES.map((resource) => `${prefix}${COLUMNS[resource]}`).join(', ');
}

export function amountsOf(row: Row, prefix = ''): Record<Resource, number> {
  return Object.fromEntries(
    RESOURCES.map((resource) => [resource, Number(row[`${prefix}${COLUMNS[resource]}`] ?? 0)]),
  ) as Record<Resource, number>;
}

export function limitsOf(row: Row): Partial<Record<Resource, number>> {
  const limits: Partial<Record<Resource, number>> = {};
  for (const resource of RESOURCES) {
    const limit = row[`limit_${COLUMNS[resource]}`];
    if (limit !== null && limit !== undefined) limits[resource] = Number(limit);
  }
  return limits;
}

/** @throws IAM_BAD_REQUEST */
export function checkAmounts(amounts: ResourceAmounts): void {
  for (const resource of RESOURCES) {
    const amount: unknown = amounts[resource];
    if (!Number.isSafeInteger(amount) || (amount as number) < 0) {
      throw fail('IAM_BAD_REQUEST', {
        problem: `${resource} ${String(amount)}: not a whole number from 0 to 2^53 - 1`,
      });
    }
  }
}
