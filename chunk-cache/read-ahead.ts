/**
 * Notices readers that go through a blob front to back, and says what to fetch before they ask: half as much as they have read so far,
 * from 2 chunks to 32 (8 MiB). A short run costs little, a long one never waits. Doubling would fetch about as much for nothing
 * as the reader of a folder of files reads (`npm run bench -- bytes-fetched`). It is asked for again when half of it is used, so
 * that it is fetched in large reads.
 *
 * Several readers may be under way in one blob. A reader whose hits are answered elsewhere shows up again only at the end of
 * what was read ahead for it, so that place is expected as well.
 */

const FIRST_WINDOW = 2;
const LARGEST_WINDOW = 32;
const STREAMS = 16;

interface Stream {
  /** The chunk that it began with. */
  readonly start: number;
  /** The chunk after the last one read. */
  next: number;
  /** The chunk after the last one asked for ahead. */
  ahead: number;
  window: number;
}

export class ReadAhead {
  readonly #count: number;
  /** The one that moved last comes last. */
  readonly #streams: Stream[] = [];

  constructor(chunkCount: number) {
    this.#count = chunkCount;
  }

  /** A reader reads chunks `first` to `last`. Returns the chunks to fetch ahead: [from, to), or undefined. */
  note(first: number, last: number): { from: number; to: number } | undefined {
    const at = this.#streams.findIndex(
      ({ next, ahead }) => first === next || first === next - 1 || (ahead > next && first === ahead),
    );
    if (at === -1) {
      this.#streams.push({ start: first, next: last + 1, ahead: last + 1, window: 0 });
      if (this.#streams.length > STREAMS) this.#streams.shift();
      return undefined;
    }
    const stream = this.#streams[at]!;
    // More of the chunk where it is already.
    if (last < stream.next) return undefined;
    this.#streams.splice(at, 1);
    this.#streams.push(stream);
    stream.next = last + 1;
    stream.ahead = Math.max(stream.ahead, stream.next);
    if (stream.ahead - stream.next > stream.window / 2) return undefined;
    stream.window = Math.min(LARGEST_WINDOW, Math.max(FIRST_WINDOW, (stream.next - stream.start) >> 1));
    const from = stream.ahead;
    const to = Math.min(this.#count, stream.next + stream.window);
    if (to <= from) return undefined;
    stream.ahead = to;
    return { from, to };
  }
}
