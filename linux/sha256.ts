/**
 * sha256 of streams: through linux/native/ where that is built and the processor has the SHA extensions, else through
 * node:crypto, with the same results. One digest is as fast either way; what the native one adds is that a blob's digest and
 * those of its chunks, and another stream's beside them, are computed in one pass that takes little longer than one of them.
 */
import { createHash, type Hash } from 'node:crypto';
import { type NativeCall, nativeLibrary } from './native.ts';

/** A digest of bytes that come piece by piece. */
export interface Sha256 {
  update(bytes: Buffer): void;
  /** On another thread where it is native: until it is done, `bytes` stay as they are and nothing else is asked of this. */
  updateAside(bytes: Buffer): Promise<void>;
  /** Once, at the end. */
  digest(): Buffer;
}

export interface BlobDigests {
  /** Of the whole, in hex. */
  readonly hex: string;
  /** Of its chunks, 32 bytes each; the last chunk may be shorter. */
  readonly digests: Uint8Array;
}

/** Where a `BlobSha256` was: it can go back there. */
export type BlobMark = object;

/** Bytes that are a stream's next. */
export interface Due {
  readonly stream: Sha256;
  readonly bytes: Buffer;
}

/** The digest of a blob and of each of its chunks. */
export interface BlobSha256 {
  /** `besides`: bytes that other streams, two at most, get in the same pass. */
  update(bytes: Buffer, besides?: readonly Due[]): void;
  mark(): BlobMark;
  /** Forgets all that came after `mark` was made by this same object. */
  restore(mark: BlobMark): void;
  /** Once, at the end. */
  finish(): BlobDigests;
}

/** Why digests are computed by node:crypto; undefined when the native library does it. */
export function sha256Fallback(): string | undefined {
  const functions = native();
  return typeof functions === 'string' ? functions : undefined;
}

export function createSha256(): Sha256 {
  const functions = native();
  return typeof functions === 'string' ? new NodeSha256() : new NativeSha256(functions);
}

/** `chunkBytes` is a multiple of 64. */
export function createBlobSha256(chunkBytes: number): BlobSha256 {
  const functions = native();
  return typeof functions === 'string' ? new NodeBlobSha256(chunkBytes) : new NativeBlobSha256(functions, chunkBytes);
}

/** Two streams in one pass, each with its own bytes. */
export function updatePair(a: Sha256, aBytes: Buffer, b: Sha256, bBytes: Buffer): void {
  if (a instanceof NativeSha256 && b instanceof NativeSha256) {
    a.functions.updatePair(a.state, aBytes, aBytes.length, b.state, bBytes, bBytes.length);
    return;
  }
  a.update(aBytes);
  b.update(bBytes);
}

const ABI = 2;
/** Of `Digest` and `Blob` in sha256.rs: 104 and 144, and room to spare. */
const STATE_BYTES = 256;
const DIGEST_BYTES = 32;

interface Functions {
  readonly begin: NativeCall;
  readonly update: NativeCall;
  readonly end: NativeCall;
  readonly updatePair: NativeCall;
  readonly blobBegin: NativeCall;
  readonly blobUpdate: NativeCall;
  readonly blobEnd: NativeCall;
}

let bound: Functions | string | undefined;

/** The functions, or why there are none. */
function native(): Functions | string {
  bound ??= bindNative();
  return bound;
}

function bindNative(): Functions | string {
  const { library, ...rest } = nativeLibrary();
  if (library === undefined) return 'reason' in rest ? rest.reason : 'unknown';
  try {
    const usable = library.bind('int32_t dsec_sha256_usable(uint32_t abi)');
    if (usable(ABI) !== 1) return 'this processor has no SHA extensions';
    const functions: Functions = {
      begin: library.bind('void dsec_sha256_begin(void *d)'),
      update: library.bind('void dsec_sha256_update(void *d, const void *p, uint64_t n)'),
      end: library.bind('void dsec_sha256_end(const void *d, void *out)'),
      updatePair: library.bind(
        'void dsec_sha256_update_pair(void *a, const void *p, uint64_t n, void *b, const void *q, uint64_t m)',
      ),
      blobBegin: library.bind('void dsec_blob_begin(void *b, uint64_t chunk_bytes)'),
      blobUpdate: library.bind(
        'uint32_t dsec_blob_update(void *b, const void *p, uint64_t n, void *out, void *d, const void *q, uint64_t m, void *e, const void *r, uint64_t l)',
      ),
      blobEnd: library.bind('uint32_t dsec_blob_end(const void *b, void *out)'),
    };
    return passesTrial(functions) ? functions : 'it computes wrong digests on this machine';
  } catch (error) {
    return error instanceof Error ? error.message : String(error);
  }
}

/** A library that is wrong must be noticed here, not in an image. */
function passesTrial(functions: Functions): boolean {
  const bytes = Buffer.from(Array.from({ length: 1000 }, (_, i) => (i * 7) % 256));
  const answers = [new NativeBlobSha256(functions, 256), new NodeBlobSha256(256)].map((blob) => {
    const stream = blob instanceof NativeBlobSha256 ? new NativeSha256(functions) : new NodeSha256();
    const other = blob instanceof NativeBlobSha256 ? new NativeSha256(functions) : new NodeSha256();
    blob.update(bytes.subarray(0, 300), [
      { stream, bytes: bytes.subarray(10, 500) },
      { stream: other, bytes: bytes.subarray(7, 300) },
    ]);
    blob.update(bytes.subarray(300), [{ stream: other, bytes: bytes.subarray(300, 700) }]);
    const { hex, digests } = blob.finish();
    return `${hex} ${Buffer.from(digests).toString('hex')} ${stream.digest().toString('hex')} ${other.digest().toString('hex')}`;
  });
  return answers[0] === answers[1];
}

class NativeSha256 implements Sha256 {
  readonly functions: Functions;
  readonly state = Buffer.alloc(STATE_BYTES);

  constructor(functions: Functions) {
    this.functions = functions;
    functions.begin(this.state);
  }

  update(bytes: Buffer): void {
    this.functions.update(this.state, bytes, bytes.length);
  }

  updateAside(bytes: Buffer): Promise<void> {
    return new Promise((resolve, reject) => {
      this.functions.update.async(this.state, bytes, bytes.length, (error: unknown) =>
        error ? reject(error) : resolve(),
      );
    });
  }

  digest(): Buffer {
    const out = Buffer.alloc(DIGEST_BYTES);
    this.functions.end(this.state, out);
    return out;
  }
}

interface NativeMark extends BlobMark {
  readonly state: Buffer;
  readonly count: number;
}

class NativeBlobSha256 implements BlobSha256 {
  readonly #functions: Functions;
  readonly #chunkBytes: number;
  readonly #state = Buffer.alloc(STATE_BYTES);
  #digests = Buffer.alloc(64 * DIGEST_BYTES);
  #count = 0;

  constructor(functions: Functions, chunkBytes: number) {
    this.#functions = functions;
    this.#chunkBytes = chunkBytes;
    functions.blobBegin(this.#state, chunkBytes);
  }

  update(bytes: Buffer, besides: readonly Due[] = []): void {
    const most = this.#count + Math.floor(bytes.length / this.#chunkBytes) + 2;
    if (most * DIGEST_BYTES > this.#digests.length) {
      this.#digests = Buffer.concat([this.#digests, Buffer.alloc(most * DIGEST_BYTES)]);
    }
    const out = this.#digests.subarray(this.#count * DIGEST_BYTES);
    const [a, b] = besides;
    this.#count += this.#functions.blobUpdate(
      this.#state,
      bytes,
      bytes.length,
      out,
      stateOf(a),
      a?.bytes ?? null,
      a?.bytes.length ?? 0,
      stateOf(b),
      b?.bytes ?? null,
      b?.bytes.length ?? 0,
    );
  }

  mark(): NativeMark {
    return { state: Buffer.from(this.#state), count: this.#count };
  }

  restore(mark: BlobMark): void {
    const { state, count } = mark as NativeMark;
    state.copy(this.#state);
    this.#count = count;
  }

  finish(): BlobDigests {
    const out = Buffer.alloc(2 * DIGEST_BYTES);
    const last = this.#functions.blobEnd(this.#state, out);
    const digests = new Uint8Array((this.#count + last) * DIGEST_BYTES);
    digests.set(this.#digests.subarray(0, this.#count * DIGEST_BYTES));
    if (last > 0) digests.set(out.subarray(DIGEST_BYTES), this.#count * DIGEST_BYTES);
    return { hex: out.toString('hex', 0, DIGEST_BYTES), digests };
  }
}

/** Where there is a native library, all digests are its. */
function stateOf(due: Due | undefined): Buffer | null {
  if (due === undefined) return null;
  if (!(due.stream instanceof NativeSha256)) throw new Error('the digest is of another kind');
  return due.stream.state;
}

class NodeSha256 implements Sha256 {
  readonly #hash = createHash('sha256');

  update(bytes: Buffer): void {
    this.#hash.update(bytes);
  }

  async updateAside(bytes: Buffer): Promise<void> {
    this.#hash.update(bytes);
  }

  digest(): Buffer {
    return this.#hash.digest();
  }
}

interface NodeMark extends BlobMark {
  readonly whole: Hash;
  readonly chunk: Hash;
  readonly inChunk: number;
  readonly count: number;
}

class NodeBlobSha256 implements BlobSha256 {
  readonly #chunkBytes: number;
  #whole = createHash('sha256');
  #chunk = createHash('sha256');
  #inChunk = 0;
  readonly #digests: Buffer[] = [];

  constructor(chunkBytes: number) {
    this.#chunkBytes = chunkBytes;
  }

  update(bytes: Buffer, besides: readonly Due[] = []): void {
    this.#whole.update(bytes);
    for (let at = 0; at < bytes.length; ) {
      const n = Math.min(this.#chunkBytes - this.#inChunk, bytes.length - at);
      this.#chunk.update(bytes.subarray(at, at + n));
      at += n;
      this.#inChunk += n;
      if (this.#inChunk === this.#chunkBytes) this.#endChunk();
    }
    for (const due of besides) due.stream.update(due.bytes);
  }

  #endChunk(): void {
    this.#digests.push(this.#chunk.digest());
    this.#chunk = createHash('sha256');
    this.#inChunk = 0;
  }

  mark(): NodeMark {
    const [whole, chunk] = [this.#whole.copy(), this.#chunk.copy()];
    return { whole, chunk, inChunk: this.#inChunk, count: this.#digests.length };
  }

  restore(mark: BlobMark): void {
    const { whole, chunk, inChunk, count } = mark as NodeMark;
    // Copies again: the mark may be gone back to more than once.
    this.#whole = whole.copy();
    this.#chunk = chunk.copy();
    this.#inChunk = inChunk;
    this.#digests.length = count;
  }

  finish(): BlobDigests {
    if (this.#inChunk > 0) this.#endChunk();
    return { hex: this.#whole.digest('hex'), digests: new Uint8Array(Buffer.concat(this.#digests)) };
  }
}
