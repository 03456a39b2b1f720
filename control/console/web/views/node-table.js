/** The nodes as a table, to be sorted by any figure. */
import { fill, h } from '../dom/element.js';
import { stateMark } from '../dom/facts.js';
import { bar } from '../dom/meter.js';
import { empty } from '../dom/notices.js';
import { VirtualTable } from '../dom/virtual-table.js';
import { count, percent } from '../format/amounts.js';
import { duration } from '../format/times.js';
import { metricOf } from '../state/node.js';

/** @typedef {import('../state/node.js').ClusterNode} ClusterNode */

/** @param {{ select: (edge: string) => void }} options */
export function nodeTable({ select }) {
  /** @type {'load' | 'promised'} */
  let basis = 'load';
  /** @param {'cpu' | 'memory' | 'disk'} key @param {string} title @param {number} priority @returns {import('../dom/virtual-table.js').Column<ClusterNode>} */
  const share = (key, title, priority) => ({
    key,
    title,
    width: 110,
    grow: 1,
    priority,
    sort: (node) => metricOf(node, key, basis),
    show: (cell, node) => {
      const value = metricOf(node, key, basis);
      fill(cell, h('span', { class: 'bar-cell' }, bar(value, title), h('span', { class: 'num' }, percent(value))));
    },
  });
  /** @type {VirtualTable<ClusterNode>} */
  const table = new VirtualTable({
    label: 'Nodes',
    keyOf: ({ edge }) => edge,
    open: ({ edge }) => select(edge),
    whenEmpty: empty('No node fits', 'Other words, or another state.'),
    columns: [
      {
        key: 'edge',
        title: 'Node',
        width: 130,
        grow: 1.5,
        mono: true,
        sort: ({ edge }) => edge,
        text: ({ edge }) => edge,
      },
      {
        key: 'state',
        title: 'State',
        width: 100,
        sort: ({ state }) => state,
        show: (cell, { state }) => fill(cell, stateMark(state)),
      },
      share('cpu', 'CPU', 1),
      share('memory', 'Memory', 2),
      share('disk', 'Disk', 4),
      {
        key: 'sandboxes',
        title: 'Sandboxes',
        width: 100,
        align: 'end',
        priority: 3,
        sort: (node) => node.sandboxes,
        text: (node) => count(node.sandboxes),
      },
      {
        key: 'heard',
        title: 'Heard',
        width: 80,
        align: 'end',
        priority: 5,
        sort: (node) => node.heardMsAgo,
        text: (node) => duration(node.heardMsAgo),
      },
      { key: 'labels', title: 'Labels', width: 120, grow: 1, priority: 6, text: ({ labels }) => labels.join(' ') },
    ],
  });
  return {
    element: table.element,
    /** @param {readonly ClusterNode[]} nodes @param {{ basis: 'load' | 'promised', selected?: string }} how */
    show(nodes, how) {
      basis = how.basis;
      table.current = how.selected;
      table.setRows(nodes);
    },
    end: () => table.end(),
  };
}
