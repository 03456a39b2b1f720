/**
 * What inflates a layer. There are several engines for the same formats, of different speed; all accept and refuse the
 * same streams, and one suite of tests runs over all of them.
 *
 * gzip: any number of members, each verified by CRC-32 and length; zero bytes may follow the last one, as tape
 * blocking leaves them; anything else is refused. zstd: any number of frames, skippable ones too, checksums verified
 * where there are any, windows up to 128 MiB; nothing may follow.
 */

export interface InflateContext {
  /** Names the layer in errors. */
  readonly label: string;
  readonly signal: AbortSignal | undefined;
}

export interface InflateEngine {
  readonly name: string;
  readonly format: 'gzip' | 'zstd';
  /**
   * The inflated bytes in order, in chunks that are valid until the next one is asked for. While the caller works on
   * one chunk, synchronously or not, the next is being inflated on another thread.
   * @throws LAYER_DAMAGED, LAYER_TRUNCATED, LAYER_TRAILING; what `source` throws; the signal's reason.
   */
  inflate(source: AsyncIterable<Buffer>, context: InflateContext): AsyncGenerator<Buffer>;
}
