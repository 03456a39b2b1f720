/** Options for what a sandbox may use: of `run` and `sandbox create`, and of `sandbox update`, where `none` takes a limit away. */
import type { Command } from 'commander';
import { humanSize } from '#base';
import type { AllLimits, LimitChanges } from '#runtime';
import { fail } from '../errors.ts';
import { parseSize } from './size.ts';

export interface LimitOptions {
  readonly cpus?: string;
  readonly memory?: string;
  readonly memorySwap?: string;
  readonly pids?: string;
  readonly ioReadBps?: string;
  readonly ioWriteBps?: string;
  readonly ioReadIops?: string;
  readonly ioWriteIops?: string;
  readonly disk?: string;
  readonly inodes?: string;
}

export function withLimitOptions(command: Command, pidsText = ''): Command {
  return command
    .option('--cpus <n>', 'processor time, in processors: 0.5, 2')
    .option('--memory <size>', 'for all of it together')
    .option('--memory-swap <size>', 'memory and swap together; twice --memory by default')
    .option('--pids <n>', `processes and threads${pidsText}`)
    .option('--io-read-bps <size>', 'read from the disk that has its changes, in a second')
    .option('--io-write-bps <size>', 'written to it')
    .option('--io-read-iops <n>', 'reads from it, in a second')
    .option('--io-write-iops <n>', 'writes to it')
    .option('--disk <size>', 'what it may change on disk')
    .option('--inodes <n>', 'files and folders that it may make; with --disk');
}

type Parse = (option: string, text: string, program: string) => number;

const size: Parse = (option, text) => parseSize(option, text);
const number: Parse = (option, text, program) => {
  if (!/^\d{1,15}$/.test(text)) throw fail('CLI_USAGE', { problem: `${option} ${text}: it is no number`, program });
  return Number(text);
};
const decimal: Parse = (option, text, program) => {
  if (!/^\d{1,4}(\.\d{1,4})?$/.test(text)) {
    throw fail('CLI_USAGE', { problem: `${option} ${text}: it is a number of processors, as 0.5 or 2`, program });
  }
  return Number(text);
};

const OPTIONS: readonly (readonly [key: keyof LimitOptions, limit: keyof AllLimits, option: string, parse: Parse])[] = [
  ['cpus', 'cpus', '--cpus', decimal],
  ['memory', 'memoryBytes', '--memory', size],
  ['memorySwap', 'memorySwapBytes', '--memory-swap', size],
  ['pids', 'pids', '--pids', number],
  ['ioReadBps', 'ioReadBps', '--io-read-bps', size],
  ['ioWriteBps', 'ioWriteBps', '--io-write-bps', size],
  ['ioReadIops', 'ioReadIops', '--io-read-iops', number],
  ['ioWriteIops', 'ioWriteIops', '--io-write-iops', number],
  ['disk', 'diskBytes', '--disk', size],
  ['inodes', 'inodes', '--inodes', number],
];

/** @throws CLI_USAGE, CLI_SIZE */
export function limitsOf(options: LimitOptions, program: string): AllLimits {
  const limits: { -readonly [K in keyof AllLimits]: AllLimits[K] } = {};
  for (const [key, limit, option, parse] of OPTIONS) {
    const text = options[key];
    if (text !== undefined) limits[limit] = parse(option, text, program);
  }
  return limits;
}

/** @throws CLI_USAGE, CLI_SIZE */
export function limitChangesOf(options: LimitOptions, program: string): LimitChanges {
  const taken = OPTIONS.filter(([key]) => options[key] === 'none');
  const set = Object.fromEntries(Object.entries(options).filter(([, value]) => value !== 'none'));
  const changes = { ...limitsOf(set, program), ...Object.fromEntries(taken.map(([, limit]) => [limit, null])) };
  if (Object.keys(changes).length === 0) throw fail('CLI_USAGE', { problem: 'no limit was named', program });
  return changes;
}

/** For people: `--cpus 2 --memory 1.0 GiB`. */
export function limitNames(limits: AllLimits): string {
  const given = OPTIONS.flatMap(([, limit, option, parse]) => {
    const value = limits[limit];
    return value === undefined ? [] : [`${option} ${parse === size ? humanSize(value) : value}`];
  });
  return given.join(' ');
}
