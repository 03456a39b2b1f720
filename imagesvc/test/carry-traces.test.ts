/** Traces on their way with their image: out of a store and into another one, through every kind of depot. */
import { spawnSync } from 'node:child_process';
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, beforeEach, describe, expect, it } from 'vitest';
import { type Digest, digestOf, hexOf } from '#base';
import { openImage } from '../catalog/catalog.ts';
import type { Image } from '../catalog/image.ts';
import { pullImage } from '../catalog/pull.ts';
import { pushImage } from '../catalog/push.ts';
import type { BlobStore } from '../store/blob-store.ts';
import { openStore } from '../store/open-store.ts';
import type { Trace } from '../trace/trace.ts';
import { buildTracesManifest, carriedTrace, parseTracesManifest } from '../trace/trace-artifact.ts';
import { keepTrace, listTraces, readTrace, removeTrace } from '../trace/trace-store.ts';
import { LoopbackRegistry } from './loopback-registry.ts';
import { publishMadeUp } from './made-up-image.ts';
import { MadeUpRegistry } from './made-up-registry.ts';

const withRegistry = spawnSync('sh', ['-c', 'command -v docker-registry']).status === 0;
if (!withRegistry) console.log('carry-traces: no docker-registry here, its tests are skipped');

let root: string;
let from: BlobStore;
let to: BlobStore;
let image: Image;
let ends: (() => Promise<void>)[];
beforeEach(async () => {
  root = mkdtempSync(join(tmpdir(), 'dsec-carry-'));
  from = await openStore(join(root, 'from'));
  to = await openStore(join(root, 'to'));
  image = await publishMadeUp(from, 'app:1', { kind: 'base', layers: ['1'], dataBytes: 700_000 });
  ends = [];
});
afterEach(async () => {
  for (const end of ends) await end();
  rmSync(root, { recursive: true, force: true });
});

function traceOf(chunks: readonly number[], word = 'start'): Trace {
  const { digest, size } = image.layers[0]!.devices[0]!.blob;
  return {
    image: image.manifestDigest,
    command: [word],
    blobs: [{ digest, sizeBytes: size }],
    chunks: chunks.map((chunk, ms) => ({ blob: 0, chunk, ms })),
    files: [{ path: '/a', sizeBytes: 10, ms: 0, ranges: [[0, 10]] }],
  };
}

const namesIn = async (store: BlobStore) => (await listTraces(store, image.manifestDigest)).map(({ name }) => name);

const madeUp = async (keepsReferrers: boolean) => {
  const registry = await MadeUpRegistry.start(keepsReferrers);
  ends.push(() => registry.stop());
  return registry;
};

const PLACES: [string, () => Promise<string>][] = [
  ['a layout', async () => `oci:${root}/layout:v1`],
  ['an archive', async () => `oci-archive:${root}/image.tar:v1`],
  ['a registry that keeps referrers', async () => `docker://${(await madeUp(true)).host}/team/app:v1`],
  ['a registry that does not', async () => `docker://${(await madeUp(false)).host}/team/app:v1`],
];
if (withRegistry) {
  PLACES.push([
    "Debian's registry",
    async () => {
      const registry = await LoopbackRegistry.start(join(root, 'registry'));
      ends.push(() => registry.stop());
      return `docker://${registry.host}/team/app:v1`;
    },
  ]);
}

describe.each(PLACES)('through %s', (kind, place) => {
  it('they come along, and say the same', async () => {
    const there = await place();
    await keepTrace(from, image, 'serve', traceOf([0, 2]));
    await keepTrace(from, image, 'test', traceOf([1], 'test'));
    expect(await pushImage(from, 'app:1', there)).toMatchObject({ traces: 2, digest: image.manifestDigest });
    expect(await pullImage(to, there, 'app:1')).toMatchObject({ fetchedTraces: 2 });
    const pulled = await openImage(to, 'app:1');
    expect(await readTrace(to, pulled, 'serve')).toEqual(traceOf([0, 2]));
    expect(await readTrace(to, pulled, 'test')).toEqual(traceOf([1], 'test'));
    // Again: nothing is new.
    expect(await pushImage(from, 'app:1', there)).toMatchObject({ traces: 2 });
    expect(await pullImage(to, there, 'app:1')).toMatchObject({ fetchedTraces: 0 });
  });

  it('not when nobody wants them, on either way', async () => {
    const there = await place();
    await keepTrace(from, image, 'serve', traceOf([0]));
    expect(await pushImage(from, 'app:1', there, { traces: false })).toMatchObject({ traces: 0 });
    expect(await pullImage(to, there, 'app:1')).toMatchObject({ fetchedTraces: 0 });
    await pushImage(from, 'app:1', there);
    expect(await pullImage(to, there, 'app:1', { traces: false })).toMatchObject({ fetchedTraces: 0 });
    expect(await namesIn(to)).toEqual([]);
    expect(await pullImage(to, there, 'app:1')).toMatchObject({ fetchedTraces: 1 });
  });

  it.skipIf(kind === 'an archive')('those of others stay there, the same name goes to the last', async () => {
    const there = await place();
    await keepTrace(from, image, 'serve', traceOf([0]));
    await keepTrace(from, image, 'old', traceOf([1]));
    await pushImage(from, 'app:1', there);
    await pullImage(to, there, 'app:1');
    await removeTrace(from, image, 'old');
    await keepTrace(from, image, 'serve', traceOf([2, 0]));
    await keepTrace(from, image, 'new', traceOf([1, 2]));
    await pushImage(from, 'app:1', there);
    expect(await pullImage(to, there, 'app:1')).toMatchObject({ fetchedTraces: 2 });
    expect(await namesIn(to)).toEqual(['new', 'old', 'serve']);
    expect(await readTrace(to, await openImage(to, 'app:1'), 'serve')).toEqual(traceOf([2, 0]));
    // A push of what has no traces takes none away.
    for (const name of await namesIn(from)) await removeTrace(from, image, name);
    await pushImage(from, 'app:1', there);
    const third = await openStore(join(root, 'third'));
    expect(await pullImage(third, there, 'app:1')).toMatchObject({ fetchedTraces: 3 });
  });
});

describe('what is wrong with them', () => {
  it('in the store: the image is pushed, and the others with it', async () => {
    await keepTrace(from, image, 'good', traceOf([0]));
    const { digest } = await keepTrace(from, image, 'spoilt', traceOf([1, 2]));
    writeFileSync(from.localPath(digest)!, readFileSync(from.localPath(digest)!).fill(32, 10, 20));
    const problems: string[] = [];
    const onTraceProblem = (text: string) => problems.push(text);
    const there = `oci-archive:${root}/image.tar`;
    expect(await pushImage(from, 'app:1', there, { onTraceProblem })).toMatchObject({ traces: 1 });
    expect(problems).toEqual([expect.stringContaining('trace spoilt of app:1 was not sent')]);
    expect(await pullImage(to, there, 'app:1')).toMatchObject({ fetchedTraces: 1 });
  });

  it('in the depot: the image is pulled, wrong bytes are no trace', async () => {
    const { digest } = await keepTrace(from, image, 'serve', traceOf([0]));
    await keepTrace(from, image, 'test', traceOf([1], 'test'));
    await pushImage(from, 'app:1', `oci:${root}/layout:v1`);
    writeFileSync(join(root, 'layout/blobs/sha256', hexOf(digest)), 'x'.repeat(10));
    const problems: string[] = [];
    const onTraceProblem = (text: string) => problems.push(text);
    expect(await pullImage(to, `oci:${root}/layout:v1`, 'app:1', { onTraceProblem })).toMatchObject({
      fetchedTraces: 1,
    });
    expect(problems).toEqual([expect.stringContaining('without its traces')]);
    expect(await namesIn(to)).toEqual(['test']);
  });

  it('a registry that refuses them gets, and gives, the image alone', async () => {
    const registry = await madeUp(true);
    const there = `docker://${registry.host}/team/app:v1`;
    await keepTrace(from, image, 'serve', traceOf([0]));
    registry.refuse = (method, path) => (method === 'PUT' && path.includes('/manifests/sha256:') ? 400 : undefined);
    const problems: string[] = [];
    const onTraceProblem = (text: string) => problems.push(text);
    expect(await pushImage(from, 'app:1', there, { onTraceProblem })).toMatchObject({ traces: 0 });
    registry.refuse = (_, path) => (path.includes('/referrers/') ? 418 : undefined);
    expect(await pullImage(to, there, 'app:1', { onTraceProblem })).toMatchObject({ fetchedTraces: 0 });
    expect(problems.length).toBe(2);
  });

  it('a manifest that is none of this image is passed by; what an entry says is held to bounds', () => {
    const of = { digest: image.manifestDigest, size: image.manifestSize };
    const good = carriedTrace('serve', digestOf('t'), 100);
    const bytes = buildTracesManifest(of, { revision: 3, traces: [good] });
    expect(parseTracesManifest(bytes, of.digest)).toEqual({ revision: 3, traces: [good] });
    expect(parseTracesManifest(bytes, digestOf('another') as Digest)).toBeUndefined();
    for (const text of ['', 'null', '[]', '5', '{}', '{"layers":{}}']) {
      expect(parseTracesManifest(Buffer.from(text), of.digest)).toBeUndefined();
    }
    const odd = [
      carriedTrace('../x', digestOf('t'), 100),
      carriedTrace('large', digestOf('t'), 2 ** 40),
      carriedTrace('odd', 'sha256:x' as Digest, 100),
      good,
      ...Array.from({ length: 100 }, (_, i) => carriedTrace(`t${i}`, digestOf('t'), 1)),
    ];
    const parsed = parseTracesManifest(buildTracesManifest(of, { revision: -1, traces: odd }), of.digest);
    expect(parsed?.revision).toBe(0);
    expect(parsed?.traces.length).toBe(61);
    expect(parsed?.traces[0]).toEqual(good);
  });
});
