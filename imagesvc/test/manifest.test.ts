import { describe, expect, test } from 'vitest';
import { digestOf, isDsecError } from '#base';
import type { ErofsLayer } from '../catalog/image.ts';
import { buildManifest, chunkDigestsSize, parseManifest } from '../catalog/manifest.ts';

const blob = (text: string, size: number) => ({ mediaType: 'whatever', digest: digestOf(text), size });
const device = (text: string, size: number) => ({
  blob: blob(text, size),
  chunkDigests: blob(`${text} chunks`, chunkDigestsSize(size)),
});
const layers: ErofsLayer[] = [
  { meta: blob('base meta', 8192), devices: [device('base data', 600_000)] },
  { meta: blob('small meta', 4096), devices: [] },
  { meta: blob('top meta', 12288), devices: [device('one', 262_144), device('two', 262_145)] },
];
const config = blob('config', 1234);
const base = digestOf('base manifest');
const bytes = buildManifest({ kind: 'snapshot', layers, ownLayers: 1, base, config });

const E = (text: string) => digestOf(text);
const GOLDEN = `{"schemaVersion":2,"mediaType":"application/vnd.oci.image.manifest.v1+json","config":{"mediaType":"application/vnd.oci.image.config.v1+json","digest":"${E('config')}","size":1234},"layers":[{"mediaType":"application/vnd.erofs","digest":"${E('base meta')}","size":8192,"annotations":{"org.erofs.role":"overlay-lower"}},{"mediaType":"application/vnd.erofs","digest":"${E('base data')}","size":600000,"annotations":{"org.erofs.role":"device"}},{"mediaType":"application/vnd.dsec.chunk-digests.v1","digest":"${E('base data chunks')}","size":96,"annotations":{"io.dsec.blob":"${E('base data')}"}},{"mediaType":"application/vnd.erofs","digest":"${E('small meta')}","size":4096,"annotations":{"org.erofs.role":"overlay-lower"}},{"mediaType":"application/vnd.erofs","digest":"${E('top meta')}","size":12288,"annotations":{"org.erofs.role":"overlay-lower"}},{"mediaType":"application/vnd.erofs","digest":"${E('one')}","size":262144,"annotations":{"org.erofs.role":"device"}},{"mediaType":"application/vnd.dsec.chunk-digests.v1","digest":"${E('one chunks')}","size":32,"annotations":{"io.dsec.blob":"${E('one')}"}},{"mediaType":"application/vnd.erofs","digest":"${E('two')}","size":262145,"annotations":{"org.erofs.role":"device"}},{"mediaType":"application/vnd.dsec.chunk-digests.v1","digest":"${E('two chunks')}","size":64,"annotations":{"io.dsec.blob":"${E('two')}"}}],"annotations":{"io.dsec.base":"${base}","io.dsec.kind":"snapshot","io.dsec.own-layers":"1"}}`;

type Json = Record<string, unknown> & {
  layers: Record<string, unknown>[];
  annotations: Record<string, unknown>;
  config: Record<string, unknown>;
};
const changed = (change: (manifest: Json) => void): Buffer => {
  const manifest = JSON.parse(bytes.toString()) as Json;
  change(manifest);
  return Buffer.from(JSON.stringify(manifest));
};
const parse = (what: Buffer) => parseManifest(what, digestOf(what));

describe('manifests', () => {
  test('have one form, byte for byte', () => {
    expect(bytes.toString()).toBe(GOLDEN);
    const noisy = layers.map((layer) => ({ ...layer, meta: { ...layer.meta, annotations: { host: 'here' } } }));
    expect(buildManifest({ config, layers: noisy, base, ownLayers: 1, kind: 'snapshot' }).equals(bytes)).toBe(true);
  });

  test('come back as they were written', () => {
    const image = parseManifest(bytes, digestOf(bytes), 'team/app:1');
    expect(image).toMatchObject({
      name: 'team/app:1',
      manifestDigest: digestOf(bytes),
      manifestSize: bytes.length,
      kind: 'snapshot',
      ownLayers: 1,
      base,
    });
    expect(image.config).toEqual({ ...config, mediaType: 'application/vnd.oci.image.config.v1+json' });
    expect(
      image.layers.map(({ meta, devices }) => [
        meta.digest,
        ...devices.map((it) => [it.blob.digest, it.chunkDigests.digest]),
      ]),
    ).toEqual(
      layers.map(({ meta, devices }) => [
        meta.digest,
        ...devices.map((it) => [it.blob.digest, it.chunkDigests.digest]),
      ]),
    );
    expect(buildManifest({ ...image }).equals(bytes)).toBe(true);
  });

  test('leave out what goes without saying', () => {
    const plain = buildManifest({ kind: 'base', layers, ownLayers: 3, config });
    expect(JSON.parse(plain.toString()).annotations).toEqual({ 'io.dsec.kind': 'base' });
    expect(parse(plain)).toMatchObject({ ownLayers: 3, base: undefined });
    expect(parse(plain).name).toBe(digestOf(plain));
  });

  test('an image may be made of its base alone', () => {
    expect(parse(buildManifest({ kind: 'snapshot', layers, ownLayers: 0, base, config })).ownLayers).toBe(0);
  });

  test.each([
    [0, 0],
    [1, 32],
    [262_143, 32],
    [262_144, 32],
    [262_145, 64],
    [3 * 2 ** 30, 12_288 * 32],
  ])('a blob of %d bytes has %d bytes of chunk digests', (size, expected) => {
    expect(chunkDigestsSize(size)).toBe(expected);
  });

  const wrong: [string, (m: Json) => void, RegExp][] = [
    [
      'schemaVersion',
      (m) => {
        m.schemaVersion = 3;
      },
      /schemaVersion: must be 2/,
    ],
    [
      'mediaType',
      (m) => {
        m.mediaType = 'x';
      },
      /mediaType: must be/,
    ],
    [
      'no annotations',
      (m) => {
        Reflect.deleteProperty(m, 'annotations');
      },
      /io\.dsec\.kind: must be one of/,
    ],
    [
      'annotations of another type',
      (m) => {
        m.annotations.x = 1;
      },
      /annotations\["x"\]: must be a string/,
    ],
    [
      'annotations as a list',
      (m) => {
        Object.assign(m, { annotations: [] });
      },
      /annotations: must be an object/,
    ],
    [
      'an unknown kind',
      (m) => {
        m.annotations['io.dsec.kind'] = 'pet';
      },
      /io\.dsec\.kind: must be one of base/,
    ],
    [
      'a kind from the prototype',
      (m) => {
        m.annotations['io.dsec.kind'] = 'constructor';
      },
      /io\.dsec\.kind/,
    ],
    [
      'base',
      (m) => {
        m.annotations['io.dsec.base'] = 'sha256:xyz';
      },
      /io\.dsec\.base: must be a sha256 digest/,
    ],
    [
      'too many own layers',
      (m) => {
        m.annotations['io.dsec.own-layers'] = '4';
      },
      /own-layers: must be a number from 0 to 3/,
    ],
    [
      'own layers that are no number',
      (m) => {
        m.annotations['io.dsec.own-layers'] = '0x1';
      },
      /own-layers/,
    ],
    [
      'no config',
      (m) => {
        Reflect.deleteProperty(m, 'config');
      },
      /config: must be a descriptor/,
    ],
    [
      'the type of the config',
      (m) => {
        m.config.mediaType = 'x';
      },
      /config\.mediaType/,
    ],
    [
      'the size of the config',
      (m) => {
        m.config.size = 2 ** 40;
      },
      /config\.size/,
    ],
    [
      'no layers',
      (m) => {
        m.layers = [];
      },
      /layers: there is none/,
    ],
    [
      'layers as an object',
      (m) => {
        Object.assign(m, { layers: {} });
      },
      /layers: must be a list/,
    ],
    [
      'a layer that is null',
      (m) => {
        Object.assign(m.layers, [null]);
      },
      /layers\[0\]: must be a descriptor/,
    ],
    [
      'an unknown role',
      (m) => {
        m.layers[0]!.annotations = { 'org.erofs.role': 'overlay-data' };
      },
      /layers\[0\], annotation org\.erofs\.role: "overlay-data" is unknown/,
    ],
    [
      'no role',
      (m) => {
        Reflect.deleteProperty(m.layers[0]!, 'annotations');
      },
      /layers\[0\], annotation org\.erofs\.role: is missing/,
    ],
    [
      'an unknown media type',
      (m) => {
        m.layers[3]!.mediaType = 'application/vnd.other';
      },
      /layers\[3\]\.mediaType: "application\/vnd\.other" is unknown/,
    ],
    [
      'a device before any metadata',
      (m) => {
        m.layers.shift();
      },
      /layers\[0\]: a device comes before any metadata image/,
    ],
    [
      'a device without chunk digests',
      (m) => {
        m.layers.splice(2, 1);
      },
      /layers\[2\]\.mediaType: must be application\/vnd\.dsec\.chunk-digests/,
    ],
    [
      'a last device without chunk digests',
      (m) => {
        m.layers.pop();
      },
      /layers\[8\]: the chunk digests of device .* are missing/,
    ],
    [
      'chunk digests without a device',
      (m) => {
        m.layers.splice(1, 1);
      },
      /layers\[1\]: chunk digests without their device/,
    ],
    [
      'chunk digests of another blob',
      (m) => {
        m.layers[2]!.annotations = { 'io.dsec.blob': E('one') };
      },
      /layers\[2\], annotation io\.dsec\.blob/,
    ],
    [
      'chunk digests of another size',
      (m) => {
        m.layers[2]!.size = 64;
      },
      /layers\[2\]\.size: must be 96: 32 bytes for each 262144 of the device's 600000/,
    ],
    [
      'a blob that grew',
      (m) => {
        m.layers[5]!.size = 262_145;
      },
      /layers\[6\]\.size: must be 64/,
    ],
    [
      'an empty metadata image',
      (m) => {
        m.layers[3]!.size = 0;
      },
      /layers\[3\]\.size/,
    ],
    [
      'a negative size',
      (m) => {
        m.layers[0]!.size = -1;
      },
      /layers\[0\]\.size/,
    ],
    [
      'a fractional size',
      (m) => {
        m.layers[0]!.size = 1.5;
      },
      /layers\[0\]\.size/,
    ],
    [
      'a size as text',
      (m) => {
        m.layers[0]!.size = '8192';
      },
      /layers\[0\]\.size/,
    ],
    [
      'a size beyond exact numbers',
      (m) => {
        m.layers[0]!.size = 2 ** 53;
      },
      /layers\[0\]\.size/,
    ],
    [
      'a digest of another algorithm',
      (m) => {
        m.layers[0]!.digest = `sha512:${'a'.repeat(128)}`;
      },
      /layers\[0\]\.digest/,
    ],
    [
      'a digest that is a path',
      (m) => {
        m.layers[0]!.digest = 'sha256:../../etc/passwd';
      },
      /layers\[0\]\.digest/,
    ],
    [
      'a digest in capitals',
      (m) => {
        m.layers[0]!.digest = String(m.layers[0]!.digest).replace(/[a-f]/g, (c) => c.toUpperCase());
      },
      /layers\[0\]\.digest/,
    ],
    [
      'one blob in two sizes',
      (m) => {
        m.layers[3]!.digest = m.layers[0]!.digest;
      },
      /layers\[3\]\.size: 4096, but elsewhere .* has 8192/,
    ],
  ];
  test.each(wrong)('%s: refused, with its place', (_, change, message) => {
    const bad = changed(change);
    expect(() => parse(bad)).toThrow(message);
    expect(() => parse(bad)).toThrow(
      expect.objectContaining({
        code: 'CATALOG_MANIFEST',
        exit: 3,
        message: expect.stringContaining(digestOf(bad)),
      }) as Error,
    );
  });

  test.each(['', 'x', '[]', 'null', '1', '"x"', '{', '{}', '\0'.repeat(100), `${'['.repeat(100_000)}`])(
    'content %#: refused',
    (text) => {
      expect(() => parse(Buffer.from(text))).toThrow(expect.objectContaining({ code: 'CATALOG_MANIFEST' }) as Error);
    },
  );

  test('more than a manifest may have: refused before it is parsed', () => {
    expect(() => parse(Buffer.alloc(4 * 2 ** 20 + 1, ' '))).toThrow(/more than 4194304/);
  });

  test.each([
    [
      'an OCI image',
      (m: Json) => {
        m.layers[0]!.mediaType = 'application/vnd.oci.image.layer.v1.tar+gzip';
        Reflect.deleteProperty(m, 'annotations');
      },
    ],
    [
      'a Docker image',
      (m: Json) => {
        m.layers[0]!.mediaType = 'application/vnd.docker.image.rootfs.diff.tar.gzip';
      },
    ],
    [
      'a Docker image without layers',
      (m: Json) => {
        Object.assign(m, { mediaType: 'application/vnd.docker.distribution.manifest.v2+json', layers: [] });
      },
    ],
    [
      'an index',
      (m: Json) => {
        Object.assign(m, { mediaType: 'application/vnd.oci.image.index.v1+json', manifests: [] });
      },
    ],
    [
      'schema 1',
      (m: Json) => {
        m.schemaVersion = 1;
      },
    ],
  ])('%s is named as one that is not converted', (_, change) => {
    expect(() => parse(changed(change))).toThrow(
      expect.objectContaining({
        code: 'CATALOG_NOT_CONVERTED',
        hint: expect.stringContaining('dsec convert'),
      }) as Error,
    );
  });

  test('what would not be read is not written', () => {
    expect(() => buildManifest({ kind: 'base', layers: [], config })).toThrow(/there is none/);
    const broken = [{ meta: blob('m', 4096), devices: [{ blob: blob('d', 300_000), chunkDigests: blob('c', 32) }] }];
    expect(() => buildManifest({ kind: 'base', layers: broken, config })).toThrow(/must be 64/);
    expect(() => buildManifest({ kind: 'base', layers, ownLayers: 4, config })).toThrow(/own-layers/);
  });

  test('any damage gives an image or an error that says where, nothing else', () => {
    let seed = 7;
    const random = (below: number) => {
      seed = (Math.imul(seed, 1_103_515_245) + 12_345) >>> 0;
      return (seed >>> 8) % below;
    };
    for (let round = 0; round < 3000; round++) {
      const bad = Buffer.from(bytes);
      for (let k = random(3); k >= 0; k--) bad[random(bad.length)] = random(256);
      const cut = random(4) === 0 ? bad.subarray(0, random(bad.length)) : bad;
      try {
        parse(cut);
      } catch (error) {
        if (!isDsecError(error)) throw error;
      }
    }
  });
});
