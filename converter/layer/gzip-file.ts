/**
 * A gzip layer that is a part of a local file, through our own library: it is read and inflated on another thread, as far as the rings
 * reach, while this one does what has to be done with what comes out. The blob's digest is computed here, in one pass with the
 * others (see BlobSha256), so that inflating, which is never done by two threads, takes as little longer as may be. Other layers go
 * through decompress.ts.
 */
import { type FileHandle, open } from 'node:fs/promises';
import { setImmediate as turn } from 'node:timers/promises';
import { Gunzip, type GunzipPause, type GunzipRings, gunzipFallback, type Sha256, sha256Fallback } from '#linux';
import { fail } from '../errors.ts';
import { type Compression, detectCompression } from './decompress.ts';
import { giveRings, gunzipProblem, takeRings } from './native-gunzip.ts';

/** Of one piece: it is looked at twice, parsed and hashed, and should stay in the cache between the two. */
const MOST_BYTES = 256 << 10;
/** Less is waited for: being woken costs as much as some of these pieces. */
const LEAST_BYTES = 1 << 20;
/** The event loop's turn comes after so many: what was written has to be heard of. */
const TURN_BYTES = 1 << 20;

export interface FilePart {
  readonly path: string;
  readonly offset: number;
  readonly sizeBytes: number;
}

export class GzipFile {
  readonly #file: FileHandle;
  readonly #part: FilePart;
  readonly #hash: Sha256 | undefined;
  readonly #rings: GunzipRings;
  readonly #stream: Gunzip;
  /** Bytes of the file that were inflated. */
  readBytes = 0;

  private constructor(file: FileHandle, part: FilePart, hash: Sha256 | undefined) {
    this.#file = file;
    this.#part = part;
    this.#hash = hash;
    this.#rings = takeRings();
    this.#stream = new Gunzip(this.#rings);
    this.#stream.readFrom({ ...part, fd: file.fd }, hash !== undefined);
  }

  /**
   * Undefined when it is no gzip, or there is no library for it. Else `chunks` must be begun: it closes the file.
   * @param hash Gets the file's bytes: by `hashed`, and at the end.
   */
  static async open(part: FilePart, compression: Compression, hash: Sha256 | undefined): Promise<GzipFile | undefined> {
    if (gunzipFallback() !== undefined || sha256Fallback() !== undefined) return undefined;
    if (compression !== 'gzip' && compression !== 'detect') return undefined;
    const file = await open(part.path, 'r');
    try {
      const first = Buffer.alloc(Math.min(4, part.sizeBytes));
      if (compression === 'detect') await file.read(first, 0, first.length, part.offset);
      if (compression === 'gzip' || detectCompression(first) === 'gzip') return new GzipFile(file, part, hash);
    } catch (error) {
      await file.close();
      throw error;
    }
    await file.close();
    return undefined;
  }

  /** What was read of the file and is to be hashed by the caller. */
  unhashed(mostBytes: number): Buffer {
    return this.#stream.unseen(mostBytes);
  }

  /** So many bytes of `unhashed` are. */
  hashed(bytes: number): void {
    this.#stream.seen(bytes);
  }

  /**
   * What is inflated. A chunk is valid until the next one is asked for.
   * @throws LAYER_DAMAGED, LAYER_TRUNCATED, LAYER_TRAILING; LAYER_SIZE when the file is shorter; SyscallError when it cannot be read
   */
  async *chunks(label: string, onProgress: () => void): AsyncGenerator<Buffer> {
    const stream = this.#stream;
    let running: Promise<void> | undefined;
    let pause: GunzipPause = 'room';
    let offset = 0;
    let sinceTurn = 0;
    try {
      for (;;) {
        if (running === undefined && pause === 'room' && stream.hasRoom) {
          // It may be the input's ring that is full: then nothing comes out until what is in it was hashed.
          if (stream.waitingBytes === 0) this.#hashRest();
          running = stream.run().then((why) => {
            pause = why;
            running = undefined;
          });
          running.catch(() => {});
        }
        const bytes = stream.output(MOST_BYTES);
        if (bytes.length > 0 && (stream.waitingBytes >= MOST_BYTES || !stream.isRunning)) {
          offset += bytes.length;
          yield bytes;
          stream.take(bytes.length);
          this.readBytes += (stream.readBytes - this.readBytes) >>> 0;
          onProgress();
          sinceTurn += bytes.length;
          if (sinceTurn < TURN_BYTES) continue;
          sinceTurn = 0;
          await turn();
        } else if (stream.isRunning) {
          stream.wait(LEAST_BYTES);
          if (stream.isRunning && stream.waitingBytes < LEAST_BYTES) await turn();
        } else if (running !== undefined) {
          await running;
        } else if (typeof pause === 'object') {
          throw gunzipProblem(pause, label, offset);
        } else {
          this.readBytes += (stream.readBytes - this.readBytes) >>> 0;
          this.#hashRest();
          onProgress();
          const { path, sizeBytes } = this.#part;
          if (this.readBytes !== sizeBytes) {
            throw fail('LAYER_SIZE', { layer: path, expected: sizeBytes, actual: this.readBytes });
          }
          if (!stream.isComplete) throw fail('LAYER_TRUNCATED', { layer: label, format: 'gzip', offset });
          return;
        }
      }
    } finally {
      await running?.catch(() => {});
      giveRings(this.#rings);
      await this.#file.close();
    }
  }

  #hashRest(): void {
    if (this.#hash === undefined) return;
    for (let bytes = this.unhashed(LEAST_BYTES); bytes.length > 0; bytes = this.unhashed(LEAST_BYTES)) {
      this.#hash.update(bytes);
      this.hashed(bytes.length);
    }
  }
}
