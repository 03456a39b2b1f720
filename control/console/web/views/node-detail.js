/** One node: what it has, what it promised, what was measured, who is there; and to drain it, or not any more. */

import { path } from '../api/client.js';
import { confirmed } from '../dom/confirm.js';
import { fill, h } from '../dom/element.js';
import { facts, section, stateMark } from '../dom/facts.js';
import { icon } from '../dom/icons.js';
import { bar, meter, plainBar } from '../dom/meter.js';
import { describe, toast } from '../dom/notices.js';
import { count, percent } from '../format/amounts.js';
import { duration } from '../format/times.js';
import { placeTo } from '../router.js';

const MOST_OWNERS = 8;

/** @typedef {import('../state/node.js').ClusterNode} ClusterNode */

/** @param {{ api: import('../api/client.js').ApiClient, cluster: import('../state/cluster.js').Cluster, close: () => void }} options */
export function nodeDetail({ api, cluster, close }) {
  const head = h('div', { class: 'detail-head' });
  const body = h('div', { class: 'detail-body' });
  const element = h('aside', { class: 'detail panel', 'aria-label': 'The chosen node', hidden: true }, head, body);
  /** @type {string | undefined} */
  let headFor;

  /** @param {ClusterNode} node */
  async function drain(node) {
    const on = node.state !== 'draining';
    const text = on
      ? `${node.edge} takes no more sandboxes. The ${count(node.sandboxes)} that it has go on until they end.`
      : `${node.edge} takes sandboxes again.`;
    const title = on ? `Drain ${node.edge}?` : `Let ${node.edge} take sandboxes?`;
    if (!(await confirmed({ title, text, action: on ? 'Drain' : 'Take sandboxes' }))) return;
    try {
      await api.post(path`/v1/nodes/${node.edge}/drain`, { on });
      toast(on ? `${node.edge} is draining` : `${node.edge} takes sandboxes`);
      await cluster.refreshNodes();
    } catch (error) {
      toast(describe(error).message, 'bad');
    }
  }

  /** @param {ClusterNode} node */
  function drawHead(node) {
    const key = `${node.edge} ${node.state}`;
    // Drawn again only when it says something else: the button keeps its focus.
    if (headFor === key) return;
    headFor = key;
    const label = node.state === 'draining' ? 'Take sandboxes' : 'Drain';
    const closing = { class: 'icon-button', type: 'button', 'aria-label': 'Close', on: { click: close } };
    fill(
      head,
      h('div', { class: 'detail-title' }, h('h2', { class: 'mono' }, node.edge), stateMark(node.state)),
      h('button', closing, icon('close')),
      h(
        'div',
        { class: 'detail-actions' },
        h(
          'a',
          { class: 'button', href: placeTo('sandboxes', undefined, { edge: node.edge }) },
          icon('sandboxes'),
          'Sandboxes',
        ),
        node.state !== 'dead' &&
          h(
            'button',
            { class: 'button', type: 'button', on: { click: () => drain(current ?? node) } },
            icon('drain'),
            label,
          ),
      ),
    );
  }

  /** @type {ClusterNode | undefined} */
  let current;
  return {
    element,
    /** @param {ClusterNode | undefined} node */
    show(node) {
      current = node;
      element.hidden = node === undefined;
      if (node === undefined) return;
      drawHead(node);
      const { capacity, reserved, load } = node;
      fill(
        body,
        section(
          'Measured',
          ...[
            { label: 'CPU', share: load.cpu },
            { label: 'Memory', share: load.memory },
            { label: 'Disk', share: load.disk },
          ].map(({ label, share }) => measured(label, share)),
        ),
        section(
          'Promised',
          meter({ label: 'CPU', used: reserved.cpuMilli, limit: capacity.cpuMilli, unit: 'milli' }),
          meter({ label: 'Memory', used: reserved.memoryBytes, limit: capacity.memoryBytes, unit: 'bytes' }),
          meter({ label: 'Disk', used: reserved.diskBytes, limit: capacity.diskBytes, unit: 'bytes' }),
          capacity.gpus > 0 && meter({ label: 'GPUs', used: reserved.gpus, limit: capacity.gpus, unit: 'count' }),
          ...node.backends.map(([name, { sandboxes, limit }]) =>
            meter({ label: name, used: sandboxes, limit, unit: 'count' }),
          ),
        ),
        facts([
          ['Heard', node.heardMsAgo === undefined ? undefined : `${duration(node.heardMsAgo)} ago`],
          ['Address', node.url && h('span', { class: 'mono' }, node.url)],
          ['Held by', node.heldBy],
          ['Layers at hand', node.layers === 0 ? undefined : count(node.layers)],
          [
            'Labels',
            node.labels.length === 0
              ? undefined
              : h('span', { class: 'chips' }, ...node.labels.map((label) => h('span', { class: 'chip' }, label))),
          ],
        ]),
        owners('Users', node.users, node.sandboxes, 'user', node.edge),
        owners('Jobs', node.jobs, node.sandboxes, 'job', node.edge),
      );
    },
  };
}

/** @param {string} label @param {number | undefined} share */
function measured(label, share) {
  return h(
    'div',
    { class: 'meter' },
    h('span', { class: 'meter-label' }, label),
    h('span', { class: 'meter-figures' }, percent(share)),
    bar(share, label),
  );
}

/** @param {string} title @param {[string, number][]} counts @param {number} all @param {'user' | 'job'} key @param {string} edge */
function owners(title, counts, all, key, edge) {
  if (counts.length === 0) return null;
  const rows = counts
    .slice(0, MOST_OWNERS)
    .map(([name, n]) =>
      h(
        'a',
        { class: 'owner', href: placeTo('sandboxes', undefined, { edge, [key]: name }) },
        h('span', { class: 'owner-name' }, name),
        h('span', { class: 'num' }, count(n)),
        plainBar(all > 0 ? n / all : 0, `${name}: share of sandboxes`),
      ),
    );
  const more = counts.length - MOST_OWNERS;
  return section(title, ...rows, more > 0 && h('p', { class: 'faint' }, `and ${count(more)} more`));
}
