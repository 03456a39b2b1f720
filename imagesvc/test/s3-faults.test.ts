/** What the S3 store makes of a server that misbehaves: the right bytes, or a clear error, in bounded time. */
import type { ServerResponse } from 'node:http';
import { afterEach, beforeEach, describe, expect, test } from 'vitest';
import { digestOf, hexOf } from '#base';
import type { RetryClock } from '../store/decorators/retry-call.ts';
import { S3Store } from '../store/s3-store.ts';
import { remoteRangeSource, storeRangeSource } from '../store/store-range-source.ts';
import { S3_KEYS } from './loopback-s3.ts';
import { answerError, type Script, ScriptedServer } from './scripted-server.ts';
import { collected, someBytes } from './store-conformance.ts';

const bytes = someBytes(300_000, 'served');
const digest = digestOf(bytes);
const key = `blobs/sha256/${hexOf(digest)}`;

let server: ScriptedServer;
let store: S3Store;
/** For servers that stall. */
let impatient: S3Store;
let slept: number[];
beforeEach(async () => {
  server = await ScriptedServer.start();
  server.objects.set(key, bytes);
  slept = [];
  store = new S3Store(server.url(), { env: S3_KEYS, retry: { clock: hasty, attempts: 4, tryTimeoutMs: 20_000 } });
  impatient = new S3Store(server.url(), { env: S3_KEYS, retry: { clock: hasty, attempts: 4, tryTimeoutMs: 700 } });
});
afterEach(() => server.stop());

/** Does not sleep, only says that it should. */
const hasty: RetryClock = {
  now: () => performance.now(),
  random: () => 0.5,
  sleep: async (ms) => {
    slept.push(ms);
  },
};
/** The first `times` requests go wrong. */
const first = (times: number, wrong: Script): Script => {
  let done = 0;
  return (request, response) => done++ < times && (wrong(request, response) ?? true);
};
const range = async (offset = 1000, length = 5000) => {
  const got = await store.read(digest, offset, length);
  expect(got).toEqual(bytes.subarray(offset, offset + length));
};
const part = (response: ServerResponse, range: string, body: Buffer, more: Record<string, string> = {}) => {
  response.writeHead(206, { 'content-range': range, ...more });
  response.end(body);
};

describe('heals', () => {
  test.each<[string, Script]>([
    ['503 SlowDown', (_, response) => void answerError(response, 503, 'SlowDown')],
    ['500', (_, response) => void answerError(response, 500, 'InternalError')],
    ['502 of a proxy, with HTML', (_, response) => void response.writeHead(502).end('<html>Bad gateway</html>')],
    ['400 RequestTimeout', (_, response) => void answerError(response, 400, 'RequestTimeout')],
    ['a reset before the answer', (_, response) => void response.socket!.resetAndDestroy()],
    [
      'a reset in the middle of the body',
      (_, response) => {
        response.writeHead(206, { 'content-range': 'bytes 1000-5999/300000', 'content-length': '5000' });
        response.write(bytes.subarray(1000, 2000), () => response.socket!.resetAndDestroy());
        return true;
      },
    ],
    [
      'an answer that ends early',
      (_, response) => {
        response.writeHead(206, { 'content-range': 'bytes 1000-5999/300000', 'content-length': '5000' });
        response.write(bytes.subarray(1000, 2000), () => response.socket!.end());
        return true;
      },
    ],
    ['chunked and short', (_, response) => void part(response, 'bytes 1000-5999/300000', bytes.subarray(1000, 2000))],
    ['chunked and long', (_, response) => void part(response, 'bytes 1000-5999/300000', bytes.subarray(1000, 9000))],
    [
      'a shorter body than its range',
      (_, response) =>
        void part(response, 'bytes 1000-5999/300000', bytes.subarray(1000, 2000), { 'content-length': '1000' }),
    ],
    ['another range', (_, response) => void part(response, 'bytes 0-4999/300000', bytes.subarray(0, 5000))],
    ['a shorter range', (_, response) => void part(response, 'bytes 1000-1999/300000', bytes.subarray(1000, 2000))],
    ['a part that does not say which', (_, response) => void response.writeHead(206).end(bytes.subarray(1000, 6000))],
    ['a part of unknown size', (_, response) => void part(response, 'bytes 1000-5999/*', bytes.subarray(1000, 6000))],
    [
      '416 for a range that is there',
      (_, response) => void response.writeHead(416, { 'content-range': 'bytes */300000' }).end(),
    ],
    ['not HTTP', (_, response) => void response.socket!.end('SSH-2.0-OpenSSH_9.2\r\n')],
  ])('%s, twice', async (_, script) => {
    server.script = first(2, script);
    await range();
    expect(server.requests).toHaveLength(3);
    expect(slept).toHaveLength(2);
  });

  test.each<[string, Script]>([
    ['silence', () => true],
    [
      'silence after the head',
      (_, response) => {
        response.writeHead(206, { 'content-range': 'bytes 1000-5999/300000', 'content-length': '5000' });
        response.flushHeaders();
        return true;
      },
    ],
    [
      'a byte now and then',
      (_, response) => {
        response.writeHead(206, { 'content-range': 'bytes 1000-5999/300000', 'content-length': '5000' });
        const drip = setInterval(() => response.write('x'), 50);
        response.on('close', () => clearInterval(drip));
        return true;
      },
    ],
  ])('%s, twice', async (_, script) => {
    server.script = first(2, script);
    expect(await impatient.read(digest, 1000, 5000)).toEqual(bytes.subarray(1000, 6000));
    expect(server.requests.length).toBeGreaterThanOrEqual(3);
  });

  test('429 with Retry-After: waits as long as it is told, not longer than the budget', async () => {
    server.script = first(1, (_, response) => void answerError(response, 429, 'TooMany', { 'retry-after': '7' }));
    await range();
    expect(slept).toEqual([7000]);
    server.script = (_, response) => {
      answerError(response, 429, 'TooMany', { 'retry-after': '3600' });
      return true;
    };
    await expect(range()).rejects.toMatchObject({ code: 'STORE_REMOTE', retryable: true });
    expect(slept).toEqual([7000]);
  });

  test('a server that ignores Range: cut to the range', async () => {
    server.script = ({ method }, response) => {
      if (method !== 'GET') return false;
      response.writeHead(200, { 'content-length': bytes.length });
      response.end(bytes);
      return true;
    };
    await range(0, 1);
    await range(299_999, 1);
    await range(1000, 200_000);
    await range(0, 300_000);
    await expect(store.read(digest, 299_999, 2)).rejects.toMatchObject({ code: 'STORE_SHORT_READ' });
    expect(digestOf(await store.readVerified(digest))).toBe(digest);
    expect(digestOf(Buffer.concat(await collected(store.stream(digest))))).toBe(digest);
  });

  test('one that ignores Range and sends chunks without a length', async () => {
    server.script = (_, response) => {
      response.writeHead(200);
      response.end(bytes);
      return true;
    };
    await range(1000, 200_000);
    await expect(store.read(digest, 299_000, 2000)).rejects.toMatchObject({ code: 'STORE_REMOTE' });
  });

  test('bytes that were damaged on their way, once: read again', async () => {
    server.script = first(1, ({ range }, response) => {
      const wrong = Buffer.from(bytes);
      wrong[5]! ^= 1;
      part(response, `bytes 0-299999/300000`, wrong.subarray(range!.first));
      return true;
    });
    expect(digestOf(await store.readVerified(digest))).toBe(digest);
    expect(server.requests).toHaveLength(2);
  });

  test('credentials that have expired: asked for anew, once', async () => {
    server.script = first(1, (_, response) => void answerError(response, 400, 'ExpiredToken'));
    await range();
    server.script = (_, response) => {
      answerError(response, 400, 'ExpiredToken');
      return true;
    };
    const before = server.requests.length;
    await expect(range()).rejects.toMatchObject({ code: 'STORE_REMOTE_ACCESS', retryable: false });
    expect(server.requests.length - before).toBe(2);
  });
});

describe('says clearly', () => {
  test('a server that is always silent: in bounded time', async () => {
    server.script = () => true;
    const silent = { code: 'STORE_TIMEOUT', retryable: true, exit: 6 };
    await expect(impatient.read(digest, 1000, 5000)).rejects.toMatchObject(silent);
    expect(server.requests).toHaveLength(4);
  });

  test('one that always breaks', async () => {
    server.script = (_, response) => {
      response.socket!.destroy();
      return true;
    };
    await expect(range()).rejects.toMatchObject({ code: 'STORE_REMOTE', retryable: true });
    expect(server.requests).toHaveLength(4);
  });

  test('a far range of a server that ignores Range', async () => {
    server.script = (_, response) => {
      response.writeHead(200, { 'content-length': String(10 ** 9) });
      response.flushHeaders();
      return true;
    };
    const far = { code: 'STORE_NO_RANGES', retryable: false };
    await expect(store.read(digest, 900_000_000, 4096)).rejects.toMatchObject(far);
    expect(server.requests).toHaveLength(1);
  });

  test('other bytes than the digest says', async () => {
    server.objects.set(key, someBytes(300_000, 'others'));
    const wrong = { code: 'STORE_DIGEST_MISMATCH', retryable: false };
    await expect(store.readVerified(digest)).rejects.toMatchObject(wrong);
    expect(server.requests).toHaveLength(2);
  });

  test('refusals are for good, and name what the server said', async () => {
    for (const [status, code, expected] of [
      [403, 'AccessDenied', 'STORE_REMOTE_ACCESS'],
      [403, 'RequestTimeTooSkewed', 'STORE_REMOTE_ACCESS'],
      [401, 'Unauthorized', 'STORE_REMOTE_ACCESS'],
      [404, 'NoSuchBucket', 'STORE_BUCKET'],
      [404, 'NoSuchKey', 'STORE_BLOB_MISSING'],
    ] as const) {
      server.requests.length = 0;
      server.script = (_, response) => {
        answerError(response, status, code);
        return true;
      };
      await expect(range()).rejects.toMatchObject({ code: expected, retryable: false });
      expect(server.requests).toHaveLength(1);
    }
  });

  test('another region is named', async () => {
    server.script = (_, response) => {
      answerError(response, 301, 'PermanentRedirect', { 'x-amz-bucket-region': 'eu-west-3' });
      return true;
    };
    await expect(range()).rejects.toMatchObject({
      code: 'STORE_REGION',
      hint: expect.stringContaining('region=eu-west-3') as string,
    });
  });

  test('a list without an end, and one that is none', async () => {
    const list = (inner: string) =>
      ((_, response) => {
        response.writeHead(200).end(`<ListBucketResult>${inner}</ListBucketResult>`);
        return true;
      }) satisfies Script;
    server.script = list('<IsTruncated>true</IsTruncated><NextContinuationToken>x</NextContinuationToken>');
    await expect(store.listRefs()).rejects.toMatchObject({ code: 'STORE_REMOTE_ANSWER' });
    server.script = list('<IsTruncated>true</IsTruncated>');
    await expect(store.listRefs()).rejects.toMatchObject({ code: 'STORE_REMOTE_ANSWER' });
    server.script = (_, response) => {
      response.writeHead(200).end('<html>Welcome</html>');
      return true;
    };
    await expect(store.listRefs()).rejects.toMatchObject({ code: 'STORE_REMOTE_ANSWER' });
    const contents = '<Contents><Key>refs%2Fa%20b</Key><Size>x</Size></Contents>';
    server.script = list(`<EncodingType>url</EncodingType>${contents}`);
    await expect(store.listRefs()).rejects.toMatchObject({ code: 'STORE_REMOTE_ANSWER' });
  });

  test('a ref that is damaged, and a marker of another version', async () => {
    server.objects.set('refs/a/_tags/b', Buffer.from('{"mediaType":'));
    await expect(store.getRef('a:b')).rejects.toMatchObject({ code: 'STORE_REF_DAMAGED' });
    server.objects.set('dsec-store.json', Buffer.from('{"format":"dsec-store","version":9}\n'));
    await expect(store.open()).rejects.toMatchObject({ code: 'STORE_VERSION' });
  });
});

test('an aborted read ends at once, with its reason', async () => {
  server.script = () => true;
  const ending = new AbortController();
  const reading = storeRangeSource(store).readRange(digest, 0, 10, { signal: ending.signal, priority: 'interactive' });
  const reason = new Error('not wanted');
  setTimeout(() => ending.abort(reason), 30);
  await expect(reading).rejects.toBe(reason);
});

test('reads one after the other share a connection, and 64 at once are right', async () => {
  for (let i = 0; i < 40; i++) await range(i * 1000, 4096);
  // A second one where a request comes before the connection knows that the one before is over.
  expect(server.connections).toBeLessThanOrEqual(2);
  await Promise.all(Array.from({ length: 64 }, (_, i) => range(i * 4000, 4000)));
  expect(server.connections).toBeLessThanOrEqual(64);
});

test('requests are signed, or not when access is anonymous or by a token', async () => {
  await range();
  expect(server.requests[0]!.headers.authorization).toMatch(/^AWS4-HMAC-SHA256 Credential=test-key\//);
  await new S3Store(`${server.url()}&anonymous=1`, { env: {} }).read(digest, 0, 1);
  expect(server.requests[1]!.headers.authorization).toBeUndefined();
  const token = new S3Store(`${server.url()}&signed-query=Signature%3Dabc`, { env: {} });
  await token.read(digest, 0, 1);
  expect(server.requests[2]!.headers.authorization).toBeUndefined();
  expect(token.url).not.toContain('abc');
  server.objects.set('dsec-store.json', Buffer.from('{"format":"dsec-store","version":1}\n'));
  await expect(token.setRef({ name: 'a', manifest: { mediaType: 'm', digest, size: 1 } })).rejects.toMatchObject({
    code: 'STORE_NO_WRITES',
  });
});

test('a server that fails 5 % of requests in all these ways: every read through the decorators is right', async () => {
  let seed = 7;
  const random = () => {
    seed = (seed * 1_103_515_245 + 12_345) % 2 ** 31;
    return seed / 2 ** 31;
  };
  let faults = 0;
  server.script = ({ range }, response) => {
    const drawn = random();
    if (drawn >= 0.05) return false;
    faults++;
    const { first, last } = range!;
    const header = {
      'content-range': `bytes ${first}-${last}/${bytes.length}`,
      'content-length': String(last + 1 - first),
    };
    if (drawn < 0.01) response.socket!.destroy();
    else if (drawn < 0.02) answerError(response, 503, 'SlowDown');
    else if (drawn < 0.03)
      response.writeHead(206, header).write(bytes.subarray(first, first + 10), () => response.socket!.destroy());
    else if (drawn < 0.04) response.writeHead(200, { 'content-length': bytes.length }).end(bytes);
    // The rest stall.
    return true;
  };
  const source = remoteRangeSource(store, { retry: { tryTimeoutMs: 1500, baseDelayMs: 1 }, limit: { concurrency: 8 } });
  const reads = Array.from({ length: 600 }, async (_, i) => {
    const offset = (i * 7919) % 250_000;
    const got = await source.readRange(digest, offset, 4096, { priority: i % 3 === 0 ? 'prefetch' : 'interactive' });
    expect(got.equals(bytes.subarray(offset, offset + 4096))).toBe(true);
  });
  await Promise.all(reads);
  expect(faults).toBeGreaterThan(10);
  const { inFlight, interactive, prefetch } = source.metrics();
  expect(inFlight).toBe(0);
  expect(interactive.reads + prefetch.reads).toBe(600);
  expect(interactive.bytes).toBe(400 * 4096);
  expect(prefetch.latency.reduce((sum, n) => sum + n, 0)).toBe(200);
  expect(interactive.errors).toEqual({});
}, 30_000);
