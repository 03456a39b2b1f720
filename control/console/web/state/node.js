/** A node as the views show it, of the watcher's answer. */
import { shareOf } from '../format/amounts.js';

/** @typedef {{ cpuMilli: number, memoryBytes: number, diskBytes: number, gpus: number }} Amounts */
/**
 * @typedef {object} ClusterNode
 * @property {string} edge
 * @property {string} [url]
 * @property {'healthy' | 'draining' | 'dead'} state
 * @property {string[]} labels
 * @property {number | undefined} heardMsAgo
 * @property {{ cpu?: number, memory?: number, disk?: number }} load Measured, 0 to 1.
 * @property {Amounts} capacity
 * @property {Amounts} reserved
 * @property {{ cpu?: number, memory?: number, disk?: number }} promised Reserved of capacity, 0 to 1.
 * @property {number} sandboxes
 * @property {number} sandboxLimit
 * @property {[string, { sandboxes: number, limit: number }][]} backends
 * @property {[string, number][]} users Most first.
 * @property {[string, number][]} jobs Most first.
 * @property {string | undefined} heldBy
 * @property {number} layers
 */

const NOTHING = { cpuMilli: 0, memoryBytes: 0, diskBytes: 0, gpus: 0 };

/** @param {any} entry @returns {ClusterNode} */
export function nodeOf(entry) {
  const { edge, url, alive = true, heardMsAgo } = entry;
  const report = entry.report ?? {};
  const capacity = { ...NOTHING, ...report.capacity };
  const reserved = { ...NOTHING, ...report.reserved };
  /** @type {[string, { sandboxes: number, limit: number }][]} */
  const backends = Object.entries(report.backends ?? {});
  return {
    edge: String(edge),
    url,
    state: !alive || entry.report === undefined ? 'dead' : (report.state ?? 'healthy'),
    labels: [...new Set([...labelsOf(entry.labels), ...labelsOf(report.labels)])],
    heardMsAgo,
    load: report.load ?? {},
    capacity,
    reserved,
    promised: {
      cpu: shareOf(reserved.cpuMilli, capacity.cpuMilli),
      memory: shareOf(reserved.memoryBytes, capacity.memoryBytes),
      disk: shareOf(reserved.diskBytes, capacity.diskBytes),
    },
    sandboxes: sum(backends.map(([, use]) => use.sandboxes)),
    sandboxLimit: sum(backends.map(([, use]) => use.limit)),
    backends,
    users: most(report.users),
    jobs: most(report.jobs),
    heldBy: report.heldBy ?? undefined,
    layers: report.layers?.length ?? 0,
  };
}

/** @param {unknown} labels @returns {string[]} */
function labelsOf(labels) {
  return Array.isArray(labels) ? labels.map(String) : [];
}

/** @param {Record<string, number> | undefined} counts @returns {[string, number][]} */
function most(counts) {
  return Object.entries(counts ?? {}).sort((a, b) => b[1] - a[1]);
}

/** @param {number[]} values */
function sum(values) {
  return values.reduce((all, value) => all + (value || 0), 0);
}

/** What the heat map can show. @type {readonly { key: 'cpu' | 'memory' | 'disk' | 'sandboxes', title: string }[]} */
export const METRICS = [
  { key: 'cpu', title: 'CPU' },
  { key: 'memory', title: 'Memory' },
  { key: 'disk', title: 'Disk' },
  { key: 'sandboxes', title: 'Sandboxes' },
];

/** @typedef {(typeof METRICS)[number]['key']} Metric */

/** 0 to 1. @param {ClusterNode} node @param {Metric} metric @param {'load' | 'promised'} basis */
export function metricOf(node, metric, basis) {
  if (metric === 'sandboxes') return shareOf(node.sandboxes, node.sandboxLimit);
  return node[basis][metric];
}
