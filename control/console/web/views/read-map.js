/**
 * What of an image's data was read, chunk by chunk, as `dsec stats --svg` draws it: each blob's chunks in their order, row by row. Drawn on a
 * canvas in the colours of the page, since a large image has tens of thousands.
 */
import { h, setText } from '../dom/element.js';
import { bytes, percent } from '../format/amounts.js';
import { onTheme } from '../state/theme.js';

const CHUNK_BYTES = 256 << 10;
const CELL = 7;
const GAP = 1;
const MOST_ROWS = 64;
const HEAT = ['cold: never here', 'prefetched, not read', 'read'];

/** @param {any} stats */
export function readMap(stats) {
  const blobs = (stats.blobs ?? []).map(blobMap);
  const total = stats.sizeBytes;
  const legend = (/** @type {string} */ kind, /** @type {string} */ text, /** @type {number} */ size) =>
    h(
      'span',
      { class: 'legend-item' },
      h('span', { class: `legend-swatch map-${kind}` }),
      `${text} ${percent(total > 0 ? size / total : 0)}`,
    );
  const draw = () => {
    for (const blob of blobs) blob.draw();
  };
  const element = h(
    'div',
    { class: 'read-map' },
    h(
      'div',
      { class: 'legend' },
      legend('read', 'read', stats.readBytes),
      legend('prefetched', 'prefetched', stats.prefetchedBytes),
      legend('cold', 'cold', stats.coldBytes),
      h('span', { class: 'faint' }, `of ${bytes(total)} on this node`),
    ),
    ...blobs.map((/** @type {any} */ blob) => blob.element),
  );
  const observer = new ResizeObserver(draw);
  observer.observe(element);
  const endTheme = onTheme(draw);
  return {
    element,
    end() {
      observer.disconnect();
      endTheme();
    },
  };
}

/** @param {any} blob */
function blobMap(blob) {
  const chunks = String(blob.chunks ?? '');
  const canvas = h('canvas', {
    class: 'map-canvas',
    role: 'img',
    'aria-label': `Layer ${blob.layer}: ${percent(blob.sizeBytes > 0 ? blob.readBytes / blob.sizeBytes : 0)} of ${bytes(blob.sizeBytes)} read`,
    on: { pointermove: (event) => point(event), pointerleave: () => setText(where, '') },
  });
  const where = h('span', { class: 'faint num' });
  const title = h(
    'div',
    { class: 'map-title' },
    h('span', null, `Layer ${blob.layer}`),
    h('span', { class: 'mono faint' }, String(blob.digest ?? '').slice(0, 19)),
    h('span', { class: 'num' }, bytes(blob.sizeBytes)),
    h('span', { class: 'spring' }),
    where,
  );
  let columns = 1;
  let perCell = 1;

  function draw() {
    const width = canvas.clientWidth || canvas.parentElement?.clientWidth || 600;
    columns = Math.max(16, Math.floor(width / (CELL + GAP)));
    perCell = Math.max(1, Math.ceil(chunks.length / (columns * MOST_ROWS)));
    const cells = Math.ceil(chunks.length / perCell);
    const rows = Math.max(1, Math.ceil(cells / columns));
    const scale = devicePixelRatio || 1;
    const height = rows * (CELL + GAP);
    if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
      canvas.width = Math.round(width * scale);
      canvas.height = Math.round(height * scale);
      canvas.style.height = `${height}px`;
    }
    const context = canvas.getContext('2d');
    if (context === null) return;
    const style = getComputedStyle(canvas);
    const colours = ['--map-cold', '--map-prefetched', '--map-read'].map((name) => style.getPropertyValue(name));
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, width, height);
    for (let cell = 0; cell < cells; cell++) {
      context.fillStyle = colours[hottest(cell)] ?? '';
      context.fillRect((cell % columns) * (CELL + GAP), Math.floor(cell / columns) * (CELL + GAP), CELL, CELL);
    }
  }

  /** @param {number} cell */
  function hottest(cell) {
    let heat = 0;
    for (let i = cell * perCell; i < Math.min(chunks.length, (cell + 1) * perCell); i++) {
      heat = Math.max(heat, chunks.charCodeAt(i) - 48);
    }
    return Math.min(2, Math.max(0, heat));
  }

  /** @param {PointerEvent} event */
  function point(event) {
    const cell = Math.floor(event.offsetY / (CELL + GAP)) * columns + Math.floor(event.offsetX / (CELL + GAP));
    const offset = cell * perCell * CHUNK_BYTES;
    if (offset >= blob.sizeBytes || event.offsetX >= columns * (CELL + GAP)) return setText(where, '');
    setText(where, `${bytes(offset)}: ${HEAT[hottest(cell)]}`);
  }

  return { element: h('div', { class: 'map-blob' }, title, canvas), draw };
}
