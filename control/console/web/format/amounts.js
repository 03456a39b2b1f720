/** Figures for people. No figure is longer than it has to be to be compared. No DOM here. */

/** @typedef {'bytes' | 'cores' | 'milli' | 'count'} Unit */

const BYTE_UNITS = ['B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB', 'EiB'];

/** @param {number | undefined | null} value */
export function bytes(value) {
  if (value === undefined || value === null || !Number.isFinite(value)) return '–';
  let unit = 0;
  let rest = Math.abs(value);
  while (rest >= 1000 && unit < BYTE_UNITS.length - 1) {
    rest /= 1024;
    unit++;
  }
  return `${value < 0 ? '-' : ''}${short(rest, unit === 0)} ${BYTE_UNITS[unit]}`;
}

/** @param {number | undefined | null} value */
export function count(value) {
  return value === undefined || value === null || !Number.isFinite(value) ? '–' : value.toLocaleString('en-US');
}

/** @param {number | undefined | null} value @param {Unit} unit */
export function amount(value, unit) {
  if (value === undefined || value === null || !Number.isFinite(value)) return '–';
  if (unit === 'bytes') return bytes(value);
  if (unit === 'milli') return `${coresText(value / 1000)}`;
  if (unit === 'cores') return coresText(value);
  return count(value);
}

/** `3 of 8 cores`: the unit once where both have the same. @param {number | undefined} used @param {number} all @param {Unit} unit @param {string} [between] */
export function amountOf(used, all, unit, between = 'of') {
  const [a, b] = [amount(used, unit), amount(all, unit)];
  const [figure, ...words] = a.split(' ');
  const unitOf = (/** @type {string} */ text) => text.replace(/^[^ ]* ?/, '').replace(/s$/, '');
  const same = words.length > 0 && unitOf(a) === unitOf(b);
  return `${same ? figure : a} ${between} ${b}`;
}

/** @param {number} cores */
function coresText(cores) {
  const text = cores >= 100 ? count(Math.round(cores)) : short(cores, false);
  return `${text} ${cores === 1 ? 'core' : 'cores'}`;
}

/** Three digits. @param {number} value @param {boolean} whole */
function short(value, whole) {
  if (whole || value >= 100) return String(Math.round(value));
  if (value >= 10) return trimmed(value.toFixed(1));
  return trimmed(value.toFixed(2));
}

/** @param {string} text */
function trimmed(text) {
  return text.replace(/\.?0+$/, '');
}

/** @param {number | undefined | null} share 0 to 1. */
export function percent(share) {
  if (share === undefined || share === null || !Number.isFinite(share)) return '–';
  const hundredth = share * 100;
  return `${hundredth > 0 && hundredth < 1 ? '<1' : Math.round(hundredth)} %`;
}

/** @param {number} used @param {number} capacity @returns {number | undefined} */
export function shareOf(used, capacity) {
  return capacity > 0 ? used / capacity : undefined;
}
