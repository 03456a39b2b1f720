/** The images of the store. */

import { listOf } from '../api/list-of.js';
import { fill, h, setText } from '../dom/element.js';
import { empty, failure, loading } from '../dom/notices.js';
import { selectFilter } from '../dom/select-filter.js';
import { VirtualTable } from '../dom/virtual-table.js';
import { bytes, count } from '../format/amounts.js';
import { placeTo } from '../router.js';
import { poll } from '../state/poll.js';

const POLL_MS = 30_000;

/** @typedef {{ name: string, digest: string, kind: string, layers: number, metaBytes: number, dataBytes: number, problem?: string }} ImageRow */

/** @param {any} image @returns {ImageRow} */
function rowOf(image) {
  const { layers, problem } = image;
  const kind = problem === undefined ? String(image.kind ?? '') : 'damaged';
  return {
    ...image,
    name: String(image.name),
    kind,
    digest: String(image.digest ?? ''),
    layers: Array.isArray(layers) ? layers.length : layers,
  };
}

/** @type {import('../main.js').MakeView} */
export function imagesView({ api }) {
  /** @type {ImageRow[] | undefined} */
  let images;
  /** @type {VirtualTable<ImageRow>} */
  const table = new VirtualTable({
    label: 'Images',
    keyOf: ({ name }) => name,
    sort: { key: 'name', down: false },
    open: ({ name }) => {
      location.hash = placeTo('images', name);
    },
    whenEmpty: empty('No image fits', 'dsec convert makes one.'),
    columns: [
      {
        key: 'name',
        title: 'Name',
        width: 200,
        grow: 2,
        mono: true,
        sort: ({ name }) => name,
        text: ({ name }) => name,
      },
      { key: 'kind', title: 'Kind', width: 96, sort: ({ kind }) => kind, text: ({ kind }) => kind },
      {
        key: 'layers',
        title: 'Layers',
        width: 76,
        align: 'end',
        priority: 2,
        sort: ({ layers }) => layers,
        text: ({ layers }) => count(layers),
      },
      {
        key: 'meta',
        title: 'Metadata',
        width: 100,
        align: 'end',
        priority: 3,
        sort: (row) => row.metaBytes,
        text: (row) => bytes(row.metaBytes),
      },
      {
        key: 'data',
        title: 'Data',
        width: 100,
        align: 'end',
        priority: 1,
        sort: (row) => row.dataBytes,
        text: (row) => bytes(row.dataBytes),
      },
      {
        key: 'digest',
        title: 'Digest',
        width: 190,
        grow: 1,
        priority: 4,
        mono: true,
        text: ({ digest }) => digest.slice(0, 23),
      },
    ],
  });
  const search = h('input', {
    class: 'input input-search',
    type: 'search',
    placeholder: 'Name or digest',
    'aria-label': 'Find images',
    on: { input: () => draw() },
  });
  const kind = selectFilter({ label: 'Kind', all: 'All kinds', change: () => draw() });
  const counted = h('span', { class: 'faint num', role: 'status' });
  const stage = h('div', { class: 'panel table-panel' }, loading(10));

  function draw() {
    if (images === undefined) return;
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const rows = images.filter((row) => {
      const text = `${row.name} ${row.digest}`.toLowerCase();
      return (kind.value === '' || row.kind === kind.value) && words.every((word) => text.includes(word));
    });
    kind.setValues(images.map((row) => row.kind));
    if (stage.firstChild !== table.element) fill(stage, table.element);
    table.setRows(rows);
    setText(
      counted,
      rows.length === images.length ? count(rows.length) : `${count(rows.length)} of ${count(images.length)}`,
    );
  }

  const asking = poll(
    POLL_MS,
    (signal) => api.json('/v1/images', { signal }),
    (answer) => {
      images = listOf(answer, 'images').map(rowOf);
      draw();
    },
    (error) =>
      images === undefined &&
      fill(
        stage,
        failure(error, () => asking.now()),
      ),
  );
  return {
    title: 'Images',
    element: h(
      'div',
      { class: 'view fixed' },
      h('h1', { class: 'sr' }, 'Images'),
      h('div', { class: 'toolbar' }, search, kind.element, h('span', { class: 'spring' }), counted),
      stage,
    ),
    end() {
      asking.end();
      table.end();
    },
  };
}
