/** What a sandbox is made of, what it may use and what it uses, measured every other second while it is looked at. */
import { fill, h, setText } from '../dom/element.js';
import { facts, section } from '../dom/facts.js';
import { meter } from '../dom/meter.js';
import { describe } from '../dom/notices.js';
import { sparkline } from '../dom/sparkline.js';
import { amount, bytes, count, percent } from '../format/amounts.js';
import { ago, clock, duration, until } from '../format/times.js';
import { placeTo } from '../router.js';
import { poll } from '../state/poll.js';
import { imageName } from '../state/sandbox.js';

const POLL_MS = 2000;

/** @typedef {import('../state/sandbox.js').SandboxRow} SandboxRow */

/** @param {{ api: import('../api/client.js').ApiClient, where: string, row: SandboxRow }} options @returns {import('./sandbox.js').Tab} */
export function overviewTab({ api, where, row: first }) {
  const about = h('div', { class: 'panel pad' });
  const use = usagePanel();
  /** @type {ReturnType<typeof poll> | undefined} */
  let asking;

  /** @param {SandboxRow} row */
  function update(row) {
    fill(about, section('Sandbox', ...aboutFacts(row)));
    use.limits(row.view.limits ?? {});
    // A paused one is not asked: it would be woken for nothing.
    if (row.state === 'running' && asking === undefined) {
      asking = poll(POLL_MS, (signal) => api.json(`${where}/usage`, { signal }), use.show, use.failed);
    } else if (row.state !== 'running') {
      asking?.end();
      asking = undefined;
      use.still(row.state === 'paused' ? 'It is paused: nothing is measured.' : 'It has ended.');
    }
  }

  update(first);
  return {
    element: h('div', { class: 'columns' }, use.element, about),
    update,
    end: () => asking?.end(),
  };
}

/** @param {SandboxRow} row */
function aboutFacts({ id, state, edge, project, user, job, view, createdMs, expiresMs }) {
  const {
    end,
    idleMs,
    idleAction,
    class: serviceClass,
    backend,
    pausedAt,
    workspace,
    toolkits = [],
    labels = [],
  } = view;
  const image = (/** @type {unknown} */ one) => {
    const name = imageName(one);
    return name && h('a', { class: 'mono', href: placeTo('images', name) }, name);
  };
  return [
    facts([
      ['Id', h('span', { class: 'mono' }, id)],
      ['Ended', end && `${end.reason}${end.detail ? `: ${end.detail}` : ''}`],
      ['Ended at', end && clock(end.at)],
      ['Node', h('a', { class: 'mono', href: placeTo('nodes', edge) }, edge)],
      ['Project', project && h('a', { href: placeTo('sandboxes', undefined, { project }) }, project)],
      ['User', user && h('a', { href: placeTo('sandboxes', undefined, { user }) }, user)],
      ['Job', job && h('a', { href: placeTo('sandboxes', undefined, { job }) }, job)],
      ['Image', image(view.base ?? view.image)],
      ['Workspace', workspace && image(workspace)],
      ['Toolkits', toolkits.length > 0 && h('span', { class: 'stack' }, ...toolkits.map(image))],
      ['Created', createdMs > 0 && `${clock(createdMs)} (${ago(createdMs)} ago)`],
      ['Ends', state !== 'ended' && expiresMs !== undefined && `${clock(expiresMs)} (in ${until(expiresMs)})`],
      ['When idle', idleMs !== undefined && `${idleAction ?? 'stop'} after ${duration(idleMs)}`],
      ['Paused', state === 'paused' && pausedAt && `${clock(pausedAt)} (${ago(pausedAt)} ago)`],
      ['Class', serviceClass === 'be' ? 'best effort' : serviceClass && 'latency-sensitive'],
      ['Launcher', backendName(backend)],
      [
        'Labels',
        labels.length > 0 &&
          h(
            'span',
            { class: 'chips' },
            ...labels.map((/** @type {unknown} */ one) => h('span', { class: 'chip' }, String(one))),
          ),
      ],
    ]),
  ];
}

/** @param {unknown} backend */
function backendName(backend) {
  const named = typeof backend === 'string' ? backend : /** @type {any} */ (backend)?.name;
  return typeof named === 'string' ? named : undefined;
}

function usagePanel() {
  const note = h('p', { class: 'faint', role: 'status' });
  const cpu = trace('CPU');
  const memory = trace('Memory');
  const io = trace('Disk I/O');
  const pids = trace('Processes');
  const meters = h('div', { class: 'meters' });
  /** @type {any} */
  let limits = {};
  /** @type {any} */
  let before;
  return {
    element: h(
      'div',
      { class: 'panel pad' },
      section('Usage', h('div', { class: 'traces' }, cpu.element, memory.element, io.element, pids.element), note),
      section('Limits', meters),
    ),
    /** @param {any} given */
    limits(given) {
      limits = given;
      if (before === undefined) fill(meters, ...limitMeters(limits, undefined, undefined));
    },
    /** @param {any} usage */
    show(usage) {
      const ms = before === undefined ? 0 : usage.atMs - before.atMs;
      const cores = ms > 0 ? (usage.cpuUsec - before.cpuUsec) / (ms * 1000) : undefined;
      const total = (/** @type {any} */ one) => one.io.readBytes + one.io.writeBytes;
      const rate = ms > 0 ? ((total(usage) - total(before)) * 1000) / ms : undefined;
      before = usage;
      const has = { ...limits, ...usage.limits };
      if (cores !== undefined) cpu.add(cores, amount(Math.max(0, cores), 'cores'), has.cpus ?? 0.1);
      memory.add(usage.memory.usedBytes, bytes(usage.memory.usedBytes), has.memoryBytes ?? 1 << 20);
      if (rate !== undefined) io.add(rate, `${bytes(rate)}/s`, 1 << 16);
      pids.add(usage.pids, count(usage.pids), 4);
      fill(meters, ...limitMeters(has, usage, cores));
      setText(note, notesOf(usage));
    },
    /** @param {unknown} error */
    failed(error) {
      setText(note, describe(error).message);
    },
    /** @param {string} why */
    still(why) {
      setText(note, why);
    },
  };
}

/** @param {any} limits @param {any} usage @param {number | undefined} cores */
function limitMeters(limits, usage, cores) {
  const { memory, disk, pids } = usage ?? {};
  return [
    meter({ label: 'CPU', used: cores, limit: limits.cpus, unit: 'cores' }),
    meter({ label: 'Memory', used: memory?.usedBytes, limit: limits.memoryBytes, unit: 'bytes' }),
    meter({ label: 'Processes', used: pids, limit: limits.pids, unit: 'count' }),
    meter({ label: 'Disk', used: disk?.usedBytes, limit: disk?.limitBytes ?? limits.diskBytes, unit: 'bytes' }),
    limits.inodes !== undefined &&
      meter({ label: 'Files', used: disk?.usedInodes, limit: limits.inodes, unit: 'count' }),
  ];
}

/** @param {any} usage */
function notesOf({ memory, throttledUsec, cpuUsec }) {
  const notes = [];
  if (memory.peakBytes !== undefined) notes.push(`peak memory ${bytes(memory.peakBytes)}`);
  if (memory.swapBytes) notes.push(`${bytes(memory.swapBytes)} in swap`);
  if (memory.outOfMemory > 0) notes.push(`out of memory ${count(memory.outOfMemory)} times`);
  notes.push(`${duration(cpuUsec / 1000)} of processor time`);
  if (throttledUsec > 0 && cpuUsec > 0)
    notes.push(`held back by its limit ${percent(throttledUsec / (throttledUsec + cpuUsec))} of the time`);
  return notes.join(' · ');
}

/** @param {string} title */
function trace(title) {
  const line = sparkline(`${title}, the last two minutes`);
  const figure = h('span', { class: 'trace-figure num' }, '–');
  return {
    element: h('div', { class: 'trace' }, h('span', { class: 'trace-title' }, title), figure, line.element),
    /** @param {number} value @param {string} text @param {number} atLeast */
    add(value, text, atLeast) {
      line.add(value, atLeast);
      setText(figure, text);
    },
  };
}
