/**
 * A real image of a few hundred MB, made by Debian's own tools and served by a registry: pulled, converted in every way, mounted,
 * and compared with what umoci unpacks, attribute by attribute.
 */
import { execFileSync } from 'node:child_process';
import { mkdirSync, mkdtempSync, realpathSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { readMountInfo, umount } from '#linux';
import { type Conversion, type ConvertToStoreOptions, convertToStore } from '../convert/convert-to-store.ts';
import { mountImage, unmount } from '../mount/image-mount.ts';
import { verifyImage } from '../reader/verify.ts';
import type { BlobStore } from '../store/blob-store.ts';
import { openStore } from '../store/open-store.ts';
import { makeDebianImage, missingForDebianImage } from './debian-image.ts';
import { LoopbackRegistry } from './loopback-registry.ts';
import { attributesOf, differences } from './tree-attributes.ts';

/** "Several hundred MB", of the files that the image shows. */
const LEAST_BYTES = 300e6;

const missing = missingForDebianImage();
if (missing !== undefined) console.log(`real-image: skipped: ${missing}`);

const WAYS: readonly { name: string; options: ConvertToStoreOptions; layers: readonly number[] }[] = [
  { name: 'collapsed', options: {}, layers: [1] },
  { name: 'one EROFS layer for each OCI layer', options: { collapseLimitBytes: 0 }, layers: [4] },
  { name: 'metadata collapsed over the layers’ own blobs', options: { collapse: 'metadata' }, layers: [1] },
  { name: 'lz4', options: { compress: 'lz4' }, layers: [1] },
  {
    name: 'no inline data, in groups',
    options: { inlineLimitBytes: 0, collapseLimitBytes: 256 << 20 },
    layers: [2, 3],
  },
];

describe.skipIf(missing !== undefined)('a real image', { timeout: 240_000 }, () => {
  let root: string;
  let registry: LoopbackRegistry | undefined;
  let store: BlobStore;
  let source: string;
  let expected: Map<string, string> | undefined;
  let fileBytes = 0;

  beforeAll(async () => {
    root = realpathSync(mkdtempSync(join(tmpdir(), 'dsec-real-')));
    const made = makeDebianImage(root);
    if (made === undefined) return;
    registry = await LoopbackRegistry.start(join(root, 'registry'));
    source = `docker://${registry.host}/debian/made:4`;
    const layout = join(root, 'layout');
    execFileSync('skopeo', ['copy', '--quiet', '--dest-tls-verify=false', `oci:${layout}:4`, source]);
    execFileSync('umoci', ['unpack', '--image', `${layout}:4`, join(root, 'unpacked')], { stdio: 'ignore' });
    rmSync(layout, { recursive: true });
    expected = attributesOf(join(root, 'unpacked/rootfs'));
    fileBytes = Number(
      execFileSync('du', ['-s', '--apparent-size', '-B1', join(root, 'unpacked/rootfs')], { encoding: 'utf8' }).split(
        '\t',
      )[0],
    );
    console.log(`${made}: ${expected.size} files, ${Math.round(fileBytes / 1e6)} MB`);
    store = await openStore(`file://${root}/store`);
  }, 1_500_000);

  afterAll(async () => {
    await registry?.stop();
    for (const { mountPoint } of readMountInfo().reverse()) {
      if (mountPoint.startsWith(`${root}/`)) umount(mountPoint, { lazy: true });
    }
    rmSync(root, { recursive: true, force: true });
  });

  const nodeFolders = () => ({ runDir: join(root, 'run'), cacheDir: join(root, 'cache') });

  async function mountedAttributes({ image }: Conversion): Promise<Map<string, string>> {
    const target = join(root, 'mounted');
    mkdirSync(target, { recursive: true });
    await mountImage({ store, image, target, ...nodeFolders() });
    try {
      return attributesOf(target);
    } finally {
      await unmount(target, nodeFolders());
    }
  }

  for (const { name, options, layers } of WAYS) {
    it(`${name}: mounted, it is what umoci unpacks`, async (context) => {
      if (expected === undefined) return context.skip('no mirror can be reached');
      const conversion = await convertToStore(store, source, 'debian:4', options);
      expect(conversion.reused).toBe(false);
      expect(layers).toContain(conversion.image.layers.length);
      expect(differences(expected, await mountedAttributes(conversion))).toEqual([]);
      const report = await verifyImage(store, conversion.image);
      expect(report.problems).toEqual([]);
      expect(report.ok).toBe(true);
    });
  }

  it('is one of several hundred MB', (context) => {
    if (expected === undefined) return context.skip('no mirror can be reached');
    expect(fileBytes).toBeGreaterThan(LEAST_BYTES);
  });

  it('converted again, it costs no work', async (context) => {
    if (expected === undefined) return context.skip('no mirror can be reached');
    const again = await convertToStore(store, source, 'debian:again');
    expect(again.reused).toBe(true);
  });
});
