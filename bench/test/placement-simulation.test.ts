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

it('sends elsewhere what is synced, when the nodes here are full by the reports, and nothing else', () => {
  const crowded = { ...OPTIONS, nodes: 4, rate: 32, burst: undefined, seconds: 120, crashes: false };
  const overflow = { nodes: 2, above: 0.8, synced: 0.5 };
  const alone = simulate(POLICIES[0]!, crowded);
  const { elsewhere, failed, overCapacity } = simulate(POLICIES[0]!, { ...crowded, overflow });
  expect(elsewhere.placed).toBeGreaterThan(100);
  expect(elsewhere.notSynced).toBe(0);
  // Reports are up to ten seconds old: much has ended since at most.
  expect(elsewhere.leastUse).toBeGreaterThan(0.5);
  expect(overCapacity).toBe(0);
  expect(failed).toBeLessThan(alone.failed);
  const calm = simulate(POLICIES[0]!, { ...crowded, rate: 8, overflow });
  expect(calm.elsewhere.placed).toBe(0);
  // With all nodes here dead or draining for a while, too.
  const hard = simulate(POLICIES[0]!, { ...crowded, crashes: true, overflow });
  expect(hard.elsewhere.notSynced).toBe(0);
  expect(hard.overCapacity).toBe(0);
});
