/** Traces as documents: parsed within bounds, merged, planned into reads, kept with their image, gone with it. */
import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, beforeEach, describe, expect, it } from 'vitest';
import { digestFromHex, hexOf } from '#base';
import { inspectImage, openImage, removeImage } from '../catalog/catalog.ts';
import { collectGarbage } from '../catalog/collect-garbage.ts';
import { CHUNK_BYTES, type Image } from '../catalog/image.ts';
import type { BlobStore } from '../store/blob-store.ts';
import { MemoryStore } from '../store/memory-store.ts';
import { openStore } from '../store/open-store.ts';
import { syncImages } from '../sync/sync-images.ts';
import { tracedNames } from '../sync/trace-coverage.ts';
import { mergeTraces } from '../trace/merge-traces.ts';
import { planPrefetch } from '../trace/prefetch-plan.ts';
import { formatTrace, MAX_TRACE_BYTES, parseTrace, type Trace, tracedBytes, traceJson } from '../trace/trace.ts';
import { TracePrefetch } from '../trace/trace-prefetch.ts';
import {
  keepTrace,
  keptTraces,
  latestKept,
  listTraces,
  MOST_USED,
  mergedTrace,
  parseTraceKey,
  readTrace,
  removeTrace,
  TRACE_RECORDS,
} from '../trace/trace-store.ts';
import { publishMadeUp } from './made-up-image.ts';

const IMAGE = digestFromHex('1'.repeat(64));
const BLOB = digestFromHex('2'.repeat(64));
const OTHER = digestFromHex('3'.repeat(64));

function traceOfChunks(chunks: readonly number[], more: Partial<Trace> = {}): Trace {
  return {
    image: IMAGE,
    command: ['sh', '-c', 'start'],
    blobs: [{ digest: BLOB, sizeBytes: 1000 * CHUNK_BYTES - 1 }],
    chunks: chunks.map((chunk, i) => ({ blob: 0, chunk, ms: i })),
    files: [],
    ...more,
  };
}

describe('the document', () => {
  it('comes back as it was, names that are no UTF-8 among it', () => {
    const trace = traceOfChunks([3, 999, 0], {
      files: [
        { path: '/etc/passwd', sizeBytes: 10, ms: 0, ranges: [[0, 10]] },
        {
          path: '/odd-\xff\x01',
          sizeBytes: 5000,
          ms: 1.5,
          ranges: [
            [0, 4096],
            [4500, 500],
          ],
        },
        { path: Buffer.from('/grün').toString('latin1'), sizeBytes: 1, ms: 2, ranges: [] },
      ],
      truncated: true,
    });
    expect(parseTrace(formatTrace(trace, 't'), 't')).toEqual(trace);
    expect(tracedBytes(trace)).toBe(3 * CHUNK_BYTES - 1);
  });

  const good = () =>
    traceJson(traceOfChunks([1, 2], { files: [{ path: '/a', sizeBytes: 9, ms: 0, ranges: [[0, 9]] }] }));
  it.each<[string, unknown]>([
    ['no JSON', 'x'],
    ['null', null],
    ['a list', []],
    ['another format', { ...good(), format: 'x' }],
    ['a later version', { ...good(), version: 2 }],
    ['no image', { ...good(), image: 'web:1' }],
    ['a command that is text', { ...good(), command: 'sh' }],
    ['no blobs', { ...good(), blobs: undefined }],
    ['a blob without size', { ...good(), blobs: [{ digest: BLOB }] }],
    ['a negative size', { ...good(), blobs: [{ digest: BLOB, sizeBytes: -1 }] }],
    ['a chunk of no blob', { ...good(), chunks: [[1, 0, 0]] }],
    ['a chunk beyond the end', { ...good(), chunks: [[0, 1000, 0]] }],
    [
      'a chunk twice',
      {
        ...good(),
        chunks: [
          [0, 1, 0],
          [0, 1, 5],
        ],
      },
    ],
    ['a chunk that is half', { ...good(), chunks: [[0, 1.5, 0]] }],
    ['a chunk without a time', { ...good(), chunks: [[0, 1]] }],
    ['a time that is none', { ...good(), chunks: [[0, 1, -1]] }],
    ['a file without a path', { ...good(), files: [{ sizeBytes: 1, ms: 0, ranges: [] }] }],
    ['a relative path', { ...good(), files: [{ path: 'etc', sizeBytes: 1, ms: 0, ranges: [] }] }],
    ['a range beyond the file', { ...good(), files: [{ path: '/a', sizeBytes: 1, ms: 0, ranges: [[0, 2]] }] }],
    ['too many blobs', { ...good(), blobs: Array.from({ length: 1025 }, () => ({ digest: BLOB, sizeBytes: 1 })) }],
  ])('is refused: %s', (_what, value) => {
    const bytes = Buffer.from(value === 'x' ? 'x' : JSON.stringify(value));
    expect(() => parseTrace(bytes, 'name')).toThrowError(
      expect.objectContaining({ code: 'TRACE_DAMAGED', message: expect.stringContaining('name') as string }),
    );
  });

  it('is refused when it is huge, without being parsed', () => {
    const bytes = Buffer.alloc(MAX_TRACE_BYTES + 1, ' ');
    expect(() => parseTrace(bytes, 'name')).toThrowError(expect.objectContaining({ code: 'TRACE_TOO_LARGE' }));
  });

  it('never crashes on damage: every flipped byte gives a trace or a refusal', () => {
    const bytes = formatTrace(traceOfChunks([3, 9, 0]), 't');
    for (let at = 0; at < bytes.length; at++) {
      for (const bit of [1, 16, 128]) {
        const damaged = Buffer.from(bytes);
        damaged[at]! ^= bit;
        try {
          parseTrace(damaged, 't');
        } catch (error) {
          expect(error).toMatchObject({ code: 'TRACE_DAMAGED' });
        }
      }
    }
  });
});

describe('merging', () => {
  it('of one is itself', () => {
    const trace = traceOfChunks([3, 9, 0]);
    expect(mergeTraces([trace])).toBe(trace);
  });

  it('is the union, by the mean of relative places', () => {
    const merged = mergeTraces([traceOfChunks([1, 2, 3, 4, 5]), traceOfChunks([5, 9])]);
    // 5: mean of 1 and 0; 9: 1, alone.
    expect(merged.chunks.map(({ chunk }) => chunk)).toEqual([1, 2, 3, 5, 4, 9]);
  });

  it('numbers blobs alike whatever the order of traces, and joins ranges of a file', () => {
    const a = traceOfChunks([1], {
      blobs: [{ digest: OTHER, sizeBytes: 10 * CHUNK_BYTES }],
      files: [
        {
          path: '/f',
          sizeBytes: 100,
          ms: 2,
          ranges: [
            [0, 10],
            [50, 10],
          ],
        },
      ],
    });
    const b = traceOfChunks([1], { files: [{ path: '/f', sizeBytes: 100, ms: 4, ranges: [[5, 20]] }] });
    const merged = mergeTraces([a, b]);
    expect(merged.blobs.map(({ digest }) => digest)).toEqual([BLOB, OTHER]);
    expect(merged.files).toEqual([
      {
        path: '/f',
        sizeBytes: 100,
        ms: 3,
        ranges: [
          [0, 25],
          [50, 10],
        ],
      },
    ]);
    expect(mergeTraces([b, a])).toEqual(merged);
    expect(parseTrace(formatTrace(merged, 'm'), 'm')).toEqual(merged);
  });
});

describe('the plan', () => {
  const planned = (chunks: readonly number[]) =>
    planPrefetch(traceOfChunks(chunks))
      .get(BLOB)!
      .map(({ offset, length }) => [offset / CHUNK_BYTES, length / CHUNK_BYTES]);

  it('joins neighbours whatever their order, over a gap where the run is worth it, up to 4 MiB', () => {
    expect(planned([7, 3, 5, 4, 20])).toEqual([
      [7, 1],
      [3, 3],
      [20, 1],
    ]);
    expect(planned([6, 3, 5, 4, 8, 10])).toEqual([
      [3, 6],
      [10, 1],
    ]);
    const run = Array.from({ length: 40 }, (_, i) => 100 + i);
    expect(planned(run)).toEqual([
      [100, 16],
      [116, 16],
      [132, 8],
    ]);
  });

  it('fetches what is needed first first, and ends with the blob', () => {
    expect(planned([900, 10, 500])).toEqual([
      [900, 1],
      [10, 1],
      [500, 1],
    ]);
    expect(planPrefetch(traceOfChunks([999])).get(BLOB)).toEqual([
      { offset: 999 * CHUNK_BYTES, length: CHUNK_BYTES - 1 },
    ]);
  });

  it('holds every chunk of the trace, in reads of 4 MiB at most', () => {
    const chunks = Array.from({ length: 1000 }, (_, i) => (i * 619) % 1000).filter((chunk) => chunk % 3 !== 0);
    const covered = new Set<number>();
    for (const [first, count] of planned(chunks) as [number, number][]) {
      expect(count).toBeLessThanOrEqual(16);
      for (let i = 0; i < count; i++) covered.add(first + i);
    }
    for (const chunk of chunks) expect(covered.has(chunk)).toBe(true);
  });
});

describe.each([
  ['a folder', (root: string) => openStore(`file://${root}/store`)],
  ['memory', async () => new MemoryStore() as BlobStore],
])('kept in %s', (_where, open) => {
  let root: string;
  let store: BlobStore;
  let image: Image;
  const trace = (of: Image, chunks: readonly number[]): Trace => {
    const { blob } = of.layers[0]!.devices[0]!;
    return {
      image: of.manifestDigest,
      command: ['start'],
      blobs: [{ digest: blob.digest, sizeBytes: blob.size }],
      chunks: chunks.map((chunk, ms) => ({ blob: 0, chunk, ms })),
      files: [],
    };
  };

  beforeEach(async () => {
    root = mkdtempSync(join(tmpdir(), 'dsec-trace-'));
    store = await open(root);
    image = await publishMadeUp(store, 'a:1', { layers: ['one', 'two'], dataBytes: 3_000_000 });
  });
  afterEach(() => rmSync(root, { recursive: true, force: true }));

  it('is listed, read, replaced and removed by its name', async () => {
    await keepTrace(store, image, 'start', trace(image, [1, 2]));
    await keepTrace(store, image, 'other', trace(image, [5]));
    await keepTrace(store, image, 'start', trace(image, [3]));
    const rows = await listTraces(store, image.manifestDigest);
    expect(rows.map(({ name, chunks, files, command }) => ({ name, chunks, files, command }))).toEqual([
      { name: 'other', chunks: 1, files: 0, command: ['start'] },
      { name: 'start', chunks: 1, files: 0, command: ['start'] },
    ]);
    expect(await readTrace(store, image, 'start')).toEqual(trace(image, [3]));
    expect((await mergedTrace(store, image))!.chunks.map(({ chunk }) => chunk)).toEqual([3, 5]);
    expect((await inspectImage(store, 'a:1')).traces).toEqual(rows);
    await removeTrace(store, image, 'start');
    await expect(removeTrace(store, image, 'start')).rejects.toMatchObject({ code: 'TRACE_NOT_FOUND' });
    await expect(readTrace(store, image, 'start')).rejects.toMatchObject({ code: 'TRACE_NOT_FOUND', exit: 4 });
  });

  it('two that are kept under one name at the same moment do not remove each other', async () => {
    for (let round = 0; round < 5; round++) {
      await Promise.all([1, 2, 3].map((chunk) => keepTrace(store, image, 'start', trace(image, [round, 4 + chunk]))));
      expect((await listTraces(store, image.manifestDigest)).map(({ name }) => name)).toEqual(['start']);
      expect((await readTrace(store, image, 'start')).chunks.map(({ chunk }) => chunk)).toContain(round);
    }
    await keepTrace(store, image, 'start', trace(image, [3]));
    expect((await keptTraces(store)).length).toBe(1);
    await removeTrace(store, image, 'start');
    expect(await keptTraces(store)).toEqual([]);
  });

  it('is used with the latest others, a bounded number of them', async () => {
    for (let i = 0; i < MOST_USED + 4; i++) {
      const { digest, chunks } = await keepTrace(store, image, `t${i}`, trace(image, [0, 1 + (i % 10)]));
      const key = `${hexOf(image.manifestDigest)}.${hexOf(digest)}.t${i}`;
      const record = await store.getRecord(TRACE_RECORDS, key);
      expect(record).toMatchObject({ keptMs: expect.any(Number) as number });
      // Later numbers were kept earlier, and of some it is not known.
      await store.putRecord(TRACE_RECORDS, key, i < 2 ? { chunks } : { chunks, keptMs: 1_000_000 - i });
    }
    const latest = await latestKept(store, await keptTraces(store, image.manifestDigest));
    const expected = Array.from({ length: MOST_USED }, (_, k) => `t${k + 2}`).sort();
    expect(latest.map(({ name }) => name)).toEqual(expected);
    expect((await mergedTrace(store, image))!.chunks.map(({ chunk }) => chunk)[0]).toBe(0);
  });

  it('is listed whatever its record says', async () => {
    const { digest } = await keepTrace(store, image, 'start', trace(image, [1]));
    const key = `${hexOf(image.manifestDigest)}.${hexOf(digest)}.start`;
    for (const value of [null, 'text', [1], { chunks: '1', bytes: -1, files: 1.5, command: 'sh' }, { command: [1] }]) {
      await store.putRecord(TRACE_RECORDS, key, value);
      const [row] = await listTraces(store, image.manifestDigest);
      expect(row).toEqual({
        name: 'start',
        digest,
        chunks: undefined,
        bytes: undefined,
        files: undefined,
        command: undefined,
      });
    }
  });

  it('refuses a trace of another image, of other blobs, and names that are none', async () => {
    const other = await publishMadeUp(store, 'b:1', { layers: ['three'] });
    await expect(keepTrace(store, image, 'x', trace(other, [0]))).rejects.toMatchObject({ code: 'TRACE_OTHER_IMAGE' });
    const wrong = { ...trace(other, [0]), image: image.manifestDigest };
    await expect(keepTrace(store, image, 'x', wrong)).rejects.toMatchObject({ code: 'TRACE_OTHER_IMAGE' });
    for (const name of ['', '-x', 'X', 'a/b', '..', 'a'.repeat(65)]) {
      await expect(keepTrace(store, image, name, trace(image, [0]))).rejects.toMatchObject({ code: 'TRACE_NAME' });
    }
    expect(await keptTraces(store)).toEqual([]);
  });

  it('says so when the record leads to nothing, to another trace, or to something huge; others are used all the same', async () => {
    await keepTrace(store, image, 'good', trace(image, [4]));
    const point = async (name: string, bytes: Buffer) => {
      const digest = await store.put(bytes);
      await store.putRecord(TRACE_RECORDS, `${hexOf(image.manifestDigest)}.${hexOf(digest)}.${name}`, {});
    };
    const other = await publishMadeUp(store, 'b:1', { layers: ['three'] });
    await point('other', formatTrace(trace(other, [0]), 'x'));
    await point('text', Buffer.from('no trace'));
    await point('huge', Buffer.alloc(MAX_TRACE_BYTES + 1));
    await store.putRecord(TRACE_RECORDS, `${hexOf(image.manifestDigest)}.${'4'.repeat(64)}.gone`, {});
    await store.putRecord(TRACE_RECORDS, 'what-is-this', {});
    const read = (name: string) => readTrace(store, image, name);
    await expect(read('other')).rejects.toMatchObject({ code: 'TRACE_OTHER_IMAGE' });
    await expect(read('text')).rejects.toMatchObject({ code: 'TRACE_DAMAGED' });
    await expect(read('huge')).rejects.toMatchObject({ code: 'TRACE_TOO_LARGE' });
    await expect(read('gone')).rejects.toMatchObject({ code: 'TRACE_DAMAGED' });
    await expect(mergedTrace(store, image)).rejects.toMatchObject({ code: expect.stringMatching(/^TRACE_/) as string });
    const problems: unknown[] = [];
    const merged = await mergedTrace(store, image, (error) => problems.push(error));
    expect(merged!.chunks.map(({ chunk }) => chunk)).toEqual([4]);
    expect(problems.length).toBe(4);
    const told: string[] = [];
    const asked: unknown[] = [];
    const ahead = new TracePrefetch(store, [image], (text) => told.push(text));
    ahead.begin({ prefetch: async (...what) => asked.push(what) }, image.layers[0]!.devices[0]!.blob.digest);
    ahead.begin({ prefetch: async (...what) => asked.push(what) }, image.layers[1]!.devices[0]!.blob.digest);
    await ahead.handedOver();
    expect(told.length).toBe(4);
    expect(asked).toEqual([
      [image.layers[0]!.devices[0]!.blob.digest, [{ offset: 4 * CHUNK_BYTES, length: CHUNK_BYTES }]],
    ]);
  });

  it('lives as long as its image, whatever names and traces it shares', async () => {
    const { digest } = await keepTrace(store, image, 'start', trace(image, [1]));
    const second = await publishMadeUp(store, 'b:1', { layers: ['one'], dataBytes: 3_000_000 });
    await keepTrace(store, second, 'start', trace(second, [1]));
    await collectGarbage(store, { graceMs: 0 });
    expect(await readTrace(store, image, 'start')).toEqual(trace(image, [1]));
    await removeTrace(store, image, 'start');
    const swept = await collectGarbage(store, { graceMs: 0 });
    expect(swept).toMatchObject({ deleted: [digest], traces: 0 });
    await keepTrace(store, image, 'start', trace(image, [2]));
    const dry = await removeImage(store, 'a:1', { dryRun: true });
    expect(dry.traces).toBe(1);
    expect(await readTrace(store, image, 'start')).toEqual(trace(image, [2]));
    const removed = await removeImage(store, 'a:1');
    expect(removed).toMatchObject({ traces: 1, kept: 0, deleted: dry.deleted });
    expect((await keptTraces(store)).map(({ manifest }) => manifest)).toEqual([second.manifestDigest]);
    expect(await readTrace(store, second, 'start')).toEqual(trace(second, [1]));
  });

  it('goes with the image into another store, which says what share of the traced accesses it covers', async () => {
    await keepTrace(store, image, 'start', trace(image, [1, 2]));
    const sharing = await publishMadeUp(store, 'b:1', { layers: ['one', 'three'], dataBytes: 3_000_000 });
    const alone = await publishMadeUp(store, 'c:1', { layers: ['four'], dataBytes: 3_000_000 });
    await publishMadeUp(store, 'd:1', { layers: ['five'] });
    await keepTrace(store, sharing, 'start', trace(sharing, [0]));
    await keepTrace(store, alone, 'start', trace(alone, [0, 3, 11]));
    expect(await tracedNames(store)).toEqual(['a:1', 'b:1', 'c:1']);
    const to = new MemoryStore();
    const synced = await syncImages(store, to, ['a:1'], { coverage: true });
    // b:1's only access is to a layer that a:1 has too; the last chunk of c:1 is short.
    expect(synced).toMatchObject({
      copiedTraces: 1,
      notes: [],
      coverage: {
        tracedImages: 3,
        coveredImages: 2,
        accesses: 6,
        coveredAccesses: 3,
        coveredBytes: 3 * CHUNK_BYTES,
        accessedBytes: 5 * CHUNK_BYTES + (3_000_000 - 11 * CHUNK_BYTES),
      },
    });
    const there = await openImage(to, 'a:1');
    expect(await readTrace(to, there, 'start')).toEqual(trace(image, [1, 2]));
    expect(await syncImages(store, to, ['a:1'])).toMatchObject({
      copiedTraces: 0,
      copiedBlobs: 0,
      coverage: undefined,
    });
  });
});

it('a key that is not ours is none', () => {
  const hex = '5'.repeat(64);
  expect(parseTraceKey(`${hex}.${hex}.a.b-c`)).toMatchObject({ name: 'a.b-c', manifest: `sha256:${hex}` });
  for (const key of ['', hex, `${hex}.${hex}`, `${hex}.${hex}.`, `${hex}.${hex}.A`, `x${hex}.${hex}.a`]) {
    expect(parseTraceKey(key)).toBeUndefined();
  }
});

it('a damaged trace does not keep an image from being copied', async () => {
  const root = mkdtempSync(join(tmpdir(), 'dsec-trace-'));
  try {
    const store = await openStore(`file://${root}/store`);
    const image = await publishMadeUp(store, 'a:1', { layers: ['one'] });
    const { blob } = image.layers[0]!.devices[0]!;
    const kept = await keepTrace(store, image, 'start', {
      image: image.manifestDigest,
      command: [],
      blobs: [{ digest: blob.digest, sizeBytes: blob.size }],
      chunks: [],
      files: [],
    });
    rmSync(store.localPath(kept.digest)!);
    writeFileSync(store.localPath(kept.digest)!, 'other bytes');
    const to = new MemoryStore();
    const synced = await syncImages(store, to, ['a:1']);
    expect(synced.notes).toEqual([expect.stringContaining('start')]);
    expect(await keptTraces(to)).toEqual([]);
    await openImage(to, 'a:1');
  } finally {
    rmSync(root, { recursive: true, force: true });
  }
});
