/** One sandbox: what it is, what it uses, its commands, its network, a terminal in it; and to stop, pause, resume or remove it. */
import { path } from '../api/client.js';
import { confirmed } from '../dom/confirm.js';
import { fill, h } from '../dom/element.js';
import { stateMark } from '../dom/facts.js';
import { icon } from '../dom/icons.js';
import { describe, empty, failure, loading, toast } from '../dom/notices.js';
import { placeTo, replacePlace } from '../router.js';
import { poll } from '../state/poll.js';
import { sandboxOf } from '../state/sandbox.js';
import { commandsTab } from './sandbox-commands.js';
import { networkTab } from './sandbox-network.js';
import { overviewTab } from './sandbox-overview.js';
import { screenTab } from './sandbox-screen.js';
import { terminalTab } from './sandbox-terminal.js';

const POLL_MS = 3000;

/** @typedef {import('../state/sandbox.js').SandboxRow} SandboxRow */
/** @typedef {{ element: HTMLElement, update?: (row: SandboxRow) => void, shown?: () => void, end: () => void }} Tab */

const TABS = /** @type {const} */ ([
  { key: 'overview', title: 'Overview', make: overviewTab },
  { key: 'commands', title: 'Commands', make: commandsTab },
  { key: 'network', title: 'Network', make: networkTab },
  { key: 'terminal', title: 'Terminal', make: terminalTab },
  { key: 'screen', title: 'Screen', make: screenTab },
]);

/** A full machine has a screen; what has none has a terminal. @param {TabKey} key @param {SandboxRow | undefined} row */
function isThere(key, row) {
  const isMachine = row?.view.backend === 'vm';
  return key === 'screen' ? isMachine : key !== 'terminal' || !isMachine;
}

/** @typedef {(typeof TABS)[number]['key']} TabKey */

/** @type {import('../main.js').MakeView} */
export function sandboxView({ api, cluster }, place) {
  const id = /** @type {string} */ (place.name);
  const where = path`/v1/sandboxes/${id}`;
  /** @type {SandboxRow | undefined} */
  let row = cluster.sandboxes?.get(id);
  let gone = false;
  let busy = false;
  const asked = /** @type {TabKey} */ (place.query.get('tab'));
  /** @type {TabKey} */
  let current = TABS.some(({ key }) => key === asked) ? asked : 'overview';
  /** @type {Map<TabKey, Tab>} */
  const tabs = new Map();
  const head = h('div', { class: 'sandbox-head' });
  const stage = h('div', { class: 'tab-stage', role: 'tabpanel', id: 'tab-panel', tabindex: -1 }, loading(8));
  const buttons = TABS.map(({ key, title }) =>
    h(
      'button',
      {
        class: 'tab',
        type: 'button',
        role: 'tab',
        id: `tab-${key}`,
        'aria-controls': 'tab-panel',
        on: { click: () => choose(key) },
      },
      title,
    ),
  );
  const tabList = h('div', { class: 'tabs', role: 'tablist', on: { keydown: (event) => walk(event) } }, ...buttons);

  /** @param {KeyboardEvent} event */
  function walk(event) {
    const by = /** @type {Record<string, number>} */ ({ ArrowRight: 1, ArrowLeft: -1 })[event.key];
    if (by === undefined) return;
    const shown = TABS.filter(({ key }) => isThere(key, row));
    const at = (shown.findIndex(({ key }) => key === current) + by + shown.length) % shown.length;
    const { key } = /** @type {(typeof TABS)[number]} */ (shown[at]);
    choose(key);
    buttons[TABS.findIndex((one) => one.key === key)]?.focus();
  }

  /** @param {TabKey} key */
  function choose(key) {
    current = key;
    replacePlace(placeTo('sandboxes', id, { tab: key === 'overview' ? undefined : key }));
    showTab();
  }

  function showTab() {
    if (row !== undefined && !isThere(current, row)) current = 'overview';
    TABS.forEach(({ key }, i) => {
      const button = buttons[i];
      if (button !== undefined) button.hidden = !isThere(key, row);
      buttons[i]?.setAttribute('aria-selected', String(key === current));
      buttons[i]?.setAttribute('tabindex', key === current ? '0' : '-1');
    });
    stage.setAttribute('aria-labelledby', `tab-${current}`);
    if (row === undefined) return;
    let tab = tabs.get(current);
    if (tab === undefined) {
      const { make } = /** @type {(typeof TABS)[number]} */ (TABS.find(({ key }) => key === current));
      tab = make({ api, where, row });
      tabs.set(current, tab);
    }
    if (stage.firstChild !== tab.element) fill(stage, tab.element);
    tab.update?.(row);
    tab.shown?.();
  }

  let headShown = '';
  function drawHead() {
    if (row === undefined) return;
    const key = `${row.state} ${busy} ${gone}`;
    if (key === headShown) return;
    headShown = key;
    const { state } = row;
    const live = !gone && (state === 'running' || state === 'paused');
    fill(
      head,
      h('a', { class: 'icon-button', href: '#/sandboxes', 'aria-label': 'All sandboxes' }, icon('back')),
      h('h1', { class: 'mono' }, row.name, h('span', { class: 'faint' }, `.${row.edge}`)),
      stateMark(gone ? 'removed' : state),
      h('span', { class: 'spring' }),
      live && state === 'running' && action('Pause', 'pause', () => act('pause', 'is paused')),
      live && state === 'paused' && action('Resume', 'play', () => act('resume', 'goes on')),
      live && action('Stop', 'stop', stop),
      !gone && action('Remove', 'trash', remove),
    );
  }

  /** @param {string} title @param {import('../dom/icons.js').IconName} name @param {() => void} click */
  function action(title, name, click) {
    return h('button', { class: 'button', type: 'button', disabled: busy, on: { click } }, icon(name), title);
  }

  /** @param {() => Promise<unknown>} work @param {string} done */
  async function during(work, done) {
    busy = true;
    drawHead();
    try {
      await work();
      toast(`${row?.name ?? id} ${done}`);
    } catch (error) {
      toast(describe(error).message, 'bad');
    }
    busy = false;
    asking.now();
    drawHead();
  }

  /** @param {'pause' | 'resume'} what @param {string} done */
  function act(what, done) {
    return during(() => api.post(`${where}/${what}`), done);
  }

  async function stop() {
    const text = 'All its commands end: SIGTERM first, then SIGKILL. What it changed stays until it is removed.';
    if (!(await confirmed({ title: `Stop ${row?.name}?`, text, action: 'Stop', danger: true }))) return;
    await during(() => api.post(`${where}/stop`), 'has ended');
  }

  async function remove() {
    const text = 'It ends, and what it changed on its disk is gone for good.';
    if (!(await confirmed({ title: `Remove ${row?.name}?`, text, action: 'Remove', danger: true }))) return;
    await during(async () => {
      await api.remove(`${where}?force=true`);
      gone = true;
      cluster.drop(id);
    }, 'is removed');
    if (gone) location.hash = '#/sandboxes';
  }

  const asking = poll(
    POLL_MS,
    (signal) => api.json(where, { signal }),
    (view) => {
      row = sandboxOf({ ...row?.view, ...view, id });
      cluster.take(row.view);
      drawHead();
      showTab();
    },
    (error) => {
      const { status, code } = /** @type {any} */ (error);
      if (status === 404 || status === 410) {
        gone = true;
        drawHead();
        if (row === undefined) fill(stage, empty(describe(error).message, describe(error).hint ?? code));
      } else if (row === undefined)
        fill(
          stage,
          failure(error, () => asking.now()),
        );
    },
  );
  drawHead();
  showTab();
  return {
    title: row?.name ?? id,
    element: h('div', { class: 'view fixed' }, head, tabList, stage),
    end() {
      asking.end();
      for (const tab of tabs.values()) tab.end();
    },
  };
}
