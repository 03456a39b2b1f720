// Reads a file in a process of its own, compares every byte with another file, and prints what it found as JSON. A process of
// its own because whoever serves the file must not wait for itself. Argument: JSON, see `order`.
import { closeSync, constants, fstatSync, openSync, readSync } from 'node:fs';

/** @type {{ path: string, expected: string, mode: 'sequential' | 'random' | 'beyond', block: number, count?: number, seed?: number, direct?: boolean }} */
const order = JSON.parse(/** @type {string} */ (process.argv[2]));
const O_DIRECT = order.direct ? 0o40000 : 0;
const fd = openSync(order.path, constants.O_RDONLY | O_DIRECT);
const other = openSync(order.expected, 'r');
const size = fstatSync(fd).size;
const got = Buffer.alloc(order.block);
const wanted = Buffer.alloc(order.block);
let state = (order.seed ?? 1) | 0;
const random = () => {
  state = (state + 0x6d2b79f5) | 0;
  let t = Math.imul(state ^ (state >>> 15), 1 | state);
  t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
  return ((t ^ (t >>> 14)) >>> 0) / 2 ** 32;
};
const result = { size, reads: 0, bytes: 0, wrong: 0, errors: /** @type {string[]} */ ([]), firstWrong: -1 };
const one = (/** @type {number} */ position) => {
  let n = 0;
  try {
    n = readSync(fd, got, 0, order.block, position);
  } catch (error) {
    result.errors.push(/** @type {any} */ (error).code);
    return 0;
  }
  const m = readSync(other, wanted, 0, order.block, position);
  result.reads++;
  result.bytes += n;
  if (n !== m || got.compare(wanted, 0, m, 0, n) !== 0) {
    result.wrong++;
    if (result.firstWrong < 0) result.firstWrong = position;
  }
  return n;
};
if (order.mode === 'sequential') for (let at = 0; at < size; at += order.block) one(at);
else if (order.mode === 'random') {
  const blocks = Math.ceil(size / order.block);
  for (let i = 0; i < (order.count ?? 100); i++) one(Math.floor(random() * blocks) * order.block);
} else for (const position of [size, size + order.block, size + 2 ** 32]) one(Math.ceil(position / 4096) * 4096);
closeSync(fd);
closeSync(other);
console.log(JSON.stringify(result));
