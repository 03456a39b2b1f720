/**
 * Blobs into a registry: mounted from another repository, sent in one piece, or in chunks where the registry refuses one
 * piece. A broken upload starts again from its beginning: what a registry keeps of half an upload is its own affair.
 */
import type { Digest } from '#base';
import { fail } from '../errors.ts';
import { discard, type HttpResponse } from './http-client.ts';
import type { RegistryRequest, RegistrySession } from './registry-session.ts';

export type OpenStream = () => AsyncIterable<Buffer>;

const CHUNK_BYTES = 16 * 1024 * 1024;
const MAX_CHUNK_BYTES = 128 * 1024 * 1024;
/** A registry hashes and moves a large blob before it answers. */
const FINISH_TIMEOUT_MS = 10 * 60_000;
/** Answers to one piece that are worth trying chunks: too large, length wanted, method or range unknown. */
const WANTS_CHUNKS = [400, 404, 405, 411, 413, 415, 501];

/** Whether the registry took the blob over from `from`, a repository of its own. */
export async function mountBlob(
  session: RegistrySession,
  repository: string,
  digest: Digest,
  from: string,
  signal?: AbortSignal,
): Promise<boolean> {
  return session.run(signal, async () => {
    const url = await session.url(`${repository}/blobs/uploads/`);
    url.search = `?mount=${encodeURIComponent(digest)}&from=${encodeURIComponent(from)}`;
    const action = `mount of blob ${digest} from ${from} into ${repository}`;
    const scope = `repository:${repository}:pull,push repository:${from}:pull`;
    const response = await session.exchange({
      method: 'POST',
      url,
      repository,
      scope,
      action,
      headers: { 'content-length': '0' },
      signal,
    });
    discard(response);
    if (response.status === 202) await cancel(session, response, repository, signal);
    return response.status === 201;
  });
}

/** @throws SOURCE_SIZE_MISMATCH when the stream is not `sizeBytes` long, and SOURCE_REGISTRY_* */
export async function uploadBlob(
  session: RegistrySession,
  repository: string,
  digest: Digest,
  sizeBytes: number,
  open: OpenStream,
  signal?: AbortSignal,
): Promise<void> {
  const upload = new Upload(session, repository, digest, sizeBytes, open, signal);
  if (await session.run(signal, () => upload.whole())) return;
  await session.run(signal, () => upload.chunked());
}

class Upload {
  readonly #session: RegistrySession;
  readonly #repository: string;
  readonly #digest: Digest;
  readonly #sizeBytes: number;
  readonly #open: OpenStream;
  readonly #signal: AbortSignal | undefined;

  constructor(
    session: RegistrySession,
    repository: string,
    digest: Digest,
    sizeBytes: number,
    open: OpenStream,
    signal: AbortSignal | undefined,
  ) {
    this.#session = session;
    this.#repository = repository;
    this.#digest = digest;
    this.#sizeBytes = sizeBytes;
    this.#open = open;
    this.#signal = signal;
  }

  /** POST, then PUT of all bytes. False when the registry wants chunks. */
  async whole(): Promise<boolean> {
    const { place } = await this.#start();
    const source = new Counted(this.#open, this.#sizeBytes);
    const request = this.#request('PUT', this.#finishUrl(place), {
      'content-type': 'application/octet-stream',
      'content-length': String(this.#sizeBytes),
    });
    let response: HttpResponse;
    try {
      response = await this.#session.exchange({ ...request, body: () => source.stream() });
    } catch (error) {
      // The source's own failure is not the network's.
      throw source.failure ?? error;
    }
    if (source.failure !== undefined) {
      discard(response);
      throw source.failure;
    }
    if (response.status === 201 || response.status === 204) {
      discard(response);
      return true;
    }
    if (!WANTS_CHUNKS.includes(response.status)) throw await this.#session.refusal(response, request);
    discard(response);
    return false;
  }

  /** POST, PATCH for each chunk, PUT to finish. */
  async chunked(): Promise<void> {
    const started = await this.#start();
    let place = started.place;
    const chunkBytes = Math.min(Math.max(CHUNK_BYTES, started.minChunkBytes), MAX_CHUNK_BYTES);
    let offset = 0;
    for await (const chunk of chunks(new Counted(this.#open, this.#sizeBytes).stream(), chunkBytes)) {
      const request = this.#request('PATCH', place, {
        'content-type': 'application/octet-stream',
        'content-length': String(chunk.length),
        'content-range': `${offset}-${offset + chunk.length - 1}`,
      });
      const response = await this.#session.exchange({ ...request, body: () => chunk });
      if (response.status !== 202 && response.status !== 204 && response.status !== 201) {
        throw await this.#session.refusal(response, request);
      }
      discard(response);
      place = await this.#session.follow(response.header('location'), place, request.action);
      offset += chunk.length;
    }
    const request = this.#request('PUT', this.#finishUrl(place), { 'content-length': '0' });
    const response = await this.#session.exchange(request);
    if (response.status !== 201 && response.status !== 204) throw await this.#session.refusal(response, request);
    discard(response);
  }

  async #start(): Promise<{ place: URL; minChunkBytes: number }> {
    const url = await this.#session.url(`${this.#repository}/blobs/uploads/`);
    const request = this.#request('POST', url, { 'content-length': '0' });
    const response = await this.#session.exchange(request);
    if (response.status !== 202) throw await this.#session.refusal(response, request);
    discard(response);
    const wanted = Number(response.header('oci-chunk-min-length') ?? 0);
    return {
      place: await this.#session.follow(response.header('location'), url, request.action),
      minChunkBytes: Number.isSafeInteger(wanted) && wanted > 0 ? wanted : 0,
    };
  }

  #finishUrl(place: URL): URL {
    const url = new URL(place);
    // By hand: the registry's own parameters must come back as they were written.
    url.search = `${place.search === '' ? '?' : `${place.search}&`}digest=${encodeURIComponent(this.#digest)}`;
    return url;
  }

  #request(method: 'POST' | 'PUT' | 'PATCH', url: URL, headers: Record<string, string>): RegistryRequest {
    return {
      method,
      url,
      repository: this.#repository,
      scope: `repository:${this.#repository}:pull,push`,
      action: `upload of blob ${this.#digest} to ${this.#repository}`,
      headers,
      headersTimeoutMs: FINISH_TIMEOUT_MS,
      signal: this.#signal,
    };
  }
}

/** A source that must be of one length, and keeps its failure apart from the connection's. */
class Counted {
  readonly #open: OpenStream;
  readonly #sizeBytes: number;
  failure: unknown;

  constructor(open: OpenStream, sizeBytes: number) {
    this.#open = open;
    this.#sizeBytes = sizeBytes;
  }

  async *stream(): AsyncGenerator<Buffer, void, undefined> {
    let done = 0;
    let inside = false;
    try {
      for await (const part of this.#open()) {
        done += part.length;
        if (done > this.#sizeBytes) throw this.#mismatch(`over ${this.#sizeBytes}`);
        inside = true;
        yield part;
        inside = false;
      }
      if (done !== this.#sizeBytes) throw this.#mismatch(done);
    } catch (error) {
      // While a part is with the consumer, what is thrown in comes from there.
      if (!inside) this.failure = error;
      throw error;
    }
  }

  #mismatch(actual: number | string) {
    return fail('SOURCE_SIZE_MISMATCH', { where: 'upload', what: 'the data', actual, expected: this.#sizeBytes });
  }
}

async function* chunks(parts: AsyncIterable<Buffer>, chunkBytes: number): AsyncGenerator<Buffer, void, undefined> {
  let held: Buffer[] = [];
  let size = 0;
  for await (const part of parts) {
    let rest = part;
    while (size + rest.length >= chunkBytes) {
      const used = chunkBytes - size;
      yield Buffer.concat([...held, rest.subarray(0, used)]);
      held = [];
      size = 0;
      rest = rest.subarray(used);
    }
    if (rest.length > 0) {
      held.push(Buffer.from(rest));
      size += rest.length;
    }
  }
  if (size > 0) yield Buffer.concat(held);
}

/** Registries expire what is left lying; saying so is only polite. */
async function cancel(
  session: RegistrySession,
  response: HttpResponse,
  repository: string,
  signal: AbortSignal | undefined,
): Promise<void> {
  try {
    const action = `end of an upload to ${repository}`;
    const url = await session.follow(response.header('location'), response.url, action);
    const scope = `repository:${repository}:pull,push`;
    discard(await session.exchange({ method: 'DELETE', url, repository, scope, action, signal }));
  } catch {
    signal?.throwIfAborted();
  }
}
