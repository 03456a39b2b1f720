/**
 * What a file `<name>.bench.ts` exports as `benchmark`, and what comes of it. The runner, scripts/bench.mjs, adds the name
 * and the machine and prints the result as one line of JSON.
 */

export interface Benchmark {
  readonly name: string;
  /** One line: what is measured, against what. */
  readonly about: string;
  /** Why it cannot run here (which tool is missing, how to get it); undefined when it can. */
  needs?(): string | undefined | Promise<string | undefined>;
  run(): Promise<Result>;
}

export interface Result {
  /** Of the peer's time to ours (more is better), or of our size to the peer's (less is better): see `target`. */
  readonly ratio: number | undefined;
  /** `>= 1.3`, `<= 1`; undefined where nothing was promised. */
  readonly target: string | undefined;
  /** Of all that was promised, also below in the details; undefined where nothing was. */
  readonly met: boolean | undefined;
  /** The peer with its version and the command line that was measured. */
  readonly against: string;
  /** Measured runs of each side. */
  readonly n: number;
  /** Of our side, in `unit`. */
  readonly p50: number;
  readonly p99: number;
  /** `ratio`: of sizes that have none of their own. */
  readonly unit: 'ms' | 'bytes' | 'MB/s' | 'ratio';
  readonly [detail: string]: unknown;
}

/** `>= 1.3`, and whether `ratio` keeps it. */
export function atLeast(target: number, ratio: number): { target: string; met: boolean } {
  return { target: `>= ${target}`, met: ratio >= target };
}

export function atMost(target: number, ratio: number): { target: string; met: boolean } {
  return { target: `<= ${target}`, met: ratio <= target };
}

/** Three digits are all that a measurement here is worth. */
export function round(value: number): number {
  return Number(value.toPrecision(Math.abs(value) >= 1000 ? 6 : 3));
}
