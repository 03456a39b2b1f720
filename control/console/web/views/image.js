/** One image: its layers, and what of its data was ever read. */
import { path } from '../api/client.js';
import { fill, h } from '../dom/element.js';
import { facts, section } from '../dom/facts.js';
import { icon } from '../dom/icons.js';
import { plainBar } from '../dom/meter.js';
import { describe, empty, failure, loading, toast } from '../dom/notices.js';
import { bytes, count, percent } from '../format/amounts.js';
import { placeTo } from '../router.js';
import { readMap } from './read-map.js';

const MOST_DIRECTORIES = 40;

/** @type {import('../main.js').MakeView} */
export function imageView({ api }, place) {
  const name = /** @type {string} */ (place.name);
  const where = path`/v1/images/${name}`;
  const stop = new AbortController();
  const about = h('div', { class: 'panel pad' }, loading(6));
  const map = h('div', { class: 'panel pad read-panel' }, loading(10));
  /** @type {(() => void) | undefined} */
  let endMap;

  async function showImage() {
    try {
      const image = await api.json(where, { signal: stop.signal });
      const layers = layersOf(image);
      fill(
        about,
        section('Image', imageFacts(image, layers)),
        section(`Layers, top first`, layers.length === 0 ? h('p', { class: 'faint' }, 'none') : layerList(layers)),
      );
    } catch (error) {
      if (!stop.signal.aborted) fill(about, failure(error, showImage));
    }
  }

  async function showMap() {
    try {
      const stats = await api.json(`${where}/stats`, { signal: stop.signal });
      const drawn = readMap(stats);
      endMap = drawn.end;
      const save = { class: 'button', type: 'button', on: { click: () => download() } };
      fill(
        map,
        h(
          'div',
          { class: 'section-head' },
          h('h3', null, 'Read map'),
          h('span', { class: 'spring' }),
          h('button', save, icon('download'), 'SVG'),
        ),
        drawn.element,
        directories(stats.directories ?? []),
      );
    } catch (error) {
      if (stop.signal.aborted) return;
      const { status } = /** @type {any} */ (error);
      if (status === 404) fill(map, empty('No read map', 'Nothing is known of what was read of this image here.'));
      else fill(map, failure(error, showMap));
    }
  }

  async function download() {
    try {
      const response = await api.open(`${where}/stats.svg`, { signal: stop.signal });
      const address = URL.createObjectURL(await response.blob());
      const link = document.createElement('a');
      link.href = address;
      link.download = `${name.replaceAll(/[^\w.-]+/g, '-')}.svg`;
      link.click();
      setTimeout(() => URL.revokeObjectURL(address), 1000);
    } catch (error) {
      toast(describe(error).message, 'bad');
    }
  }

  void showImage();
  void showMap();
  return {
    title: name,
    element: h(
      'div',
      { class: 'view' },
      h(
        'div',
        { class: 'sandbox-head' },
        h('a', { class: 'icon-button', href: '#/images', 'aria-label': 'All images' }, icon('back')),
        h('h1', { class: 'mono' }, name),
      ),
      h('div', { class: 'columns image-columns' }, about, map),
    ),
    end() {
      stop.abort();
      endMap?.();
    },
  };
}

/** @typedef {{ number: number, digest: string, metaBytes: number, dataBytes: number, own: boolean, sharedWith: string[] }} Layer */

/** Bottom first. @param {any} image @returns {Layer[]} */
function layersOf(image) {
  const sizeOf = (/** @type {any[]} */ blobs) => blobs.reduce((all, { sizeBytes }) => all + sizeBytes, 0);
  // A disk has blobs of data alone.
  const disk = (image.disk?.layers ?? []).map((/** @type {any} */ layer) => ({ ...layer, devices: [layer] }));
  return [...(image.layers ?? []), ...disk].map((layer, i) => ({
    number: i + 1,
    digest: String((layer.meta ?? layer).digest),
    metaBytes: layer.meta?.sizeBytes ?? 0,
    dataBytes: sizeOf(layer.devices),
    own: layer.own !== false,
    sharedWith: layer.sharedWith ?? [],
  }));
}

/** @param {any} image @param {Layer[]} layers */
function imageFacts(image, layers) {
  const sum = (/** @type {'metaBytes' | 'dataBytes'} */ key) => layers.reduce((all, layer) => all + layer[key], 0);
  const { digest, kind, base, ownLayers } = image;
  return facts([
    ['Kind', kind],
    ['Digest', digest && h('span', { class: 'mono breaks' }, digest)],
    ['Metadata', `${bytes(image.metaBytes ?? sum('metaBytes'))}, always local`],
    ['Data', `${bytes(image.dataBytes ?? sum('dataBytes'))}, read on demand`],
    ['Layers', count(layers.length)],
    ['Of its own', ownLayers !== undefined && ownLayers !== layers.length && count(ownLayers)],
    ['Base', base && h('a', { class: 'mono breaks', href: placeTo('images', base) }, base)],
    ['Problem', image.problem],
  ]);
}

/** @param {Layer[]} layers */
function layerList(layers) {
  const most = Math.max(1, ...layers.map((layer) => layer.dataBytes + layer.metaBytes));
  return h(
    'ol',
    { class: 'layers' },
    ...[...layers]
      .reverse()
      .map((layer) =>
        h(
          'li',
          { class: 'layer' },
          h('span', { class: 'num faint' }, layer.number),
          h('span', { class: 'mono layer-digest', title: layer.digest }, layer.digest.slice(0, 19)),
          layerNote(layer),
          h(
            'span',
            { class: 'num layer-size' },
            bytes(layer.dataBytes),
            h('span', { class: 'faint' }, ` + ${bytes(layer.metaBytes)}`),
          ),
          plainBar((layer.dataBytes + layer.metaBytes) / most, `Layer ${layer.number}: size beside the largest`),
        ),
      ),
  );
}

/** @param {Layer} layer */
function layerNote({ own, sharedWith }) {
  const n = sharedWith.length;
  const shared =
    n > 0 &&
    h(
      'span',
      { class: 'chip', title: sharedWith.slice(0, 30).join('\n') },
      `in ${count(n)} ${n === 1 ? 'other image' : 'other images'}`,
    );
  return h('span', { class: 'chips' }, !own && h('span', { class: 'chip' }, 'of the base'), shared);
}

/** @param {any[]} list */
function directories(list) {
  if (list.length === 0) return null;
  const shown = list.slice(0, MOST_DIRECTORIES);
  const row = (/** @type {any} */ one) => {
    const share = one.sizeBytes > 0 ? one.readBytes / one.sizeBytes : 0;
    return h(
      'tr',
      null,
      h('td', { class: 'mono' }, pathText(one)),
      h('td', { class: 'num end' }, bytes(one.sizeBytes)),
      h('td', { class: 'num end' }, percent(share)),
      h('td', { class: 'bar-cell' }, plainBar(share, 'read')),
    );
  };
  return h(
    'table',
    { class: 'plain-table' },
    h(
      'thead',
      null,
      h(
        'tr',
        null,
        ...['Directory', 'Data', 'Read', ''].map((title, i) =>
          h('th', { class: i === 1 || i === 2 ? 'end' : '' }, title),
        ),
      ),
    ),
    h('tbody', null, ...shown.map(row)),
  );
}

/** @param {any} one */
function pathText({ path: text, pathBase64 }) {
  const shown = text ?? (pathBase64 === undefined ? '' : `base64:${pathBase64}`);
  return shown === '' ? '/' : shown;
}
