/**
 * Small charts as SVG text: bars in groups, and lines. Numbers stand at the bars and points, so that a figure can be read
 * without guessing at its axes. No dates and no random ids: the same numbers give the same file.
 */

import {
  svgColour as colour,
  svgDocument as document,
  svgEscaped as escaped,
  svgHeading as heading,
  svgLegend as legend,
  svgNumber as n,
  svgShort as short,
  svgText as text,
  SVG_WIDTH as WIDTH,
} from '#base';

const LEFT = 64;
const MOST_TICKS = 14;
const RIGHT = 16;

export interface BarChart {
  readonly title: string;
  /** Behind every number: `s`, `MiB`. */
  readonly unit: string;
  readonly groups: readonly { readonly label: string; readonly values: readonly number[] }[];
  /** One for each value of a group. */
  readonly series: readonly string[];
}

/** Horizontal bars: labels of any length stay readable. */
export function barChart({ title, unit, groups, series }: BarChart): string {
  const barHeight = 18;
  const gap = 14;
  const labelWidth = 8 + 7 * Math.max(4, ...groups.map((group) => group.label.length));
  const top = 56;
  const groupHeight = barHeight * series.length + gap;
  const height = top + groupHeight * groups.length + 8;
  const most = Math.max(...groups.flatMap((group) => group.values)) || 1;
  const scale = (WIDTH - labelWidth - 96) / most;
  const parts = [heading(title), legend(series)];
  groups.forEach((group, g) => {
    const y = top + g * groupHeight;
    parts.push(text(labelWidth - 8, y + (barHeight * series.length) / 2 + 4, group.label, 'end'));
    group.values.forEach((value, s) => {
      const barY = y + s * barHeight;
      const width = Math.max(1, value * scale);
      parts.push(
        `<rect x="${labelWidth}" y="${n(barY)}" width="${n(width)}" height="${barHeight - 3}" fill="${colour(s)}"/>`,
        text(labelWidth + width + 6, barY + 12, `${short(value)} ${unit}`),
      );
    });
  });
  return document(height, parts);
}

export interface LineChart {
  readonly title: string;
  readonly xLabel: string;
  readonly yLabel: string;
  readonly series: readonly { readonly label: string; readonly points: readonly (readonly [number, number])[] }[];
}

/** The y axis begins at 0. */
export function lineChart({ title, xLabel, yLabel, series }: LineChart): string {
  const top = 60;
  const plotHeight = 280;
  const height = top + plotHeight + 56;
  const xs = series.flatMap((one) => one.points.map(([x]) => x));
  const ys = series.flatMap((one) => one.points.map(([, y]) => y));
  const [xMin, xMax] = [Math.min(...xs), Math.max(...xs)];
  const most = Math.max(...ys) || 1;
  const step = niceStep(most / 5);
  const yMax = step * Math.ceil(most / step);
  const px = (x: number) => LEFT + ((x - xMin) / (xMax - xMin || 1)) * (WIDTH - LEFT - RIGHT);
  const py = (y: number) => top + plotHeight - (y / yMax) * plotHeight;
  const parts = [heading(title), legend(series.map((one) => one.label))];
  for (let y = 0; y <= yMax + step / 2; y += step) {
    parts.push(
      `<line x1="${LEFT}" x2="${WIDTH - RIGHT}" y1="${n(py(y))}" y2="${n(py(y))}" stroke="#ddd"/>`,
      text(LEFT - 6, py(y) + 4, short(y), 'end'),
    );
  }
  for (const x of xTicks(xs)) {
    parts.push(text(px(x), top + plotHeight + 18, short(x), 'middle'));
  }
  parts.push(text((LEFT + WIDTH) / 2, height - 10, xLabel, 'middle'), text(8, top - 10, yLabel));
  series.forEach((one, s) => {
    const path = one.points.map(([x, y]) => `${n(px(x))},${n(py(y))}`).join(' ');
    parts.push(`<polyline points="${path}" fill="none" stroke="${colour(s)}" stroke-width="2"/>`);
    for (const [x, y] of one.points) {
      parts.push(
        `<circle cx="${n(px(x))}" cy="${n(py(y))}" r="3" fill="${colour(s)}"><title>${escaped(`${one.label}: ${short(x)}, ${short(y)}`)}</title></circle>`,
      );
    }
  });
  return document(height, parts);
}

/** Every x there is, or round ones where there are too many to stand side by side. */
function xTicks(xs: readonly number[]): number[] {
  const all = [...new Set(xs)].sort((a, b) => a - b);
  if (all.length <= MOST_TICKS) return all;
  const [first, last] = [all[0]!, all.at(-1)!];
  const step = niceStep((last - first) / MOST_TICKS);
  const ticks: number[] = [];
  for (let i = Math.ceil(first / step); i * step <= last; i++) ticks.push(i * step);
  return ticks;
}

function niceStep(least: number): number {
  const power = 10 ** Math.floor(Math.log10(least));
  return power * [1, 2, 5, 10].find((factor) => factor * power >= least)!;
}
