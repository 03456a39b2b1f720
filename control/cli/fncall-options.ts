/** Options of pools, for `dsec fncall pool` and `dsec serve fncall`. */
import { readFileSync } from 'node:fs';
import type { Command } from 'commander';
import { messageOf } from '#base';
import { fail } from '../errors.ts';
import type { PoolAsked } from '../fncall/task-schemas.ts';
import { parseDuration } from './duration.ts';
import { repeated } from './repeated.ts';
import { parseSize } from './size.ts';

export interface PoolFlags {
  readonly image?: string;
  readonly store?: string;
  readonly workspace?: string;
  readonly toolkit?: string[];
  readonly floor?: string;
  readonly ceiling?: string;
  readonly queue?: string;
  readonly queueTime?: string;
  readonly idleTime?: string;
  readonly language?: string[];
  readonly languages?: string;
  readonly env?: string[];
  readonly pythonImport?: string[];
  readonly python?: boolean;
  readonly cpus?: string;
  readonly gpu?: string;
  readonly gpuProfile?: string;
  readonly gpuMemory?: string;
}

export function withPoolOptions(command: Command): Command {
  return command
    .option('--store <url>', 'of its images (default: $DSEC_STORE, else this user’s)')
    .option('--workspace <image>', 'above the image')
    .option('--toolkit <image>', 'above that; may be given several times', repeated)
    .option('--floor <n>', 'containers that are there though nobody calls (default: 0)')
    .option('--ceiling <n>', 'containers at most (default: 8)')
    .option('--queue <n>', 'calls that may wait for one; one more is refused (default: 256)')
    .option('--queue-time <time>', 'how long a call waits before it is refused (default: 30s)')
    .option('--idle-time <time>', 'a container above the floor that was not used for so long goes (default: 60s)')
    .option('--language <name>', 'take this one alone; may be given several times', repeated)
    .option(
      '--languages <file>',
      'JSON: rows {file, compile, run, env} by name, in place of those of the table or beside them',
    )
    .option('--env <name=value>', 'for every task; may be given several times', repeated)
    .option('--python', 'a Python that has started waits in each container; a task gets a fork of it')
    .option('--python-import <module>', 'the same, with this module imported; may be given several times', repeated)
    .option('--cpus <n>', 'processors of one container (default: as many as there are)')
    .option('--gpu <mode>', 'each container has a graphics processor: exclusive, or shared with up to three others')
    .option('--gpu-profile <name>', 'with --gpu: an instance (MIG) of this profile, such as 1g.10gb')
    .option('--gpu-memory <size>', 'with --gpu: one that has so much memory');
}

/** @throws CLI_USAGE, CLI_DURATION */
export function poolAsked(options: PoolFlags, program: string): PoolAsked {
  const usage = (problem: string) => fail('CLI_USAGE', { problem, program });
  const number = (flag: string, text: string | undefined) => {
    if (text === undefined) return undefined;
    if (!/^\d{1,9}(\.\d{1,3})?$/.test(text)) throw usage(`${flag} ${text}: it is no number`);
    return Number(text);
  };
  const time = (flag: string, text: string | undefined) => (text === undefined ? undefined : parseDuration(flag, text));
  const { image, store, workspace, toolkit, language, env, pythonImport } = options;
  if (image === undefined) throw usage('--image is missing');
  const python = options.python === true || pythonImport !== undefined ? { imports: pythonImport ?? [] } : undefined;
  return {
    image,
    store,
    workspace,
    toolkits: toolkit,
    floor: number('--floor', options.floor),
    ceiling: number('--ceiling', options.ceiling),
    queue: number('--queue', options.queue),
    queueMs: time('--queue-time', options.queueTime),
    idleMs: time('--idle-time', options.idleTime),
    languages: language,
    table: options.languages === undefined ? undefined : readTable(options.languages, usage),
    env,
    python,
    cpus: number('--cpus', options.cpus),
    gpu: gpuAsked(options, usage),
  };
}

function gpuAsked(options: PoolFlags, usage: (problem: string) => Error): PoolAsked['gpu'] {
  const { gpu: mode, gpuProfile: profile, gpuMemory } = options;
  if (mode === undefined) {
    if (profile !== undefined || gpuMemory !== undefined) throw usage('--gpu exclusive or --gpu shared is missing');
    return undefined;
  }
  if (mode !== 'exclusive' && mode !== 'shared') throw usage(`--gpu ${mode}: exclusive or shared`);
  const memoryMib = gpuMemory === undefined ? undefined : Math.ceil(parseSize('--gpu-memory', gpuMemory) / 2 ** 20);
  return { mode, profile, memoryMib };
}

function readTable(file: string, usage: (problem: string) => Error): PoolAsked['table'] {
  try {
    return JSON.parse(readFileSync(file, 'utf8')) as PoolAsked['table'];
  } catch (error) {
    throw usage(`--languages ${file}: ${messageOf(error)}`);
  }
}
