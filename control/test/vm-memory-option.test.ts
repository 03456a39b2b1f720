import { describe, expect, it } from 'vitest';
import { vmMemoryOf } from '../cli/vm-memory-option.ts';

describe('--vm-memory', () => {
  const of = (vmMemory: string | undefined, backend = 'microvm') => vmMemoryOf({ vmMemory }, backend, 'dsec');

  it('names what is on; what it does not name is off', () => {
    expect(of(undefined)).toBeUndefined();
    expect(of(undefined, 'container')).toBeUndefined();
    expect(of('pmem')).toEqual({ pmem: true, reporting: false, damon: false });
    expect(of('damon,reporting')).toEqual({ pmem: false, reporting: true, damon: true });
    expect(of('pmem,reporting,damon')).toEqual({ pmem: true, reporting: true, damon: true });
    expect(of('none')).toEqual({ pmem: false, reporting: false, damon: false });
  });

  it.each(['', 'ksm', 'pmem,', 'pmem, damon', 'none,pmem'])('refuses %j', (list) => {
    expect(() => of(list)).toThrow(expect.objectContaining({ code: 'CLI_USAGE' }));
  });

  it('is for microVMs', () => {
    expect(() => of('pmem', 'container')).toThrow('--backend microvm');
    expect(() => of('none', 'vm')).toThrow('--backend microvm');
  });
});
