/** Where the kernel can put memory that nobody uses. */
import { readFileSync } from 'node:fs';

export interface SwapSpace {
  /** Devices and files, as the kernel names them. */
  readonly places: readonly string[];
  readonly totalBytes: number;
  readonly freeBytes: number;
}

export function swapSpace(): SwapSpace {
  try {
    const rows = readFileSync('/proc/swaps', 'latin1').trim().split('\n').slice(1);
    const cells = rows.map((row) => row.split(/\s+/));
    const sum = (column: number) => cells.reduce((bytes, row) => bytes + Number(row[column]) * 1024, 0);
    const totalBytes = sum(2);
    return { places: cells.map((row) => row[0]!), totalBytes, freeBytes: totalBytes - sum(3) };
  } catch {
    // A kernel without any.
    return { places: [], totalBytes: 0, freeBytes: 0 };
  }
}
