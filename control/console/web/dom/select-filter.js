/** A drop-down of the values there are, with one for all of them. It keeps what is chosen while values come and go. */
import { fill, h } from './element.js';

const MOST = 500;

/** @param {{ label: string, all: string, value?: string, change: (value: string) => void }} options */
export function selectFilter({ label, all, value = '', change }) {
  const select = h('select', { class: 'select', 'aria-label': label, on: { change: () => change(select.value) } });
  let shown = '\0';
  const api = {
    element: select,
    /** @param {Iterable<string>} values */
    setValues(values) {
      const chosen = select.value || value;
      const sorted = [...new Set(values)].filter(Boolean).sort().slice(0, MOST);
      if (chosen !== '' && !sorted.includes(chosen)) sorted.unshift(chosen);
      const key = sorted.join('\0');
      if (key === shown) return;
      shown = key;
      fill(select, h('option', { value: '' }, all), ...sorted.map((one) => h('option', { value: one }, one)));
      select.value = chosen;
    },
    /** @param {string} chosen */
    set(chosen) {
      value = chosen;
      shown = '\0';
      select.value = '';
      api.setValues([chosen]);
    },
    get value() {
      return select.value;
    },
  };
  api.setValues([]);
  return api;
}
