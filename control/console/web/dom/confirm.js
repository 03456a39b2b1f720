/** Asks before what cannot be taken back. The dialog is the browser's own, so focus stays inside and Escape says no. */
import { h } from './element.js';

/**
 * @param {{ title: string, text: string, action: string, danger?: boolean }} question
 * @returns {Promise<boolean>}
 */
export function confirmed({ title, text, action, danger = false }) {
  return new Promise((resolve) => {
    const dialog = h('dialog', { class: 'dialog', 'aria-labelledby': 'dialog-title' });
    const close = (/** @type {boolean} */ answer) => {
      dialog.close();
      dialog.remove();
      resolve(answer);
    };
    const no = h('button', { class: 'button', type: 'button', on: { click: () => close(false) } }, 'Cancel');
    const yes = h(
      'button',
      {
        class: danger ? 'button button-danger' : 'button button-main',
        type: 'button',
        on: { click: () => close(true) },
      },
      action,
    );
    dialog.append(
      h('h2', { id: 'dialog-title' }, title),
      h('p', null, text),
      h('div', { class: 'dialog-actions' }, no, yes),
    );
    dialog.addEventListener('cancel', (event) => {
      event.preventDefault();
      close(false);
    });
    document.body.append(dialog);
    dialog.showModal();
    no.focus();
  });
}
