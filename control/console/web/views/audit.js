/** Who did what, newest first, where one may read it. */

import { query } from '../api/client.js';
import { listOf } from '../api/list-of.js';
import { fill, h, setText } from '../dom/element.js';
import { setStateMark } from '../dom/facts.js';
import { empty, failure, loading } from '../dom/notices.js';
import { VirtualTable } from '../dom/virtual-table.js';
import { count } from '../format/amounts.js';
import { clock } from '../format/times.js';
import { poll } from '../state/poll.js';

const POLL_MS = 5000;
const PAGE = 500;

/** @typedef {{ id: number, atMs: number, principal: string, action: string, project: string, target?: string, outcome: string, detail?: Record<string, unknown> }} AuditRow */

/** @type {import('../main.js').MakeView} */
export function auditView({ api, who }) {
  /** @type {AuditRow[] | undefined} */
  let all;
  /** @type {VirtualTable<AuditRow>} */
  const table = new VirtualTable({
    label: 'Audit log',
    keyOf: ({ id }) => String(id),
    whenEmpty: empty('Nothing yet'),
    columns: [
      { key: 'time', title: 'Time', width: 150, mono: true, text: ({ atMs }) => clock(atMs) },
      { key: 'outcome', title: 'Outcome', width: 92, show: (cell, { outcome }) => setStateMark(cell, outcome) },
      { key: 'principal', title: 'Who', width: 110, grow: 0.8, text: ({ principal }) => principal },
      { key: 'action', title: 'Action', width: 140, grow: 0.8, mono: true, text: ({ action }) => action },
      { key: 'project', title: 'Project', width: 120, grow: 1, priority: 2, text: ({ project }) => project },
      {
        key: 'target',
        title: 'Target',
        width: 140,
        grow: 1.2,
        priority: 1,
        mono: true,
        text: ({ target }) => target ?? '',
      },
      { key: 'detail', title: 'Detail', width: 160, grow: 1.6, priority: 3, text: ({ detail }) => detailText(detail) },
    ],
  });
  const search = h('input', {
    class: 'input input-search',
    type: 'search',
    placeholder: 'Who, action, target…',
    'aria-label': 'Find entries',
    on: { input: () => draw() },
  });
  const counted = h('span', { class: 'faint num', role: 'status' });
  const stage = h('div', { class: 'panel table-panel' }, loading(12));

  function draw() {
    if (all === undefined) return;
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const rows = all.filter(({ principal, action, project, target, outcome, detail }) => {
      const text = [principal, action, project, target, outcome, detailText(detail)].join(' ').toLowerCase();
      return words.every((word) => text.includes(word));
    });
    if (stage.firstChild !== table.element) fill(stage, table.element);
    table.setRows(rows);
    setText(counted, `the latest ${count(rows.length)}`);
  }

  const asking = poll(
    POLL_MS,
    (signal) => api.json(`/v1/audit${query({ project: who.project, limit: PAGE })}`, { signal }),
    (answer) => {
      all = listOf(answer, 'entries', 'records', 'audit');
      draw();
    },
    (error) => {
      const { status } = /** @type {any} */ (error);
      if (status === 403) {
        asking.end();
        fill(
          stage,
          empty('Not for this token', 'The audit log takes the action audit.read, which the role operator has.'),
        );
      } else if (all === undefined)
        fill(
          stage,
          failure(error, () => asking.now()),
        );
    },
  );
  return {
    title: 'Audit',
    element: h(
      'div',
      { class: 'view fixed' },
      h('h1', { class: 'sr' }, 'Audit log'),
      h('div', { class: 'toolbar' }, search, h('span', { class: 'spring' }), counted),
      stage,
    ),
    end() {
      asking.end();
      table.end();
    },
  };
}

/** @param {Record<string, unknown> | undefined} detail */
function detailText(detail) {
  return Object.entries(detail ?? {})
    .map(([key, value]) => `${key}=${typeof value === 'object' ? JSON.stringify(value) : value}`)
    .join(' ');
}
