/** Columns of denied network attempts, of one sandbox or of all. */
import { fill, h } from '../dom/element.js';
import { count } from '../format/amounts.js';
import { clock, momentOf } from '../format/times.js';
import { placeTo } from '../router.js';

/**
 * @typedef {object} DeniedRow
 * @property {string} key
 * @property {string} sandbox
 * @property {any} attempt
 */

/** @param {any[]} attempts @param {string} [sandbox] @returns {DeniedRow[]} */
export function deniedRows(attempts, sandbox) {
  return attempts.map((attempt, i) => {
    const id = String(sandbox ?? attempt.sandbox ?? attempt.id ?? '');
    return { key: `${id} ${attempt.time} ${attempt.destination} ${attempt.port ?? ''} ${i}`, sandbox: id, attempt };
  });
}

/** @param {{ withSandbox: boolean }} options @returns {import('../dom/virtual-table.js').Column<DeniedRow>[]} */
export function deniedColumns({ withSandbox }) {
  /** @type {import('../dom/virtual-table.js').Column<DeniedRow>[]} */
  const columns = [
    {
      key: 'time',
      title: 'First',
      width: 150,
      mono: true,
      sort: ({ attempt }) => momentOf(attempt.time),
      text: ({ attempt }) => clock(attempt.time),
    },
    {
      key: 'destination',
      title: 'Destination',
      width: 180,
      grow: 1.4,
      mono: true,
      sort: ({ attempt }) => attempt.destination,
      text: ({ attempt }) =>
        attempt.port === undefined ? attempt.destination : `${attempt.destination} :${attempt.port}`,
    },
    {
      key: 'protocol',
      title: 'Kind',
      width: 70,
      priority: 3,
      sort: ({ attempt }) => attempt.protocol,
      text: ({ attempt }) => attempt.protocol,
    },
    {
      key: 'name',
      title: 'Name',
      width: 120,
      grow: 0.8,
      priority: 5,
      mono: true,
      sort: ({ attempt }) => attempt.name,
      text: ({ attempt }) => attempt.name ?? '',
    },
    {
      key: 'reason',
      title: 'Reason',
      width: 150,
      grow: 1.2,
      priority: 2,
      sort: ({ attempt }) => attempt.reason,
      text: ({ attempt }) => attempt.reason ?? '',
    },
    {
      key: 'program',
      title: 'Program',
      width: 120,
      grow: 0.7,
      priority: 4,
      mono: true,
      sort: ({ attempt }) => attempt.program,
      text: ({ attempt }) => (attempt.program === undefined ? '' : `${attempt.program} (uid ${attempt.uid})`),
    },
    {
      key: 'count',
      title: 'Times',
      width: 64,
      align: 'end',
      sort: ({ attempt }) => attempt.count,
      text: ({ attempt }) => count(attempt.count ?? 1),
    },
  ];
  if (withSandbox) {
    columns.splice(1, 0, {
      key: 'sandbox',
      title: 'Sandbox',
      width: 140,
      grow: 1,
      sort: (row) => row.sandbox,
      show: (cell, row) =>
        fill(cell, h('a', { class: 'mono', href: placeTo('sandboxes', row.sandbox, { tab: 'network' }) }, row.sandbox)),
    });
  }
  return columns;
}
