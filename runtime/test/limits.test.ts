/** What limits can be asked for, and that they are held on this machine as it is. */
import { describe, expect, it } from 'vitest';
import { changedLimits, checkedLimits } from '../sandbox-api/limits.ts';
import { residentLimits } from './limits-suite.ts';

const MIB = 1 << 20;

describe('limits as they are asked for', () => {
  it.each([
    [{ cpus: 0 }],
    [{ cpus: Number.NaN }],
    [{ memoryBytes: 1.5 * MIB + 0.5 }],
    [{ memoryBytes: 1 }],
    [{ pids: 0 }],
    [{ ioReadBps: -1 }],
    [{ diskBytes: MIB }],
    [{ inodes: 1000 }],
    [{ memorySwapBytes: 64 * MIB }],
    [{ memoryBytes: 64 * MIB, memorySwapBytes: 63 * MIB }],
  ])('are refused where nothing could hold them: %j', (limits) => {
    expect(() => checkedLimits(limits)).toThrow(/^limit /);
  });

  it('change one by one, and are taken away by null', () => {
    const before = { cpus: 1, memoryBytes: 64 * MIB, memorySwapBytes: 64 * MIB, pids: 10 };
    expect(changedLimits(before, { cpus: null, pids: 20 })).toEqual({
      memoryBytes: 64 * MIB,
      memorySwapBytes: 64 * MIB,
      pids: 20,
    });
    expect(changedLimits(before, { memoryBytes: null })).toEqual({ cpus: 1, pids: 10 });
    expect(() => changedLimits(before, { memoryBytes: 128 * MIB })).toThrow(/memorySwapBytes/);
  });
});

residentLimits('here');
