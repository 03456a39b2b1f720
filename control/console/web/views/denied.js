/** What sandboxes tried to reach and were denied, over all of them that one may see. */
import { listOf } from '../api/list-of.js';
import { fill, h, setText } from '../dom/element.js';
import { empty, failure, loading } from '../dom/notices.js';
import { VirtualTable } from '../dom/virtual-table.js';
import { count } from '../format/amounts.js';
import { poll } from '../state/poll.js';
import { deniedColumns, deniedRows } from './denied-rows.js';

/** The server asks the nodes for each sandbox. */
const POLL_MS = 15_000;

/** @typedef {import('./denied-rows.js').DeniedRow} DeniedRow */

/** @type {import('../main.js').MakeView} */
export function deniedView({ api }) {
  /** @type {DeniedRow[] | undefined} */
  let all;
  let partly = '';
  /** @type {VirtualTable<DeniedRow>} */
  const table = new VirtualTable({
    label: 'Denied network attempts',
    columns: deniedColumns({ withSandbox: true }),
    keyOf: ({ key }) => key,
    sort: { key: 'time', down: true },
    whenEmpty: empty('Nothing was denied', 'Attempts that a network policy denies are listed here.'),
  });
  const search = h('input', {
    class: 'input input-search',
    type: 'search',
    placeholder: 'Destination, sandbox, program…',
    'aria-label': 'Find attempts',
    on: { input: () => draw() },
  });
  const counted = h('span', { class: 'faint num', role: 'status' });
  const stage = h('div', { class: 'panel table-panel' }, loading(12));

  function draw() {
    if (all === undefined) return;
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const rows = all.filter(({ sandbox, attempt }) => {
      if (words.length === 0) return true;
      const { destination, port, name, program, reason, protocol } = attempt;
      const text = [sandbox, destination, port, name, program, reason, protocol].join(' ').toLowerCase();
      return words.every((word) => text.includes(word));
    });
    if (stage.firstChild !== table.element) fill(stage, table.element);
    table.setRows(rows);
    setText(counted, `${rows.length === all.length ? '' : `${count(rows.length)} of `}${count(all.length)}${partly}`);
  }

  const asking = poll(
    POLL_MS,
    (signal) => api.json('/v1/denied', { signal }),
    (answer) => {
      all = deniedRows(listOf(answer, 'denied', 'attempts'));
      partly = answer.truncated
        ? ', of the first thousand sandboxes'
        : answer.unreachable?.length > 0
          ? ', without nodes that do not answer'
          : '';
      draw();
    },
    (error) =>
      all === undefined &&
      fill(
        stage,
        failure(error, () => asking.now()),
      ),
  );
  return {
    title: 'Denied',
    element: h(
      'div',
      { class: 'view fixed' },
      h('h1', { class: 'sr' }, 'Denied network attempts'),
      h('div', { class: 'toolbar' }, search, h('span', { class: 'spring' }), counted),
      stage,
    ),
    end() {
      asking.end();
      table.end();
    },
  };
}
