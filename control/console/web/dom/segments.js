/** A choice of a few, all in sight. Arrow keys move, as in a group of radio buttons, which it is. */
import { h } from './element.js';

/**
 * @template {string} T
 * @param {{ label: string, choices: readonly { key: T, title: string }[], value: T, change: (value: T) => void }} options
 */
export function segments({ label, choices, value, change }) {
  const name = `segments-${Math.random().toString(36).slice(2, 8)}`;
  const options = choices.map(({ key, title }) => {
    const chosen = { type: 'radio', name, value: key, checked: key === value, on: { change: () => change(key) } };
    return h('label', { class: 'segment' }, h('input', chosen), h('span', null, title));
  });
  return h('div', { class: 'segments', role: 'radiogroup', 'aria-label': label }, ...options);
}
