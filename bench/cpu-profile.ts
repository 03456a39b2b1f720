/**
 * Processor profiles of services under a benchmark (`node --cpu-prof`): how a process is told to write one, and where its time went: the functions that took
 * most of it themselves, and the share of what is neither idle nor theirs (`(program)`: system calls and other native code; `(garbage collector)`).
 */
import { readdirSync, readFileSync } from 'node:fs';
import { join } from 'node:path';

/** Options of node for a process that writes its profiles there when it ends. */
export function profileOptions(folder: string): string[] {
  return ['--cpu-prof', `--cpu-prof-dir=${folder}`, '--cpu-prof-interval=1000'];
}

interface Profile {
  readonly nodes: readonly {
    readonly id: number;
    readonly callFrame: { readonly functionName: string; readonly url: string; readonly lineNumber: number };
  }[];
  readonly samples: readonly number[];
  readonly timeDeltas: readonly number[];
}

export interface SelfTime {
  readonly name: string;
  /** Of the time that was not idle. */
  readonly share: number;
  readonly ms: number;
}

/** Of all profiles in the folder together. */
export function selfTimes(folder: string): readonly SelfTime[] {
  const byName = new Map<string, number>();
  for (const file of readdirSync(folder).filter((name) => name.endsWith('.cpuprofile'))) {
    const { nodes, samples, timeDeltas } = JSON.parse(readFileSync(join(folder, file), 'utf8')) as Profile;
    const names = new Map(nodes.map(({ id, callFrame }) => [id, nameOf(callFrame)]));
    for (const [at, id] of samples.entries()) {
      const name = names.get(id) ?? '?';
      byName.set(name, (byName.get(name) ?? 0) + Math.max(0, timeDeltas[at]!) / 1000);
    }
  }
  byName.delete('(idle)');
  byName.delete('(root)');
  const all = [...byName.values()].reduce((sum, ms) => sum + ms, 0);
  return [...byName]
    .map(([name, ms]) => ({ name, ms, share: all > 0 ? ms / all : 0 }))
    .sort((one, other) => other.ms - one.ms);
}

function nameOf({ functionName, url, lineNumber }: Profile['nodes'][number]['callFrame']): string {
  const name = functionName === '' ? '(anonymous)' : functionName;
  const file = url.replace(/^.*\//, '');
  return file === '' ? name : `${name} ${file}:${lineNumber + 1}`;
}
