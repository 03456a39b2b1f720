/** All nodes at once: a tile each, coloured by one figure, or as a table; beside them the one that was chosen. */
import { fill, h, setText } from '../dom/element.js';
import { empty, failure, loading } from '../dom/notices.js';
import { segments } from '../dom/segments.js';
import { selectFilter } from '../dom/select-filter.js';
import { placeTo, replacePlace } from '../router.js';
import { METRICS } from '../state/node.js';
import { clusterSummary } from './cluster-summary.js';
import { heatMap, legend } from './heat-map.js';
import { nodeDetail } from './node-detail.js';
import { nodeTable } from './node-table.js';

/** @typedef {import('../state/node.js').ClusterNode} ClusterNode */

/** @type {{ metric: import('../state/node.js').Metric, basis: 'load' | 'promised', form: 'map' | 'table' }} */
const chosen = { metric: 'cpu', basis: 'load', form: 'map' };

/** @type {import('../main.js').MakeView} */
export function nodesView({ api, cluster }, place) {
  let selected = place.name;
  const summary = clusterSummary(cluster);
  const search = h('input', {
    class: 'input input-search',
    type: 'search',
    placeholder: 'Name or label',
    'aria-label': 'Find nodes by name or label',
    on: { input: () => draw() },
  });
  const state = selectFilter({ label: 'State', all: 'All states', change: () => draw() });
  const detail = nodeDetail({ api, cluster, close: () => select(undefined) });
  const map = heatMap({ select });
  const table = nodeTable({ select });
  const legendSlot = h('div', { class: 'legend-slot' });
  const stage = h('div', { class: 'stage' }, loading(8));
  const counted = h('span', { class: 'faint', role: 'status' });
  const metricChoice = segments({
    label: 'Coloured by',
    choices: METRICS,
    value: chosen.metric,
    change: (metric) => choose({ metric }),
  });
  const basisChoice = segments({
    label: 'Figures',
    choices: [
      { key: 'load', title: 'Measured' },
      { key: 'promised', title: 'Promised' },
    ],
    value: chosen.basis,
    change: (basis) => choose({ basis }),
  });
  const formChoice = segments({
    label: 'Shown as',
    choices: [
      { key: 'map', title: 'Map' },
      { key: 'table', title: 'Table' },
    ],
    value: chosen.form,
    change: (form) => choose({ form }),
  });

  /** @param {Partial<typeof chosen>} other */
  function choose(other) {
    Object.assign(chosen, other);
    draw();
  }

  /** @param {string | undefined} edge */
  function select(edge) {
    selected = edge;
    replacePlace(placeTo('nodes', edge));
    draw();
  }

  function draw() {
    const { nodes, errors } = cluster;
    if (nodes === undefined) {
      if (cluster.nodesDenied)
        fill(stage, empty('Not for this token', 'Nodes take the action node.read on the project root.'));
      else if (errors.nodes !== undefined)
        fill(
          stage,
          failure(errors.nodes, () => cluster.refreshNodes()),
        );
      return;
    }
    const text = search.value.toLowerCase();
    state.setValues(nodes.map((node) => node.state));
    const shown = nodes.filter((node) => {
      if (state.value !== '' && node.state !== state.value) return false;
      return text === '' || [node.edge, ...node.labels].some((one) => one.toLowerCase().includes(text));
    });
    setText(counted, shown.length === nodes.length ? '' : `${shown.length} of ${nodes.length}`);
    const form = chosen.form === 'map' ? map : table;
    if (stage.firstChild !== form.element) fill(stage, form.element);
    form.show(shown, { ...chosen, selected });
    fill(legendSlot, chosen.form === 'map' && legend());
    detail.show(nodes.find(({ edge }) => edge === selected));
    layout.classList.toggle('with-detail', selected !== undefined);
  }

  const layout = h(
    'div',
    { class: 'split' },
    h('div', { class: 'split-main' }, h('div', { class: 'panel nodes-panel' }, stage, legendSlot)),
    detail.element,
  );
  const end = cluster.nodesTopic.subscribe(draw);
  const closeDetail = (/** @type {KeyboardEvent} */ event) => {
    if (event.key === 'Escape' && selected !== undefined) select(undefined);
  };
  addEventListener('keydown', closeDetail);
  draw();
  return {
    title: 'Nodes',
    element: h(
      'div',
      { class: 'view nodes' },
      h('h1', { class: 'sr' }, 'Nodes'),
      summary.element,
      h(
        'div',
        { class: 'toolbar' },
        metricChoice,
        basisChoice,
        h('span', { class: 'spring' }),
        counted,
        search,
        state.element,
        formChoice,
      ),
      layout,
    ),
    end() {
      end();
      map.end();
      table.end();
      summary.end();
      removeEventListener('keydown', closeDetail);
    },
  };
}
