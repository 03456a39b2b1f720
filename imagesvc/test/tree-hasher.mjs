// Hashes every file of a tree again and again, each time from the disk and not from the page cache, until a file appears; prints, as
// JSON, how many rounds it made, the different tree hashes that it saw, and its errors. Argument: JSON {tree, until, direct}.
import { createHash } from 'node:crypto';
import { closeSync, existsSync, openSync, readdirSync, readSync } from 'node:fs';
import { join } from 'node:path';
import koffi from 'koffi';

/** @type {{ tree: string, until: string, rounds?: number }} */
const order = JSON.parse(/** @type {string} */ (process.argv[2]));
const fadvise = koffi.load(null).func('int posix_fadvise(int, int64_t, int64_t, int)');
const POSIX_FADV_DONTNEED = 4;
const piece = Buffer.alloc(256 * 1024);
/** @type {string[]} */
const files = [];
const visit = (/** @type {string} */ folder) => {
  for (const entry of readdirSync(folder, { withFileTypes: true })) {
    const path = join(folder, entry.name);
    if (entry.isDirectory()) visit(path);
    else if (entry.isFile()) files.push(path);
  }
};
visit(order.tree);
files.sort();
const result = {
  rounds: 0,
  files: files.length,
  hashes: /** @type {string[]} */ ([]),
  errors: /** @type {string[]} */ ([]),
};
do {
  const hash = createHash('sha256');
  for (const path of files) {
    try {
      const fd = openSync(path, 'r');
      try {
        fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
        for (;;) {
          const n = readSync(fd, piece);
          if (n === 0) break;
          hash.update(piece.subarray(0, n));
        }
        hash.update(path.slice(order.tree.length));
      } finally {
        closeSync(fd);
      }
    } catch (error) {
      result.errors.push(`${path}: ${/** @type {any} */ (error).code}`);
    }
  }
  const digest = hash.digest('hex');
  if (!result.hashes.includes(digest)) result.hashes.push(digest);
  result.rounds++;
} while (result.rounds < (order.rounds ?? Number.POSITIVE_INFINITY) && !existsSync(order.until));
console.log(JSON.stringify(result));
