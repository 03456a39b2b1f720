/**
 * A map of an image's data blobs as SVG: every chunk in its place, row by row, coloured by what became of it. The offset of each
 * row stands at its left, what a row holds below it. A blob of very many chunks has several in a cell, which has the colour of
 * the hottest.
 */
import { humanSize, SVG_COLOURS, SVG_WIDTH, svgDocument, svgHeading, svgLegend, svgNumber, svgText } from '#base';
import { CHUNK_BYTES } from '../catalog/image.ts';
import {
  type BlobHeat,
  COLD_CHUNK,
  type HeatBytes,
  type ImageStats,
  PREFETCHED_CHUNK,
  READ_CHUNK,
} from './image-stats.ts';

const LEFT = 72;
const RIGHT = 16;
const COLUMNS = 128;
const MOST_ROWS = 64;
const ROW_HEIGHT = 9;
const CELL_HEIGHT = 7;
const TITLE_HEIGHT = 30;
const AXIS_HEIGHT = 26;
const CELL_WIDTH = (SVG_WIDTH - LEFT - RIGHT) / COLUMNS;

const COLOUR: Readonly<Record<number, string>> = {
  [READ_CHUNK]: SVG_COLOURS[0]!,
  [PREFETCHED_CHUNK]: SVG_COLOURS[1]!,
  [COLD_CHUNK]: '#dcdcdc',
};

export function blobMapSvg(stats: ImageStats): string {
  const share = (bytes: number) => percent(bytes, stats.sizeBytes);
  const parts = [
    svgHeading(`${stats.name}: what was read of its data on this node`),
    svgLegend(
      [
        `hot: read, ${share(stats.readBytes)}`,
        `prefetched, not read: ${share(stats.prefetchedBytes)}`,
        `cold: never here, ${share(stats.coldBytes)}`,
      ],
      [COLOUR[READ_CHUNK]!, COLOUR[PREFETCHED_CHUNK]!, COLOUR[COLD_CHUNK]!],
    ),
  ];
  let y = 56;
  for (const blob of stats.blobs) y = drawBlob(parts, blob, y);
  return svgDocument(y + 8, parts);
}

/** `12.3 %` */
export function percent(bytes: number, of: number): string {
  return of === 0 ? '0 %' : `${((bytes / of) * 100).toFixed(1)} %`;
}

export function heatText({ sizeBytes, readBytes, prefetchedBytes, coldBytes }: HeatBytes): string {
  const share = (bytes: number) => percent(bytes, sizeBytes);
  return `${share(readBytes)} read, ${share(prefetchedBytes)} prefetched, ${share(coldBytes)} cold`;
}

/** Returns where the next one goes. */
function drawBlob(parts: string[], blob: BlobHeat, top: number): number {
  const perCell = Math.max(1, Math.ceil(blob.chunks.length / (COLUMNS * MOST_ROWS)));
  const cells = cellsOf(blob.chunks, perCell);
  const rows = Math.ceil(cells.length / COLUMNS);
  const rowBytes = COLUMNS * perCell * CHUNK_BYTES;
  const title = `layer ${blob.layer}, ${blob.digest.slice(0, 19)}, ${humanSize(blob.sizeBytes)}: ${heatText(blob)}`;
  parts.push(svgText(8, top + 12, title));
  const gridTop = top + TITLE_HEIGHT - 8;
  // A label at every row would not fit.
  const every = Math.max(1, Math.ceil(14 / ROW_HEIGHT));
  for (let row = 0; row < rows; row++) {
    const y = gridTop + row * ROW_HEIGHT;
    if (row % every === 0) parts.push(svgText(LEFT - 6, y + CELL_HEIGHT + 2, humanSize(row * rowBytes), 'end'));
    const inRow = cells.subarray(row * COLUMNS, (row + 1) * COLUMNS);
    for (let from = 0; from < inRow.length; ) {
      let to = from + 1;
      while (to < inRow.length && inRow[to] === inRow[from]) to++;
      const x = svgNumber(LEFT + from * CELL_WIDTH);
      const width = svgNumber((to - from) * CELL_WIDTH);
      parts.push(
        `<rect x="${x}" y="${svgNumber(y)}" width="${width}" height="${CELL_HEIGHT}" fill="${COLOUR[inRow[from]!]}"/>`,
      );
      from = to;
    }
  }
  const bottom = gridTop + rows * ROW_HEIGHT;
  const width = Math.min(COLUMNS, cells.length) * CELL_WIDTH;
  parts.push(
    `<line x1="${LEFT}" x2="${svgNumber(LEFT + width)}" y1="${svgNumber(bottom)}" y2="${svgNumber(bottom)}" stroke="#999"/>`,
    svgText(LEFT, bottom + 13, '0'),
    svgText(LEFT + width, bottom + 13, `${humanSize(Math.min(rowBytes, blob.sizeBytes))} a row`, 'end'),
  );
  return bottom + AXIS_HEIGHT;
}

function cellsOf(chunks: Uint8Array, perCell: number): Uint8Array {
  if (perCell === 1) return chunks;
  const cells = new Uint8Array(Math.ceil(chunks.length / perCell));
  chunks.forEach((heat, i) => {
    const cell = Math.floor(i / perCell);
    cells[cell] = Math.max(cells[cell]!, heat);
  });
  return cells;
}
