/** Dark or light: as the system has it, or as chosen here. Loaded by itself before all else, so that the page never shows the other one first. */

const KEY = 'dsec.theme';

/** @typedef {'dark' | 'light'} Theme */

const system = matchMedia('(prefers-color-scheme: light)');
/** @type {Set<() => void>} */
const listeners = new Set();

/** @returns {Theme} */
export function theme() {
  const chosen = localStorage.getItem(KEY);
  if (chosen === 'dark' || chosen === 'light') return chosen;
  return system.matches ? 'light' : 'dark';
}

export function toggleTheme() {
  localStorage.setItem(KEY, theme() === 'dark' ? 'light' : 'dark');
  apply();
}

/** @param {() => void} listener @returns {() => void} Ends it. */
export function onTheme(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

function apply() {
  document.documentElement.dataset.theme = theme();
  for (const listener of listeners) listener();
}

system.addEventListener('change', apply);
apply();
