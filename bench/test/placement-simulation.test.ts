/** The simulated cluster: it keeps its own rules, and shows what placement promises. */
import { expect, it } from 'vitest';
import { POLICIES } from '../placement/policies.ts';
import { simulate } from '../placement/simulation.ts';

const OPTIONS = { nodes: 40, seconds: 60, rate: 80, seed: 3, burst: { everySeconds: 10, size: 600 } };
const runs = new Map(POLICIES.map((policy) => [policy.name, simulate(policy, OPTIONS)]));
const late = (name: string) => {
  const peaks = runs.get(name)!.peakOverMean.filter(({ second }) => second > 20);
  return peaks.reduce((sum, { value }) => sum + value, 0) / peaks.length;
};

it('no node ever holds more than it can promise', () => {
  for (const { policy, overCapacity, fullest } of runs.values()) {
    expect({ policy, overCapacity }).toEqual({ policy, overCapacity: 0 });
    expect(fullest).toBeLessThanOrEqual(1);
  }
});

it('every request is placed where there is room', () => {
  const ours = runs.get('two choices, decisions laid over')!;
  expect(ours.failed).toBe(0);
  expect(ours.placed).toBeGreaterThan(7000);
});

it('spreads better than chance, than turns, than without its own decisions, and than the least loaded by stale reports', () => {
  const ours = late('two choices, decisions laid over');
  for (const name of ['random', 'round robin', 'two choices, reports alone', 'least loaded of all, reports alone']) {
    expect(ours).toBeLessThan(late(name));
  }
  expect(late('least loaded of all, knowing everything')).toBeLessThan(ours);
});

it('gives the same again', () => {
  expect(simulate(POLICIES[0]!, OPTIONS)).toEqual(runs.get(POLICIES[0]!.name));
});
