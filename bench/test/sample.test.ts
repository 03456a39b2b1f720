import { expect, it } from 'vitest';
import { inTurn, median, quantile, summary } from '../sample.ts';

it('takes medians and quantiles of unsorted samples', () => {
  expect(median([3, 1, 2])).toBe(2);
  expect(median([4, 1, 3, 2])).toBe(2.5);
  const hundred = Array.from({ length: 100 }, (_, i) => 100 - i);
  expect([0, 0.5, 0.99, 1].map((part) => quantile(hundred, part))).toEqual([1, 50, 99, 100]);
  expect(quantile([], 0.5)).toBeNaN();
  expect(summary([10, 30, 20])).toEqual({ n: 3, p50: 20, p99: 30, min: 10 });
});

it('runs both sides in turn, the first to go changing, and compares neighbours', async () => {
  const order: string[] = [];
  const pairs = await inTurn(
    3,
    async (run) => {
      order.push(`a${run}`);
      return 10 * (run + 1);
    },
    async (run) => {
      order.push(`b${run}`);
      // The machine slows down for both: the ratio stays.
      return 25 * (run + 1);
    },
    () => void order.push('-'),
  );
  expect(order.join(' ')).toBe('- a0 - b0 - b1 - a1 - a2 - b2');
  expect(pairs).toEqual({ ours: [10, 20, 30], theirs: [25, 50, 75], ratio: 2.5 });
});
