/** Conversion from sources to stores, checked through the mountless reader. */
import { createHash, randomBytes } from 'node:crypto';
import { mkdirSync, mkdtempSync, readdirSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { gzipSync } from 'node:zlib';
import { afterEach, beforeEach, describe, expect, test } from 'vitest';
import { fromText } from '#base';
import { type Entry, tarHeader } from '#converter';
import { openImage } from '../catalog/catalog.ts';
import { type ConvertToStoreOptions, convertBatch, convertToStore } from '../convert/convert-to-store.ts';
import { openTree } from '../reader/image-tree.ts';
import { verifyImage } from '../reader/verify.ts';
import type { BlobStore } from '../store/blob-store.ts';
import { openStore } from '../store/open-store.ts';

let dir: string;
let store: BlobStore;
beforeEach(async () => {
  dir = mkdtempSync(join(tmpdir(), 'dsec-convert-'));
  store = await openStore(`file://${dir}/store`);
});
afterEach(() => rmSync(dir, { recursive: true, force: true }));

type Member = Partial<Entry> & { path: string; content?: Buffer };

function tar(members: readonly Member[]): Buffer {
  const parts = members.flatMap(({ content, ...more }) => {
    const entry: Entry = {
      kind: 'file',
      mode: 0o644,
      uid: 0,
      gid: 0,
      mtimeSec: 1_700_000_000,
      mtimeNsec: 0,
      sizeBytes: content?.length ?? 0,
      target: '',
      major: 0,
      minor: 0,
      xattrs: undefined,
      ...more,
    };
    return [tarHeader(entry), content ?? Buffer.alloc(0), Buffer.alloc((512 - ((content?.length ?? 0) % 512)) % 512)];
  });
  return Buffer.concat([...parts, Buffer.alloc(1024)]);
}

const sha = (bytes: Buffer) => `sha256:${createHash('sha256').update(bytes).digest('hex')}`;

/** An OCI layout with an image of these layers; returns the source's name. */
function layout(name: string, layers: readonly (readonly Member[])[]): string {
  const root = join(dir, name);
  const blobs = join(root, 'blobs/sha256');
  mkdirSync(blobs, { recursive: true });
  const put = (bytes: Buffer, mediaType: string) => {
    writeFileSync(join(blobs, sha(bytes).slice(7)), bytes);
    return { mediaType, digest: sha(bytes), size: bytes.length };
  };
  const json = (value: unknown, type: string) => put(Buffer.from(JSON.stringify(value)), type);
  const tars = layers.map(tar);
  const config = json(
    { architecture: 'amd64', os: 'linux', config: {}, rootfs: { type: 'layers', diff_ids: tars.map(sha) } },
    'application/vnd.oci.image.config.v1+json',
  );
  const manifest = json(
    {
      schemaVersion: 2,
      mediaType: 'application/vnd.oci.image.manifest.v1+json',
      config,
      layers: tars.map((t) => put(gzipSync(t), 'application/vnd.oci.image.layer.v1.tar+gzip')),
    },
    'application/vnd.oci.image.manifest.v1+json',
  );
  writeFileSync(join(root, 'oci-layout'), '{"imageLayoutVersion":"1.0.0"}');
  const annotations = { 'org.opencontainers.image.ref.name': 'latest' };
  writeFileSync(
    join(root, 'index.json'),
    JSON.stringify({ schemaVersion: 2, manifests: [{ ...manifest, annotations }] }),
  );
  return `oci:${root}:latest`;
}

const PLATFORM = { os: 'linux', architecture: 'amd64' };
const convert = (source: string, name = 'web:1', options: ConvertToStoreOptions = {}) =>
  convertToStore(store, source, name, { platform: PLATFORM, ...options });

async function contents(name: string): Promise<Record<string, string>> {
  const tree = await openTree(store, await openImage(store, name));
  const out: Record<string, string> = {};
  for (const { path, node } of tree.walk()) {
    const stat = tree.stat(node);
    if (stat.kind !== 'file') continue;
    const chunks: Buffer[] = [];
    for await (const chunk of tree.stream(node)) chunks.push(chunk);
    out[path.slice(1)] = sha(Buffer.concat(chunks));
  }
  await tree.close();
  return out;
}

const BIG = randomBytes(700_000);
const LAYERS: Member[][] = [
  [
    { path: 'bin/app', content: BIG },
    { path: 'etc/conf', content: Buffer.from('a=1\n') },
    { path: 'gone', content: randomBytes(9000) },
  ],
  [{ path: 'etc/conf', content: Buffer.from('a=2\n') }, { path: '.wh.gone' }, { path: 'copy', content: BIG }],
  [
    { path: 'data/zeros', content: Buffer.alloc(1 << 20) },
    { path: 'data/text', content: Buffer.from('hello '.repeat(50_000)) },
  ],
];
const EXPECTED = {
  'bin/app': sha(BIG),
  copy: sha(BIG),
  'data/text': sha(Buffer.from('hello '.repeat(50_000))),
  'data/zeros': sha(Buffer.alloc(1 << 20)),
  'etc/conf': sha(Buffer.from('a=2\n')),
};

describe('every form of conversion gives the same files, and verifies', () => {
  const forms: [string, ConvertToStoreOptions][] = [
    ['collapsed', {}],
    ['a layer each', { collapseLimitBytes: 0 }],
    ['metadata merged', { collapse: 'metadata' }],
    ['no inline data', { inlineLimitBytes: 0 }],
    ['lz4', { compress: 'lz4' }],
    ['deflate, a layer each', { compress: 'deflate', collapseLimitBytes: 0 }],
    ['zstd, metadata merged', { compress: 'zstd', collapse: 'metadata' }],
  ];
  test.each(forms)('%s', async (_, options) => {
    const done = await convert(layout('l', LAYERS), 'web:1', options);
    expect(await contents('web:1')).toEqual(EXPECTED);
    const report = await verifyImage(store, done.image);
    expect(report.problems).toEqual([]);
  });
});

test('a file that several layers have is stored once, a removed one not at all', async () => {
  const done = await convert(layout('l', LAYERS), 'web:1', { inlineLimitBytes: 0 });
  const blocks = (n: number) => Math.ceil(n / 4096) * 4096;
  expect(done.stats!.dataBytes).toBe(blocks(BIG.length) + blocks(4) + blocks(300_000));
});

test('the same image converted again costs no work and gives the same digest', async () => {
  const source = layout('l', LAYERS);
  const first = await convert(source);
  const again = await convert(source, 'other:2');
  expect([first.reused, again.reused]).toEqual([false, true]);
  expect(again.digest).toBe(first.digest);
  const elsewhere = await openStore(`file://${dir}/store2`);
  const fresh = await convertToStore(elsewhere, source, 'web:1', { platform: PLATFORM });
  expect([fresh.reused, fresh.digest]).toEqual([false, first.digest]);
});

test('options that shape the bytes are not confused', async () => {
  const source = layout('l', LAYERS);
  const plain = await convert(source);
  const packed = await convert(source, 'web:2', { compress: 'lz4' });
  expect([packed.reused, packed.digest === plain.digest]).toEqual([false, false]);
});

test('a record that leads to a blob that is gone is not believed', async () => {
  const source = layout('l', LAYERS);
  const first = await convert(source);
  await store.deleteBlob(first.image.layers[0]!.meta.digest);
  const again = await convert(source);
  expect([again.reused, again.digest]).toEqual([false, first.digest]);
  expect(await contents('web:1')).toEqual(EXPECTED);
});

describe('a batch', () => {
  const shared: Member[] = [{ path: 'base', content: randomBytes(300_000) }];
  const own = (n: number): Member[] => [{ path: `own${n}`, content: randomBytes(100_000) }];

  test('cuts where chains part: what is shared is one EROFS layer of both', async () => {
    const items = [1, 2, 3].map((n) => ({
      source: layout(`b${n}`, n === 3 ? [shared] : [shared, own(n)]),
      name: `img:${n}`,
    }));
    const outcomes = await convertBatch(store, items, { platform: PLATFORM });
    const images = outcomes.map((o) => ('image' in o ? o.image : undefined)!);
    expect(images.map((i) => i.layers.length)).toEqual([2, 2, 1]);
    expect(new Set(images.map((i) => i.layers[0]!.meta.digest)).size).toBe(1);
    expect(Object.keys(await contents('img:2')).sort()).toEqual(['base', 'own2']);
  });

  test('an image that fails does not stop the others', async () => {
    const items = [
      { source: `oci:${dir}/nowhere:latest`, name: 'bad:1' },
      { source: layout('ok', [shared]), name: 'ok:1' },
    ];
    const outcomes = await convertBatch(store, items, { platform: PLATFORM });
    expect(outcomes.map((o) => 'error' in o)).toEqual([true, false]);
    expect((await store.listRefs()).map((r) => r.name)).toEqual(['ok:1']);
  });
});

describe('an interrupted conversion', () => {
  test('fails with the reason of the signal and leaves nothing', async () => {
    const abort = new AbortController();
    const source = layout('l', [[{ path: 'f', content: randomBytes(8 << 20) }]]);
    const reason = new Error('stopped by the test');
    const running = convert(source, 'web:1', {
      signal: abort.signal,
      progress: ({ phase }) => {
        if (phase === 'wait') abort.abort(reason);
      },
    });
    await expect(running).rejects.toBe(reason);
    expect(await store.listRefs()).toEqual([]);
    expect(readdirSync(join(dir, 'store/tmp')).filter((name) => !name.startsWith('.'))).toEqual([]);
  });
});

test('notes tell what could not be kept', async () => {
  const done = await convert(
    layout('n', [
      [
        { path: fromText('null'), kind: 'char', major: 0, minor: 0 },
        { path: 'ok', content: Buffer.from('x') },
      ],
    ]),
  );
  expect(done.notes).toHaveLength(1);
  expect(Object.keys(await contents('web:1'))).toEqual(['ok']);
});
