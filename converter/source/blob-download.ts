/**
 * A blob as it arrives, across broken connections: what is missing is asked for again with a Range. A server that ignores
 * ranges sends the blob from its beginning; the part that is known already is skipped. Sizes are checked here, the digest
 * by whoever sees all bytes.
 */
import type { Readable } from 'node:stream';
import type { Digest } from '#base';
import { fail } from '../errors.ts';
import { discard, type HttpResponse, networkFailure } from './http-client.ts';
import type { RegistryRequest, RegistrySession } from './registry-session.ts';
import { delayMs, MAX_TRIES, TransientFailure } from './retry.ts';

/** A connection that brought less than this made no progress. */
const PROGRESS_BYTES = 16 * 1024;

/** @throws SOURCE_SIZE_MISMATCH, SOURCE_REGISTRY_DOWNLOAD and what RegistrySession throws */
export async function* downloadBlob(
  session: RegistrySession,
  repository: string,
  digest: Digest,
  sizeBytes: number,
  signal: AbortSignal | undefined,
): AsyncGenerator<Buffer, void, undefined> {
  let done = 0;
  let stalls = 0;
  do {
    const begun = done;
    const response = await session.run(signal, () =>
      requestRange(session, repository, digest, done, sizeBytes, sizeBytes, signal),
    );
    try {
      for await (const part of skipping(response, done)) {
        if (done + part.length > sizeBytes)
          throw sizeMismatch(session, repository, digest, `over ${sizeBytes}`, sizeBytes);
        done += part.length;
        yield part;
      }
    } catch (error) {
      signal?.throwIfAborted();
      const failure = asFailure(session, repository, digest, response, error);
      if (!(failure instanceof TransientFailure)) throw failure;
    } finally {
      discard(response);
    }
    if (done >= sizeBytes) return;
    stalls = done - begun >= PROGRESS_BYTES ? 0 : stalls + 1;
    if (stalls >= MAX_TRIES) {
      throw fail('SOURCE_REGISTRY_DOWNLOAD', {
        registry: session.registry,
        repository,
        digest,
        offset: done,
        size: sizeBytes,
        tries: stalls,
      });
    }
    if (stalls > 0) await session.clock.sleep(delayMs(stalls, undefined, session.clock), signal);
  } while (done < sizeBytes);
}

/** Exactly `length` bytes from `offset`. @throws as downloadBlob; SOURCE_REGISTRY_RESPONSE when the blob ends before */
export async function downloadRange(
  session: RegistrySession,
  repository: string,
  digest: Digest,
  offset: number,
  length: number,
  signal: AbortSignal | undefined,
): Promise<Buffer> {
  if (length === 0) return Buffer.alloc(0);
  return session.run(signal, async () => {
    const response = await requestRange(session, repository, digest, offset, offset + length, undefined, signal);
    const out = Buffer.allocUnsafe(length);
    let done = 0;
    try {
      for await (const part of skipping(response, offset)) {
        done += part.copy(out, done, 0, Math.min(part.length, length - done));
        if (done === length) return out;
      }
    } catch (error) {
      signal?.throwIfAborted();
      throw asFailure(session, repository, digest, response, error);
    } finally {
      discard(response);
    }
    throw new TransientFailure(
      session.unexpected(action(repository, digest), `${done} bytes from ${offset} instead of ${length}`),
    );
  });
}

/** Asks for bytes `from` up to `end`. `total`: the blob's whole size, where known. */
async function requestRange(
  session: RegistrySession,
  repository: string,
  digest: Digest,
  from: number,
  end: number,
  total: number | undefined,
  signal: AbortSignal | undefined,
): Promise<HttpResponse> {
  const whole = from === 0 && end === total;
  const request: RegistryRequest = {
    method: 'GET',
    url: await session.url(`${repository}/blobs/${digest}`),
    repository,
    scope: `repository:${repository}:pull`,
    action: action(repository, digest),
    headers: whole ? {} : { range: `bytes=${from}-${end - 1}` },
    signal,
  };
  const response = await session.exchange(request);
  if (response.status === 206) {
    const range = /^bytes (\d+)-(\d+)\/(\d+|\*)$/.exec(response.header('content-range') ?? '');
    if (range === null || Number(range[1]) !== from) {
      discard(response);
      throw session.unexpected(request.action, `another range than the one asked for (bytes ${from}-${end - 1})`);
    }
    if (total !== undefined && range[3] !== '*' && Number(range[3]) !== total) {
      discard(response);
      throw sizeMismatch(session, repository, digest, range[3]!, total);
    }
    return response;
  }
  if (response.status === 200) {
    const length = response.header('content-length');
    if (total !== undefined && length !== undefined && Number(length) !== total) {
      discard(response);
      throw sizeMismatch(session, repository, digest, length, total);
    }
    return response;
  }
  if (response.status === 416) {
    discard(response);
    throw session.unexpected(request.action, `the blob ends before byte ${end}`);
  }
  throw await session.refusal(response, request);
}

/** The body from byte `from` of the blob on, whether or not the server kept to the range. */
async function* skipping(response: HttpResponse, from: number): AsyncGenerator<Buffer, void, undefined> {
  let skip = response.status === 206 ? 0 : from;
  for await (const part of response.body as Readable & AsyncIterable<Buffer>) {
    if (skip >= part.length) {
      skip -= part.length;
      continue;
    }
    yield skip > 0 ? part.subarray(skip) : part;
    skip = 0;
  }
}

function asFailure(
  session: RegistrySession,
  repository: string,
  digest: Digest,
  response: HttpResponse,
  error: unknown,
) {
  if (error instanceof Error && error.name === 'DsecError') return error;
  return networkFailure(session.registry, action(repository, digest), response.url, error);
}

function action(repository: string, digest: Digest): string {
  return `blob ${digest} of ${repository}`;
}

function sizeMismatch(
  session: RegistrySession,
  repository: string,
  digest: Digest,
  actual: number | string,
  expected: number,
) {
  return fail('SOURCE_SIZE_MISMATCH', {
    where: `${session.registry}/${repository}`,
    what: `blob ${digest}`,
    actual,
    expected,
  });
}
