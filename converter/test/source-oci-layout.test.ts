import { execFileSync } from 'node:child_process';
import { readFileSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { gzipSync } from 'node:zlib';
import { afterAll, beforeAll, describe, expect, test } from 'vitest';
import { type Digest, digestOf, hexOf } from '#base';
import type { SourceImage, SourceOptions } from '../source/image-source.ts';
import { openSource } from '../source/open-source.ts';
import { hostPlatform, parsePlatform } from '../source/platform.ts';
import { type Described, DOCKER, failureOf, ImageFixture, OCI, tarOf, Workshop } from './image-fixture.ts';

const work = new Workshop();
afterAll(() => work.remove());
let tars: Buffer[];
const HOST = hostPlatform().architecture;
const OTHER = HOST === 'amd64' ? 'arm64' : 'amd64';

beforeAll(async () => {
  tars = [await tarOf([{ name: 'a', content: 'one' }]), await tarOf([{ name: 'b', content: 'two' }])];
});

async function resolve(reference: string, options: SourceOptions = {}): Promise<SourceImage> {
  const source = await openSource(reference, options);
  try {
    return await source.resolve();
  } finally {
    await source.close();
  }
}

function simple(edit?: Parameters<ImageFixture['image']>[2]): { fixture: ImageFixture; manifest: Described } {
  const fixture = new ImageFixture();
  const manifest = fixture.image(tars, HOST, edit);
  fixture.name(manifest, 'latest');
  return { fixture, manifest };
}

const written = (fixture: ImageFixture) => fixture.write(work.fresh('layout'));

/** The bytes that an input names. */
function bytesOf(image: SourceImage, i: number): Buffer {
  const { input } = image.layers[i]!;
  if (input.kind !== 'file') throw new Error(input.kind);
  return readFileSync(input.path).subarray(input.offset, input.offset + input.sizeBytes);
}

describe('an OCI layout', () => {
  test('config, layers, order', async () => {
    const { fixture, manifest } = simple();
    const folder = written(fixture);
    for (const reference of [`oci:${folder}:latest`, `oci:${folder}`]) {
      const image = await resolve(reference);
      expect(image.manifestDigest).toBe(manifest.digest);
      expect(JSON.parse(image.config.toString()).rootfs.diff_ids).toEqual(tars.map(digestOf));
      expect(image.layers.map((layer) => layer.diffId)).toEqual(tars.map(digestOf));
      for (const [i, layer] of image.layers.entries()) {
        expect(bytesOf(image, i)).toEqual(gzipSync(tars[i]!));
        expect(layer.digest).toBe(digestOf(gzipSync(tars[i]!)));
        expect(layer.compression).toBe('gzip');
        expect(layer.label).toBe(`layer ${i + 1}/2 ${layer.digest!.slice(0, 19)}`);
        expect(layer.sizeBytes).toBe(gzipSync(tars[i]!).length);
      }
    }
  });

  test.each([
    [`${OCI}.layer.v1.tar`, 'plain'],
    [`${OCI}.layer.v1.tar+gzip`, 'gzip'],
    [`${OCI}.layer.v1.tar+zstd`, 'zstd'],
    [`${OCI}.layer.nondistributable.v1.tar+gzip`, 'gzip'],
    [`${DOCKER}.image.rootfs.diff.tar`, 'plain'],
    [`${DOCKER}.image.rootfs.diff.tar.gzip`, 'gzip'],
    [`${DOCKER}.image.rootfs.foreign.diff.tar.gzip`, 'gzip'],
  ])('layer type %s', async (mediaType, compression) => {
    const { fixture } = simple((manifest) => {
      manifest.layers[0]!.mediaType = mediaType;
    });
    expect((await resolve(`oci:${written(fixture)}`)).layers[0]!.compression).toBe(compression);
  });

  test('Docker media types', async () => {
    const { fixture, manifest } = simple((m) => {
      m.mediaType = `${DOCKER}.distribution.manifest.v2+json`;
      m.config.mediaType = `${DOCKER}.container.image.v1+json`;
    });
    expect((await resolve(`oci:${written(fixture)}`)).manifestDigest).toBe(manifest.digest);
  });

  test.each([
    ['encrypted', `${OCI}.layer.v1.tar+gzip+encrypted`, 'decrypt'],
    ['converted', 'application/vnd.erofs', 'dsec pull'],
    ['unknown', 'text/plain', 'only tar layers'],
  ])('refuses an %s layer', async (_what, mediaType, hint) => {
    const { fixture } = simple((manifest) => {
      manifest.layers[1]!.mediaType = mediaType;
    });
    const error = await failureOf(resolve(`oci:${written(fixture)}`));
    expect(error.code).toBe('SOURCE_LAYER_TYPE');
    expect(error.message).toContain('layer 2/2');
    expect(error.hint).toContain(hint);
  });

  test('names: exact, whole, and by their tag', async () => {
    const fixture = new ImageFixture();
    const a = fixture.image([tars[0]!], HOST);
    const b = fixture.image([tars[1]!], HOST);
    fixture.name(a, 'one');
    fixture.name(b, 'docker.io/library/two:v2');
    const folder = written(fixture);
    const digest = async (name: string) => (await resolve(`oci:${folder}:${name}`)).manifestDigest;
    expect(await digest('one')).toBe(a.digest);
    expect(await digest('docker.io/library/two:v2')).toBe(b.digest);
    expect(await digest('two:v2')).toBe(b.digest);
    expect(await digest('v2')).toBe(b.digest);
    const missing = await failureOf(digest('three'));
    expect(missing.code).toBe('SOURCE_NAME_MISSING');
    expect(missing.message).toContain('docker.io/library/two:v2, one');
    const ambiguous = await failureOf(resolve(`oci:${folder}`));
    expect(ambiguous.code).toBe('SOURCE_AMBIGUOUS');
    expect(ambiguous.message).toContain('docker.io/library/two:v2, one');
    expect(ambiguous.hint).toContain(`oci:${folder}:one`);
  });

  test('platforms: of a nested index, of a name that stands twice', async () => {
    const fixture = new ImageFixture();
    const own = fixture.image([tars[0]!], HOST);
    const other = fixture.image([tars[1]!], OTHER);
    const attestation = fixture.image([tars[1]!], 'unknown');
    const at = (d: Described, architecture: string, os = 'linux') => ({ ...d, platform: { os, architecture } });
    const inner = fixture.json(
      { schemaVersion: 2, manifests: [at(attestation, 'unknown', 'unknown'), at(other, OTHER), at(own, HOST)] },
      `${OCI}.index.v1+json`,
    );
    const list = fixture.json(
      {
        schemaVersion: 2,
        mediaType: `${DOCKER}.distribution.manifest.list.v2+json`,
        manifests: [at(own, HOST), at(other, OTHER)],
      },
      `${DOCKER}.distribution.manifest.list.v2+json`,
    );
    fixture.name(inner, 'nested');
    fixture.name(list, 'list');
    fixture.name(own, 'twice', { os: 'linux', architecture: HOST });
    fixture.name(other, 'twice', { os: 'linux', architecture: OTHER });
    const folder = written(fixture);
    for (const name of ['nested', 'list', 'twice']) {
      const reference = `oci:${folder}:${name}`;
      expect((await resolve(reference)).manifestDigest).toBe(own.digest);
      expect((await resolve(reference, { platform: parsePlatform(`linux/${OTHER}`) })).manifestDigest).toBe(
        other.digest,
      );
      const error = await failureOf(resolve(reference, { platform: parsePlatform('linux/s390x') }));
      expect(error.code).toBe('SOURCE_PLATFORM');
      expect(error.message).toContain(`linux/${HOST}`);
      expect(error.message).toContain(`linux/${OTHER}`);
      expect(error.message).not.toContain('unknown');
    }
  });

  test('one image of another platform: taken, unless a platform is asked for', async () => {
    const fixture = new ImageFixture();
    const other = fixture.image([tars[0]!], OTHER);
    fixture.name(other, 'x', { os: 'linux', architecture: OTHER });
    const folder = written(fixture);
    expect((await resolve(`oci:${folder}`)).manifestDigest).toBe(other.digest);
    const error = await failureOf(resolve(`oci:${folder}`, { platform: parsePlatform(`linux/${HOST}`) }));
    expect(error.code).toBe('SOURCE_PLATFORM');
  });

  test('indexes without end are refused', async () => {
    const fixture = new ImageFixture();
    let d = fixture.image([tars[0]!], HOST);
    for (let i = 0; i < 7; i++) d = fixture.json({ schemaVersion: 2, manifests: [d] }, `${OCI}.index.v1+json`);
    fixture.name(d, 'x');
    expect((await failureOf(resolve(`oci:${written(fixture)}`))).code).toBe('SOURCE_MANIFEST_TYPE');
  });
});

describe('what is wrong with a layout', () => {
  type Spoil = (fixture: ImageFixture, manifest: Described) => void;
  const replaceManifest = (fixture: ImageFixture, value: unknown, mediaType = `${OCI}.manifest.v1+json`) => {
    fixture.index.manifests = [];
    fixture.name(fixture.json(value, mediaType), 'latest');
  };
  const document = (fixture: ImageFixture, d: Described) => JSON.parse(fixture.blobs.get(d.digest)!.toString());

  test.each<[string, string, string, Spoil]>([
    ['no oci-layout', 'SOURCE_NOT_A_LAYOUT', 'oci-layout', (f) => f.files.delete('oci-layout')],
    [
      'layout version',
      'SOURCE_NOT_A_LAYOUT',
      '2.0.0',
      (f) => f.files.set('oci-layout', Buffer.from('{"imageLayoutVersion":"2.0.0"}')),
    ],
    [
      'no images',
      'SOURCE_NOT_A_LAYOUT',
      'no image',
      (f) => {
        f.index.manifests = [];
      },
    ],
    ['index not JSON', 'SOURCE_JSON', 'index.json', (f) => f.files.set('index.json', Buffer.from('{'))],
    ['index not UTF-8', 'SOURCE_JSON', 'UTF-8', (f) => f.files.set('index.json', Buffer.from([0x22, 0xff, 0x22]))],
    ['index a list', 'SOURCE_FIELD', '(top)', (f) => f.files.set('index.json', Buffer.from('[]'))],
    [
      'index version',
      'SOURCE_FIELD',
      'schemaVersion',
      (f) => {
        f.index.schemaVersion = 3;
      },
    ],
    [
      'entry digest',
      'SOURCE_FIELD',
      'manifests[0].digest',
      (f) => {
        f.index.manifests[0]!.digest = 'sha256:x' as Digest;
      },
    ],
    [
      'entry digest climbing out',
      'SOURCE_FIELD',
      'manifests[0].digest',
      (f) => {
        f.index.manifests[0]!.digest = 'sha256:../../x' as Digest;
      },
    ],
    [
      'entry size',
      'SOURCE_FIELD',
      'manifests[0].size',
      (f) => {
        f.index.manifests[0]!.size = -1;
      },
    ],
    ['entry size off', 'SOURCE_SIZE_MISMATCH', 'manifest', (f) => void f.index.manifests[0]!.size++],
    [
      'manifest too large',
      'SOURCE_TOO_LARGE',
      '4194304',
      (f) => {
        f.index.manifests[0]!.size = 5 << 20;
      },
    ],
    ['manifest changed', 'SOURCE_DIGEST_MISMATCH', 'manifest', (f, m) => f.blobs.get(m.digest)!.write('[', 0)],
    ['manifest missing', 'SOURCE_BLOB_MISSING', 'manifest', (f, m) => f.blobs.delete(m.digest)],
    [
      'unknown type',
      'SOURCE_MANIFEST_TYPE',
      'application/vnd.example',
      (f, m) => replaceManifest(f, { ...document(f, m), mediaType: 'application/vnd.example.unknown.v1+json' }),
    ],
    [
      'a type that is no string',
      'SOURCE_FIELD',
      'mediaType',
      (f, m) => replaceManifest(f, { ...document(f, m), mediaType: 7 }),
    ],
    [
      'schema 1',
      'SOURCE_SCHEMA1',
      'schema 1',
      (f) => replaceManifest(f, { schemaVersion: 1, name: 'x', fsLayers: [] }),
    ],
    [
      'an index and a manifest',
      'SOURCE_FIELD',
      'manifests',
      (f, m) => replaceManifest(f, { ...document(f, m), manifests: [] }),
    ],
    [
      'an artifact',
      'SOURCE_CONFIG_TYPE',
      'artifact',
      (f, m) =>
        replaceManifest(f, {
          ...document(f, m),
          config: { ...document(f, m).config, mediaType: 'application/vnd.oci.empty.v1+json' },
        }),
    ],
    [
      'no layers field',
      'SOURCE_FIELD',
      'layers',
      (f, m) => replaceManifest(f, { ...document(f, m), layers: undefined }),
    ],
    [
      'a layer without size',
      'SOURCE_FIELD',
      'layers[1].size',
      (f, m) => {
        const d = document(f, m);
        delete d.layers[1].size;
        replaceManifest(f, d);
      },
    ],
    [
      'annotations no map',
      'SOURCE_FIELD',
      'layers[0].annotations',
      (f, m) => {
        const d = document(f, m);
        d.layers[0].annotations = ['x'];
        replaceManifest(f, d);
      },
    ],
    [
      'config changed',
      'SOURCE_DIGEST_MISMATCH',
      'config',
      (f, m) => f.blobs.get(document(f, m).config.digest)!.write('[', 0),
    ],
    ['config missing', 'SOURCE_BLOB_MISSING', 'config', (f, m) => f.blobs.delete(document(f, m).config.digest)],
    ['layer missing', 'SOURCE_BLOB_MISSING', 'layer 2/2', (f, m) => f.blobs.delete(document(f, m).layers[1].digest)],
    [
      'layer size off',
      'SOURCE_SIZE_MISMATCH',
      'layer 1/2',
      (f, m) => {
        const d = document(f, m);
        d.layers[0].size++;
        replaceManifest(f, d);
      },
    ],
    [
      'fewer diff_ids',
      'SOURCE_DIFF_IDS',
      '2 layers, but the config names 1',
      (f, m) => {
        const d = document(f, m);
        const c = JSON.parse(f.blobs.get(d.config.digest)!.toString());
        c.rootfs.diff_ids.pop();
        d.config = f.json(c, d.config.mediaType);
        replaceManifest(f, d);
      },
    ],
    [
      'a wrong diff_id',
      'SOURCE_FIELD',
      'rootfs.diff_ids[1]',
      (f, m) => {
        const d = document(f, m);
        const c = JSON.parse(f.blobs.get(d.config.digest)!.toString());
        c.rootfs.diff_ids[1] = 'sha256:0';
        d.config = f.json(c, d.config.mediaType);
        replaceManifest(f, d);
      },
    ],
    [
      'rootfs type',
      'SOURCE_FIELD',
      'rootfs.type',
      (f, m) => {
        const d = document(f, m);
        d.config = f.json({ os: 'linux', architecture: 'amd64', rootfs: { type: 'x' } }, d.config.mediaType);
        replaceManifest(f, d);
      },
    ],
  ])('%s: %s', async (_name, code, part, spoil) => {
    const { fixture, manifest } = simple();
    spoil(fixture, manifest);
    const folder = written(fixture);
    const error = await failureOf(
      resolve(`oci:${folder}:latest`.replace(/:latest$/, fixture.index.manifests.length === 0 ? '' : ':latest')),
    );
    expect(error.code, error.message).toBe(code);
    expect(error.message).toContain(part);
    const file = await failureOf(resolve(`oci-archive:${await fixture.archive(work.fresh('layout'))}`));
    expect(file.code, file.message).toBe(code);
  });

  test('a missing layer names digest and path', async () => {
    const { fixture, manifest } = simple();
    const digest = document(fixture, manifest).layers[1].digest as Digest;
    fixture.blobs.delete(digest);
    const folder = written(fixture);
    const error = await failureOf(resolve(`oci:${folder}`));
    expect(error.message).toContain(digest);
    expect(error.message).toContain(join(folder, 'blobs', 'sha256', hexOf(digest)));
  });

  test('a missing foreign layer says why', async () => {
    const { fixture, manifest } = simple((m) => {
      m.layers[0]!.mediaType = `${DOCKER}.image.rootfs.foreign.diff.tar.gzip`;
    });
    fixture.blobs.delete(document(fixture, manifest).layers[0].digest);
    expect((await failureOf(resolve(`oci:${written(fixture)}`))).message).toContain('foreign layer');
  });

  test('no folder, a file, a pipe in place of a blob', async () => {
    expect(await failureOf(resolve('oci:/does/not/exist'))).toMatchObject({
      code: 'SOURCE_PATH',
      exit: 4,
      message: '/does/not/exist: no such folder',
    });
    const file = work.fresh('file');
    writeFileSync(file, 'x');
    expect((await failureOf(resolve(`oci:${file}`))).code).toBe('SOURCE_PATH');
    const { fixture } = simple();
    fixture.files.set('index.json', Buffer.from('x'));
    const folder = written(fixture);
    execFileSync('rm', [join(folder, 'index.json')]);
    execFileSync('mkfifo', [join(folder, 'index.json')]);
    const error = await failureOf(resolve(`oci:${folder}`));
    expect(error.code).toBe('SOURCE_PATH');
    expect(error.message).toContain('a pipe');
  });

  test('documents that are not documents never crash it', async () => {
    for (const text of [
      'null',
      '1',
      '"x"',
      '[]',
      '{}',
      '{"schemaVersion":2}',
      '{"schemaVersion":2,"manifests":{}}',
      `${'['.repeat(100_000)}`,
      '{"__proto__":{"schemaVersion":2}}',
    ]) {
      const { fixture } = simple();
      fixture.files.set('index.json', Buffer.from(text));
      const error = await failureOf(resolve(`oci:${written(fixture)}`));
      expect(error.code, text.slice(0, 40)).toMatch(/^SOURCE_(JSON|FIELD|NOT_A_LAYOUT)$/);
    }
  });
});

test('a layout in an archive, compressed or not', async () => {
  const { fixture, manifest } = simple();
  const path = await fixture.archive(work.fresh('archive'));
  const image = await resolve(`oci-archive:${path}:latest`);
  expect(image.manifestDigest).toBe(manifest.digest);
  expect(bytesOf(image, 1)).toEqual(gzipSync(tars[1]!));
  expect(image.layers[1]!.input).toMatchObject({ kind: 'file', path });

  writeFileSync(path, gzipSync(readFileSync(path)));
  const source = await openSource(`oci-archive:${path}`, { workDir: work.path });
  const inflated = await source.resolve();
  expect(bytesOf(inflated, 0)).toEqual(gzipSync(tars[0]!));
  expect(await source.resolve()).toEqual(inflated);
  const { input } = inflated.layers[0]!;
  await source.close();
  await source.close();
  expect(() => readFileSync(input.kind === 'file' ? input.path : '')).toThrow('ENOENT');
});
