/** The last minute or so of one figure as a line. The space is there from the beginning. */
import { svg } from './element.js';

const WIDTH = 120;
const HEIGHT = 28;
const MOST = 60;

/** @param {string} label */
export function sparkline(label) {
  /** @type {number[]} */
  const values = [];
  const line = svg('polyline', { fill: 'none', stroke: 'currentColor', 'stroke-width': 1.4 });
  const area = svg('polygon', { fill: 'currentColor', opacity: 0.14 });
  const attributes = { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, class: 'sparkline', role: 'img', 'aria-label': label };
  const element = svg('svg', { ...attributes, preserveAspectRatio: 'none' }, area, line);
  line.setAttribute('vector-effect', 'non-scaling-stroke');
  return {
    element,
    /** @param {number} value @param {number} [atLeast] What the top stands for when all are below it. */
    add(value, atLeast = 0) {
      values.push(value);
      if (values.length > MOST) values.shift();
      const top = Math.max(atLeast, ...values) || 1;
      const step = WIDTH / (MOST - 1);
      const first = WIDTH - (values.length - 1) * step;
      const points = values.map((v, i) => {
        return `${(first + i * step).toFixed(1)},${(HEIGHT - 1 - (v / top) * (HEIGHT - 3)).toFixed(1)}`;
      });
      line.setAttribute('points', points.join(' '));
      area.setAttribute('points', `${first.toFixed(1)},${HEIGHT} ${points.join(' ')} ${WIDTH},${HEIGHT}`);
    },
  };
}
