/** The whole cluster in one row of figures. */
import { fill, h } from '../dom/element.js';
import { bar } from '../dom/meter.js';
import { amountOf, count, percent, shareOf } from '../format/amounts.js';

/** @typedef {import('../state/node.js').ClusterNode} ClusterNode */

/** @param {import('../state/cluster.js').Cluster} cluster */
export function clusterSummary(cluster) {
  const element = h('div', { class: 'summary', 'aria-label': 'The cluster' });
  const draw = () => fill(element, ...tiles(cluster.nodes));
  const end = cluster.nodesTopic.subscribe(draw);
  draw();
  return { element, end };
}

/** @param {readonly ClusterNode[] | undefined} nodes */
function tiles(nodes) {
  const alive = nodes?.filter(({ state }) => state !== 'dead') ?? [];
  const inState = (/** @type {string} */ state) => nodes?.filter((node) => node.state === state).length ?? 0;
  const sum = (/** @type {(node: ClusterNode) => number} */ of) => alive.reduce((all, node) => all + of(node), 0);
  const troubles = [
    [inState('draining'), 'draining'],
    [inState('dead'), 'dead'],
  ].filter(([n]) => n !== 0);
  const sandboxes = sum((node) => node.sandboxes);
  const room = sum((node) => node.sandboxLimit);
  return [
    tile(
      'Nodes',
      nodes === undefined ? '–' : count(alive.length),
      nodes === undefined ? '' : `of ${count(nodes.length)} up`,
      troubles.length === 0 ? 'all healthy' : troubles.map(([n, what]) => `${n} ${what}`).join(', '),
      troubles.length > 0,
    ),
    tile(
      'Sandboxes',
      nodes === undefined ? '–' : count(sandboxes),
      `of ${count(room)}`,
      undefined,
      false,
      shareOf(sandboxes, room),
    ),
    promised(
      'CPU promised',
      sum((n) => n.reserved.cpuMilli),
      sum((n) => n.capacity.cpuMilli),
      'milli',
    ),
    promised(
      'Memory promised',
      sum((n) => n.reserved.memoryBytes),
      sum((n) => n.capacity.memoryBytes),
      'bytes',
    ),
    promised(
      'Disk promised',
      sum((n) => n.reserved.diskBytes),
      sum((n) => n.capacity.diskBytes),
      'bytes',
    ),
  ];
}

/** @param {string} title @param {number} used @param {number} capacity @param {import('../format/amounts.js').Unit} unit */
function promised(title, used, capacity, unit) {
  const share = shareOf(used, capacity);
  return tile(title, percent(share), amountOf(used, capacity, unit), undefined, false, share);
}

/** @param {string} title @param {string} figure @param {string} beside @param {string | undefined} below @param {boolean} trouble @param {number} [share] */
function tile(title, figure, beside, below, trouble, share) {
  return h(
    'div',
    { class: 'summary-tile' },
    h('span', { class: 'summary-title' }, title),
    h('span', { class: 'summary-line' }, h('strong', null, figure), h('span', { class: 'faint' }, beside)),
    below === undefined
      ? bar(share, title)
      : h('span', { class: trouble ? 'summary-below warn' : 'summary-below faint' }, below),
  );
}
