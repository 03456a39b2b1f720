/** The tree of projects, each with what its limits are, what is used of them, and what it has given to those below. */
import { listOf } from '../api/list-of.js';
import { fill, h } from '../dom/element.js';
import { icon } from '../dom/icons.js';
import { bar, level } from '../dom/meter.js';
import { empty, failure, loading } from '../dom/notices.js';
import { amount, amountOf, percent, shareOf } from '../format/amounts.js';
import { placeTo } from '../router.js';
import { poll } from '../state/poll.js';
import { treeOf } from '../state/project-tree.js';

const POLL_MS = 5000;

/** @type {readonly { key: string, title: string, unit: import('../format/amounts.js').Unit }[]} */
const RESOURCES = [
  { key: 'sandboxes', title: 'Sandboxes', unit: 'count' },
  { key: 'cpuMilli', title: 'CPU', unit: 'milli' },
  { key: 'memoryBytes', title: 'Memory', unit: 'bytes' },
  { key: 'diskBytes', title: 'Disk', unit: 'bytes' },
];

/** @typedef {import('../state/project-tree.js').ProjectNode} ProjectNode */

/** Folded ones, for as long as the page lives. @type {Set<string>} */
const folded = new Set();

/** @type {import('../main.js').MakeView} */
export function projectsView({ api }) {
  const stage = h('div', { class: 'panel projects-panel' }, loading(8));
  /** @type {ProjectNode[] | undefined} */
  let roots;
  let drawn = '';

  function draw() {
    if (roots === undefined) return;
    const key = JSON.stringify([roots, [...folded]]);
    if (key === drawn) return;
    drawn = key;
    if (roots.length === 0) return fill(stage, empty('No projects', 'There is none that this token may read.'));
    const focused = /** @type {HTMLElement | null} */ (document.activeElement)?.dataset?.path;
    fill(
      stage,
      h(
        'table',
        { class: 'projects', 'aria-label': 'Projects' },
        h(
          'thead',
          null,
          h(
            'tr',
            null,
            h('th', { scope: 'col' }, 'Project'),
            ...RESOURCES.map(({ title }) => h('th', { scope: 'col' }, title)),
          ),
        ),
        h('tbody', null, ...roots.flatMap((root) => rowsOf(root))),
      ),
      h(
        'p',
        { class: 'projects-note faint' },
        'Used of the limit. The dotted line is what projects below have been given of it.',
      ),
    );
    if (focused !== undefined) {
      for (const one of stage.querySelectorAll('button')) if (one.dataset.path === focused) one.focus();
    }
  }

  /** @param {ProjectNode} node @returns {HTMLElement[]} */
  function rowsOf(node) {
    const { path, name, depth, children } = node;
    const open = !folded.has(path);
    const fold = () => {
      if (open) folded.add(path);
      else folded.delete(path);
      draw();
    };
    const toggle = {
      class: `fold${open ? ' open' : ''}`,
      type: 'button',
      'data-path': path,
      'aria-expanded': String(open),
      'aria-label': `Projects below ${name}`,
      on: { click: fold },
    };
    const head = h(
      'th',
      { scope: 'row', vars: { '--depth': String(depth) } },
      h(
        'span',
        { class: 'project-name' },
        children.length > 0 ? h('button', toggle, icon('chevron')) : h('span', { class: 'fold-none' }),
        h('a', { href: placeTo('sandboxes', undefined, { project: path }), title: `Sandboxes of ${path}` }, name),
      ),
    );
    const row = h('tr', null, head, ...RESOURCES.map((resource) => quotaCell(node, resource)));
    return open ? [row, ...children.flatMap((child) => rowsOf(child))] : [row];
  }

  const asking = poll(
    POLL_MS,
    async (signal) => {
      const [projects, quotas] = await Promise.all([
        api.json('/v1/projects', { signal }),
        api.json('/v1/quotas', { signal }),
      ]);
      return treeOf(listOf(projects, 'projects'), listOf(quotas, 'quotas'));
    },
    (tree) => {
      roots = tree;
      draw();
    },
    (error) =>
      roots === undefined &&
      fill(
        stage,
        failure(error, () => asking.now()),
      ),
  );
  return {
    title: 'Projects',
    element: h('div', { class: 'view' }, h('h1', { class: 'sr' }, 'Projects'), stage),
    end: () => asking.end(),
  };
}

/** @param {ProjectNode} node @param {(typeof RESOURCES)[number]} resource */
function quotaCell({ quota }, { key, title, unit }) {
  const used = quota?.used?.[key] ?? 0;
  const limit = quota?.limits?.[key];
  const delegated = quota?.delegated?.[key] ?? 0;
  const share = limit === undefined ? undefined : limit === 0 ? (used > 0 ? 1 : 0) : shareOf(used, limit);
  // The unit once, where both have the same.
  const usedText = limit === undefined ? amount(used, unit) : amountOf(used, limit, unit, '/').split(' / ')[0];
  const figures =
    limit === undefined
      ? h('span', { class: 'quota-figures' }, usedText, h('span', { class: 'faint' }, ' no limit'))
      : h(
          'span',
          { class: `quota-figures level-${level(share)}` },
          usedText,
          h('span', { class: 'faint' }, ` / ${amount(limit, unit)}`),
          h('span', { class: 'faint quota-share' }, percent(share)),
        );
  const given =
    limit && delegated > 0
      ? h('span', { class: 'quota-given', vars: { '--share': String(Math.min(1, delegated / limit)) } })
      : undefined;
  return h(
    'td',
    { 'data-title': title },
    figures,
    limit === undefined
      ? h('span', { class: 'bar bar-none' })
      : h(
          'span',
          {
            class: 'quota-bar',
            title: delegated > 0 ? `${amount(delegated, unit)} given to projects below` : undefined,
          },
          bar(share, `${title} of ${limit}`),
          given,
        ),
  );
}
