/**
 * fsck.erofs accepts every kind of image that is written here: the metadata with its devices as they are stored, and all of it, data
 * decoded and extracted, as one file (see writeFlat). What it extracts is what the kernel shows.
 */
import { spawnSync } from 'node:child_process';
import { appendFileSync, mkdirSync, rmSync, truncateSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { mount, umount } from '#linux';
import { openImage } from '../catalog/catalog.ts';
import { type ConvertToStoreOptions, convertToStore } from '../convert/convert-to-store.ts';
import { openLayerFiles } from '../reader/open-layer.ts';
import type { BlobStore } from '../store/blob-store.ts';
import { openStore } from '../store/open-store.ts';
import { type FsckErofs, findFsck, writeFlat } from './erofs-tools.ts';
import { isRoot, makeFolder, scratch, someText } from './reader-fixture.ts';
import { tarOfTree, writeTarLayout } from './small-layout.ts';
import { attributesOf, differences } from './tree-attributes.ts';

const WAYS: readonly (readonly [string, ConvertToStoreOptions])[] = [
  ['collapsed', {}],
  ['a layer each', { collapseLimitBytes: 0 }],
  ['metadata collapsed', { collapse: 'metadata' }],
  ['lz4', { compress: 'lz4' }],
  ['lz4, metadata collapsed, nothing inline', { compress: 'lz4', collapse: 'metadata', inlineLimitBytes: 0 }],
  ['deflate', { compress: 'deflate' }],
  ['zstd', { compress: 'zstd' }],
  ['zstd, a layer each', { compress: 'zstd', collapseLimitBytes: 0 }],
];

const tools = findFsck();
if (tools.length === 0) console.log('fsck-erofs: skipped: fsck.erofs is missing (apt-get install erofs-utils)');
const unread = ['deflate', 'zstd'].filter((codec) => !tools.some(({ codecs }) => codecs.includes(codec)));
if (tools.length > 0 && unread.length > 0) {
  console.log(
    `fsck-erofs: ${unread.join(' and ')} skipped: fsck.erofs ${tools.at(-1)!.version} does not know them (erofs-utils 1.9.3 built from its source does: name its fsck.erofs in $FSCK_EROFS)`,
  );
}

/** Size of the file with holes that does not end in one. */
const ENDS_IN_DATA = 3_000_000;

interface StoredLayer {
  readonly meta: string;
  readonly devices: readonly string[];
}

describe.skipIf(tools.length === 0)('fsck.erofs accepts', { timeout: 120_000 }, () => {
  const place = scratch();
  let store: BlobStore;
  let source: string;

  beforeAll(async () => {
    store = await openStore(`file://${place.path}/store`);
    const everyKind = tarOfTree(
      join(place.path, 'work'),
      (tree) => {
        rmSync(tree, { recursive: true });
        makeFolder(tree);
      },
      ['--format=pax', '--xattrs', '--xattrs-include=*', '--sparse'],
    );
    const folder = join(place.path, 'layout');
    source = `oci:${writeTarLayout(folder, [everyKind, tarOfTree(join(place.path, 'work'), changes)])}`;
  });
  afterAll(() => place.remove());

  describe.each(WAYS)('%s', (way, options) => {
    const layers: StoredLayer[] = [];
    /** What the kernel shows of each. */
    const shown: Map<string, string>[] = [];

    beforeAll(async () => {
      const { name } = await convertToStore(store, source, `checked:${WAYS.findIndex(([of]) => of === way)}`, options);
      for (const { meta, devices } of (await openImage(store, name)).layers) {
        layers.push({
          meta: store.localPath(meta.digest)!,
          devices: devices.map(({ blob }) => store.localPath(blob.digest)!),
        });
      }
      expect(layers).toHaveLength(options.collapseLimitBytes === 0 ? 2 : 1);
      expect(layers[0]!.devices).toHaveLength(options.collapse === 'metadata' ? 2 : 1);
      if (isRoot) for (const layer of layers) shown.push(mounted(layer, join(place.path, 'mounted')));
    });

    describe.each(tools)('by $version', (tool) => {
      const knows = options.compress === undefined || tool.codecs.includes(options.compress);

      it.skipIf(!knows)('as it is stored', () => {
        for (const { meta, devices } of layers) {
          expect(fsck(tool, [...devices.map((path) => `--device=${path}`), meta])).toEqual(ACCEPTED);
        }
      });

      it.skipIf(!knows || !isRoot)('with all its data, which it extracts as the kernel shows it', async () => {
        for (const [i, { meta, devices }] of layers.entries()) {
          const flat = join(place.path, 'flat.erofs');
          const layer = await openLayerFiles(meta, devices);
          writeFlat(flat, layer, meta, devices);
          await layer.reader.close();
          const extracted = join(place.path, 'extracted');
          try {
            const attributes = tool.restoresAll ? ['--xattrs'] : [];
            expect(fsck(tool, [`--extract=${extracted}`, '--preserve', ...attributes, flat])).toEqual(ACCEPTED);
            expect(differences(restored(tool, shown[i]!), restored(tool, attributesOf(extracted)))).toEqual([]);
          } finally {
            rmSync(extracted, { recursive: true, force: true });
          }
        }
      });
    });
  });
});

const ACCEPTED = { status: 0, complaints: [] };

function fsck({ path }: FsckErofs, args: readonly string[]) {
  const { status, stdout, stderr } = spawnSync(path, [...args], { encoding: 'utf8' });
  const complaints = `${stdout}${stderr}`.split('\n').filter((line) => /^<[EW]>|error|fail/i.test(line));
  // 1.9.3 takes the length of an empty attribute for a failure, and goes on without it.
  return { status, complaints: complaints.filter((line) => !line.includes('value size of `user.number0`')) };
}

/**
 * Of what a tree is, what fsck.erofs puts back. No version makes a file long enough that ends in a hole, or keeps capabilities over its
 * own chown; 1.9.3 stops at an empty attribute; 1.5 knows neither holes nor attributes nor links nor setuid bits.
 */
function restored({ restoresAll }: FsckErofs, tree: Map<string, string>): Map<string, string> {
  const less = new Map<string, string>();
  for (const [path, line] of tree) {
    if (path === '/zeros') continue;
    if (path === '/sparse' && !(restoresAll && line.includes(` ${ENDS_IN_DATA} `))) continue;
    const attributes = restoresAll && path !== '/text-4096' ? / security\.capability=[0-9a-f]*/g : / [^ ]+=[0-9a-f]*/g;
    const bare = line.replace(attributes, '');
    less.set(path, restoresAll ? bare : bare.replace(/ links .*/, '').replace(/^file \d*(\d{3}) /, 'file $1 '));
  }
  return less;
}

function mounted({ meta, devices }: StoredLayer, target: string): Map<string, string> {
  mkdirSync(target, { recursive: true });
  mount(meta, target, 'erofs', 1, devices.map((path) => `device=${path}`).join(','));
  try {
    return attributesOf(target);
  } finally {
    umount(target);
  }
}

/** Over makeFolder: whiteouts, an opaque directory, another kind under the same name, a directory of many blocks, holes again. */
function changes(tree: string): void {
  const at = (path: string) => join(tree, path);
  for (const folder of ['many', 'deep/er', 'text-100']) mkdirSync(at(folder), { recursive: true });
  writeFileSync(at('.wh.text-300000'), '');
  writeFileSync(at('many/.wh..wh..opq'), '');
  writeFileSync(at('deep/er/.wh.hard'), '');
  writeFileSync(at('text-100/now-a-folder'), 'yes');
  for (let k = 0; k < 500; k++) writeFileSync(at(`many/${'in a directory of many blocks '.repeat(7)}${k}`), `${k}`);
  writeFileSync(at('sparse'), someText(200_000));
  truncateSync(at('sparse'), ENDS_IN_DATA - 3);
  appendFileSync(at('sparse'), 'end');
}
