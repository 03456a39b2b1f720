import { describe, expect, test } from 'vitest';
import { cutsWhereChainsPart, planGroups } from '../tree/collapse-plan.ts';

describe('planGroups', () => {
  test('merges consecutive layers up to the limit', () => {
    expect(planGroups([1, 1, 1, 1], { limitBytes: 2 })).toEqual([
      [0, 1],
      [2, 3],
    ]);
    expect(planGroups([1, 1, 1], { limitBytes: 10 })).toEqual([[0, 1, 2]]);
  });

  test('a layer larger than the limit is a group of its own', () => {
    expect(planGroups([1, 5, 1, 1], { limitBytes: 2 })).toEqual([[0], [1], [2, 3]]);
  });

  test('limit 0 keeps every layer apart, empty ones too', () => {
    expect(planGroups([0, 3, 0], { limitBytes: 0 })).toEqual([[0], [1], [2]]);
  });

  test('cuts below a layer do not depend on what comes above it', () => {
    const sizes = [3, 1, 4, 1, 5, 9, 2, 6];
    const whole = planGroups(sizes, { limitBytes: 8 });
    for (let n = 1; n < sizes.length; n++) {
      const part = planGroups(sizes.slice(0, n), { limitBytes: 8 });
      const full = whole.filter((group) => group[group.length - 1]! < n);
      expect(part.slice(0, full.length)).toEqual(full);
    }
  });

  test('asked-for cuts are made', () => {
    expect(planGroups([1, 1, 1], { limitBytes: 10, cuts: new Set([2]) })).toEqual([[0, 1], [2]]);
  });
});

describe('cutsWhereChainsPart', () => {
  const cuts = (...chains: string[][]) => cutsWhereChainsPart(chains).map((set) => [...set]);

  test('one chain has no cuts', () => {
    expect(cuts(['a', 'b', 'c'])).toEqual([[]]);
  });

  test('chains that part are cut after what they share', () => {
    expect(cuts(['a', 'b', 'c'], ['a', 'b', 'd'])).toEqual([[2], [2]]);
  });

  test('a chain that ends inside another is cut off there', () => {
    expect(cuts(['a', 'b'], ['a', 'b', 'c'])).toEqual([[], [2]]);
  });

  test('equal layers at different depths share nothing', () => {
    expect(cuts(['a', 'x'], ['b', 'x'])).toEqual([[], []]);
  });

  test('the same image twice is not cut', () => {
    expect(cuts(['a', 'b'], ['a', 'b'])).toEqual([[], []]);
  });
});
