/**
 * Made-up visits of chunks as a node's sandboxes make them: images of uneven popularity; a start reads 4 to 13 % of its image, mostly the
 * same chunks as the last start of it, in runs; several starts at a time; a share of whole-image scans (an export, a verification); and
 * a popularity that drifts.
 */

export interface TraceOptions {
  readonly images: number;
  readonly chunksPerImage: number;
  readonly starts: number;
  /** Of the starts, this part reads all of its image. */
  readonly scanPart: number;
  readonly seed: number;
}

const AT_A_TIME = 8;
const ZIPF = 0.9;
/** Starts after which the most popular image is another one. */
const DRIFT = 400;

export function* makeTrace({ images, chunksPerImage, starts, scanPart, seed }: TraceOptions): Generator<number> {
  const random = randomFrom(seed);
  const cumulative: number[] = [];
  for (let rank = 0; rank < images; rank++) cumulative.push((cumulative.at(-1) ?? 0) + 1 / (rank + 1) ** ZIPF);
  const running: number[][] = [];
  let started = 0;
  while (started < starts || running.length > 0) {
    while (started < starts && running.length < AT_A_TIME) {
      const pick = random() * cumulative.at(-1)!;
      const rank = cumulative.findIndex((sum) => sum >= pick);
      const image = (rank + Math.floor(started / DRIFT) * 7) % images;
      running.push(random() < scanPart ? wholeImage(image, chunksPerImage) : startOf(image, chunksPerImage, random));
      started++;
    }
    const at = Math.floor(random() * running.length);
    for (let i = 0; i < 4; i++) {
      const next = running[at]!.pop();
      if (next !== undefined) yield next;
    }
    if (running[at]!.length === 0) running.splice(at, 1);
  }
}

/** Visits of a start, the last one first. */
function startOf(image: number, chunksPerImage: number, random: () => number): number[] {
  const own = randomFrom(image * 7919 + 1);
  const wanted = chunksPerImage * (0.04 + 0.09 * own());
  const visits: number[] = [];
  while (visits.length < wanted) {
    // One run in ten is not what the image usually reads.
    const place = random() < 0.1 ? random() : own();
    const length = 1 + Math.floor(own() * 6);
    const first = Math.floor(place * (chunksPerImage - length));
    for (let i = 0; i < length; i++) visits.push(image * chunksPerImage + first + i);
  }
  return visits.reverse();
}

function wholeImage(image: number, chunksPerImage: number): number[] {
  return Array.from({ length: chunksPerImage }, (_, i) => image * chunksPerImage + chunksPerImage - 1 - i);
}

/** mulberry32. */
function randomFrom(seed: number): () => number {
  let state = seed | 0;
  return () => {
    state = (state + 0x6d2b79f5) | 0;
    let t = Math.imul(state ^ (state >>> 15), 1 | state);
    t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
    return ((t ^ (t >>> 14)) >>> 0) / 2 ** 32;
  };
}
