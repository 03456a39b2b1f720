import { execFileSync } from 'node:child_process';
import { randomBytes } from 'node:crypto';
import { readFileSync } from 'node:fs';
import { createServer } from 'node:http';
import { type AddressInfo, connect } from 'node:net';
import { networkInterfaces } from 'node:os';
import { join } from 'node:path';
import { afterAll, afterEach, beforeEach, describe, expect, test } from 'vitest';
import { type Digest, digestOf } from '#base';
import { openSource } from '../source/open-source.ts';
import { parsePlatform } from '../source/platform.ts';
import { RegistryClient } from '../source/registry-client.ts';
import { parseRetryAfter } from '../source/retry.ts';
import { breakAfter, FakeRegistry, type Handler, refuse, sendRange, TestClock } from './fake-registry.ts';
import { expectBytes, failureOf, ImageFixture, OCI, tarOf, Workshop } from './image-fixture.ts';

const work = new Workshop();
afterAll(() => work.remove());

let registry: FakeRegistry;
let other: FakeRegistry;
let clock: TestClock;
const clients: RegistryClient[] = [];

beforeEach(async () => {
  registry = await FakeRegistry.start();
  other = await FakeRegistry.start();
  clock = new TestClock();
});
afterEach(async () => {
  await Promise.all(clients.splice(0).map((client) => client.close()));
  await Promise.all([registry.close(), other.close()]);
});

function client(extra: Partial<ConstructorParameters<typeof RegistryClient>[0]> = {}): RegistryClient {
  const made = new RegistryClient({ registry: registry.host, env: { HOME: work.path }, clock, ...extra });
  clients.push(made);
  return made;
}

async function all(parts: AsyncIterable<Buffer>): Promise<Buffer> {
  const out: Buffer[] = [];
  for await (const part of parts) out.push(Buffer.from(part));
  return Buffer.concat(out);
}

const blob = randomBytes(1_000_000);
const ranges = () => registry.calls.map((asked) => asked.range);

describe('manifests', () => {
  const index = { schemaVersion: 2, mediaType: `${OCI}.index.v1+json`, manifests: [] };

  test('asks for every type, hashes what comes', async () => {
    const digest = registry.addManifest('a/b', 'v1', index, index.mediaType);
    let accept = '';
    registry.intercept = (_asked, _response, request) => {
      accept = request.headers.accept ?? '';
      return false;
    };
    const manifest = await client().getManifest('a/b', 'v1');
    expect(manifest).toMatchObject({ digest, mediaType: index.mediaType });
    for (const type of [
      'oci.image.manifest',
      'oci.image.index',
      'distribution.manifest.v2',
      'distribution.manifest.list',
    ]) {
      expect(accept).toContain(type);
    }
    expect(await client().headManifest('a/b', 'v1')).toMatchObject({ mediaType: index.mediaType });
    expect(await client().headManifest('a/b', 'v2')).toBeUndefined();
  });

  test('by digest: other bytes are refused, whatever the header says', async () => {
    const digest = registry.addManifest('a/b', 'v1', index, index.mediaType);
    registry.intercept = (_asked, response) => {
      response.writeHead(200, { 'content-type': index.mediaType, 'docker-content-digest': digest });
      response.end(`${JSON.stringify(index)} `);
      return true;
    };
    const error = await failureOf(client().getManifest('a/b', digest));
    expect(error.code).toBe('SOURCE_DIGEST_MISMATCH');
    expect(error.message).toContain(digest);
  });

  test('bounded in size', async () => {
    registry.addManifest('a/b', 'v1', Buffer.alloc(5 << 20, 0x20), index.mediaType);
    expect((await failureOf(client().getManifest('a/b', 'v1'))).code).toBe('SOURCE_TOO_LARGE');
    const digest = registry.addBlob(blob);
    expect((await failureOf(client().getBlob('a/b', digest, 1000))).code).toBe('SOURCE_TOO_LARGE');
    expectBytes(await client().getBlob('a/b', digest), blob);
  });

  test('the type: its own, the header, its fields', async () => {
    registry.addManifest('a', '1', { schemaVersion: 2, manifests: [] }, 'application/json');
    registry.addManifest(
      'a',
      '2',
      { schemaVersion: 2, layers: [], config: {} },
      `${OCI}.manifest.v1+json; charset=utf-8`,
    );
    registry.addManifest('a', '3', { schemaVersion: 2, layers: [], config: {} }, 'text/plain');
    const type = async (tag: string) => (await client().getManifest('a', tag)).mediaType;
    expect(await type('1')).toBe(`${OCI}.index.v1+json`);
    expect(await type('2')).toBe(`${OCI}.manifest.v1+json`);
    expect(await type('3')).toBe(`${OCI}.manifest.v1+json`);
  });

  test('refusals name the repository and the way on', async () => {
    const missing = await failureOf(client().getManifest('a/b', 'nope'));
    expect(missing.code).toBe('SOURCE_REGISTRY_NOT_FOUND');
    expect(missing.message).toContain('manifest nope of a/b');
    expect(missing.message).toContain('NOT_KNOWN: nothing here');
    registry.intercept = (_asked, response) => refuse(response, 403, 'DENIED', 'access\r\n\u001b[31mdenied');
    const denied = await failureOf(client().getManifest('a/b', 'nope'));
    expect(denied.code).toBe('SOURCE_REGISTRY_FORBIDDEN');
    expect(denied.hint).toContain('--creds');
    expect(denied.message).not.toMatch(/[\u0000-\u001f]/);
    registry.intercept = (_asked, response) => refuse(response, 418, 'TEAPOT', 'x');
    expect((await failureOf(client().getManifest('a/b', 'nope'))).message).toContain('status 418');
    registry.intercept = (_asked, response) => {
      response.end('<html>');
      return true;
    };
    expect((await failureOf(client().getManifest('a/b', 'nope'))).code).toBe('SOURCE_JSON');
  });
});

describe('trying again', () => {
  test('429 with Retry-After, then 503, then it works', async () => {
    const digest = registry.addBlob(blob);
    const answers: [number, Record<string, string>][] = [
      [429, { 'retry-after': '3' }],
      [503, {}],
      [502, { 'retry-after': '99999' }],
    ];
    registry.intercept = (_asked, response) => {
      const answer = answers.shift();
      return answer ? refuse(response, answer[0], 'BUSY', 'later', answer[1]) : false;
    };
    expectBytes(await client().getBlob('a/b', digest), blob);
    // 0.5 s doubled, halved by the least jitter; the server's wish counts, up to a minute.
    expect(clock.slept).toEqual([3000, 500, 60_000]);
  });

  test('five tries, then the error', async () => {
    registry.intercept = (_asked, response) => refuse(response, 500, 'X', 'broken');
    const error = await failureOf(client().getManifest('a/b', 'v1'));
    expect(error.code).toBe('SOURCE_REGISTRY_BUSY');
    expect(error).toMatchObject({ retryable: true });
    expect(error.message).toContain('status 500: X: broken');
    expect(registry.calls).toHaveLength(5);
    expect(clock.slept).toEqual([250, 500, 1000, 2000]);
  });

  test('nobody there', async () => {
    const c = client();
    await registry.close();
    const error = await failureOf(c.getManifest('a/b', 'v1'));
    expect(error.code).toBe('SOURCE_REGISTRY_UNREACHABLE');
    expect(error.message).toContain('connection refused');
    expect(clock.slept).toHaveLength(4);
    registry = await FakeRegistry.start();
  });

  test('a closed client does not wait', async () => {
    const c = client();
    await c.close();
    expect((await failureOf(c.getManifest('a/b', 'v1'))).message).toContain('closed');
    expect(clock.slept).toEqual([]);
  });

  test('an abort ends the waiting', async () => {
    registry.intercept = (_asked, response) => refuse(response, 500, 'X', 'broken');
    const abort = new AbortController();
    const c = client({
      clock: {
        now: Date.now,
        random: () => 0,
        sleep: (_ms, signal) =>
          new Promise((_done, reject) => {
            signal?.addEventListener('abort', () => reject(signal.reason));
            abort.abort();
          }),
      },
    });
    expect((await failureOf(c.getManifest('a/b', 'v1', abort.signal))).name).toBe('AbortError');
    expect(registry.calls).toHaveLength(1);
  });

  test('Retry-After', () => {
    expect(parseRetryAfter('120', 0)).toBe(120_000);
    expect(parseRetryAfter('Thu, 01 Jan 1970 00:01:00 GMT', 20_000)).toBe(40_000);
    expect(parseRetryAfter('Thu, 01 Jan 1970 00:01:00 GMT', 90_000)).toBe(0);
    for (const text of [undefined, 'soon', '-1', '99999999999999']) expect(parseRetryAfter(text, 0)).toBeUndefined();
  });
});

describe('redirects', () => {
  const wanted = `Basic ${Buffer.from('joe:hunter2').toString('base64')}`;
  const protectedBy: Handler = (asked, response) =>
    asked.authorization === wanted ? false : refuse(response, 401, 'X', 'x', { 'www-authenticate': 'Basic realm="r"' });

  test('Authorization stays with its host, port and scheme', async () => {
    const digest = registry.addBlob(blob);
    other.blobs.set(digest, blob);
    for (const target of [other.origin, `http://localhost:${registry.port}`]) {
      const asks = target === other.origin ? other : registry;
      registry.intercept = (asked, response, request) => {
        if (asked.url.startsWith('/elsewhere')) return false;
        if (protectedBy(asked, response, request)) return true;
        response.writeHead(307, { location: `${target}/elsewhere/v2/a/b/blobs/${digest}?signature=S` });
        response.end();
        return true;
      };
      const at =
        (path: Handler): Handler =>
        (asked, response, request) => {
          if (!asked.url.startsWith('/elsewhere')) return path(asked, response, request);
          sendRange(asked, response, blob);
          return true;
        };
      if (asks === registry) registry.intercept = at(registry.intercept);
      else other.intercept = at(() => false);
      asks.asked.length = 0;
      expectBytes(await client({ credentials: 'joe:hunter2' }).getBlob('a/b', digest), blob);
      const redirected = asks.asked.filter((asked) => asked.url.startsWith('/elsewhere'));
      expect(redirected.map((asked) => asked.authorization)).toEqual([undefined]);
      expect(redirected[0]!.url).toContain('signature=S');
    }
  });

  test('on the same host it is kept', async () => {
    registry.intercept = (asked, response, request) => {
      if (protectedBy(asked, response, request)) return true;
      if (asked.url === '/v2/a/b/blobs/moved') return sendRange(asked, response, blob) ?? true;
      response.writeHead(302, { location: 'moved' });
      response.end();
      return true;
    };
    expectBytes(await client({ credentials: 'joe:hunter2' }).getBlob('a/b', digestOf(blob)), blob);
  });

  test('away and back again: it does not come back', async () => {
    registry.intercept = (asked, response, request) => {
      if (asked.url === '/back') return sendRange(asked, response, blob) ?? true;
      if (protectedBy(asked, response, request)) return true;
      response.writeHead(307, { location: other.origin });
      response.end();
      return true;
    };
    other.intercept = (_asked, response) => {
      response.writeHead(307, { location: `${registry.origin}/back` });
      response.end();
      return true;
    };
    await client({ credentials: 'joe:hunter2' }).getBlob('a/b', digestOf(blob));
    expect(registry.calls.find((asked) => asked.url === '/back')!.authorization).toBeUndefined();
  });

  test('too many, to nowhere, to another scheme', async () => {
    let location = 'again';
    registry.intercept = (_asked, response) => {
      response.writeHead(307, { location });
      response.end();
      return true;
    };
    const failed = async () => failureOf(client().getBlob('a/b', digestOf(blob)));
    expect((await failed()).code).toBe('SOURCE_REGISTRY_REDIRECT');
    expect(registry.calls).toHaveLength(11);
    for (location of ['file:///etc/passwd', 'http://', 'data:text/plain,x']) {
      expect((await failed()).code).toBe('SOURCE_REGISTRY_REDIRECT');
    }
  });

  test('an address that has run out is signed again', async () => {
    const digest = registry.addBlob(blob);
    let n = 0;
    registry.intercept = (_asked, response) => {
      response.writeHead(307, { location: `${other.origin}/signed/${n++}` });
      response.end();
      return true;
    };
    other.intercept = (asked, response) => {
      if (asked.url === '/signed/0') return refuse(response, 403, 'EXPIRED', 'x');
      sendRange(asked, response, blob);
      return true;
    };
    expectBytes(await all(client().openBlob('a/b', digest, blob.length)), blob);
    expect(clock.slept).toHaveLength(1);
  });
});

describe('downloads', () => {
  test('whole, in one request', async () => {
    const digest = registry.addBlob(blob);
    expectBytes(await all(client().openBlob('a/b', digest, blob.length)), blob);
    expect(ranges()).toEqual([undefined]);
    const empty = registry.addBlob(Buffer.alloc(0));
    expect(await all(client().openBlob('a/b', empty, 0))).toEqual(Buffer.alloc(0));
  });

  test('broken twice: resumed where it broke', async () => {
    const digest = registry.addBlob(blob);
    let breaks = 2;
    registry.intercept = (asked, response) => {
      if (breaks-- <= 0) return false;
      const from = Number(/^bytes=(\d+)/.exec(asked.range ?? '')?.[1] ?? 0);
      const headers = {
        'content-length': blob.length - from,
        'content-range': `bytes ${from}-${blob.length - 1}/${blob.length}`,
      };
      return breakAfter(response, asked.range ? 206 : 200, headers, blob.subarray(from, from + 300_000));
    };
    expectBytes(await all(client().openBlob('a/b', digest, blob.length)), blob);
    expect(ranges()).toEqual([undefined, 'bytes=300000-999999', 'bytes=600000-999999']);
  });

  test('a server that ignores ranges starts over; what is known is skipped', async () => {
    const digest = registry.addBlob(blob);
    let breaks = 2;
    registry.intercept = (_asked, response) => {
      const part = breaks-- > 0 ? blob.subarray(0, 400_000 + 100_000 * (2 - breaks)) : blob;
      if (part !== blob) return breakAfter(response, 200, { 'content-length': blob.length }, part);
      response.writeHead(200);
      response.end(blob);
      return true;
    };
    expectBytes(await all(client().openBlob('a/b', digest, blob.length)), blob);
    expect(ranges()).toEqual([undefined, 'bytes=500000-999999', 'bytes=600000-999999']);
  });

  test('an end that comes too early, without a word, is a break too', async () => {
    const digest = registry.addBlob(blob);
    let first = true;
    registry.intercept = (_asked, response) => {
      if (!first) return false;
      first = false;
      response.writeHead(200, { 'transfer-encoding': 'chunked' });
      response.end(blob.subarray(0, 123_456));
      return true;
    };
    expectBytes(await all(client().openBlob('a/b', digest, blob.length)), blob);
    expect(ranges()).toEqual([undefined, 'bytes=123456-999999']);
  });

  test('a token that expires in the middle is replaced in the middle', async () => {
    const digest = registry.addBlob(blob);
    let valid = 'Bearer t1';
    let issued = 0;
    let broken = false;
    other.intercept = (_asked, response) => {
      valid = `Bearer t${++issued}`;
      response.end(JSON.stringify({ token: `t${issued}`, expires_in: 300 }));
      return true;
    };
    registry.intercept = (asked, response) => {
      if (asked.authorization !== valid || issued === 0) {
        return refuse(response, 401, 'X', 'x', { 'www-authenticate': `Bearer realm="${other.origin}/token"` });
      }
      if (broken) return false;
      broken = true;
      valid = 'none';
      return breakAfter(response, 200, { 'content-length': blob.length }, blob.subarray(0, 500_000));
    };
    expectBytes(await all(client().openBlob('a/b', digest, blob.length)), blob);
    expect(registry.calls.map((asked) => [asked.authorization, asked.range])).toEqual([
      [undefined, undefined],
      ['Bearer t1', undefined],
      ['Bearer t1', 'bytes=500000-999999'],
      ['Bearer t2', 'bytes=500000-999999'],
    ]);
  });

  test('no progress: given up after five', async () => {
    const digest = registry.addBlob(blob);
    registry.intercept = (_asked, response) =>
      breakAfter(response, 200, { 'content-length': blob.length }, blob.subarray(0, 100));
    const error = await failureOf(all(client().openBlob('a/b', digest, blob.length)));
    expect(error.code).toBe('SOURCE_REGISTRY_DOWNLOAD');
    expect(error).toMatchObject({ retryable: true });
    expect(error.message).toContain('at byte 100 of 1000000');
    expect(registry.calls).toHaveLength(5);
  });

  test('sizes that lie', async () => {
    const digest = registry.addBlob(blob);
    for (const size of [blob.length - 1, blob.length + 1]) {
      const error = await failureOf(all(client().openBlob('a/b', digest, size)));
      expect(error.code).toBe('SOURCE_SIZE_MISMATCH');
    }
    // Without a length: what comes decides.
    registry.intercept = (_asked, response) => {
      response.writeHead(200);
      response.write(blob);
      response.end('more');
      return true;
    };
    expect((await failureOf(all(client().openBlob('a/b', digest, blob.length)))).code).toBe('SOURCE_SIZE_MISMATCH');
    // In a range's total.
    let first = true;
    registry.intercept = (_asked, response) => {
      if (first) {
        first = false;
        return breakAfter(response, 200, { 'content-length': blob.length }, blob.subarray(0, 500_000));
      }
      response.writeHead(206, { 'content-range': `bytes 500000-999998/999999` });
      response.end(blob.subarray(500_000, 999_999));
      return true;
    };
    expect((await failureOf(all(client().openBlob('a/b', digest, blob.length)))).code).toBe('SOURCE_SIZE_MISMATCH');
  });

  test('another range than the one asked for', async () => {
    const digest = registry.addBlob(blob);
    registry.intercept = (_asked, response) => {
      response.writeHead(206, { 'content-range': 'bytes 0-9/1000000' });
      response.end(blob.subarray(0, 10));
      return true;
    };
    expect((await failureOf(client().readBlobRange('a/b', digest, 10, 10))).code).toBe('SOURCE_REGISTRY_RESPONSE');
  });

  test('ranges: exact, ignored by the server, broken, past the end', async () => {
    const digest = registry.addBlob(blob);
    const c = client();
    expectBytes(await c.readBlobRange('a/b', digest, 1000, 5000), blob.subarray(1000, 6000));
    expectBytes(await c.readBlobRange('a/b', digest, 999_999, 1), blob.subarray(999_999));
    expect(await c.readBlobRange('a/b', digest, 5, 0)).toEqual(Buffer.alloc(0));
    registry.intercept = (_asked, response) => {
      response.end(blob);
      return true;
    };
    expectBytes(await c.readBlobRange('a/b', digest, 70_000, 100_000), blob.subarray(70_000, 170_000));
    let first = true;
    registry.intercept = (_asked, response) => {
      if (!first) return false;
      first = false;
      return breakAfter(
        response,
        206,
        { 'content-length': 1000, 'content-range': 'bytes 0-999/1000000' },
        blob.subarray(0, 10),
      );
    };
    expectBytes(await c.readBlobRange('a/b', digest, 0, 1000), blob.subarray(0, 1000));
    registry.intercept = (_asked, response) => refuse(response, 416, 'X', 'x');
    expect((await failureOf(c.readBlobRange('a/b', digest, 2_000_000, 1))).code).toBe('SOURCE_REGISTRY_RESPONSE');
  });

  test('an abort ends it at once; a reader that stops frees the connection', async () => {
    const digest = registry.addBlob(blob);
    const closed: Promise<unknown>[] = [];
    registry.intercept = (_asked, response) => {
      closed.push(new Promise((done) => response.once('close', done)));
      response.writeHead(200, { 'content-length': blob.length });
      response.write(blob.subarray(0, 200_000));
      return true;
    };
    const abort = new AbortController();
    const error = await failureOf(async () => {
      for await (const _part of client().openBlob('a/b', digest, blob.length, abort.signal))
        abort.abort(new Error('enough'));
    });
    expect(error.message).toBe('enough');
    for await (const _part of client().openBlob('a/b', digest, blob.length)) break;
    expect(closed).toHaveLength(2);
    await Promise.all(closed);
  });

  test('a server that falls silent: another try, or the rest asked for again', async () => {
    const digest = registry.addBlob(blob);
    const silences = ['head', 'body'];
    registry.intercept = (_asked, response) => {
      const silence = silences.shift();
      if (silence === 'body') {
        response.writeHead(200, { 'content-length': blob.length });
        response.write(blob.subarray(0, 500_000));
      }
      return silence !== undefined;
    };
    const c = client({ timeouts: { headersMs: 200, bodyIdleMs: 200 } });
    expectBytes(await all(c.openBlob('a/b', digest, blob.length)), blob);
    expect(ranges()).toEqual([undefined, undefined, 'bytes=500000-999999']);
  });

  test('no more connections than allowed', async () => {
    const digest = registry.addBlob(blob.subarray(0, 1000));
    let open = 0;
    let most = 0;
    registry.intercept = async () => {
      most = Math.max(most, ++open);
      await new Promise((done) => setTimeout(done, 5));
      open--;
      return false;
    };
    const c = client({ connections: 3 });
    await Promise.all(Array.from({ length: 30 }, () => c.getBlob('a/b', digest)));
    expect(most).toBeLessThanOrEqual(3);
    expect(most).toBeGreaterThan(1);
  });
});

describe('uploads', () => {
  const digest = digestOf(blob);
  const parts = async function* () {
    for (let at = 0; at < blob.length; at += 100_000) yield blob.subarray(at, at + 100_000);
  };
  const started: Handler = (asked, response) => {
    if (asked.method !== 'POST') return false;
    response.writeHead(202, { location: '/v2/a/b/blobs/uploads/1?_state=a%2Bb%20c' });
    response.end();
    return true;
  };
  const created = (response: Parameters<Handler>[1]) => {
    response.writeHead(201);
    response.end();
    return true as const;
  };

  test('in one piece', async () => {
    registry.intercept = (asked, response, request) => started(asked, response, request) || created(response);
    await client().uploadBlob('a/b', digest, blob.length, parts);
    const [post, put] = registry.calls;
    expect(post).toMatchObject({ method: 'POST', url: '/v2/a/b/blobs/uploads/' });
    expect(put).toMatchObject({
      method: 'PUT',
      url: `/v2/a/b/blobs/uploads/1?_state=a%2Bb%20c&digest=${encodeURIComponent(digest)}`,
    });
    expect(put!.body.equals(blob)).toBe(true);
  });

  test('in chunks where one piece is refused', async () => {
    const big = randomBytes(40 * 1024 * 1024);
    let n = 0;
    registry.intercept = (asked, response, request) => {
      if (started(asked, response, request)) return true;
      if (asked.method === 'PUT')
        return asked.body.length > 0 ? refuse(response, 413, 'X', 'too large') : created(response);
      response.writeHead(202, { location: `${registry.origin}/v2/a/b/blobs/uploads/1?n=${++n}` });
      response.end();
      return true;
    };
    await client().uploadBlob('a/b', digestOf(big), big.length, async function* () {
      for (let at = 0; at < big.length; at += 3_000_000) yield big.subarray(at, at + 3_000_000);
    });
    const patches = registry.calls.filter((asked) => asked.method === 'PATCH');
    expect(patches.map((asked) => asked.body.length)).toEqual([16 << 20, 16 << 20, 8 << 20]);
    expect(Buffer.concat(patches.map((asked) => asked.body)).equals(big)).toBe(true);
    expect(patches.map((asked) => asked.url.replace(/.*\?/, ''))).toEqual(['_state=a%2Bb%20c', 'n=1', 'n=2']);
    expect(registry.calls.at(-1)!.url).toContain('?n=3&digest=');
  });

  test('broken once: begun again', async () => {
    let first = true;
    registry.intercept = (asked, response, request) => {
      if (started(asked, response, request)) return true;
      if (!first) return created(response);
      first = false;
      response.destroy();
      return true;
    };
    await client().uploadBlob('a/b', digest, blob.length, parts);
    expect(registry.calls.map((asked) => asked.method)).toEqual(['POST', 'PUT', 'POST', 'PUT']);
    expect(registry.calls.at(-1)!.body.equals(blob)).toBe(true);
  });

  test('a source that fails or has another length', async () => {
    registry.intercept = (asked, response, request) => started(asked, response, request) || created(response);
    const failing = async function* (): AsyncGenerator<Buffer> {
      yield blob.subarray(0, 100);
      throw new Error('disk gone');
    };
    expect((await failureOf(client().uploadBlob('a/b', digest, blob.length, failing))).message).toBe('disk gone');
    for (const size of [blob.length - 1, blob.length + 1]) {
      expect((await failureOf(client().uploadBlob('a/b', digest, size, parts))).code).toBe('SOURCE_SIZE_MISMATCH');
    }
  });

  test('a place on another host gets no credentials', async () => {
    const wanted = `Basic ${Buffer.from('joe:hunter2').toString('base64')}`;
    registry.intercept = (asked, response) => {
      if (asked.authorization !== wanted)
        return refuse(response, 401, 'X', 'x', { 'www-authenticate': 'Basic realm="r"' });
      response.writeHead(202, { location: `${other.origin}/put` });
      response.end();
      return true;
    };
    other.intercept = (_asked, response) => created(response);
    await client({ credentials: 'joe:hunter2' }).uploadBlob('a/b', digest, blob.length, parts);
    expect(other.asked.map((asked) => [asked.method, asked.authorization])).toEqual([['PUT', undefined]]);
    registry.intercept = (_asked, response) => {
      response.writeHead(202);
      response.end();
      return true;
    };
    expect((await failureOf(client().uploadBlob('a/b', digest, blob.length, parts))).message).toContain('Location');
  });

  test('mounts, or says that it could not', async () => {
    registry.intercept = (_asked, response) => created(response);
    expect(await client().mountBlob('a/b', digest, 'c/d')).toBe(true);
    expect(registry.calls[0]!.url).toBe(`/v2/a/b/blobs/uploads/?mount=${encodeURIComponent(digest)}&from=c%2Fd`);
    registry.intercept = (asked, response, request) => started(asked, response, request) || created(response);
    expect(await client().mountBlob('a/b', digest, 'c/d')).toBe(false);
    expect(registry.calls.at(-1)!.method).toBe('DELETE');
    registry.intercept = (_asked, response) => refuse(response, 404, 'X', 'x');
    expect(await client().mountBlob('a/b', digest, 'c/d')).toBe(false);
  });

  test('manifests, blobs that are there, tags page by page', async () => {
    registry.addBlob(blob);
    expect(await client().blobExists('a/b', digest)).toBe(true);
    expect(await client().blobExists('a/b', digestOf('x'))).toBe(false);
    registry.intercept = (asked, response) => {
      if (asked.method === 'PUT') return created(response);
      const last = new URL(asked.url, 'http://x').searchParams.get('last');
      const [tags, next] = last === null ? [['a', 'b'], 'b'] : last === 'b' ? [['c'], 'c'] : [null, undefined];
      response.writeHead(200, next === undefined ? {} : { link: `</v2/a/b/tags/list?last=${next}&n=2>; rel="next"` });
      response.end(JSON.stringify({ name: 'a/b', tags }));
      return true;
    };
    const bytes = Buffer.from('{}');
    expect(await client().putManifest('a/b', 'v1', bytes, `${OCI}.manifest.v1+json`)).toBe(digestOf(bytes));
    expect(registry.calls.at(-1)).toMatchObject({ method: 'PUT', url: '/v2/a/b/manifests/v1', body: bytes });
    expect(await client().listTags('a/b')).toEqual(['a', 'b', 'c']);
  });
});

describe('TLS', () => {
  const tls = (() => {
    const [key, cert] = [join(work.path, 'key.pem'), join(work.path, 'cert.pem')];
    try {
      execFileSync(
        'openssl',
        ['req', '-x509', '-newkey', 'rsa:2048', '-nodes', '-keyout', key, '-out', cert, '-days', '2', '-subj', '/CN=x'],
        { stdio: 'ignore' },
      );
      return { key: readFileSync(key, 'utf8'), cert: readFileSync(cert, 'utf8') };
    } catch {
      console.log('skipped: TLS tests need openssl');
      return undefined;
    }
  })();
  const address = Object.values(networkInterfaces())
    .flat()
    .find((face) => face?.family === 'IPv4' && !face.internal)?.address;

  test.skipIf(!tls)('on this machine any certificate will do; https does not become http', async () => {
    const secure = await FakeRegistry.start(tls);
    try {
      const digest = secure.addBlob(blob);
      expectBytes(await client({ registry: secure.host }).getBlob('a/b', digest), blob);
      other.blobs.set(digest, blob);
      secure.intercept = (asked, response) => {
        response.writeHead(307, { location: `${other.origin}${asked.url}` });
        response.end();
        return true;
      };
      const error = await failureOf(client({ registry: secure.host }).getBlob('a/b', digest));
      expect(error.code).toBe('SOURCE_REGISTRY_REDIRECT');
      expect(error.hint).toContain('--insecure');
      expect(other.asked).toHaveLength(0);
      expectBytes(await client({ registry: secure.host, insecure: true }).getBlob('a/b', digest), blob);
    } finally {
      await secure.close();
    }
  });

  test.skipIf(!tls || !address)('elsewhere an unknown certificate or plain http needs --insecure', async () => {
    const secure = await FakeRegistry.start(tls, address);
    const plain = await FakeRegistry.start(undefined, address);
    try {
      for (const [server, hint] of [
        [secure, 'NODE_EXTRA_CA_CERTS'],
        [plain, '--insecure'],
      ] as const) {
        const digest = server.addBlob(blob);
        const error = await failureOf(client({ registry: server.host }).getBlob('a/b', digest));
        expect(error.code).toBe('SOURCE_REGISTRY_UNREACHABLE');
        expect(error.hint, error.message).toContain(hint);
        expect(server.asked).toHaveLength(0);
        expectBytes(await client({ registry: server.host, insecure: true }).getBlob('a/b', digest), blob);
      }
    } finally {
      await Promise.all([secure.close(), plain.close()]);
    }
  });

  test.skipIf(!tls || !address)('a proxy from the environment, not for this machine itself', async () => {
    const secure = await FakeRegistry.start(tls, address);
    const asked: string[] = [];
    const proxy = createServer();
    proxy.on('connect', (request, socket, head) => {
      asked.push(request.url ?? '');
      const [host, port] = (request.url ?? '').split(':');
      const up = connect(Number(port), host, () => {
        socket.write('HTTP/1.1 200 OK\r\n\r\n');
        up.write(head);
        up.pipe(socket).pipe(up);
      });
      for (const end of [up, socket]) end.on('error', () => end.destroy());
    });
    await new Promise<void>((done) => proxy.listen(0, '127.0.0.1', done));
    try {
      const { port } = proxy.address() as AddressInfo;
      const env = {
        HOME: work.path,
        https_proxy: `http://127.0.0.1:${port}`,
        http_proxy: `http://127.0.0.1:${port}`,
        no_proxy: '',
      };
      const digest = secure.addBlob(blob);
      registry.addBlob(blob);
      expectBytes(await client({ registry: secure.host, insecure: true, env }).getBlob('a/b', digest), blob);
      const through = asked.length;
      expect(new Set(asked)).toEqual(new Set([secure.host]));
      expectBytes(await client({ env }).getBlob('a/b', digest), blob);
      expect(asked).toHaveLength(through);
    } finally {
      await Promise.all(clients.splice(0).map((made) => made.close()));
      proxy.closeAllConnections();
      await new Promise((done) => proxy.close(done));
      await secure.close();
    }
  });
});

describe('docker:// as a source', () => {
  test('config at once, layers as streams; platform by --platform', async () => {
    const tar = await tarOf([{ name: 'a', content: 'one' }]);
    const fixture = new ImageFixture();
    const amd = fixture.image([tar], 'amd64');
    const arm = fixture.image([tar, tar], 'arm64');
    for (const [digest, bytes] of fixture.blobs) registry.blobs.set(digest, bytes);
    for (const d of [amd, arm]) registry.addManifest('x/y', d.digest, fixture.blobs.get(d.digest)!, d.mediaType);
    registry.addManifest(
      'x/y',
      'latest',
      {
        schemaVersion: 2,
        manifests: [
          { ...amd, platform: { os: 'linux', architecture: 'amd64' } },
          { ...arm, platform: { os: 'linux', architecture: 'arm64', variant: 'v8' } },
        ],
      },
      `${OCI}.index.v1+json`,
    );
    const source = await openSource(`docker://${registry.host}/x/y`, { platform: parsePlatform('linux/arm64') });
    try {
      const image = await source.resolve();
      expect(image.manifestDigest).toBe(arm.digest);
      expect(registry.calls.filter((asked) => asked.url.includes('/blobs/'))).toHaveLength(1);
      const { input, digest } = image.layers[1]!;
      if (input.kind !== 'stream') throw new Error(input.kind);
      for (let again = 0; again < 2; again++) {
        expect(digestOf(await all(input.open(new AbortController().signal)))).toBe(digest);
      }
    } finally {
      await source.close();
      await source.close();
    }
    const wrong = await openSource(`docker://${registry.host}/x/y:latest`, { platform: parsePlatform('linux/s390x') });
    const error = await failureOf(wrong.resolve());
    await wrong.close();
    expect(error.message).toContain('linux/amd64, linux/arm64/v8');
  });

  test('a config that is larger than its descriptor says', async () => {
    const fixture = new ImageFixture();
    const manifest = fixture.image([], 'amd64', (m) => {
      m.config.size -= 1;
    });
    for (const [digest, bytes] of fixture.blobs) registry.blobs.set(digest, bytes);
    const digest: Digest = registry.addManifest('x', 'latest', fixture.blobs.get(manifest.digest)!, manifest.mediaType);
    const source = await openSource(`docker://${registry.host}/x@${digest}`, {});
    expect((await failureOf(source.resolve())).code).toBe('SOURCE_TOO_LARGE');
    await source.close();
  });
});
