/** The commands of a sandbox, newest first, and what one of them wrote: as it comes while it runs. */
import { bodyChunks } from '../api/body-chunks.js';
import { listOf } from '../api/list-of.js';
import { parseOutput } from '../api/output-frames.js';
import { fill, h, setText } from '../dom/element.js';
import { icon } from '../dom/icons.js';
import { describe, empty, failure, loading, toast } from '../dom/notices.js';
import { bytes } from '../format/amounts.js';
import { ago, duration } from '../format/times.js';
import { poll } from '../state/poll.js';

const POLL_MS = 2000;
const MOST_SHOWN = 256;
/** Characters of output that the page holds. */
const MOST_OUTPUT = 400_000;

/** @param {{ api: import('../api/client.js').ApiClient, where: string }} options @returns {import('./sandbox.js').Tab} */
export function commandsTab({ api, where }) {
  const list = h('div', { class: 'command-list panel' }, loading(6));
  const output = h('div', { class: 'command-output panel' }, empty('No command chosen', 'Its output is shown here.'));
  /** @type {number | undefined} */
  let chosen;
  let drawn = '';
  let stop = new AbortController();

  /** @param {any[]} commands */
  function draw(commands) {
    const rows = commands.slice(-MOST_SHOWN).reverse();
    const key = JSON.stringify([rows.map(({ id, running, result }) => [id, running, result?.exitCode]), chosen]);
    if (key === drawn) return;
    drawn = key;
    if (rows.length === 0)
      return fill(list, empty('No commands', 'dsec sandbox exec starts one; so does the terminal.'));
    fill(list, ...rows.map((command) => commandRow(command)));
  }

  /** @param {any} command */
  function commandRow(command) {
    const { id, args = [], running, result, startedMs } = command;
    const end = running ? 'runs' : endText(result);
    const bad = !running && result?.exitCode !== 0;
    return h(
      'button',
      { class: 'command', type: 'button', 'aria-pressed': String(id === chosen), on: { click: () => open(command) } },
      h('span', { class: 'num faint command-id' }, id),
      h('span', { class: 'mono command-args' }, args.map(quoted).join(' ')),
      h('span', { class: `command-end${bad ? ' bad' : running ? ' good' : ' faint'}` }, end),
      h('span', { class: 'num faint command-time' }, running ? ago(startedMs) : duration(result?.durationMs)),
    );
  }

  /** @param {any} command */
  async function open({ id, args = [] }) {
    stop.abort();
    stop = new AbortController();
    chosen = id;
    drawn = '';
    asking.now();
    const text = h('pre', { class: 'output', tabindex: 0, 'aria-label': 'Output' });
    const state = h('span', { class: 'faint', role: 'status' }, 'reading');
    const kill = h(
      'button',
      { class: 'button', type: 'button', on: { click: () => killed(id) } },
      icon('stop'),
      'Kill',
    );
    fill(
      output,
      h(
        'div',
        { class: 'output-head' },
        h('span', { class: 'mono command-args' }, args.map(quoted).join(' ')),
        state,
        kill,
      ),
      text,
    );
    try {
      await follow(id, text, state, stop.signal);
    } catch (error) {
      if (!stop.signal.aborted || chosen === id) setText(state, describe(error).message);
    }
    kill.hidden = true;
    asking.now();
  }

  /** @param {number} id @param {HTMLElement} text @param {HTMLElement} state @param {AbortSignal} signal */
  async function follow(id, text, state, signal) {
    const response = await api.open(`${where}/commands/${id}/output`, { signal });
    const decoders = { stdout: new TextDecoder(), stderr: new TextDecoder() };
    setText(state, 'live');
    let held = 0;
    for await (const news of parseOutput(bodyChunks(response))) {
      if (news.kind === 'result') return setText(state, endText(news.result));
      if (news.kind === 'error') return setText(state, news.error.message);
      const part =
        news.kind === 'missing'
          ? h('span', { class: 'faint' }, `\n[${bytes(news.missingBytes)} were dropped]\n`)
          : h('span', { class: news.stream }, plain(decoders[news.stream].decode(news.bytes, { stream: true })));
      const atEnd = text.scrollHeight - text.scrollTop - text.clientHeight < 40;
      held += part.textContent?.length ?? 0;
      text.append(part);
      while (held > MOST_OUTPUT && text.childNodes.length > 1) {
        held -= text.firstChild?.textContent?.length ?? 0;
        text.firstChild?.remove();
      }
      if (atEnd) text.scrollTop = text.scrollHeight;
    }
    setText(state, 'the output broke off');
  }

  /** @param {number} id */
  async function killed(id) {
    try {
      await api.post(`${where}/commands/${id}/kill`);
    } catch (error) {
      toast(describe(error).message, 'bad');
    }
  }

  const asking = poll(
    POLL_MS,
    (signal) => api.json(`${where}/commands`, { signal }),
    (answer) => draw(listOf(answer, 'commands')),
    (error) =>
      drawn === '' &&
      fill(
        list,
        failure(error, () => asking.now()),
      ),
  );
  return {
    element: h('div', { class: 'commands' }, list, output),
    end() {
      asking.end();
      stop.abort();
    },
  };
}

/** @param {any} result */
function endText(result) {
  if (result === undefined || result === null) return 'ended';
  const { exitCode, signal, timedOut, outOfMemory } = result;
  const why = timedOut ? ', timed out' : outOfMemory ? ', out of memory' : '';
  return signal ? `${signal}${why}` : `exit ${exitCode}${why}`;
}

/** As one would type it. @param {unknown} arg */
function quoted(arg) {
  const text = String(arg);
  return /^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`;
}

/** Without what is meant for terminals. @param {string} text */
function plain(text) {
  return text
    .replace(/\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[@-_]/g, '')
    .replace(/\r+\n/g, '\n');
}
