/** Names and values, one below the other. */
import { h } from './element.js';

/** Rows without a value are left out. @param {[string, import('./element.js').Child][]} rows */
export function facts(rows) {
  const given = rows.filter(([, value]) => value !== undefined && value !== null && value !== '' && value !== false);
  return h('dl', { class: 'facts' }, ...given.flatMap(([name, value]) => [h('dt', null, name), h('dd', null, value)]));
}

const STATES = /** @type {Record<string, string>} */ ({
  running: 'good',
  healthy: 'good',
  placed: 'good',
  allowed: 'good',
  ok: 'good',
  paused: 'idle',
  draining: 'warn',
  pending: 'warn',
  starting: 'warn',
  ended: 'off',
  dead: 'bad',
  denied: 'bad',
  failed: 'bad',
  damaged: 'bad',
});

/** @param {string} state */
export function stateClass(state) {
  return `state state-${Object.hasOwn(STATES, state) ? STATES[state] : 'off'}`;
}

/** A state as dot and word: never by colour alone. @param {string} state */
export function stateMark(state) {
  return h('span', { class: stateClass(state) }, state);
}

/** The same in a cell that shows one after the other. @param {HTMLElement} cell @param {string} state */
export function setStateMark(cell, state) {
  if (cell.dataset.mark === state) return;
  cell.dataset.mark = state;
  cell.replaceChildren(stateMark(state));
}

/** @param {string} title @param {...import('./element.js').Child} content */
export function section(title, ...content) {
  return h('section', { class: 'section' }, h('h3', null, title), ...content);
}
