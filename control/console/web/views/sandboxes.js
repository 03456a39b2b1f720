/** All sandboxes, live: narrowed by words, project, user, job, state and node. What it is narrowed by is in the address. */
import { pagesOf } from '../api/pages.js';
import { fill, h, setText } from '../dom/element.js';
import { setStateMark } from '../dom/facts.js';
import { empty, failure, loading } from '../dom/notices.js';
import { selectFilter } from '../dom/select-filter.js';
import { VirtualTable } from '../dom/virtual-table.js';
import { amount, bytes, count } from '../format/amounts.js';
import { ago, until } from '../format/times.js';
import { placeTo, replacePlace } from '../router.js';
import { poll } from '../state/poll.js';
import { filtered } from '../state/sandbox.js';

const REDRAW_MS = 1000;
const MORE_MS = 5000;
const STATES = ['running', 'paused', 'ended'];

/** @typedef {import('../state/sandbox.js').SandboxRow} SandboxRow */
/** @typedef {import('../state/sandbox.js').SandboxFilter} SandboxFilter */

/** @type {readonly import('../dom/virtual-table.js').Column<SandboxRow>[]} */
const COLUMNS = [
  {
    key: 'state',
    title: 'State',
    width: 92,
    sort: (row) => row.state,
    show: (cell, row) => setStateMark(cell, row.state),
  },
  { key: 'name', title: 'Name', width: 150, grow: 2, mono: true, sort: (row) => row.name, text: (row) => row.name },
  {
    key: 'edge',
    title: 'Node',
    width: 96,
    grow: 0.6,
    priority: 3,
    mono: true,
    sort: (row) => row.edge,
    text: (row) => row.edge,
  },
  {
    key: 'project',
    title: 'Project',
    width: 120,
    grow: 1.2,
    priority: 4,
    sort: (row) => row.project,
    text: (row) => row.project,
  },
  { key: 'user', title: 'User', width: 90, grow: 0.7, priority: 5, sort: (row) => row.user, text: (row) => row.user },
  { key: 'job', title: 'Job', width: 90, grow: 0.8, priority: 8, sort: (row) => row.job, text: (row) => row.job },
  {
    key: 'image',
    title: 'Image',
    width: 130,
    grow: 1.5,
    priority: 6,
    mono: true,
    sort: (row) => row.image,
    text: (row) => row.image,
  },
  {
    key: 'cpus',
    title: 'CPU',
    width: 78,
    align: 'end',
    priority: 9,
    sort: (row) => row.cpus,
    text: (row) => amount(row.cpus, 'cores'),
  },
  {
    key: 'memory',
    title: 'Memory',
    width: 82,
    align: 'end',
    priority: 9,
    sort: (row) => row.memoryBytes,
    text: (row) => bytes(row.memoryBytes),
  },
  {
    key: 'commands',
    title: 'Cmds',
    width: 58,
    align: 'end',
    priority: 10,
    sort: (row) => row.commands,
    text: (row) => row.commands || '',
  },
  {
    key: 'age',
    title: 'Age',
    width: 72,
    align: 'end',
    priority: 2,
    sort: (row) => -row.createdMs,
    text: (row) => (row.createdMs === 0 ? '–' : ago(row.createdMs)),
  },
  {
    key: 'expires',
    title: 'Ends in',
    width: 76,
    align: 'end',
    priority: 7,
    sort: (row) => row.expiresMs,
    text: (row) => (row.state === 'ended' || row.expiresMs === undefined ? '' : until(row.expiresMs)),
  },
];

/** @type {import('../main.js').MakeView} */
export function sandboxesView({ cluster }, place) {
  /** @type {ReturnType<typeof poll> | undefined} */
  let asking;
  /** @type {SandboxFilter} */
  const filter = Object.fromEntries(place.query);
  const table = new VirtualTable({
    label: 'Sandboxes',
    columns: COLUMNS,
    keyOf: (/** @type {SandboxRow} */ row) => row.id,
    sort: { key: 'age', down: false },
    open: ({ id }) => {
      location.hash = placeTo('sandboxes', id);
    },
    whenEmpty: empty('No sandbox fits', 'dsec sandbox create makes one; or narrow the list less.'),
  });
  const search = h('input', {
    class: 'input input-search',
    type: 'search',
    placeholder: 'Name, image, user… ( / )',
    'aria-label': 'Find sandboxes',
    on: { input: () => change('text', search.value) },
  });
  search.value = filter.text ?? '';
  const choose = (/** @type {'project' | 'user' | 'job' | 'edge'} */ key, /** @type {string} */ all) =>
    selectFilter({ label: all, all, value: filter[key], change: (value) => change(key, value) });
  const selects = {
    project: choose('project', 'All projects'),
    user: choose('user', 'All users'),
    job: choose('job', 'All jobs'),
    edge: choose('edge', 'All nodes'),
  };
  const stateBar = h('div', { class: 'state-bar', role: 'group', 'aria-label': 'States' });
  const counted = h('span', { class: 'faint num', role: 'status' });
  const warning = h('p', { class: 'banner', hidden: true, role: 'status' });
  const stage = h('div', { class: 'panel table-panel' }, loading(14));

  /** @param {keyof SandboxFilter} key @param {string} value */
  function change(key, value) {
    filter[key] = value || undefined;
    replacePlace(placeTo('sandboxes', undefined, filter));
    table.scroller.scrollTop = 0;
    askMore();
    draw();
  }

  /** What the list of all leaves out: those that have ended, and of very many what is narrowed down to. */
  function askMore() {
    asking?.end();
    asking = undefined;
    const { project, user, job, state } = filter;
    const narrowed = cluster.truncated && Boolean(project || user || job);
    if (state !== 'ended' && !narrowed) return;
    asking = poll(
      MORE_MS,
      (signal) => pagesOf(cluster.api, { project, user, job, state }, signal),
      ({ sandboxes: more }) => {
        for (const view of more) cluster.take(view);
      },
      () => {},
    );
  }

  function draw() {
    const { sandboxes, errors, unreachable, truncated } = cluster;
    if (sandboxes === undefined) {
      if (errors.sandboxes)
        fill(
          stage,
          failure(errors.sandboxes, () => cluster.refreshSandboxes()),
        );
      return;
    }
    if (stage.firstChild !== table.element) fill(stage, table.element);
    const ofAnyState = filtered(sandboxes.values(), { ...filter, state: undefined });
    const rows = filter.state ? ofAnyState.filter(({ state }) => state === filter.state) : ofAnyState;
    drawStates(ofAnyState);
    table.setRows(rows);
    setText(
      counted,
      rows.length === sandboxes.size ? count(rows.length) : `${count(rows.length)} of ${count(sandboxes.size)}`,
    );
    const problem = truncated
      ? `There are more sandboxes than the ${count(sandboxes.size)} here. Those of one project, user or job are all here once it is chosen.`
      : errors.sandboxes
        ? 'The server does not answer; this is what was known last.'
        : unreachable.length > 0
          ? `${unreachable.length === 1 ? 'One node does' : `${unreachable.length} nodes do`} not answer; what is on ${listed(unreachable)} is missing here.`
          : '';
    setText(warning, problem);
    warning.hidden = problem === '';
    const all = [...sandboxes.values()];
    for (const [key, select] of Object.entries(selects)) {
      select.setValues(new Set(all.map((row) => row[/** @type {'project'} */ (key)])));
    }
  }

  /** @param {readonly SandboxRow[]} rows */
  function drawStates(rows) {
    const counts = new Map(STATES.map((state) => [state, 0]));
    for (const { state } of rows) counts.set(state, (counts.get(state) ?? 0) + 1);
    const known = new Map(
      [...stateBar.children].map((child) => [/** @type {HTMLElement} */ (child).dataset.state, child]),
    );
    for (const [state, n] of counts) {
      const button = known.get(state) ?? newState(state);
      const figure = /** @type {Element} */ (button.lastElementChild);
      // Those that have ended are not in the list of all: how many there are is not known until one asks.
      setText(figure, state === 'ended' && n === 0 && filter.state !== state ? '' : count(n));
      button.setAttribute('aria-pressed', String(filter.state === state));
    }
  }

  /** @param {string} state */
  function newState(state) {
    const toggle = () => change('state', filter.state === state ? '' : state);
    const mark = h('span', null);
    setStateMark(mark, state);
    const button = h(
      'button',
      { class: 'state-button', type: 'button', 'data-state': state, on: { click: toggle } },
      mark,
      h('span', { class: 'num' }),
    );
    stateBar.append(button);
    return button;
  }

  const end = cluster.sandboxesTopic.subscribe(draw);
  // Ages go on by themselves.
  const timer = setInterval(() => cluster.sandboxes !== undefined && table.redraw(), REDRAW_MS);
  const slash = (/** @type {KeyboardEvent} */ event) => {
    const typing = /** @type {Element} */ (event.target).closest?.('input, select, textarea');
    if (event.key !== '/' || typing || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    search.focus();
  };
  addEventListener('keydown', slash);
  askMore();
  draw();
  return {
    title: 'Sandboxes',
    element: h(
      'div',
      { class: 'view fixed' },
      h('h1', { class: 'sr' }, 'Sandboxes'),
      h(
        'div',
        { class: 'toolbar' },
        search,
        ...Object.values(selects).map(({ element }) => element),
        h('span', { class: 'spring' }),
        stateBar,
        counted,
      ),
      warning,
      stage,
    ),
    end() {
      end();
      asking?.end();
      table.end();
      clearInterval(timer);
      removeEventListener('keydown', slash);
    },
  };
}

/** @param {readonly string[]} names */
function listed(names) {
  return names.length > 3 ? `${names.slice(0, 3).join(', ')} and others` : names.join(', ');
}
