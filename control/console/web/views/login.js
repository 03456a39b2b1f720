/** The token, once: it is tried before it is kept, and what is wrong is said beside the field. */
import { fill, h } from '../dom/element.js';
import { describe } from '../dom/notices.js';

/** @param {(token: string) => Promise<void>} logIn @param {string} [reason] Why one is here again. */
export function loginView(logIn, reason) {
  const message = h('p', { class: 'login-message', role: 'alert', id: 'login-message' }, reason);
  const field = h('input', {
    class: 'input',
    id: 'token',
    name: 'token',
    type: 'password',
    autocomplete: 'off',
    spellcheck: 'false',
    required: true,
    'aria-describedby': 'login-message',
  });
  const button = h('button', { class: 'button button-main', type: 'submit' }, 'Log in');
  const submit = async (/** @type {SubmitEvent} */ event) => {
    event.preventDefault();
    const token = field.value.trim();
    // A header takes no other bytes, and no token has them.
    if (!/^[\x21-\x7e]+$/.test(token)) return fill(message, 'A token has no blanks and no letters but those of ASCII.');
    button.disabled = true;
    fill(message);
    try {
      await logIn(token);
    } catch (error) {
      const { message: text, hint } = describe(error);
      fill(message, hint ? `${text} ${hint}` : text);
      button.disabled = false;
      field.select();
    }
  };
  queueMicrotask(() => field.focus());
  return h(
    'main',
    { class: 'login' },
    h(
      'form',
      { class: 'login-card', on: { submit } },
      h('h1', { class: 'brand' }, h('span', { class: 'brand-mark' }), 'DSec'),
      h('label', { for: 'token' }, 'Access token'),
      field,
      message,
      button,
      h(
        'p',
        { class: 'faint' },
        'dsec serve all says where the first one is kept; dsec token create makes others. It stays in this tab alone.',
      ),
    ),
  );
}
