/** The S3 store against a real S3 server, where there is one. */
import { execFileSync, spawnSync } from 'node:child_process';
import { existsSync, mkdtempSync, readdirSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, test } from 'vitest';
import { digestOf, hexOf } from '#base';
import { allBlobsOf, openImage, removeImage } from '../catalog/catalog.ts';
import { collectGarbage } from '../catalog/collect-garbage.ts';
import { openStore } from '../store/open-store.ts';
import { S3Access } from '../store/s3-access.ts';
import { S3Store, type S3StoreOptions } from '../store/s3-store.ts';
import { parseS3Url } from '../store/s3-url.ts';
import { S3Writer } from '../store/s3-writer.ts';
import { findS3Server, LoopbackS3, S3_KEYS } from './loopback-s3.ts';
import { publishMadeUp } from './made-up-image.ts';
import { collected, someBytes, storeConformance } from './store-conformance.ts';

const MiB = 1024 * 1024;
/** The smallest part that S3 allows. */
const sizes = { singleBytes: MiB, partBytes: 5 * MiB };

const program = findS3Server('s3-store');
let root: string;
let s3: LoopbackS3;
beforeAll(async () => {
  if (program === undefined) return;
  root = mkdtempSync(join(tmpdir(), 'dsec-s3-'));
  s3 = await LoopbackS3.start(program, root, 'bucket');
});
afterAll(async () => {
  await s3?.stop();
  if (root !== undefined) rmSync(root, { recursive: true, force: true });
});

const environment = () => ({ ...S3_KEYS, DSEC_CACHE: join(root, 'cache') });
const storeAt = async (prefix: string, more: S3StoreOptions = {}) => {
  const store = new S3Store(s3.url('bucket', prefix), { env: environment(), ...more });
  await store.open();
  return store;
};
const inBucket = (...parts: string[]) => join(root, 'buckets/bucket', ...parts);
const filesIn = (folder: string): string[] =>
  existsSync(folder)
    ? readdirSync(folder, { recursive: true, withFileTypes: true })
        .filter((entry) => entry.isFile())
        .map((entry) => join(entry.parentPath, entry.name).slice(folder.length + 1))
        .sort()
    : [];
let stores = 0;

if (program !== undefined) {
  storeConformance('s3', async () => {
    const prefix = `conformance/${stores++}`;
    return {
      store: await storeAt(prefix),
      again: () => storeAt(prefix),
      damage: async (digest, bytes) => writeFileSync(inBucket(prefix, 'blobs/sha256', hexOf(digest)), bytes),
      damageRef: async (repository, tag, text) =>
        writeFileSync(inBucket(prefix, 'refs', repository, '_tags', tag), text),
      close: async () => rmSync(inBucket(prefix), { recursive: true, force: true }),
      ageStepMs: 1100,
    };
  });
}

describe.skipIf(program === undefined)('an S3 bucket', () => {
  test('holds the keys that docs/store.md names', async () => {
    const store = await storeAt('keys');
    const digest = await store.put(Buffer.from('x'));
    await store.renew(digest);
    await store.setRef({ name: 'team/app:1', manifest: { mediaType: 'm', digest, size: 1 } });
    await store.putRecord('conversion', 'k.1', { a: 1 });
    const staging = await store.stage();
    const hold = await store.hold('publish');
    const id = staging.path.split('/').at(-1);
    expect(filesIn(inBucket('keys'))).toEqual([
      `blobs/sha256/${hexOf(digest)}`,
      'dsec-store.json',
      'records/conversion/k.1.json',
      'refs/team/app/_tags/1',
      `renewed/sha256/${hexOf(digest)}`,
      expect.stringMatching(/^work\/holds\/publish\/[0-9a-f]{16}$/),
      `work/staging/${id}/beat`,
      `work/staging/${id}/start`,
    ]);
    await hold.release();
    await staging.remove();
    await store.deleteBlob(digest);
    expect(filesIn(inBucket('keys'))).toEqual([
      'dsec-store.json',
      'records/conversion/k.1.json',
      'refs/team/app/_tags/1',
    ]);
    expect(readdirSync(join(root, 'cache/staging'))).toEqual([]);
  });

  test('the whole bucket is a store too, and a prefix with other things in it is none', async () => {
    await expect(storeAt('')).rejects.toMatchObject({ code: 'STORE_FOREIGN' });
    writeFileSync(inBucket('stray.txt'), 'x');
    await expect(storeAt('stray.txt')).resolves.toBeDefined();
    rmSync(inBucket('stray.txt'));
    const other = await LoopbackS3.start(program!, join(root, 'other'), 'whole');
    try {
      const store = new S3Store(other.url('whole'), { env: environment() });
      await store.open();
      const digest = await store.put(Buffer.from('x'));
      expect((await store.readVerified(digest)).toString()).toBe('x');
      expect(await collected(store.listBlobs())).toHaveLength(1);
    } finally {
      await other.stop();
    }
  });

  test('wrong keys, no bucket, no server: each said in its own words', async () => {
    const wrong = new S3Store(s3.url('bucket', 'a'), {
      env: { ...environment(), AWS_SECRET_ACCESS_KEY: 'wrong' },
    });
    await expect(wrong.open()).rejects.toMatchObject({ code: 'STORE_REMOTE_ACCESS', retryable: false, exit: 5 });
    const gone = new S3Store(s3.url('no-such-bucket', 'a'), { env: environment() });
    await expect(gone.open()).rejects.toMatchObject({ code: 'STORE_BUCKET', exit: 4 });
    const nobody = new S3Store('s3://bucket/a?endpoint=http://127.0.0.1:9', {
      env: environment(),
      retry: { attempts: 2 },
    });
    await expect(nobody.open()).rejects.toMatchObject({
      code: 'STORE_REMOTE',
      retryable: true,
      message: expect.stringContaining('connection refused') as string,
    });
    await expect(
      nobody.setRef({ name: 'a', manifest: { mediaType: 'm', digest: digestOf(''), size: 0 } }),
    ).rejects.toMatchObject({
      code: 'STORE_REMOTE',
    });
  }, 60_000);

  test('a large file goes up in parts, and comes back the same', async () => {
    const store = await storeAt('large', { sizes });
    const bytes = someBytes(17 * MiB + 123, 'large');
    const staging = await store.stage();
    writeFileSync(join(staging.path, 'f'), bytes);
    await store.putFile(join(staging.path, 'f'), digestOf(bytes), bytes.length);
    await staging.remove();
    expect(digestOf(await store.readVerified(digestOf(bytes)))).toBe(digestOf(bytes));
    expect(digestOf(Buffer.concat(await collected(store.stream(digestOf(bytes)))))).toBe(digestOf(bytes));
    expect(await store.read(digestOf(bytes), 9 * MiB - 7, 5000)).toEqual(bytes.subarray(9 * MiB - 7, 9 * MiB + 4993));
    const other = someBytes(6 * MiB, 'buffer');
    expect(digestOf(await store.readVerified(await store.put(other)))).toBe(digestOf(other));
  });

  test('a server killed in the middle of uploads: nothing half published, and the next try succeeds', async () => {
    const store = await storeAt('killed', { sizes });
    const bytes = someBytes(30 * MiB, 'killed');
    const digest = digestOf(bytes);
    let failed = 0;
    for (let round = 0; round < 4; round++) {
      const path = join(root, 'file');
      writeFileSync(path, bytes);
      const upload = store.putFile(path, digest, bytes.length).then(
        () => undefined,
        (error: unknown) => error,
      );
      // A different moment each time; the first is before the first part is whole.
      await new Promise((resolve) => setTimeout(resolve, 10 + round * 40));
      await s3.stop();
      const error = await upload;
      await s3.restart();
      if (error === undefined) continue;
      failed++;
      expect(error).toMatchObject({ code: 'STORE_REMOTE', retryable: true });
      const found = await store.stat(digest);
      // Whole, when only the answer to its completion was lost.
      if (found !== undefined) expect(digestOf(await store.readVerified(digest))).toBe(digest);
      else expect(await collected(store.listBlobs())).toEqual([]);
      await store.deleteBlob(digest);
    }
    expect(failed).toBeGreaterThan(0);
    await store.putFile(join(root, 'file'), digest, bytes.length).catch(() => {});
    writeFileSync(join(root, 'file'), bytes);
    await store.putFile(join(root, 'file'), digest, bytes.length);
    expect(digestOf(await store.readVerified(digest))).toBe(digest);
  }, 120_000);

  test('an upload that a dead process left is ended by housekeeping', async () => {
    const access = new S3Access(parseS3Url(s3.url('bucket', 'left')), environment());
    const { CreateMultipartUploadCommand } = await import('@aws-sdk/client-s3');
    const client = await access.sdk();
    await client.send(new CreateMultipartUploadCommand({ Bucket: 'bucket', Key: 'left/blobs/sha256/x' }));
    const writer = new S3Writer(access);
    expect(await writer.abortUploads('left/', Date.now() - 60_000)).toBe(0);
    expect(await writer.abortUploads('other/', Date.now() + 60_000)).toBe(0);
    expect(await writer.abortUploads('left/', Date.now() + 60_000)).toBe(1);
    expect(await writer.abortUploads('left/', Date.now() + 60_000)).toBe(0);
  });

  test('images: published, opened, garbage collected, removed', async () => {
    const store = await storeAt('images');
    await publishMadeUp(store, 'app:1', { kind: 'toolkit', layers: ['1', '2'], dataBytes: 700_000 });
    await publishMadeUp(store, 'app:2', { kind: 'toolkit', layers: ['1', '3'], dataBytes: 700_000 });
    const [first, second] = [await openImage(store, 'app:1'), await openImage(store, 'app:2')];
    const stray = await store.put(Buffer.from('stray'));
    // Ages are whole seconds here: what is this young is kept.
    await new Promise((resolve) => setTimeout(resolve, 1100));
    const staging = await store.stage();
    const mine = await store.put(Buffer.from('mine'));
    await store.renew(stray);
    expect((await collectGarbage(store, { graceMs: 0 })).deleted).toEqual([]);
    await staging.remove();
    await new Promise((resolve) => setTimeout(resolve, 1100));
    expect((await collectGarbage(store)).deleted).toEqual([]);
    expect((await collectGarbage(store, { graceMs: 0 })).deleted).toEqual([stray, mine].sort());
    const removed = await removeImage(store, 'app:1');
    const kept = new Set(allBlobsOf(second).map((blob) => blob.digest));
    const expected = allBlobsOf(first)
      .map((blob) => blob.digest)
      .filter((digest) => !kept.has(digest));
    expect(removed.deleted).toEqual([...expected, first.manifestDigest].sort());
    for (const { digest } of allBlobsOf(second)) await store.readVerified(digest);
  });

  test('who is at work: silent ones are forgotten, a collector waits for a publisher and gives up in time', async () => {
    const quick = {
      stagingSilentMs: 1500,
      holdSilentMs: 2500,
      holdTimeoutMs: 700,
      holdBeatMs: 100_000,
      stagingBeatMs: 100_000,
    };
    const [store, other] = [await storeAt('work', { leases: quick }), await storeAt('work', { leases: quick })];
    const dead = await store.stage();
    const stuck = await store.hold('publish');
    await expect(other.hold('collect')).rejects.toMatchObject({ code: 'STORE_BUSY', retryable: true });
    expect(await other.oldestStagingMs()).toBeDefined();
    await new Promise((resolve) => setTimeout(resolve, 4000));
    expect(await other.oldestStagingMs()).toBeUndefined();
    // Its holder has not been heard of: it may collect.
    const collecting = await other.hold('collect');
    await expect(store.hold('publish')).rejects.toMatchObject({ code: 'STORE_BUSY' });
    // And a collector that has not been heard of deletes nothing more.
    await new Promise((resolve) => setTimeout(resolve, 1400));
    await expect(other.deleteBlob(digestOf('x'))).rejects.toMatchObject({ code: 'STORE_HOLD_LOST' });
    await collecting.release();
    await other.deleteBlob(digestOf('x'));
    await stuck.release();
    await dead.remove();
    expect(filesIn(inBucket('work/work'))).toEqual([]);
  }, 30_000);

  test.skipIf(spawnSync('openssl', ['version']).status !== 0)('over TLS with an authority of our own', async () => {
    const [cert, key] = [join(root, 'cert.pem'), join(root, 'key.pem')];
    const made = [
      'req',
      '-x509',
      '-newkey',
      'rsa:2048',
      '-nodes',
      '-days',
      '2',
      '-subj',
      '/CN=test',
      '-keyout',
      key,
      '-out',
      cert,
    ];
    execFileSync('openssl', [...made, '-addext', 'subjectAltName=IP:127.0.0.1'], { stdio: 'ignore' });
    const secure = await LoopbackS3.start(program!, join(root, 'secure'), 'bucket', { cert, key });
    try {
      const store = new S3Store(`${secure.url('bucket', 'tls')}&ca=${cert}`, { env: environment() });
      await store.open();
      const digest = await store.put(Buffer.from('x'));
      expect((await store.readVerified(digest)).toString()).toBe('x');
      const untrusted = new S3Store(secure.url('bucket', 'tls'), { env: environment() });
      await expect(untrusted.open()).rejects.toMatchObject({ code: 'STORE_CERTIFICATE', retryable: false });
      const noFile = new S3Store(`${secure.url('bucket', 'tls')}&ca=/no/such.pem`, { env: environment() });
      await expect(noFile.open()).rejects.toMatchObject({ code: 'STORE_CERTIFICATE' });
      const plain = secure.url('bucket', 'tls').replace('https', 'http');
      await expect(new S3Store(plain, { env: environment(), retry: { attempts: 1 } }).open()).rejects.toMatchObject({
        exit: 6,
      });
    } finally {
      await secure.stop();
    }
  });

  test('keys of a profile; none at all is said', async () => {
    const before = { ...process.env };
    writeFileSync(
      join(root, 'credentials'),
      `[images]\naws_access_key_id = ${S3_KEYS.AWS_ACCESS_KEY_ID}\naws_secret_access_key = ${S3_KEYS.AWS_SECRET_ACCESS_KEY}\n`,
    );
    Object.assign(process.env, {
      AWS_SHARED_CREDENTIALS_FILE: join(root, 'credentials'),
      AWS_CONFIG_FILE: join(root, 'no-config'),
      AWS_EC2_METADATA_DISABLED: 'true',
      DSEC_CACHE: join(root, 'cache'),
    });
    try {
      const store = new S3Store(`${s3.url('bucket', 'profile')}&profile=images`);
      await store.open();
      const digest = await store.put(Buffer.from('x'));
      expect((await store.readVerified(digest)).toString()).toBe('x');
      const none = new S3Store(s3.url('bucket', 'profile'));
      await expect(none.open()).rejects.toMatchObject({ code: 'STORE_CREDENTIALS', exit: 5 });
    } finally {
      for (const name of Object.keys(process.env)) if (!(name in before)) delete process.env[name];
      Object.assign(process.env, before);
    }
  });

  test('openStore reads the environment', async () => {
    const before = { ...process.env };
    Object.assign(process.env, S3_KEYS, { AWS_ENDPOINT_URL_S3: s3.endpoint });
    try {
      const store = await openStore('s3://bucket/environment');
      const digest = await store.put(Buffer.from('x'));
      expect(await store.stat(digest)).toEqual({ sizeBytes: 1 });
      expect(store.url).toBe('s3://bucket/environment');
      await expect(openStore('s3://bucket/environment?anonymous=1')).rejects.toMatchObject({
        code: 'STORE_REMOTE_ACCESS',
      });
    } finally {
      for (const name of Object.keys(process.env)) if (!(name in before)) delete process.env[name];
      Object.assign(process.env, before);
    }
  });
});
