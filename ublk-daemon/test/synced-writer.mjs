// Writes files into a folder, each with fsync, and tells of each when it is safe: `NAME SHA256`. Until a write fails, or it is told to stop
// by the end of stdin. Plain JavaScript, so that it starts at once. Arguments: folder, prefix, and whether to remove old ones.
import { createHash, randomBytes } from 'node:crypto';
import { closeSync, fsyncSync, mkdirSync, openSync, rmSync, writeSync } from 'node:fs';
import { join } from 'node:path';

const [folder = '', prefix = ''] = process.argv.slice(2);
let stopped = false;
process.stdin.on('end', () => {
  stopped = true;
});
process.stdin.resume();

try {
  for (let count = 0; !stopped; count++) {
    // Names move through folders, so that metadata is written as well.
    const place = join(folder, `${prefix}-${count % 7}`);
    mkdirSync(place, { recursive: true });
    const bytes = randomBytes(1 + ((count * 7919) % 300_000));
    const name = join(`${prefix}-${count % 7}`, `file-${count}`);
    const file = openSync(join(folder, name), 'wx');
    writeSync(file, bytes);
    fsyncSync(file);
    closeSync(file);
    const kept = count % 5 !== 0;
    if (kept) process.stdout.write(`${name} ${createHash('sha256').update(bytes).digest('hex')}\n`);
    else rmSync(join(folder, name));
    await new Promise((done) => setImmediate(done));
  }
  process.stdout.write('stopped\n');
} catch (error) {
  process.stdout.write(`failed ${/** @type {NodeJS.ErrnoException} */ (error).code}\n`);
}
process.stdin.destroy();
