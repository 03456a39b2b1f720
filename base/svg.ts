/**
 * Figures as SVG text: what all of them are made of. No dates and no random ids: the same numbers give the same file. Charts are
 * in bench/figures/, the map of a blob in imagesvc/stats/.
 */

export const SVG_COLOURS = ['#2f6db3', '#c4692b', '#4d8f4d', '#8a5aa8', '#a88b2f'];
export const SVG_WIDTH = 720;
const FONT = 'font-family="system-ui, sans-serif"';

export function svgDocument(height: number, parts: readonly string[]): string {
  return [
    `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${SVG_WIDTH} ${svgNumber(height)}" width="${SVG_WIDTH}" height="${svgNumber(height)}">`,
    `<rect width="${SVG_WIDTH}" height="${svgNumber(height)}" fill="#fff"/>`,
    ...parts,
    '</svg>',
    '',
  ].join('\n');
}

export function svgHeading(title: string): string {
  return `<text x="8" y="20" font-size="15" ${FONT} fill="#222">${svgEscaped(title)}</text>`;
}

export function svgLegend(series: readonly string[], colours: readonly string[] = SVG_COLOURS): string {
  let x = 8;
  const parts: string[] = [];
  series.forEach((label, s) => {
    parts.push(
      `<rect x="${x}" y="30" width="10" height="10" fill="${colours[s % colours.length]}"/>`,
      svgText(x + 14, 39, label),
    );
    x += 30 + 7 * label.length;
  });
  return parts.join('\n');
}

export function svgText(x: number, y: number, content: string, anchor: 'start' | 'middle' | 'end' = 'start'): string {
  return `<text x="${svgNumber(x)}" y="${svgNumber(y)}" font-size="12" ${FONT} fill="#444" text-anchor="${anchor}">${svgEscaped(content)}</text>`;
}

export function svgColour(series: number): string {
  return SVG_COLOURS[series % SVG_COLOURS.length]!;
}

/** Coordinates to a tenth of a pixel. */
export function svgNumber(value: number): string {
  return String(Math.round(value * 10) / 10);
}

/** Three significant digits, no exponent. */
export function svgShort(value: number): string {
  if (Math.abs(value) >= 1000) return String(Math.round(value));
  return String(Number(value.toPrecision(3)));
}

export function svgEscaped(content: string): string {
  return content.replace(/[&<>"]/g, (c) => ({ '&': '&amp;', '<': '&lt;', '>': '&gt;', '"': '&quot;' })[c]!);
}
