/**
 * A tile for each node. How full it is shows as lightness of one hue, what is nearly full as another hue, and always as a number. Tiles are made
 * once and only change; arrow keys walk over them as they lie.
 */
import { h, setText } from '../dom/element.js';
import { tooltip } from '../dom/tooltip.js';
import { count, percent } from '../format/amounts.js';
import { METRICS, metricOf } from '../state/node.js';

/** @typedef {import('../state/node.js').ClusterNode} ClusterNode */
/** @typedef {{ metric: import('../state/node.js').Metric, basis: 'load' | 'promised', selected?: string }} Shown */

const STEPS = 8;

/** @param {{ select: (edge: string) => void }} options */
export function heatMap({ select }) {
  /** @type {Map<string, { element: HTMLButtonElement, name: HTMLElement, figure: HTMLElement, node: ClusterNode }>} */
  const tiles = new Map();
  const element = h('div', { class: 'heat', role: 'group', 'aria-label': 'Nodes', on: { keydown } });
  const tip = tooltip();
  /** @type {Shown} */
  let shown = { metric: 'cpu', basis: 'load' };

  /** @param {ClusterNode} node */
  function newTile(node) {
    const name = h('span', { class: 'heat-name' });
    const figure = h('span', { class: 'heat-figure' });
    const over = () => tip.show(button, ...tipOf(tile.node, shown.basis));
    const button = h(
      'button',
      {
        class: 'heat-tile',
        type: 'button',
        tabindex: -1,
        on: {
          click: () => select(tile.node.edge),
          pointerenter: over,
          focus: over,
          pointerleave: tip.hide,
          blur: tip.hide,
        },
      },
      name,
      figure,
    );
    const tile = { element: button, name, figure, node };
    tiles.set(node.edge, tile);
    return tile;
  }

  /** @param {KeyboardEvent} event */
  function keydown(event) {
    const all = /** @type {HTMLElement[]} */ ([...element.children]);
    const at = all.indexOf(/** @type {HTMLElement} */ (document.activeElement));
    if (at < 0) return;
    const top = all[0]?.offsetTop;
    const across = Math.max(1, all.filter((one) => one.offsetTop === top).length);
    const by = /** @type {Record<string, number>} */ ({
      ArrowRight: 1,
      ArrowLeft: -1,
      ArrowDown: across,
      ArrowUp: -across,
    })[event.key];
    const to = event.key === 'Home' ? 0 : event.key === 'End' ? all.length - 1 : by === undefined ? undefined : at + by;
    const target = to === undefined ? undefined : all[to];
    if (to === undefined) return;
    event.preventDefault();
    if (target === undefined) return;
    all[at]?.setAttribute('tabindex', '-1');
    target.setAttribute('tabindex', '0');
    target.focus();
  }

  return {
    element,
    /** @param {readonly ClusterNode[]} nodes @param {Shown} how */
    show(nodes, how) {
      shown = how;
      const prefix = commonPrefix(nodes.map(({ edge }) => edge));
      const present = new Set(nodes.map(({ edge }) => edge));
      for (const [edge, tile] of tiles) {
        if (present.has(edge)) continue;
        tile.element.remove();
        tiles.delete(edge);
      }
      /** @type {Element | null} */
      let before = null;
      for (const node of nodes) {
        const tile = tiles.get(node.edge) ?? newTile(node);
        tile.node = node;
        drawTile(tile, prefix, how);
        /** @type {ChildNode | null} */
        const next = before === null ? element.firstChild : before.nextSibling;
        if (next !== tile.element) element.insertBefore(tile.element, next);
        before = tile.element;
      }
      if (element.querySelector('[tabindex="0"]') === null) element.firstElementChild?.setAttribute('tabindex', '0');
    },
    end: () => tip.end(),
  };
}

/** @param {{ element: HTMLElement, name: HTMLElement, figure: HTMLElement, node: ClusterNode }} tile @param {string} prefix @param {Shown} how */
function drawTile({ element, name, figure, node }, prefix, { metric, basis, selected }) {
  const share = metricOf(node, metric, basis);
  const text =
    node.state === 'dead' ? 'dead' : metric === 'sandboxes' ? count(node.sandboxes) : percent(share).replace(' ', '');
  setText(name, node.edge.slice(prefix.length) || node.edge);
  setText(figure, text);
  element.dataset.heat = node.state === 'dead' ? 'dead' : String(stepOf(share));
  element.dataset.state = node.state;
  element.setAttribute('aria-pressed', String(node.edge === selected));
  const title = METRICS.find(({ key }) => key === metric)?.title ?? metric;
  element.setAttribute('aria-label', `${node.edge}, ${node.state}, ${title} ${text}`);
}

/** @param {number | undefined} share */
function stepOf(share) {
  if (share === undefined) return 0;
  if (share >= 0.95) return 'full';
  if (share >= 0.85) return 'raised';
  return Math.min(STEPS - 1, Math.floor((share / 0.85) * STEPS));
}

/** Up to the last separator that all have in common: `edge-001` and `edge-002` are shown as 001 and 002. @param {string[]} names */
function commonPrefix(names) {
  const first = names[0] ?? '';
  if (names.length < 2) return '';
  let length = first.length;
  for (const name of names) {
    while (!name.startsWith(first.slice(0, length))) length--;
  }
  return first.slice(0, first.slice(0, length).lastIndexOf('-') + 1);
}

/** @param {ClusterNode} node @param {'load' | 'promised'} basis */
function tipOf(node, basis) {
  const rows = METRICS.map(({ key, title }) => {
    const share = metricOf(node, key, basis);
    const figure = key === 'sandboxes' ? `${count(node.sandboxes)} / ${count(node.sandboxLimit)}` : percent(share);
    return h('span', { class: 'tip-row' }, h('span', { class: 'faint' }, title), h('span', { class: 'num' }, figure));
  });
  return [h('strong', null, node.edge), h('span', { class: 'tip-state' }, node.state), ...rows];
}

export function legend() {
  const swatch = (/** @type {string} */ heat) => h('span', { class: 'legend-swatch', 'data-heat': heat });
  return h(
    'div',
    { class: 'legend', 'aria-hidden': 'true' },
    h('span', null, '0 %'),
    h('span', { class: 'legend-ramp' }, ...Array.from({ length: STEPS }, (_, i) => swatch(String(i)))),
    h('span', null, '85 %'),
    swatch('raised'),
    h('span', null, '95 %'),
    swatch('full'),
    h('span', { class: 'legend-gap' }),
    h('span', { class: 'legend-swatch', 'data-heat': '3', 'data-state': 'draining' }),
    h('span', null, 'draining'),
    swatch('dead'),
    h('span', null, 'dead'),
  );
}
