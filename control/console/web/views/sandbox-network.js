/** What a sandbox may reach, what passed, and what it tried and was denied. */

import { listOf } from '../api/list-of.js';
import { fill, h } from '../dom/element.js';
import { facts, section } from '../dom/facts.js';
import { describe, empty } from '../dom/notices.js';
import { VirtualTable } from '../dom/virtual-table.js';
import { bytes, count } from '../format/amounts.js';
import { poll } from '../state/poll.js';
import { deniedColumns, deniedRows } from './denied-rows.js';

const POLL_MS = 3000;
const MOST = 1000;

/** @typedef {import('../state/sandbox.js').SandboxRow} SandboxRow */

/** @param {{ api: import('../api/client.js').ApiClient, where: string, row: SandboxRow }} options @returns {import('./sandbox.js').Tab} */
export function networkTab({ api, where, row: first }) {
  const about = h('div', { class: 'panel pad network-about' });
  const counters = h('div', null);
  const table = new VirtualTable({
    label: 'Denied attempts',
    columns: deniedColumns({ withSandbox: false }),
    keyOf: (/** @type {import('./denied-rows.js').DeniedRow} */ row) => row.key,
    sort: { key: 'time', down: true },
    whenEmpty: empty('Nothing was denied'),
  });
  table.setRows([]);
  /** @type {ReturnType<typeof poll>[]} */
  let asking = [];
  let shown = '';

  /** @param {SandboxRow} row */
  function update(row) {
    const { network = { mode: 'none' } } = row.view;
    const key = JSON.stringify(network);
    if (key === shown) return;
    shown = key;
    for (const one of asking) one.end();
    const policy = network.policy;
    fill(
      about,
      section(
        'Network',
        facts([
          ['Mode', network.mode],
          ['IPv4', network.ipv4],
          ['IPv6', network.ipv6],
          ['Default', policy?.default],
        ]),
      ),
      policy !== undefined && section('Rules', rules(policy)),
      counters,
    );
    if (network.mode !== 'policy') {
      asking = [];
      return fill(counters, h('p', { class: 'faint' }, MODES[/** @type {'none'} */ (network.mode)] ?? ''));
    }
    const ask = (/** @type {string} */ what) => (/** @type {AbortSignal} */ signal) =>
      api.json(`${where}/network/${what}`, { signal });
    asking = [
      poll(POLL_MS, ask('counters'), (one) => fill(counters, section('Counters', counterFacts(one))), ignore),
      poll(
        POLL_MS,
        ask(`denied?limit=${MOST}`),
        (answer) => table.setRows(deniedRows(listOf(answer, 'denied', 'attempts'), row.id)),
        failed,
      ),
    ];
  }

  /** @param {unknown} error */
  function failed(error) {
    fill(counters, h('p', { class: 'faint' }, describe(error).message));
  }

  update(first);
  return {
    element: h('div', { class: 'network' }, about, h('div', { class: 'panel table-panel' }, table.element)),
    update,
    end() {
      table.end();
      for (const one of asking) one.end();
    },
  };
}

const MODES = {
  none: 'Loopback alone: there is nothing to deny.',
  host: "The node's own network: nothing is denied.",
};

function ignore() {}

/** @param {any} policy */
function rules({ rules: list = [], services = {} }) {
  const rows = [
    ...list.map((/** @type {any} */ rule) => {
      const allow = rule.allow !== undefined;
      const ports = rule.ports?.length > 0 ? ` : ${rule.ports.join(', ')}` : '';
      return [
        allow,
        `${rule.allow ?? rule.deny}${ports}${rule.protocol && rule.protocol !== 'any' ? ` ${rule.protocol}` : ''}`,
      ];
    }),
    ...Object.entries(services).map(([name, open]) => [open, `@${name}`]),
  ];
  if (rows.length === 0) return h('p', { class: 'faint' }, 'None: the default is all there is.');
  return h(
    'ul',
    { class: 'rules' },
    ...rows.map(([allow, text]) =>
      h(
        'li',
        null,
        h('span', { class: allow ? 'rule good' : 'rule bad' }, allow ? 'allow' : 'deny'),
        h('span', { class: 'mono' }, text),
      ),
    ),
  );
}

/** Whatever the node counts. @param {Record<string, unknown>} counters */
function counterFacts(counters) {
  const rows = Object.entries(counters).filter(([, value]) => typeof value === 'number');
  return facts(
    rows.map(([name, value]) => {
      const title = name.replace(/([A-Z])/g, (_, letter) => ` ${letter.toLowerCase()}`);
      const figure = /bytes/i.test(name) ? bytes(/** @type {number} */ (value)) : count(/** @type {number} */ (value));
      return [title[0]?.toUpperCase() + title.slice(1), h('span', { class: 'num' }, figure)];
    }),
  );
}
