/** benny for one group of cases, silent but for one line each: how many bytes a second each case works through. */
import { add, configure, cycle, suite } from 'benny';
import { round } from '../benchmark.ts';

export interface Case {
  readonly name: string;
  readonly bytes: number;
  run(): unknown;
}

export interface Speed {
  readonly name: string;
  readonly mbPerSecond: number;
  readonly p50Ms: number;
  readonly p99Ms: number;
  readonly samples: number;
}

const OPTIONS = { minSamples: 5, maxTime: 1 };

export async function measure(title: string, cases: readonly Case[]): Promise<Speed[]> {
  const speeds: Speed[] = [];
  console.log(title);
  const { results } = await suite(
    title,
    configure({ cases: OPTIONS }),
    ...cases.map(({ name, run }) => add(name, () => run())),
    cycle(() => ''),
  );
  for (const { name, details, samples } of results) {
    const { bytes } = cases.find((one) => one.name === name)!;
    const sorted = [...details.sampleResults].sort((a, b) => a - b);
    const speed = {
      name,
      mbPerSecond: round(bytes / 1e6 / details.median),
      p50Ms: round(details.median * 1000),
      p99Ms: round(sorted[Math.min(sorted.length - 1, Math.floor(sorted.length * 0.99))]! * 1000),
      samples,
    };
    speeds.push(speed);
    console.log(`  ${name.padEnd(28)} ${speed.mbPerSecond.toFixed(0).padStart(6)} MB/s`);
  }
  return speeds;
}
