/** Folders and tars placed below a folder of the image. */
import { execFileSync } from 'node:child_process';
import { linkSync, mkdirSync, mkdtempSync, rmSync, symlinkSync, utimesSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, beforeEach, describe, expect, it } from 'vitest';
import { openImage } from '../catalog/catalog.ts';
import { convertToStore } from '../convert/convert-to-store.ts';
import { openTree } from '../reader/image-tree.ts';
import { verifyImage } from '../reader/verify.ts';
import type { BlobStore } from '../store/blob-store.ts';
import { openStore } from '../store/open-store.ts';

let dir: string;
let store: BlobStore;
beforeEach(async () => {
  dir = mkdtempSync(join(tmpdir(), 'dsec-prefix-'));
  store = await openStore(`file://${dir}/store`);
  const tree = join(dir, 'repo');
  mkdirSync(join(tree, 'src'), { recursive: true, mode: 0o700 });
  writeFileSync(join(tree, 'src/one'), 'x'.repeat(9000));
  linkSync(join(tree, 'src/one'), join(tree, 'two'));
  symlinkSync('/etc/hosts', join(tree, 'abs'));
  utimesSync(tree, 1_600_000_000, 1_600_000_000);
});
afterEach(() => rmSync(dir, { recursive: true, force: true }));

async function shown(name: string): Promise<Record<string, string>> {
  const image = await openImage(store, name);
  const tree = await openTree(store, image);
  const out: Record<string, string> = {};
  for (const { path, node } of tree.walk()) {
    const { kind, mode, nlink, mtimeSec } = tree.stat(node);
    const more = path === '/srv' || path === '/srv/work' ? ` ${(mode & 0o7777).toString(8)} ${mtimeSec}` : '';
    out[path] = kind === 'file' ? `file ${nlink}` : `${kind}${more}`;
  }
  await tree.close();
  return out;
}

const EXPECTED = {
  '/': 'dir',
  '/srv': 'dir 755 0',
  '/srv/work': 'dir 700 1600000000',
  '/srv/work/abs': 'symlink',
  '/srv/work/src': 'dir',
  '/srv/work/src/one': 'file 2',
  '/srv/work/two': 'file 2',
};

describe('convert --prefix', () => {
  it('places a folder, the same every time', async () => {
    const source = `dir:${dir}/repo`;
    const { digest } = await convertToStore(store, source, 'a:1', { prefix: '/srv/work', kind: 'workspace' });
    const again = await convertToStore(store, source, 'a:2', { prefix: '/srv/work/', kind: 'workspace' });
    expect(again.digest).toBe(digest);
    expect(await shown('a:1')).toEqual(EXPECTED);
    expect((await convertToStore(store, source, 'a:3', { kind: 'workspace' })).digest).not.toBe(digest);
    expect((await convertToStore(store, source, 'a:4', { prefix: '/srv/x', kind: 'workspace' })).digest).not.toBe(
      digest,
    );
  });

  it('places a tar, with its hard links', async () => {
    execFileSync('tar', ['-C', `${dir}/repo`, '-cf', `${dir}/repo.tar`, '.']);
    await convertToStore(store, `tar:${dir}/repo.tar`, 'a:1', { prefix: '/srv/work' });
    expect(await shown('a:1')).toEqual(EXPECTED);
    await verifyImage(store, await openImage(store, 'a:1'));
  });
});
