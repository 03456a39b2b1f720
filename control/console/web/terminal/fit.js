/** How many rows and columns fit into the place that a terminal has. */

/** @param {import('@xterm/xterm').Terminal} terminal @param {HTMLElement} place @returns {{ rows: number, columns: number } | undefined} */
export function fittingSize(terminal, place) {
  const screen = terminal.element?.querySelector('.xterm-screen');
  if (!screen || place.clientWidth === 0 || place.clientHeight === 0) return undefined;
  const { width, height } = screen.getBoundingClientRect();
  const [cellWidth, cellHeight] = [width / terminal.cols, height / terminal.rows];
  if (!(cellWidth > 0 && cellHeight > 0)) return undefined;
  const style = getComputedStyle(place);
  const padding = (/** @type {string[]} */ ...names) =>
    names.reduce((all, name) => all + Number.parseFloat(style.getPropertyValue(name)), 0);
  const scrollbar = 10;
  const columns = Math.floor((place.clientWidth - padding('padding-left', 'padding-right') - scrollbar) / cellWidth);
  const rows = Math.floor((place.clientHeight - padding('padding-top', 'padding-bottom')) / cellHeight);
  return { rows: Math.max(2, rows), columns: Math.max(10, columns) };
}
