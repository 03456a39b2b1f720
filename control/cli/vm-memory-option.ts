/** `--vm-memory` of `dsec sandbox create`: which measures keep a virtual machine's memory small (docs/density.md). */
import type { Command } from 'commander';
import { MEMORY_OPTIONS, type MemoryOptions } from '#runtime';
import { fail } from '../errors.ts';

export interface VmMemoryOption {
  readonly vmMemory?: string;
}

const NONE = 'none';

export function withVmMemoryOption(command: Command): Command {
  return command.option(
    '--vm-memory <list>',
    `of a microvm, what keeps its memory small: of ${MEMORY_OPTIONS.join(',')}, or ${NONE}; all that this machine has by default`,
  );
}

/** What is not named is off. @throws CLI_USAGE */
export function vmMemoryOf(
  { vmMemory }: VmMemoryOption,
  backend: string,
  program: string,
): Required<MemoryOptions> | undefined {
  if (vmMemory === undefined) return undefined;
  const refuse = (problem: string) => fail('CLI_USAGE', { problem, program });
  if (backend !== 'microvm') throw refuse('--vm-memory is for --backend microvm');
  const named = vmMemory === NONE ? [] : vmMemory.split(',');
  for (const name of named) {
    if (!(MEMORY_OPTIONS as readonly string[]).includes(name)) {
      throw refuse(`--vm-memory ${vmMemory}: ${JSON.stringify(name)} is none of ${MEMORY_OPTIONS.join(', ')}, ${NONE}`);
    }
  }
  const has = (name: keyof MemoryOptions) => named.includes(name);
  return { pmem: has('pmem'), reporting: has('reporting'), damon: has('damon') };
}
