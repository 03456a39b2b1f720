/** Used of a limit, as a bar with its figures; and one bar alone for rows of a table. */
import { amount, amountOf, percent } from '../format/amounts.js';
import { h } from './element.js';

/** @param {number | undefined} share */
export function level(share) {
  if (share === undefined || !Number.isFinite(share)) return 'none';
  return share >= 0.95 ? 'high' : share >= 0.85 ? 'raised' : 'normal';
}

/** Of something that may be full: a part of a whole, a size beside the largest. @param {number} share @param {string} label */
export function plainBar(share, label) {
  const element = bar(share, label);
  element.className = 'bar bar-normal';
  return element;
}

/** @param {number | undefined} share 0 to 1. @param {string} label For readers that see no bars. */
export function bar(share, label) {
  const shown = share === undefined || !Number.isFinite(share) ? 0 : Math.max(0, Math.min(1, share));
  return h(
    'span',
    {
      class: `bar bar-${level(share)}`,
      role: 'meter',
      'aria-label': label,
      'aria-valuemin': 0,
      'aria-valuemax': 100,
      'aria-valuenow': Math.round(shown * 100),
      vars: { '--share': String(shown) },
    },
    h('span', { class: 'bar-fill' }),
  );
}

/**
 * @param {{ label: string, used: number | undefined, limit?: number, unit: import('../format/amounts.js').Unit, note?: string }} of
 */
export function meter({ label, used, limit, unit, note }) {
  const share = used === undefined || !limit ? undefined : used / limit;
  const figures = limit === undefined ? amount(used, unit) : amountOf(used, limit, unit, '/');
  return h(
    'div',
    { class: 'meter' },
    h('span', { class: 'meter-label' }, label),
    h(
      'span',
      { class: 'meter-figures' },
      figures,
      share !== undefined && h('span', { class: 'faint' }, ` ${percent(share)}`),
    ),
    limit === undefined ? h('span', { class: 'meter-open faint' }, note ?? 'no limit') : bar(share, label),
  );
}
