/** Line icons of one weight, drawn on 16 x 16. */
import { svg } from './element.js';

const PATHS = {
  nodes: 'M2.5 2.5h4v4h-4zM9.5 2.5h4v4h-4zM2.5 9.5h4v4h-4zM9.5 9.5h4v4h-4z',
  sandboxes: 'M8 1.8 13.5 5v6L8 14.2 2.5 11V5zM2.5 5 8 8.2 13.5 5M8 8.2v6',
  images: 'M8 2 14 5 8 8 2 5zM2 8l6 3 6-3M2 11l6 3 6-3',
  projects: 'M3 2.5v8.5a2 2 0 0 0 2 2h2M3 6h4M9 4.5h4.5v3H9zM9 11.5h4.5v3H9z',
  denied: 'M8 2a6 6 0 1 0 0 12A6 6 0 0 0 8 2zM3.8 3.8l8.4 8.4',
  audit: 'M3.5 2h9v12h-9zM6 5.5h4M6 8h4M6 10.5h2.5',
  terminal: 'M2 3h12v10H2zM4.5 6l2 2-2 2M8 10h3',
  pause: 'M5.5 3.5v9M10.5 3.5v9',
  play: 'M5 3l7.5 5L5 13z',
  stop: 'M4 4h8v8H4z',
  trash: 'M3 4.5h10M6 4.5V3h4v1.5M4.5 4.5l.5 9h6l.5-9',
  drain: 'M8 2v7M5 6.5 8 9.5l3-3M2.5 12.5h11',
  close: 'M4 4l8 8M12 4l-8 8',
  back: 'M9.5 3.5 5 8l4.5 4.5',
  search: 'M7 2.5a4.5 4.5 0 1 0 0 9 4.5 4.5 0 0 0 0-9zM10.3 10.3 14 14',
  sun: 'M8 5a3 3 0 1 0 0 6 3 3 0 0 0 0-6zM8 1.5v1M8 13.5v1M1.5 8h1M13.5 8h1M3.4 3.4l.7.7M11.9 11.9l.7.7M12.6 3.4l-.7.7M4.1 11.9l-.7.7',
  moon: 'M13 9.5A5.5 5.5 0 0 1 6.5 3 5.5 5.5 0 1 0 13 9.5z',
  out: 'M6.5 2.5h-4v11h4M10 5l3 3-3 3M13 8H6',
  download: 'M8 2v8M5 7l3 3 3-3M2.5 13.5h11',
  copy: 'M5.5 5.5h8v8h-8zM3 10.5h-.5v-8h8V3',
  chevron: 'M6 3.5 10.5 8 6 12.5',
};

/** @typedef {keyof typeof PATHS} IconName */

/** @param {IconName} name */
export function icon(name) {
  const path = svg('path', { d: PATHS[name], fill: 'none', stroke: 'currentColor', 'stroke-width': 1.4 });
  path.setAttribute('stroke-linejoin', 'round');
  path.setAttribute('stroke-linecap', 'round');
  return svg('svg', { viewBox: '0 0 16 16', width: 16, height: 16, class: 'icon', 'aria-hidden': 'true' }, path);
}
