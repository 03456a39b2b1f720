/**
 * gzip inflated by linux/native/ on another thread, from one ring of memory into another. A run goes on while this thread takes
 * bytes out and puts bytes in, and ends when there is no input or no room. So neither side waits for the other unless a ring is
 * full or empty. A part of a file can be the input instead: then a run reads it, too.
 */
import type { SyscallError } from './errors.ts';
import { syscallError } from './libc.ts';
import { type NativeCall, nativeLibrary } from './native.ts';

/** Why a run ended. The text: what is wrong with the stream, for good. */
export type GunzipPause =
  | 'input'
  | 'room'
  | { readonly kind: 'unreadable'; readonly error: SyscallError }
  | { readonly kind: 'damaged' | 'trailing'; readonly problem: string };

const ABI = 2;
/** Matches reach so far back: that much of the ring's end is kept before its beginning, too. */
const WINDOW_BYTES = 32 << 10;
/** The counters at the beginning of the state (`Gunzip` in gzip.rs), as 32-bit numbers. */
const AT = { made: 0, taken: 1, put: 2, read: 3, isRunning: 6, isComplete: 7, fileProblem: 8, seen: 9 } as const;
const COUNTERS = 10;
const PAUSES = ['input', 'room'] as const;
const LONGEST_WAIT_NS = 20_000_000;
const TRAILING = -11;
const FILE = -13;
const PROBLEMS: Readonly<Record<number, string>> = {
  [-1]: 'invalid deflate block',
  [-2]: 'invalid deflate symbol',
  [-3]: 'a match reaches before the beginning',
  [-4]: 'invalid code lengths',
  [-5]: 'wrong checksum behind a member',
  [-6]: 'wrong length behind a member',
  [-7]: 'not a gzip header',
  [-8]: 'unknown compression method',
  [-9]: 'unknown header flags',
  [-10]: 'wrong header checksum',
};

interface Functions {
  readonly begin: NativeCall;
  readonly file: NativeCall;
  readonly run: NativeCall;
  readonly wait: NativeCall;
  readonly stateBytes: number;
}

let bound: Functions | string | undefined;

/** Why there is none; undefined where there is. */
export function gunzipFallback(): string | undefined {
  bound ??= bindNative();
  return typeof bound === 'string' ? bound : undefined;
}

function bindNative(): Functions | string {
  const { library, ...rest } = nativeLibrary();
  if (library === undefined) return 'reason' in rest ? rest.reason : 'unknown';
  try {
    const stateBytes = library.bind('uint32_t dsec_gunzip_bytes(uint32_t abi)')(ABI);
    if (stateBytes === 0) return 'it is another version';
    return {
      begin: library.bind(
        'int32_t dsec_gunzip_begin(void *s, void *out, uint64_t outBytes, void *input, uint64_t inputBytes)',
      ),
      file: library.bind('void dsec_gunzip_file(void *s, int32_t fd, uint64_t from, uint64_t end, uint32_t is_shown)'),
      run: library.bind('int32_t dsec_gunzip_run(void *s)'),
      wait: library.bind('void dsec_gunzip_wait(void *s, uint32_t bytes, uint32_t nanoseconds)'),
      stateBytes,
    };
  } catch (error) {
    return error instanceof Error ? error.message : String(error);
  }
}

/** Memory for one stream at a time; it can be used again for the next one. */
export interface GunzipRings {
  /** Its ring, and before it a copy of that one's end. */
  readonly out: Buffer;
  readonly input: Buffer;
}

/** Sizes are powers of two, 64 KiB or more. */
export function gunzipRings(outBytes: number, inputBytes: number): GunzipRings {
  return { out: Buffer.allocUnsafeSlow(WINDOW_BYTES + outBytes), input: Buffer.allocUnsafeSlow(inputBytes) };
}

/** A part of a file, open. */
export interface GunzipFile {
  readonly fd: number;
  /** For errors. */
  readonly path: string;
  readonly offset: number;
  readonly sizeBytes: number;
}

/** One stream of members. */
export class Gunzip {
  readonly #functions: Functions;
  readonly #state: Buffer;
  readonly #counters: Int32Array;
  readonly #out: Buffer;
  readonly #input: Buffer;
  #isRunning = false;
  /** Of the file, for errors. */
  #path = '';

  /** @throws where `gunzipFallback` says why there is none */
  constructor({ out, input }: GunzipRings) {
    const fallback = gunzipFallback();
    if (fallback !== undefined) throw new Error(fallback);
    this.#functions = bound as Functions;
    this.#state = Buffer.from(new ArrayBuffer(this.#functions.stateBytes));
    this.#counters = new Int32Array(this.#state.buffer, 0, COUNTERS);
    this.#out = out.subarray(WINDOW_BYTES);
    this.#input = input;
    const { begin } = this.#functions;
    if (begin(this.#state, out, this.#out.length, input, input.length) !== 1) throw new Error('bad rings');
  }

  /**
   * Instead of what is put: input is this part of a file, which stays open until no run is under way. `isShown`: what is read stays in
   * the ring until it was `seen`, too.
   */
  readFrom({ fd, path, offset, sizeBytes }: GunzipFile, isShown: boolean): void {
    this.#path = path;
    this.#functions.file(this.#state, fd, offset, offset + sizeBytes, isShown ? 1 : 0);
  }

  /** What was read of the file and not seen yet, as far as it lies in one piece. */
  unseen(mostBytes: number): Buffer {
    const seen = this.#load(AT.seen);
    return piece(this.#input, seen, Math.min(mostBytes, distance(seen, this.#load(AT.put))));
  }

  /** So many bytes of `unseen` are done with. */
  seen(bytes: number): void {
    this.#add(AT.seen, bytes);
  }

  /** Bytes of input that were inflated so far, modulo 2^32. */
  get readBytes(): number {
    return this.#load(AT.read) >>> 0;
  }

  /** Where input goes next, as far as there is room in one piece. */
  space(): Buffer {
    const put = this.#load(AT.put);
    return piece(this.#input, put, this.#input.length - distance(this.#load(AT.read), put));
  }

  /** So many bytes are in `space`. */
  put(bytes: number): void {
    this.#add(AT.put, bytes);
  }

  /** Bytes of input that no run has read. */
  get unreadBytes(): number {
    return distance(this.#load(AT.read), this.#load(AT.put));
  }

  /** Whether a run is worth while: it costs a hand-over between threads. */
  get hasRoom(): boolean {
    return this.waitingBytes <= this.#out.length / 2;
  }

  /** Bytes that wait to be taken. */
  get waitingBytes(): number {
    return distance(this.#load(AT.taken), this.#load(AT.made));
  }

  /** The first of them, as far as they lie in one piece. */
  output(mostBytes: number): Buffer {
    return piece(this.#out, this.#load(AT.taken), Math.min(mostBytes, this.waitingBytes));
  }

  /** So many bytes of `output` are done with: their memory is written to again. */
  take(bytes: number): void {
    this.#add(AT.taken, bytes);
  }

  /**
   * Blocks this thread until so many bytes wait, the run has ended, or some milliseconds have passed: what comes back is soon there, and a
   * sleep costs less than a turn of the event loop.
   */
  wait(bytes: number): void {
    this.#functions.wait(this.#state, bytes, LONGEST_WAIT_NS);
  }

  /** Whether a run is under way; its promise comes a little later. */
  get isRunning(): boolean {
    return this.#load(AT.isRunning) === 1;
  }

  /** Whether the stream may end with the input that there was. While no run is under way, and the last one paused for input. */
  get isComplete(): boolean {
    return this.#load(AT.isComplete) === 1;
  }

  /** One at a time. All memory stays until it is done. */
  run(): Promise<GunzipPause> {
    if (this.#isRunning) throw new Error('a run is under way');
    this.#isRunning = true;
    Atomics.store(this.#counters, AT.isRunning, 1);
    return new Promise((resolve, reject) => {
      this.#functions.run.async(this.#state, (error: unknown, code: number) => {
        // Being named here, this object holds the memory that the other thread uses.
        this.#isRunning = false;
        if (error) reject(error);
        else if (code >= 0) resolve(PAUSES[code]!);
        else if (code === FILE)
          resolve({ kind: 'unreadable', error: syscallError('read', this.#load(AT.fileProblem), this.#path) });
        else resolve({ kind: code === TRAILING ? 'trailing' : 'damaged', problem: PROBLEMS[code] ?? `code ${code}` });
      });
    });
  }

  #load(counter: number): number {
    return Atomics.load(this.#counters, counter);
  }

  #add(counter: number, bytes: number): void {
    Atomics.store(this.#counters, counter, (this.#load(counter) + bytes) | 0);
  }
}

/** From one counter to another; they wrap. */
function distance(from: number, to: number): number {
  return (to - from) >>> 0;
}

function piece(ring: Buffer, counter: number, bytes: number): Buffer {
  const at = counter & (ring.length - 1);
  return ring.subarray(at, Math.min(ring.length, at + bytes));
}
