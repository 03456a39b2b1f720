/** Which edges live, by polls that get lost, come late, and overtake each other. */
import { describe, expect, it } from 'vitest';
import { NOTHING } from '../placement/amounts.ts';
import type { NodeReport } from '../placement/node-report.ts';
import { EdgeWatch } from '../watcher/edge-watch.ts';

const OPTIONS = { silenceMs: 5000, answersToLive: 3 };

function report(admitted: number, state: NodeReport['state'] = 'healthy'): NodeReport {
  return {
    edge: 'a',
    epoch: 'first',
    admitted,
    state,
    backends: new Map(),
    labels: new Set(),
    capacity: NOTHING,
    reserved: NOTHING,
    load: { cpu: 0, memory: 0, disk: 0 },
    users: new Map(),
    jobs: new Map(),
    heldBy: undefined,
    layers: new Set(),
  };
}

function watchOf(): EdgeWatch {
  const watch = new EdgeWatch(OPTIONS);
  watch.add('a', 0);
  return watch;
}

const seen = (watch: EdgeWatch, now: number) => watch.reports(now).map(({ admitted, state }) => [admitted, state]);

describe('an edge', () => {
  it('is nothing before its first answer, and lives with it', () => {
    const watch = watchOf();
    expect(seen(watch, 0)).toEqual([]);
    watch.missed('a', 500);
    watch.heard('a', report(1), 1000, 1001);
    expect(seen(watch, 1001)).toEqual([[1, 'healthy']]);
  });

  it('says itself that it drains', () => {
    const watch = watchOf();
    watch.heard('a', report(1, 'draining'), 1, 2);
    expect(seen(watch, 2)).toEqual([[1, 'draining']]);
  });

  it('lives while polls are lost, and is dead exactly when it was silent too long', () => {
    const watch = watchOf();
    watch.heard('a', report(1), 0, 100);
    for (let now = 1000; now < 5000; now += 1000) watch.missed('a', now);
    expect(seen(watch, 5099)).toEqual([[1, 'healthy']]);
    expect(seen(watch, 5100)).toEqual([[1, 'dead']]);
  });

  it('comes back after some answers in a row only', () => {
    const watch = watchOf();
    watch.heard('a', report(1), 0, 0);
    expect(seen(watch, 5000)).toEqual([[1, 'dead']]);
    watch.heard('a', report(2), 6000, 6000);
    watch.heard('a', report(3), 7000, 7000);
    watch.missed('a', 8000);
    watch.heard('a', report(4), 9000, 9000);
    watch.heard('a', report(5), 10_000, 10_000);
    expect(seen(watch, 10_000)).toEqual([[5, 'dead']]);
    watch.heard('a', report(6), 11_000, 11_000);
    expect(seen(watch, 11_000)).toEqual([[6, 'healthy']]);
  });

  it('is not described by answers that were overtaken', () => {
    const watch = watchOf();
    expect(watch.heard('a', report(2), 2000, 2100)).toBe(true);
    expect(watch.heard('a', report(1), 1000, 2200)).toBe(false);
    expect(watch.heard('a', report(2), 2000, 2300)).toBe(false);
    expect(seen(watch, 2300)).toEqual([[2, 'healthy']]);
    // Nor does what is old keep it alive.
    expect(watch.heard('a', report(1), 1500, 7000)).toBe(false);
    expect(seen(watch, 7100)).toEqual([[2, 'dead']]);
  });

  it('that is watched no more is gone', () => {
    const watch = watchOf();
    watch.heard('a', report(1), 1, 1);
    watch.remove('a');
    expect(seen(watch, 1)).toEqual([]);
    expect(watch.heard('a', report(2), 2, 2)).toBe(false);
  });
});

it('never flaps: 2 % of polls lost, delays up to four seconds, an hour long', () => {
  let state = 5;
  const random = () => {
    state = (Math.imul(state, 1_664_525) + 1_013_904_223) >>> 0;
    return state / 2 ** 32;
  };
  const watch = watchOf();
  const arrivals: { at: number; askedAt: number }[] = [];
  for (let askedAt = 0; askedAt < 3_600_000; askedAt += 500) {
    if (random() >= 0.02) arrivals.push({ at: askedAt + random() * 4000, askedAt });
  }
  arrivals.sort((a, b) => a.at - b.at);
  let deaths = 0;
  for (const { at, askedAt } of arrivals) {
    if (seen(watch, at)[0]?.[1] === 'dead') deaths++;
    watch.heard('a', report(askedAt), askedAt, at);
  }
  expect(deaths).toBe(0);
});
