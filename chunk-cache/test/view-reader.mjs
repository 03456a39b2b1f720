/** A thread that reads at random through a ChunkView until it is told to stop, and compares with the right bytes. */
import { parentPort, workerData } from 'node:worker_threads';
import { register } from 'tsx/esm/api';

register();
const { ChunkView } = await import('../chunk-view.ts');

const { handle } = workerData;
/** @type {Int32Array} */
const stop = workerData.stop;
const right = Buffer.from(workerData.bytes.buffer);
const view = new ChunkView(handle);
let hits = 0;
let wrong = 0;
while (Atomics.load(stop, 0) === 0) {
  for (let i = 0; i < 100; i++) {
    const length = Math.random() < 0.5 ? 4096 : 100_000;
    const offset = Math.floor(Math.random() * (right.length - length));
    const bytes = view.readNow(offset, length);
    if (bytes === undefined) continue;
    hits++;
    if (!bytes.equals(right.subarray(offset, offset + length))) wrong++;
  }
}
view.close();
parentPort?.postMessage({ hits, wrong });
