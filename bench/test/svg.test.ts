import { expect, it } from 'vitest';
import { barChart, lineChart } from '../figures/svg.ts';

/** Attribute values of all elements of a kind. */
const all = (svg: string, element: string, attribute: string) =>
  [...svg.matchAll(new RegExp(`<${element} [^>]*?\\b${attribute}="([^"]*)"`, 'g'))].map((match) => match[1]);

it('draws bars in proportion, with their values', () => {
  const svg = barChart({
    title: 'a < b & "c"',
    unit: 's',
    series: ['one', 'two'],
    groups: [
      { label: 'first', values: [1, 2] },
      { label: 'second', values: [4, 0] },
    ],
  });
  expect(svg).toContain('a &lt; b &amp; &quot;c&quot;');
  // The first is the background, the next two are the legend's.
  const widths = all(svg, 'rect', 'width').slice(3).map(Number);
  expect(widths.length).toBe(4);
  expect(widths[1]! / widths[0]!).toBeCloseTo(2, 1);
  expect(widths[2]! / widths[0]!).toBeCloseTo(4, 1);
  expect(widths[3]).toBe(1);
  for (const label of ['first', 'second', '1 s', '2 s', '4 s', '0 s', 'one', 'two'])
    expect(svg).toContain(`>${label}<`);
});

it('draws lines between an axis from 0 and one that is rounded up', () => {
  const svg = lineChart({
    title: 't',
    xLabel: 'x',
    yLabel: 'y',
    series: [
      {
        label: 'l',
        points: [
          [0, 0],
          [10, 9],
          [20, 18],
        ],
      },
    ],
  });
  const [points] = all(svg, 'polyline', 'points');
  const [first, middle, last] = points!.split(' ').map((pair) => pair.split(',').map(Number));
  expect(middle![0]).toBeCloseTo((first![0]! + last![0]!) / 2, 0);
  expect(middle![1]).toBeCloseTo((first![1]! + last![1]!) / 2, 0);
  for (const label of ['0', '5', '10', '15', '20']) expect(svg).toContain(`>${label}<`);
});

it('gives the same file for the same numbers, also for none that are above 0', () => {
  const chart = { title: 't', unit: 'B', series: ['s'], groups: [{ label: 'g', values: [0] }] };
  expect(barChart(chart)).toBe(barChart(chart));
  expect(barChart(chart)).not.toContain('NaN');
});

it('writes round numbers below the axis where there are too many points to stand side by side', () => {
  const points = Array.from({ length: 40 }, (_, i) => [i * 1.37, i] as const);
  const svg = lineChart({ title: 't', xLabel: 'x', yLabel: 'y', series: [{ label: 'l', points }] });
  const ticks = [...svg.matchAll(/text-anchor="middle">([^<x]+)</g)].map((match) => Number(match[1]));
  expect(ticks).toEqual([0, 5, 10, 15, 20, 25, 30, 35, 40, 45, 50]);
});
