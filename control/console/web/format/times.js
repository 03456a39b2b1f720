/** Moments and lengths of time, short. No DOM here. */

const STEPS = /** @type {const} */ ([
  ['d', 86_400_000],
  ['h', 3_600_000],
  ['m', 60_000],
  ['s', 1000],
]);

/** `3d 4h`, `12m`, `40s`: two units at most. @param {number | undefined} ms */
export function duration(ms) {
  if (ms === undefined || !Number.isFinite(ms)) return '–';
  if (ms < 1000) return `${Math.max(0, Math.round(ms))} ms`;
  const first = STEPS.findIndex(([, size]) => ms >= size);
  const [unit, size] = /** @type {(typeof STEPS)[number]} */ (STEPS[first]);
  const next = STEPS[first + 1];
  const whole = Math.floor(ms / size);
  const rest = next === undefined || whole >= 10 ? 0 : Math.floor((ms % size) / next[1]);
  return rest === 0 || next === undefined ? `${whole}${unit}` : `${whole}${unit} ${rest}${next[0]}`;
}

/** Milliseconds since 1970 of what an API writes: ISO 8601 or a number. @param {unknown} value @returns {number | undefined} */
export function momentOf(value) {
  const ms = typeof value === 'number' ? value : typeof value === 'string' ? Date.parse(value) : Number.NaN;
  return Number.isFinite(ms) ? ms : undefined;
}

/** @param {unknown} value @param {number} [now] */
export function ago(value, now = Date.now()) {
  const ms = momentOf(value);
  return ms === undefined ? '–' : duration(Math.max(0, now - ms));
}

/** @param {unknown} value @param {number} [now] */
export function until(value, now = Date.now()) {
  const ms = momentOf(value);
  if (ms === undefined) return '–';
  return ms <= now ? 'due' : duration(ms - now);
}

/** `2026-03-01 12:30:05`, local. @param {unknown} value */
export function clock(value) {
  const ms = momentOf(value);
  if (ms === undefined) return '–';
  const date = new Date(ms);
  const two = (/** @type {number} */ n) => String(n).padStart(2, '0');
  const day = `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())}`;
  return `${day} ${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
}
