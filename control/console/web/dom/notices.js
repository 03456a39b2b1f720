/** What stands where nothing is yet, nothing is at all, or something failed; and short messages at the edge of the page. */
import { h } from './element.js';

/** Grey bars in the place of what comes, so that nothing jumps when it does. @param {number} [rows] */
export function loading(rows = 6) {
  const bars = Array.from({ length: rows }, (_, i) =>
    h('div', { class: 'skeleton', vars: { '--width': `${88 - ((i * 17) % 45)}%` } }),
  );
  return h('div', { class: 'loading', role: 'status', 'aria-label': 'Loading' }, ...bars);
}

/** @param {string} title @param {string} [hint] */
export function empty(title, hint) {
  return h('div', { class: 'notice' }, h('p', { class: 'notice-title' }, title), hint && h('p', null, hint));
}

/** @param {unknown} error @param {() => void} [retry] */
export function failure(error, retry) {
  const { message, hint, code, requestId } = describe(error);
  return h(
    'div',
    { class: 'notice notice-error', role: 'alert' },
    h('p', { class: 'notice-title' }, message),
    hint && h('p', null, hint),
    code && h('p', { class: 'faint mono' }, requestId ? `${code} · request ${requestId}` : code),
    retry && h('button', { class: 'button', type: 'button', on: { click: retry } }, 'Try again'),
  );
}

/** @param {unknown} error @returns {{ message: string, hint?: string, code?: string, requestId?: string }} */
export function describe(error) {
  const { message = String(error), hint, code, requestId } = /** @type {any} */ (error ?? {});
  return { message, hint, code, requestId };
}

const SHOWN_MS = 6000;

/** @param {string} text @param {'good' | 'bad'} [kind] */
export function toast(text, kind = 'good') {
  let tray = document.querySelector('.toasts');
  if (tray === null) {
    tray = h('div', { class: 'toasts', role: 'status', 'aria-live': 'polite' });
    document.body.append(tray);
  }
  const one = h('div', { class: `toast toast-${kind}` }, text);
  tray.append(one);
  setTimeout(() => one.remove(), SHOWN_MS);
}
