/**
 * gzip through ISA-L (libisal.so.2, Debian package libisal2), twice as fast as zlib or more. Loaded when first asked
 * for; where it is missing, or does not pass the trial below, node:zlib does the work.
 *
 * Member headers are read here, not by the library: it forgets a header's flags when the header is cut in the middle.
 * It inflates, and verifies CRC-32 and length behind each member.
 */

import { gzipSync } from 'node:zlib';
import { addressOf, openSystemLibrary } from '#linux';
import { measureGzipHeader } from './gzip-header.ts';
import { type InflateWindow, inflateAhead, type NativeDecoder, StreamProblem } from './inflate-ahead.ts';
import type { InflateEngine } from './inflate-engine.ts';

/** `struct inflate_state` of igzip_lib.h, version 2.2x to 2.31: 87368 bytes, and room to spare. */
const STATE_BYTES = 128 << 10;
const AT = { nextOut: 0, availOut: 8, nextIn: 16, availIn: 32, blockState: 21160, crcFlag: 21172 } as const;
/** No header, verify the trailer of a gzip member. */
const ISAL_GZIP_NO_HDR_VER = 6;
const ISAL_BLOCK_FINISH = 5;
/** END_INPUT and OUT_OVERFLOW: a part is done. Negative codes and larger ones are failures. */
const ISAL_OUT_OVERFLOW = 2;
const PROBLEMS: Readonly<Record<number, string>> = {
  [-1]: 'invalid deflate block',
  [-2]: 'invalid deflate symbol',
  [-3]: 'a match reaches before the beginning',
  [-4]: 'invalid trailer',
  [-6]: 'wrong checksum or length behind a member',
};

interface Library {
  reset(state: Buffer): void;
  inflate(state: Buffer): number;
  inflateAsync(state: Buffer, done: (error: unknown, code: number) => void): void;
}

let library: Library | undefined | null = null;

/** The engine, or undefined where the library is missing or is not the one that this code knows. */
export function igzipEngine(): InflateEngine | undefined {
  if (library === null) library = loadLibrary();
  const loaded = library;
  if (loaded === undefined) return undefined;
  return {
    name: 'ISA-L',
    format: 'gzip',
    inflate: (source, context) => inflateAhead(new IgzipDecoder(loaded), source, context),
  };
}

function loadLibrary(): Library | undefined {
  // Pointers are taken for eight bytes, the lower ones first.
  if (process.arch !== 'x64' && process.arch !== 'arm64') return undefined;
  try {
    const lib = openSystemLibrary('libisal.so.2');
    const init = lib.bind('void isal_inflate_init(void *state)');
    const inflate = lib.bind('int isal_inflate(void *state)');
    const loaded: Library = {
      reset: (state) => {
        init(state);
      },
      inflate: (state) => inflate(state) as number,
      inflateAsync: (state, done) => inflate.async(state, done),
    };
    return passesTrial(loaded) ? loaded : undefined;
  } catch {
    return undefined;
  }
}

/** A build with another layout of its state must be noticed here, not on a layer: a member in two parts, and a damaged one. */
function passesTrial(loaded: Library): boolean {
  const text = Buffer.from('the same bytes, the same bytes, the same bytes, again and again and again; '.repeat(40));
  const member = gzipSync(text, { level: 6 }).subarray(10);
  const damaged = Buffer.from(member);
  damaged[damaged.length - 6]! ^= 1;
  const run = (input: Buffer): { made: Buffer; code: number; isFinished: boolean } => {
    const state = Buffer.alloc(STATE_BYTES);
    const out = Buffer.alloc(text.length + 64);
    begin(loaded, state);
    aim(state, AT.nextOut, AT.availOut, out, 0, out.length);
    let code = 0;
    for (const [start, end] of [
      [0, 20],
      [20, input.length],
    ] as const) {
      aim(state, AT.nextIn, AT.availIn, input, start, end);
      code = loaded.inflate(state);
    }
    const made = out.subarray(0, out.length - state.readUInt32LE(AT.availOut));
    return { made, code, isFinished: state.readUInt32LE(AT.blockState) === ISAL_BLOCK_FINISH };
  };
  const good = run(member);
  const bad = run(damaged);
  return good.code === 0 && good.isFinished && good.made.equals(text) && bad.code === -6;
}

function begin(loaded: Library, state: Buffer): void {
  loaded.reset(state);
  state.writeUInt32LE(ISAL_GZIP_NO_HDR_VER, AT.crcFlag);
}

function aim(state: Buffer, pointer: number, length: number, bytes: Buffer, start: number, end: number): void {
  state.writeBigUInt64LE(BigInt(addressOf(bytes) + start), pointer);
  state.writeUInt32LE(end - start, length);
}

class IgzipDecoder implements NativeDecoder {
  readonly format = 'gzip';
  private readonly lib: Library;
  private readonly state = Buffer.alloc(STATE_BYTES);
  private isInMember = false;
  private members = 0;
  private isPadding = false;

  constructor(lib: Library) {
    this.lib = lib;
  }

  get isComplete(): boolean {
    return !this.isInMember && this.members > 0;
  }

  async step(window: InflateWindow, out: Buffer, at: number): Promise<number> {
    if (!this.isInMember && !this.beginMember(window)) return 0;
    const { state } = this;
    const givenIn = window.end - window.start;
    aim(state, AT.nextIn, AT.availIn, window.bytes, window.start, window.end);
    aim(state, AT.nextOut, AT.availOut, out, at, out.length);
    const code = await new Promise<number>((resolve, reject) => {
      this.lib.inflateAsync(state, (error, result) => (error ? reject(error) : resolve(result)));
    });
    window.start += givenIn - state.readUInt32LE(AT.availIn);
    if (code < 0 || code > ISAL_OUT_OVERFLOW) {
      throw new StreamProblem('damaged', PROBLEMS[code] ?? `code ${code}`);
    }
    if (state.readUInt32LE(AT.blockState) === ISAL_BLOCK_FINISH) {
      this.isInMember = false;
      this.members++;
    }
    return out.length - at - state.readUInt32LE(AT.availOut);
  }

  /** @returns whether a member has begun; false when more input is needed, or none may come. */
  private beginMember(window: InflateWindow): boolean {
    const { bytes } = window;
    if (this.members > 0 && window.start < window.end && bytes[window.start] === 0) this.isPadding = true;
    if (this.isPadding) {
      for (; window.start < window.end; window.start++) {
        if (bytes[window.start] !== 0) throw new StreamProblem('trailing', '');
      }
      return false;
    }
    const length = measureGzipHeader(bytes, window.start, window.end);
    if (length === 0) return false;
    if (typeof length === 'string') throw new StreamProblem(this.members > 0 ? 'trailing' : 'damaged', length);
    window.start += length;
    this.isInMember = true;
    begin(this.lib, this.state);
    return true;
  }

  close(): void {}
}
