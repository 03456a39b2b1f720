/** Carrying converted images out and in: layouts and archives always, Debian's docker-registry and skopeo where they are. */
import { type ChildProcess, execFileSync, spawn, spawnSync } from 'node:child_process';
import {
  existsSync,
  mkdirSync,
  mkdtempSync,
  readdirSync,
  readFileSync,
  rmSync,
  truncateSync,
  writeFileSync,
} from 'node:fs';
import { createServer } from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { setTimeout as delay } from 'node:timers/promises';
import { afterAll, afterEach, beforeAll, beforeEach, describe, expect, test } from 'vitest';
import { DsecError, digestOf, hexOf, inParallel, type ProgressEvent } from '#base';
import { allBlobsOf, openImage, removeImage } from '../catalog/catalog.ts';
import { parseAddress } from '../catalog/depot.ts';
import type { Image } from '../catalog/image.ts';
import { LayoutDepot } from '../catalog/layout-depot.ts';
import { pullFrom, pullImage } from '../catalog/pull.ts';
import { pushImage } from '../catalog/push.ts';
import { verified } from '../catalog/verified-stream.ts';
import type { BlobStore } from '../store/blob-store.ts';
import { openStore } from '../store/open-store.ts';
import { publishMadeUp } from './made-up-image.ts';
import { collected } from './store-conformance.ts';

const has = (tool: string) => spawnSync('sh', ['-c', `command -v ${tool}`]).status === 0;
const withRegistry = has('docker-registry');
const withSkopeo = has('skopeo');
if (!withRegistry)
  console.log('push-pull: no docker-registry here, its tests are skipped (apt install docker-registry)');
if (!withSkopeo) console.log('push-pull: no skopeo here, its tests are skipped (apt install skopeo)');

let root: string;
let from: BlobStore;
let to: BlobStore;
let image: Image;
beforeEach(async () => {
  root = mkdtempSync(join(tmpdir(), 'dsec-push-'));
  from = await openStore(join(root, 'from'));
  to = await openStore(join(root, 'to'));
  image = await publishMadeUp(from, 'app:1', { kind: 'toolkit', layers: ['1', '2'], dataBytes: 700_000 });
});
afterEach(() => rmSync(root, { recursive: true, force: true }));

const same = async (store: BlobStore, name: string) => {
  const pulled = await openImage(store, name);
  expect({ ...pulled, name: '' }).toEqual({ ...image, name: '' });
  for (const { digest } of allBlobsOf(pulled)) await store.readVerified(digest);
  expect(readdirSync(join(root, store === to ? 'to' : 'from', 'tmp'))).toEqual([]);
};
const nothingIn = async (store: BlobStore) => {
  expect(await collected(store.listBlobs())).toEqual([]);
  expect(await store.listRefs()).toEqual([]);
  expect(existsSync(join(root, 'to/tmp')) ? readdirSync(join(root, 'to/tmp')) : []).toEqual([]);
};

describe('addresses', () => {
  test('are read as skopeo reads them', () => {
    expect(parseAddress('docker://localhost:5000/a/b:1')).toEqual({
      kind: 'docker',
      reference: 'localhost:5000/a/b:1',
    });
    expect(parseAddress('oci:/a/b')).toEqual({ kind: 'oci', path: '/a/b', tag: undefined });
    expect(parseAddress('oci:a:x/y:1')).toEqual({ kind: 'oci', path: 'a', tag: 'x/y:1' });
    expect(parseAddress('oci-archive:/f.tar:v1')).toEqual({ kind: 'oci-archive', path: '/f.tar', tag: 'v1' });
  });
  test.each([
    '',
    'app:1',
    'oci:',
    'oci:dir:',
    'oci::tag',
    'oci-archive:',
    'http://x/y',
    'user:secret-word@host/x',
    'docker:x',
    'oci:a\0b',
  ])('%j is refused', async (text) => {
    await expect(pushImage(from, 'app:1', text)).rejects.toMatchObject({
      code: 'CATALOG_DESTINATION',
      exit: 2,
      message: expect.not.stringContaining('secret-word') as string,
    });
    await expect(pullImage(to, text, 'x')).rejects.toMatchObject({ code: 'CATALOG_DESTINATION' });
    expect(existsSync(join(root, 'to'))).toBe(false);
  });
});

describe('an image layout', () => {
  test('takes images beside others, and gives them back whole', async () => {
    const other = await publishMadeUp(from, 'other', { layers: ['2', '3'], dataBytes: 700_000 });
    const layout = join(root, 'layout');
    expect(await pushImage(from, 'app:1', `oci:${layout}:v1`)).toEqual({
      destination: `oci:${layout}:v1`,
      digest: image.manifestDigest,
      sentBlobs: 7,
      sentBytes: 2 * (8192 + 700_000 + 96) + image.config.size,
      skippedBlobs: 0,
      traces: 0,
    });
    // One layer and the config are there already.
    expect(await pushImage(from, 'other', `oci:${layout}:v2`)).toMatchObject({ sentBlobs: 3, skippedBlobs: 4 });
    expect(await pushImage(from, 'app:1', `oci:${layout}:v1`)).toMatchObject({ sentBlobs: 0, skippedBlobs: 7 });
    expect(readdirSync(layout).sort()).toEqual(['blobs', 'index.json', 'oci-layout']);
    expect(
      JSON.parse(readFileSync(join(layout, 'index.json'), 'utf8')).manifests.map(
        (it: { annotations: object }) => it.annotations,
      ),
    ).toEqual([{ 'org.opencontainers.image.ref.name': 'v2' }, { 'org.opencontainers.image.ref.name': 'v1' }]);
    const events: ProgressEvent[] = [];
    const pulled = await pullImage(to, `oci:${layout}:v1`, 'got/app', { progress: (event) => events.push(event) });
    expect(pulled).toMatchObject({ fetchedBlobs: 7, skippedBlobs: 0, image: { name: 'got/app:latest' } });
    await same(to, 'got/app');
    expect(events.filter((event) => event.phase === 'done')).toHaveLength(7);
    expect(events).toContainEqual({
      task: `pull ${image.layers[0]!.devices[0]!.blob.digest.slice(0, 19)}`,
      phase: 'done',
      doneBytes: 700_000,
      totalBytes: 700_000,
    });
    expect(await pullImage(to, `oci:${layout}:v1`, 'again')).toMatchObject({ fetchedBlobs: 0, skippedBlobs: 7 });
    expect(await pullImage(to, `oci:${layout}:v2`, 'other')).toMatchObject({
      fetchedBlobs: 3,
      image: { manifestDigest: other.manifestDigest },
    });
    await expect(pullImage(to, `oci:${layout}`, 'x')).rejects.toMatchObject({
      code: 'CATALOG_LAYOUT_AMBIGUOUS',
      exit: 2,
      message: expect.stringContaining('several images: v2, v1') as string,
    });
    await expect(pullImage(to, `oci:${layout}:v3`, 'x')).rejects.toMatchObject({
      code: 'CATALOG_LAYOUT_NOT_FOUND',
      exit: 4,
      hint: 'it has: v2, v1; use one of these names, or none if there is only one image',
    });
  });

  test('without a tag', async () => {
    await pushImage(from, 'app:1', `oci:${root}/l`);
    await pushImage(from, 'app:1', `oci:${root}/l`);
    await pullImage(to, `oci:${root}/l`, 'x');
    await same(to, 'x');
    await pullImage(to, `oci:${root}/l:latest`, 'y');
    await same(to, 'y');
  });

  test('without a tag takes away no name of the same image', async () => {
    await pushImage(from, 'app:1', `oci:${root}/l:v1`);
    await pushImage(from, 'app:1', `oci:${root}/l:v2`);
    await pushImage(from, 'app:1', `oci:${root}/l`);
    const { manifests } = JSON.parse(readFileSync(join(root, 'l/index.json'), 'utf8')) as {
      manifests: { annotations: Record<string, string> }[];
    };
    expect(manifests.map(({ annotations }) => Object.values(annotations)[0])).toEqual(['v1', 'v2', 'latest']);
    // Three names of one image: no choice is needed.
    await pullImage(to, `oci:${root}/l`, 'x');
    await same(to, 'x');
  });

  test('a folder with other things in it does not become one', async () => {
    mkdirSync(join(root, 'mine'));
    writeFileSync(join(root, 'mine/thesis'), 'x');
    await expect(pushImage(from, 'app:1', `oci:${root}/mine`)).rejects.toMatchObject({ code: 'CATALOG_LAYOUT' });
    await expect(pushImage(from, 'app:1', `oci:${root}/mine/thesis`)).rejects.toMatchObject({ code: 'CATALOG_LAYOUT' });
    expect(readdirSync(join(root, 'mine'))).toEqual(['thesis']);
    await expect(pullImage(to, `oci:${root}/nowhere:x`, 'x')).rejects.toMatchObject({
      code: 'CATALOG_LAYOUT_NOT_FOUND',
      message: `oci:${root}/nowhere:x: no such folder`,
    });
    await expect(pullImage(to, `oci:${root}/mine`, 'x')).rejects.toMatchObject({
      code: 'CATALOG_LAYOUT_NOT_FOUND',
      message: expect.stringContaining('no index.json') as string,
    });
    await nothingIn(to);
  });

  const blobOf = (which: 'meta' | 'data' | 'chunks' | 'config') => {
    const layer = image.layers[1]!;
    return {
      meta: layer.meta,
      data: layer.devices[0]!.blob,
      chunks: layer.devices[0]!.chunkDigests,
      config: image.config,
    }[which];
  };
  test.each(['meta', 'data', 'chunks', 'config'] as const)(
    'wrong bytes in its %s: nothing is published',
    async (which) => {
      await pushImage(from, 'app:1', `oci:${root}/l:1`);
      const { digest, size } = blobOf(which);
      const path = join(root, 'l/blobs/sha256', hexOf(digest));
      const good = readFileSync(path);
      const mismatch = { code: 'CATALOG_PULL_MISMATCH', exit: 3, message: expect.stringContaining(digest) as string };
      for (const damage of [
        () => {
          const bad = Buffer.from(good);
          bad[size - 1]! ^= 1;
          writeFileSync(path, bad);
        },
        () => truncateSync(path, size - 1),
        () => writeFileSync(path, Buffer.concat([good, Buffer.from('x')])),
        () => writeFileSync(path, ''),
      ]) {
        damage();
        await expect(pullImage(to, `oci:${root}/l:1`, 'x')).rejects.toMatchObject(mismatch);
        await nothingIn(to);
      }
      rmSync(path);
      await expect(pullImage(to, `oci:${root}/l:1`, 'x')).rejects.toMatchObject({ code: 'CATALOG_LAYOUT' });
      execFileSync('mkfifo', [path]);
      await expect(pullImage(to, `oci:${root}/l:1`, 'x')).rejects.toMatchObject({
        code: 'CATALOG_LAYOUT',
        message: expect.stringContaining('not a file') as string,
      });
      await nothingIn(to);
      writeFileSync(path.replace(/$/, '.new'), good);
      rmSync(path);
      writeFileSync(path, good);
      await pullImage(to, `oci:${root}/l:1`, 'x');
      await same(to, 'x');
    },
  );

  test('a wrong index or manifest: refused', async () => {
    await pushImage(from, 'app:1', `oci:${root}/l:1`);
    const manifest = join(root, 'l/blobs/sha256', hexOf(image.manifestDigest));
    writeFileSync(manifest, readFileSync(manifest, 'utf8').replace('toolkit', 'basekit'));
    await expect(pullImage(to, `oci:${root}/l:1`, 'x')).rejects.toMatchObject({
      code: 'CATALOG_LAYOUT',
      message: expect.stringContaining('other bytes') as string,
    });
    for (const text of [
      '',
      '{',
      'null',
      '[]',
      '{"manifests":{}}',
      '{"manifests":[null]}',
      '{"manifests":[{"digest":"sha256:../../x"}]}',
      '{"manifests":[]}',
    ]) {
      writeFileSync(join(root, 'l/index.json'), text);
      const code = text.endsWith('[]}') ? 'CATALOG_LAYOUT_NOT_FOUND' : 'CATALOG_LAYOUT';
      await expect(pullImage(to, `oci:${root}/l:1`, 'x')).rejects.toMatchObject({ code });
    }
    await nothingIn(to);
  });

  test('an ordinary image is not pulled, but named as one to convert', async () => {
    const put = (text: string) => {
      const digest = digestOf(text);
      mkdirSync(join(root, 'l/blobs/sha256'), { recursive: true });
      writeFileSync(join(root, 'l/blobs/sha256', hexOf(digest)), text);
      return { digest, size: text.length };
    };
    const manifest = put(
      JSON.stringify({
        schemaVersion: 2,
        config: { mediaType: 'application/vnd.oci.image.config.v1+json', ...put('{}') },
        layers: [{ mediaType: 'application/vnd.oci.image.layer.v1.tar+gzip', ...put('x') }],
      }),
    );
    writeFileSync(
      join(root, 'l/index.json'),
      JSON.stringify({ manifests: [{ mediaType: 'application/vnd.oci.image.manifest.v1+json', ...manifest }] }),
    );
    await expect(pullImage(to, `oci:${root}/l`, 'x')).rejects.toMatchObject({ code: 'CATALOG_NOT_CONVERTED' });
    await nothingIn(to);
  });
});

describe('an archive', () => {
  test('goes out in one file, the same bytes each time, and comes back whole', async () => {
    const archive = `${root}/app.tar`;
    await pushImage(from, 'app:1', `oci-archive:${archive}:v1`);
    const first = readFileSync(archive);
    await pushImage(from, 'app:1', `oci-archive:${archive}:v1`, { parallel: 1 });
    expect(digestOf(readFileSync(archive))).toBe(digestOf(first));
    await pullImage(to, `oci-archive:${archive}:v1`, 'x');
    await same(to, 'x');
    await removeImage(to, 'x');
    for (const size of [0, 100, 1000, 500_000]) {
      writeFileSync(archive, first.subarray(0, size));
      await expect(pullImage(to, `oci-archive:${archive}:v1`, 'x')).rejects.toMatchObject({
        code: expect.stringMatching(/CATALOG_(LAYOUT|PULL_MISMATCH)/) as string,
      });
      await nothingIn(to);
    }
    await expect(pullImage(to, `oci-archive:${root}/none`, 'x')).rejects.toMatchObject({ code: 'CATALOG_LAYOUT' });
  });

  test('a damaged store does not get into one, and the old one stays', async () => {
    const archive = `${root}/app.tar`;
    writeFileSync(archive, 'the old one');
    const path = from.localPath(image.layers[1]!.devices[0]!.blob.digest)!;
    const bytes = readFileSync(path);
    bytes[5]! ^= 1;
    writeFileSync(path, bytes);
    const damaged = { code: 'STORE_DIGEST_MISMATCH', message: expect.stringContaining(path) as string };
    await expect(pushImage(from, 'app:1', `oci-archive:${archive}`)).rejects.toMatchObject(damaged);
    expect(readFileSync(archive, 'utf8')).toBe('the old one');
    expect(readdirSync(root).sort()).toEqual(['app.tar', 'from']);
    await expect(pushImage(from, 'app:1', `oci:${root}/l`)).rejects.toMatchObject(damaged);
    expect(existsSync(join(root, 'l/index.json'))).toBe(false);
  });
});

describe('streams and tasks', () => {
  const bytes = Buffer.from('abcdefghij');
  const blob = { mediaType: '', digest: digestOf(bytes), size: 10 };
  async function* pieces(of: Buffer, size = 3) {
    for (let i = 0; i < of.length; i += size) yield of.subarray(i, i + size);
  }
  test('the end of a verified stream is the proof', async () => {
    const mismatch = (why: string) => new Error(why);
    expect(Buffer.concat(await collected(verified(pieces(bytes), blob, mismatch))).toString()).toBe('abcdefghij');
    for (const [wrong, why] of [
      ['abcdefghiX', 'digest'],
      ['abcdefghijk', 'longer'],
      ['abcdefghi', '9 bytes came'],
      ['', '0 bytes came'],
    ] as const) {
      const got: Buffer[] = [];
      await expect(
        (async () => {
          for await (const piece of verified(pieces(Buffer.from(wrong)), blob, mismatch)) got.push(piece);
        })(),
      ).rejects.toThrow(why);
      expect(Buffer.concat(got).length).toBeLessThan(10);
    }
    expect(
      await collected(verified(pieces(Buffer.alloc(0)), { ...blob, digest: digestOf(''), size: 0 }, mismatch)),
    ).toEqual([]);
  });
  test('the first failure stops the other tasks, which end first', async () => {
    const log: string[] = [];
    const work = async (name: string, signal: AbortSignal) => {
      if (name === 'bad') {
        await delay(5);
        throw new Error('bad');
      }
      await delay(1000, undefined, { signal }).catch(() => log.push(`${name} stopped`));
    };
    await expect(inParallel(['a', 'bad', 'c', 'd'], 2, work)).rejects.toThrow('bad');
    expect(log).toEqual(['a stopped']);
  });
  test('a broken connection keeps what has been verified, for the next try; wrong bytes keep nothing', async () => {
    await pushImage(from, 'app:1', `oci:${root}/l`);
    const last = allBlobsOf(image).at(-1)!.digest;
    const depot = new LayoutDepot(join(root, 'l'), undefined);
    const open = depot.open.bind(depot);
    const pull = async () => {
      const staging = await to.stage();
      return pullFrom(to, depot, 'x', staging.path, { parallel: 1 }).finally(() => staging.remove());
    };
    for (const retryable of [false, true]) {
      const broken = new DsecError('BROKEN', { message: 'the connection broke', exit: 6, http: 502, retryable });
      depot.open = async function* (blob) {
        if (blob.digest === last) throw broken;
        yield* open(blob);
      };
      await expect(pull()).rejects.toBe(broken);
      expect(await collected(to.listBlobs())).toHaveLength(retryable ? 6 : 0);
      expect(await to.listRefs()).toEqual([]);
    }
    depot.open = open;
    expect(await pull()).toMatchObject({ fetchedBlobs: 1, skippedBlobs: 6 });
    await same(to, 'x');
  });

  test('an abort ends a pull, and leaves nothing', async () => {
    await pushImage(from, 'app:1', `oci:${root}/l`);
    const stop = new AbortController();
    const pulling = pullImage(to, `oci:${root}/l`, 'x', {
      parallel: 1,
      signal: stop.signal,
      progress: () => stop.abort(new Error('enough')),
    });
    await expect(pulling).rejects.toThrow('enough');
    await nothingIn(to);
  });
});

describe.skipIf(!withRegistry)('a registry', () => {
  let folder: string;
  let server: ChildProcess;
  let host: string;
  beforeAll(async () => {
    folder = mkdtempSync(join(tmpdir(), 'dsec-registry-'));
    const port = await new Promise<number>((resolve) => {
      const probe = createServer().listen(0, '127.0.0.1', () => {
        const { port } = probe.address() as { port: number };
        probe.close(() => resolve(port));
      });
    });
    host = `127.0.0.1:${port}`;
    writeFileSync(
      join(folder, 'config.yml'),
      `version: 0.1\nlog: {level: error}\nstorage: {filesystem: {rootdirectory: ${folder}/data}, delete: {enabled: true}}\nhttp: {addr: "${host}"}\n`,
    );
    server = spawn('docker-registry', ['serve', join(folder, 'config.yml')], { stdio: 'ignore' });
    for (let i = 0; i < 200; i++) {
      if ((await fetch(`http://${host}/v2/`).catch(() => undefined))?.ok) break;
      await delay(50);
    }
  });
  afterAll(() => {
    server.kill('SIGKILL');
    rmSync(folder, { recursive: true, force: true });
  });

  test('takes an image, skips what it has, mounts what another repository has, and gives it back', async () => {
    expect(await pushImage(from, 'app:1', `docker://${host}/team/app:1`)).toMatchObject({
      sentBlobs: 7,
      skippedBlobs: 0,
      destination: `docker://${host}/team/app:1`,
    });
    expect(await pushImage(from, 'app:1', `docker://${host}/team/app:2`)).toMatchObject({
      sentBlobs: 0,
      skippedBlobs: 7,
    });
    // Remembered from the push before.
    expect(await pushImage(from, 'app:1', `docker://${host}/other/app`)).toMatchObject({
      sentBlobs: 0,
      skippedBlobs: 7,
    });
    expect(await pullImage(to, `docker://${host}/other/app`, 'got')).toMatchObject({ fetchedBlobs: 7 });
    await same(to, 'got');
    // Named by whoever pushes.
    expect(
      await pushImage(to, 'got', `docker://${host}/third/app:x`, { mountFrom: ['not/there', 'team/app'] }),
    ).toMatchObject({ sentBlobs: 0 });
    const third = await openStore(join(root, 'third'));
    const pulled = await pullImage(third, `docker://${host}/third/app@${image.manifestDigest}`, 'by/digest');
    expect(pulled.image.manifestDigest).toBe(image.manifestDigest);
    await expect(pullImage(third, `docker://${host}/team/app:none`, 'x')).rejects.toMatchObject({
      code: 'SOURCE_REGISTRY_NOT_FOUND',
    });
  });

  test('bytes that the registry damaged are not published', async () => {
    await pushImage(from, 'app:1', `docker://${host}/damaged/app:1`);
    const digest = image.layers[1]!.devices[0]!.blob.digest;
    const path = join(folder, 'data/docker/registry/v2/blobs/sha256', hexOf(digest).slice(0, 2), hexOf(digest), 'data');
    const good = readFileSync(path);
    for (const size of [good.length, good.length - 1000]) {
      const bad = Buffer.from(good.subarray(0, size));
      bad[10]! ^= 1;
      writeFileSync(path, bad);
      await expect(pullImage(to, `docker://${host}/damaged/app:1`, 'x')).rejects.toMatchObject({ name: 'DsecError' });
      expect(await to.listRefs()).toEqual([]);
      expect(await to.stat(digest)).toBeUndefined();
    }
    writeFileSync(path, good);
    await pullImage(to, `docker://${host}/damaged/app:1`, 'x');
    await same(to, 'x');
  });

  test('a damaged store does not get into one', async () => {
    const bytes = Buffer.from('not what it was'.padEnd(700_000));
    const fresh = await publishMadeUp(from, 'fresh', { layers: ['fresh'], dataBytes: 700_000 });
    writeFileSync(from.localPath(fresh.layers[0]!.devices[0]!.blob.digest)!, bytes);
    await expect(pushImage(from, 'fresh', `docker://${host}/fresh/app`)).rejects.toMatchObject({
      code: 'STORE_DIGEST_MISMATCH',
    });
    await expect(pullImage(to, `docker://${host}/fresh/app`, 'x')).rejects.toMatchObject({
      code: 'SOURCE_REGISTRY_NOT_FOUND',
    });
  });

  test.skipIf(!withSkopeo)('what is pushed is an image to skopeo, and what skopeo copies is one to us', async () => {
    await pushImage(from, 'app:1', `docker://${host}/skopeo/app:1`);
    const skopeo = (...args: string[]) =>
      execFileSync('skopeo', args, { encoding: 'utf8', stdio: ['ignore', 'pipe', 'pipe'] });
    const raw = skopeo('inspect', '--raw', '--tls-verify=false', `docker://${host}/skopeo/app:1`);
    expect(digestOf(raw)).toBe(image.manifestDigest);
    skopeo('copy', '--src-tls-verify=false', `docker://${host}/skopeo/app:1`, `oci:${root}/copied:v1`);
    await pullImage(to, `oci:${root}/copied:v1`, 'x');
    await same(to, 'x');
    await pushImage(from, 'app:1', `oci:${root}/ours:v2`);
    skopeo('copy', '--dest-tls-verify=false', `oci:${root}/ours:v2`, `docker://${host}/skopeo/back:1`);
    expect(digestOf(skopeo('inspect', '--raw', '--tls-verify=false', `docker://${host}/skopeo/back:1`))).toBe(
      image.manifestDigest,
    );
    skopeo('copy', `oci:${root}/ours:v2`, `oci-archive:${root}/skopeo.tar:v3`);
    await removeImage(to, 'x');
    await pullImage(to, `oci-archive:${root}/skopeo.tar:v3`, 'y');
    await same(to, 'y');
    await pushImage(from, 'app:1', `oci-archive:${root}/ours.tar:v4`);
    expect(digestOf(skopeo('inspect', '--raw', `oci-archive:${root}/ours.tar:v4`))).toBe(image.manifestDigest);
  });
});
