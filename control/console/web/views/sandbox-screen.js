/**
 * The screen of a full machine: what it shows, with keyboard and mouse, by VNC (noVNC) over a WebSocket to its port 5900. Text is pasted by typing it, which
 * works on every machine; what a machine copies comes by VNC where it has that.
 */
import { fill, h, setText } from '../dom/element.js';
import { describe, toast } from '../dom/notices.js';
import { openSocket } from '../state/socket.js';

const VNC_PORT = 5900;
const MOST_PASTED = 4096;

/** @typedef {import('../state/sandbox.js').SandboxRow} SandboxRow */

/** @param {{ api: import('../api/client.js').ApiClient, where: string, row: SandboxRow }} options @returns {import('./sandbox.js').Tab} */
export function screenTab({ api, where, row: first }) {
  const place = h('div', { class: 'screen-place' });
  const state = h('span', { class: 'terminal-state', role: 'status' });
  /** @param {string} title @param {() => void} click */
  const button = (title, click) => h('button', { class: 'button', type: 'button', hidden: true, on: { click } }, title);
  const again = button('Connect', () => start());
  const copy = button('Copy', () => void copied());
  const paste = button('Paste', () => void pasted());
  const attention = button('Ctrl-Alt-Del', () => rfb?.sendCtrlAltDel());
  const hint = h('span', { class: 'faint terminal-hint' }, 'all keys go to the machine; Ctrl-Shift-Escape leaves it');
  const bar = h(
    'div',
    { class: 'terminal-bar' },
    state,
    h('span', { class: 'spring' }),
    hint,
    copy,
    paste,
    attention,
    again,
  );
  const element = h('div', { class: 'terminal panel' }, bar, place);
  /** What noVNC gives; it has no types. @type {any} */
  let rfb;
  /** @type {any} */
  let Rfb;
  let over = false;
  let row = first;
  /** What the machine copied last. */
  let clipboard = '';

  /** @param {string} text @param {'good' | 'warn' | 'off'} kind */
  function say(text, kind) {
    state.className = `terminal-state state state-${kind}`;
    setText(state, text);
    again.hidden = kind !== 'off';
    paste.hidden = kind !== 'good';
    attention.hidden = kind !== 'good';
    copy.hidden = kind !== 'good' || clipboard === '';
  }

  async function start() {
    if (row.state === 'ended') return say('the sandbox has ended', 'off');
    say('connecting', 'warn');
    const address = new URL('../vendor/novnc/core/rfb.js', import.meta.url).href;
    Rfb ??= (await import(address)).default;
    if (over) return;
    rfb?.disconnect();
    const mine = new Rfb(place, openSocket(api, `${where}/ports/${VNC_PORT}`), { shared: true });
    rfb = mine;
    mine.background = 'transparent';
    mine.scaleViewport = true;
    mine.addEventListener('connect', () => {
      if (rfb !== mine) return;
      say('connected', 'good');
      mine.focus();
    });
    mine.addEventListener('disconnect', () => {
      if (rfb !== mine || over) return;
      rfb = undefined;
      void whyNot().then((text) => !over && rfb === undefined && say(text, 'off'));
    });
    mine.addEventListener('clipboard', (/** @type {any} */ { detail }) => {
      clipboard = String(detail.text);
      copy.hidden = clipboard === '';
    });
  }

  /** A socket that was refused does not say why; the API does. */
  async function whyNot() {
    try {
      const { state: now } = await api.json(where);
      return now === 'ended' ? 'the sandbox has ended' : 'the connection is lost';
    } catch (error) {
      return describe(error).message;
    }
  }

  async function pasted() {
    try {
      const text = await navigator.clipboard.readText();
      if (text === '') return;
      if (text.length > MOST_PASTED) return toast(`at most ${MOST_PASTED} characters are typed`, 'bad');
      await api.post(`${where}/screen/input`, { actions: [{ type: 'text', text }] });
    } catch (error) {
      toast(describe(error).message, 'bad');
    }
    rfb?.focus();
  }

  async function copied() {
    await navigator.clipboard?.writeText(clipboard).catch((error) => toast(describe(error).message, 'bad'));
    rfb?.focus();
  }

  /** @param {KeyboardEvent} event */
  function leave(event) {
    if (!event.ctrlKey || !event.shiftKey || event.key !== 'Escape') return;
    rfb?.blur();
    (paste.hidden ? again : paste).focus();
  }

  // noVNC keeps the keys that it takes to itself: this one is seen on its way down.
  element.addEventListener('keydown', leave, true);
  start().catch((error) => fill(place, describe(error).message));
  return {
    element,
    update(now) {
      row = now;
    },
    shown: () => rfb?.focus(),
    end() {
      over = true;
      rfb?.disconnect();
    },
  };
}
