/** A terminal in the browser: a shell in the sandbox. Ctrl-C goes to it; copying is Ctrl-Shift-C, pasting Ctrl-Shift-V or as the browser does it. */
import { fill, h, setText } from '../dom/element.js';
import { describe } from '../dom/notices.js';
import { onTheme } from '../state/theme.js';
import { terminalColours } from '../terminal/colours.js';
import { fittingSize } from '../terminal/fit.js';
import { ShellCommand } from '../terminal/shell-command.js';
import { takeTerminalStyles } from '../terminal/terminal-styles.js';

const FONT =
  'ui-monospace, "SF Mono", "Cascadia Mono", "JetBrains Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace';

/** @typedef {import('../state/sandbox.js').SandboxRow} SandboxRow */

/** @param {{ api: import('../api/client.js').ApiClient, where: string, row: SandboxRow }} options @returns {import('./sandbox.js').Tab} */
export function terminalTab({ api, where, row: first }) {
  const place = h('div', { class: 'terminal-place' });
  const state = h('span', { class: 'terminal-state', role: 'status' });
  const again = h(
    'button',
    { class: 'button', type: 'button', hidden: true, on: { click: () => start() } },
    'New shell',
  );
  const hint = h(
    'span',
    { class: 'faint terminal-hint' },
    'Ctrl-Shift-C copies, Ctrl-Shift-V pastes, Ctrl-Shift-Escape leaves the terminal',
  );
  const element = h(
    'div',
    { class: 'terminal panel' },
    h('div', { class: 'terminal-bar' }, state, h('span', { class: 'spring' }), hint, again),
    place,
  );
  const endStyles = takeTerminalStyles();
  /** @type {import('@xterm/xterm').Terminal | undefined} */
  let terminal;
  /** @type {ShellCommand | undefined} */
  let shell;
  let over = false;
  let row = first;

  /** @param {string} text @param {'good' | 'warn' | 'off'} kind */
  function say(text, kind) {
    state.className = `terminal-state state state-${kind}`;
    setText(state, text);
  }

  async function load() {
    say('loading', 'warn');
    const address = new URL('../vendor/xterm.mjs', import.meta.url).href;
    const { Terminal } = /** @type {typeof import('@xterm/xterm')} */ (await import(address));
    if (over) return;
    terminal = new Terminal({
      allowProposedApi: false,
      cursorBlink: false,
      fontFamily: FONT,
      fontSize: 13,
      lineHeight: 1.2,
      scrollback: 10_000,
      theme: terminalColours(),
      // What runs in a sandbox is not trusted: no links of its own making.
      linkHandler: { activate: () => {} },
    });
    terminal.open(place);
    terminal.onData((text) => shell?.write(new TextEncoder().encode(text)));
    terminal.onBinary((text) => shell?.write(Uint8Array.from(text, (c) => c.charCodeAt(0) & 0xff)));
    terminal.onResize(({ rows, cols }) => shell?.resize({ rows, columns: cols }));
    terminal.attachCustomKeyEventHandler(keys);
    fitToPlace();
    terminal.focus();
    await start();
  }

  /** @param {KeyboardEvent} event @returns {boolean} Whether it is the shell's. */
  function keys(event) {
    if (!event.ctrlKey || !event.shiftKey || event.type !== 'keydown') return true;
    if (event.code === 'KeyC') {
      const text = terminal?.getSelection() ?? '';
      if (text !== '') void navigator.clipboard?.writeText(text).catch(() => {});
      event.preventDefault();
      return false;
    }
    if (event.key === 'Escape') {
      again.hidden = false;
      again.focus();
      return false;
    }
    // The browser pastes: what it reads of the clipboard comes as an event.
    return event.code !== 'KeyV';
  }

  function fitToPlace() {
    const size = terminal && fittingSize(terminal, place);
    if (size && (size.rows !== terminal?.rows || size.columns !== terminal.cols))
      terminal?.resize(size.columns, size.rows);
  }

  async function start() {
    if (terminal === undefined) return;
    const on = terminal;
    shell?.close();
    again.hidden = true;
    if (row.state === 'ended') return end('the sandbox has ended');
    say('connecting', 'warn');
    on.reset();
    const mine = new ShellCommand(api, where, {
      output: (bytes) => new Promise((resolve) => on.write(bytes, resolve)),
      missing: (n) =>
        on.write(`\r\n\x1b[2m[${n < 0 ? `${-n} typed bytes may be lost` : `${n} bytes were dropped`}]\x1b[0m\r\n`),
      state: (now) => say(now, now === 'connected' ? 'good' : 'warn'),
      ended: end,
    });
    shell = mine;
    try {
      await mine.open({ rows: on.rows, columns: on.cols });
      // It may have become another one meanwhile.
      void mine.resize({ rows: on.rows, columns: on.cols });
      on.focus();
    } catch (error) {
      if (!over && shell === mine) end(describe(error).message);
    }
  }

  /** @param {string} text */
  function end(text) {
    say(text, 'off');
    again.hidden = false;
  }

  const observer = new ResizeObserver(() => fitToPlace());
  observer.observe(place);
  const endTheme = onTheme(() => {
    if (terminal !== undefined) terminal.options.theme = terminalColours();
  });
  load().catch((error) => fill(place, describe(error).message));
  return {
    element,
    update(now) {
      row = now;
    },
    shown: () => fitToPlace(),
    end() {
      over = true;
      observer.disconnect();
      endTheme();
      shell?.close();
      terminal?.dispose();
      endStyles();
    },
  };
}
