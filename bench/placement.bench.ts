/**
 * How evenly placement spreads sandboxes on reports that are seconds old, in a simulated cluster of 160 nodes in virtual time: the
 * fullest node over the mean, against random choice, round robin, and the least loaded node with full and with stale knowledge. No
 * clock is read.
 */
import { atMost, type Benchmark, type Result, round } from './benchmark.ts';
import { lineChart } from './figures/svg.ts';
import { numberOption } from './options.ts';
import { POLICIES } from './placement/policies.ts';
import { simulate } from './placement/simulation.ts';
import { printTable, saveFigure } from './results.ts';
import { median, quantile } from './sample.ts';

/** Before this the cluster fills up. */
const SETTLED_SECONDS = 60;
const NODES = 160;
/** Fills somewhat more than half of the cluster; bursts come on top. */
const REQUESTS_A_SECOND = 450;

export const benchmark: Benchmark = {
  name: 'placement',
  about: 'peak over mean load of 160 simulated nodes, against random, round robin and full knowledge',
  run,
};

async function run(): Promise<Result> {
  const seconds = numberOption('n', 140);
  const runs = POLICIES.map((policy) => {
    const result = simulate(policy, {
      nodes: NODES,
      seconds,
      rate: REQUESTS_A_SECOND,
      seed: 7,
      burst: { everySeconds: 20, size: 4000 },
    });
    const peaks = result.peakOverMean.filter(({ second }) => second >= SETTLED_SECONDS).map(({ value }) => value);
    return { result, p50: median(peaks), p99: quantile(peaks, 0.99) };
  });
  printTable([
    ['policy', 'peak / mean', 'p99', 'fullest node', 'refusals a request', 'no room'],
    ...runs.map(({ result, p50, p99 }) => [
      result.policy,
      p50.toFixed(3),
      p99.toFixed(3),
      `${(result.fullest * 100).toFixed(0)} %`,
      result.refusalsPerRequest.toFixed(4),
      String(result.failed),
    ]),
  ]);
  const figure = saveFigure(
    'placement',
    lineChart({
      title: `Fullest node over the mean, ${NODES} nodes, reports 1 to 10 s old`,
      xLabel: 'virtual seconds',
      yLabel: 'peak / mean',
      series: runs.map(({ result }) => ({
        label: result.policy,
        points: result.peakOverMean
          .filter(({ second }) => second % 4 === 0)
          .map(({ second, value }) => [second, value] as const),
      })),
    }),
  );
  const of = (name: string) => runs.find(({ result }) => result.policy === name)!;
  const ours = runs[0]!;
  const knowing = of('least loaded of all, knowing everything');
  const ratio = round(ours.p50 / knowing.p50);
  return {
    ratio,
    ...atMost(1.2, ratio),
    against: 'the least loaded node of all, by figures that are never old (peak over mean, same requests)',
    n: seconds - SETTLED_SECONDS,
    p50: round(ours.p50),
    p99: round(ours.p99),
    unit: 'ratio',
    figure,
    policies: runs.map(({ result, p50, p99 }) => ({ policy: result.policy, p50: round(p50), p99: round(p99) })),
  };
}
