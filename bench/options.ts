/**
 * `npm run bench -- NAME --n=7 --full`: what a run may be told.
 *
 *     --n=N     measured runs of each side
 *     --mb=N    compressed size of the layers that conversion is measured with
 *     --full    the sizes that are promised, where a benchmark runs smaller ones by default
 *     --apiservers=N  so many API servers over one PostgreSQL (cluster-scale)
 *     --hold=N  sandboxes that are there before anything is measured (cluster-scale --full)
 *     --profile=FOLDER  write processor profiles of services there, and print where their time goes (cluster-scale)
 *     --count   instructions instead of time: emulated, and slow, but without anybody else's load (ublk-loop)
 *     --keep    leave what was made in the temporary folder
 *     --clean   remove what is kept there between runs, and end (scripts/bench.mjs)
 */
import { fail } from './errors.ts';

export function hasFlag(name: 'full' | 'keep' | 'count'): boolean {
  return process.argv.includes(`--${name}`);
}

export function folderOption(name: 'profile'): string | undefined {
  const prefix = `--${name}=`;
  return process.argv.find((word) => word.startsWith(prefix))?.slice(prefix.length) || undefined;
}

export function numberOption(name: 'n' | 'mb' | 'hold' | 'apiservers', otherwise: number): number {
  const prefix = `--${name}=`;
  const given = process.argv.find((word) => word.startsWith(prefix))?.slice(prefix.length);
  if (given === undefined) return otherwise;
  const value = Number(given);
  if (!(value > 0)) throw fail('BENCH_OPTION', { name, value: given });
  return value;
}
