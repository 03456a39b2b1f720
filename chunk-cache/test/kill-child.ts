/**
 * Works on a cache until it is killed: fills, evicts, removes. `node kill-child.mjs FOLDER SEED FAILPOINT|- AFTER`: the fail point is
 * armed after AFTER steps, so that it strikes in the middle of a life, not at its start.
 */
import { openChunkCache } from '../cache.ts';
import { CHUNK_BYTES } from '../chunk.ts';
import { KILL_CAPACITY_BYTES, killBlobs } from './kill-blobs.ts';

const [folder, seed, point, after] = process.argv.slice(2) as [string, string, string, string];
const blobs = killBlobs();
const source = {
  async readRange(digest: string, offset: number, length: number) {
    const { bytes } = blobs.find((blob) => blob.digest === digest)!;
    return Buffer.from(bytes.subarray(offset, offset + length));
  },
};
const cache = await openChunkCache({
  folder,
  source,
  capacityBytes: KILL_CAPACITY_BYTES,
  memoryBytes: 2 * CHUNK_BYTES,
  minFreeBytes: 0,
});
let state = Number(seed) >>> 0;
const below = (limit: number) => {
  state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
  return (state >>> 8) % limit;
};
process.stdout.write('ready\n');
for (let step = 0; ; step++) {
  if (step === Number(after) && point !== '-') process.env.DSEC_FAILPOINT = point;
  const blob = blobs[below(blobs.length)]!;
  const at = below(blob.sizeBytes);
  const bytes = await cache.open(blob).read(at, 700_000);
  if (!bytes.equals(blob.bytes.subarray(at, at + 700_000))) process.exit(3);
  if (below(12) === 0) await cache.flush();
  if (below(30) === 0) await cache.remove(blob.digest);
  // A life that the fail point never ended.
  if (step > Number(after) + 3000) process.exit(4);
}
