/** Traces over HTTP: who may read, keep and remove them, and what is refused. */
import { createHash } from 'node:crypto';
import { writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { afterAll, beforeAll, expect, it } from 'vitest';
import type { Image } from '../catalog/image.ts';
import { Tokens } from '../server/tokens.ts';
import { MAX_TRACE_BYTES, traceJson } from '../trace/trace.ts';
import { publishMadeUp } from './made-up-image.ts';
import { ServiceFixture } from './service-fixture.ts';

let fixture: ServiceFixture;
let image: Image;
const TRACES = '/v1/images/team%2Fweb:1/traces';

beforeAll(async () => {
  fixture = await ServiceFixture.start();
  const file = join(fixture.root, 'tokens');
  const line = (role: string) =>
    `${role} ${role} sha256:${createHash('sha256').update(`${role}-token`).digest('hex')}\n`;
  writeFileSync(file, ['read', 'write', 'admin'].map(line).join(''));
  await fixture.service.close(0);
  await fixture.open({ tokens: new Tokens({ file }) });
  image = await publishMadeUp(fixture.store, 'team/web:1', { layers: ['one'], dataBytes: 1_000_000 });
});
afterAll(() => fixture.stop());

const trace = () => {
  const { blob } = image.layers[0]!.devices[0]!;
  return traceJson({
    image: image.manifestDigest,
    command: ['sh'],
    blobs: [{ digest: blob.digest, sizeBytes: blob.size }],
    chunks: [
      { blob: 0, chunk: 3, ms: 0 },
      { blob: 0, chunk: 0, ms: 1.5 },
    ],
    files: [{ path: '/bin/sh', sizeBytes: 5, ms: 0, ranges: [[0, 5]] }],
  });
};
const ask = (path: string, role: string, method = 'GET', body?: unknown) =>
  fixture.ask(path, { method, body, token: `${role}-token` });

it('is kept by who may write, read by who may read, removed by an admin', async () => {
  expect((await ask(`${TRACES}/start`, 'read', 'PUT', trace())).status).toBe(403);
  const kept = await ask(`${TRACES}/start`, 'write', 'PUT', trace());
  expect(kept).toMatchObject({ status: 200, json: { name: 'start', chunks: 2, files: 1, command: ['sh'] } });
  expect((await ask(TRACES, 'read')).json).toEqual({ traces: [kept.json] });
  expect((await ask(`${TRACES}/start`, 'read')).json).toEqual(trace());
  expect((await ask('/v1/images/team%2Fweb:1/merged-trace', 'read')).json).toEqual(trace());
  expect((await ask('/v1/images/team%2Fweb:1', 'read')).json.traces).toEqual([kept.json]);
  expect((await ask(`${TRACES}/start`, 'write', 'DELETE')).status).toBe(403);
  expect(await ask(`${TRACES}/start`, 'admin', 'DELETE')).toMatchObject({ status: 200, json: { removed: 'start' } });
  expect((await ask(`${TRACES}/start`, 'admin', 'DELETE')).status).toBe(404);
  expect((await ask(`${TRACES}/start`, 'read')).json.error.code).toBe('TRACE_NOT_FOUND');
  expect((await ask('/v1/images/team%2Fweb:1/merged-trace', 'read')).json.error.code).toBe('TRACE_NONE');
  expect((await fixture.ask(TRACES)).status).toBe(401);
});

it('refuses what is damaged, of another image, huge, or badly named', async () => {
  const put = async (body: unknown, name = 'x') => {
    const { status, json } = await ask(`${TRACES}/${name}`, 'write', 'PUT', body);
    return [status, json.error?.code];
  };
  const good = trace();
  expect(await put({ ...good, chunks: [[0, 99, 0]] })).toEqual([422, 'TRACE_DAMAGED']);
  expect(await put({ ...good, format: 'x' })).toEqual([422, 'TRACE_DAMAGED']);
  expect(await put({ ...good, image: `sha256:${'0'.repeat(64)}` })).toEqual([409, 'TRACE_OTHER_IMAGE']);
  expect(await put([])).toEqual([400, 'SERVER_BAD_REQUEST']);
  expect(await put({})).toEqual([400, 'SERVER_BAD_REQUEST']);
  expect(await put(good, 'No%20Name')).toEqual([400, 'TRACE_NAME']);
  const files = Array.from({ length: 30_000 }, (_, i) => ({
    path: `/${'x'.repeat(600)}${i}`,
    sizeBytes: 1,
    ms: 0,
    ranges: [],
  }));
  expect(JSON.stringify(files).length).toBeGreaterThan(MAX_TRACE_BYTES);
  const huge = await ask(`${TRACES}/x`, 'write', 'PUT', { ...good, files });
  expect(huge).toMatchObject({ status: 413, json: { error: { code: 'SERVER_BODY_TOO_LARGE' } } });
  expect(huge.json.error.message).toContain(String(MAX_TRACE_BYTES));
  // Larger than what other routes take.
  expect(await put({ ...good, files: files.slice(0, 500) })).toEqual([200, undefined]);
  await ask(`${TRACES}/x`, 'admin', 'DELETE');
  expect((await ask(TRACES, 'read')).json).toEqual({ traces: [] });
});
