/**
 * What every store must do, as tests. An implementation calls `storeConformance` from its own test file, with a function
 * that makes an empty store and one that takes it away.
 */
import { createHash } from 'node:crypto';
import { existsSync } from 'node:fs';
import { writeFile } from 'node:fs/promises';
import { join } from 'node:path';
import { afterEach, beforeEach, describe, expect, test } from 'vitest';
import { type Digest, digestOf } from '#base';
import type { BlobStore, Descriptor } from '../store/blob-store.ts';

export interface StoreUnderTest {
  readonly store: BlobStore;
  /** The same stored things, through a second object (another process would have one). */
  again(): Promise<BlobStore>;
  /** Overwrites a blob's bytes behind the store's back, to damage it. */
  damage(digest: Digest, bytes: Buffer): Promise<void>;
  /** Overwrites the file or object of a ref; for stores that keep refs where others can reach them. */
  damageRef?(repository: string, tag: string, text: string): Promise<void>;
  close(): Promise<void>;
  /** How far apart two moments must be to give different ages; 30 ms. */
  readonly ageStepMs?: number;
}

const ABSENT = digestOf('absent');

export async function collected<T>(items: AsyncIterable<T>): Promise<T[]> {
  const all: T[] = [];
  for await (const item of items) all.push(item);
  return all;
}

/** The same bytes on every run. */
export function someBytes(sizeBytes: number, seed: string): Buffer {
  const bytes = Buffer.alloc(sizeBytes);
  let block = createHash('sha256').update(seed).digest();
  for (let offset = 0; offset < sizeBytes; offset += block.length) {
    block.copy(bytes, offset);
    if (offset % 4096 === 0) block = createHash('sha256').update(block).digest();
  }
  return bytes;
}

export function storeConformance(name: string, make: () => Promise<StoreUnderTest>): void {
  describe(`${name}: a store`, () => {
    let under: StoreUnderTest;
    let store: BlobStore;
    beforeEach(async () => {
      under = await make();
      store = under.store;
    });
    afterEach(() => under.close());

    const manifest = (text: string): Descriptor => ({ mediaType: 'a/b', digest: digestOf(text), size: text.length });

    test('an empty store reads as empty', async () => {
      expect(await store.stat(ABSENT)).toBeUndefined();
      expect(await store.renew(ABSENT)).toBeUndefined();
      expect(await collected(store.listBlobs())).toEqual([]);
      expect(await store.listRefs()).toEqual([]);
      expect(await store.getRef('a:b')).toBeUndefined();
      expect(await store.deleteRef('a:b')).toBe(false);
      expect(await store.getRecord('kind', 'key')).toBeUndefined();
      expect(await store.oldestStagingMs()).toBeUndefined();
      await store.deleteBlob(ABSENT);
    });

    test('every way to read a missing blob says so, for good', async () => {
      const missing = { code: 'STORE_BLOB_MISSING', retryable: false, exit: 4 };
      await expect(store.read(ABSENT, 0, 1)).rejects.toMatchObject(missing);
      await expect(store.readVerified(ABSENT)).rejects.toMatchObject(missing);
      await expect(collected(store.stream(ABSENT))).rejects.toMatchObject(missing);
      await store.put(Buffer.from('another'));
      await expect(store.read(ABSENT, 0, 1)).rejects.toMatchObject(missing);
    });

    test.each([0, 1, 4095, 1024 * 1024, 2_500_001])('a blob of %d bytes comes back as it was put', async (size) => {
      const bytes = someBytes(size, 'x');
      const digest = await store.put(bytes);
      expect(digest).toBe(digestOf(bytes));
      const other = await under.again();
      expect(await other.stat(digest)).toEqual({ sizeBytes: size });
      expect(digestOf(await other.readVerified(digest))).toBe(digest);
      expect(digestOf(Buffer.concat(await collected(other.stream(digest))))).toBe(digest);
      expect(digestOf(await other.read(digest, 0, size))).toBe(digest);
      expect(await collected(other.listBlobs())).toEqual([
        { digest, sizeBytes: size, modifiedMs: expect.any(Number) as number },
      ]);
    });

    test('ranges are exact, and what lies outside the blob is refused', async () => {
      const bytes = someBytes(10_000, 'range');
      const digest = await store.put(bytes);
      for (const [offset, length] of [
        [0, 10_000],
        [1, 1],
        [9_999, 1],
        [4_095, 2],
        [10_000, 0],
        [0, 0],
      ] as const) {
        expect(await store.read(digest, offset, length)).toEqual(bytes.subarray(offset, offset + length));
      }
      for (const [offset, length] of [
        [0, 10_001],
        [9_999, 2],
        [10_001, 0],
        [20_000, 5],
        [-1, 1],
        [0, 2 ** 52],
      ] as const) {
        await expect(store.read(digest, offset, length)).rejects.toMatchObject({ code: 'STORE_SHORT_READ' });
      }
    });

    test('what is read may be changed by its reader', async () => {
      const digest = await store.put(Buffer.from('unchanged'));
      (await store.read(digest, 0, 9)).fill(0);
      (await store.readVerified(digest)).fill(0);
      for await (const piece of store.stream(digest)) piece.fill(0);
      expect((await store.readVerified(digest)).toString()).toBe('unchanged');
    });

    test('a staged file becomes a blob, and is gone from the staging folder', async () => {
      const staging = await store.stage();
      try {
        const bytes = someBytes(300_000, 'staged');
        for (let i = 0; i < 2; i++) {
          const file = join(staging.path, `file${i}`);
          await writeFile(file, bytes);
          await store.putFile(file, digestOf(bytes), bytes.length);
          expect(existsSync(file)).toBe(false);
        }
        expect(digestOf(await store.readVerified(digestOf(bytes)))).toBe(digestOf(bytes));
        expect(await collected(store.listBlobs())).toHaveLength(1);
      } finally {
        await staging.remove();
        await staging.remove();
      }
      expect(existsSync(staging.path)).toBe(false);
    });

    test('a file of another size than promised is not published', async () => {
      const staging = await store.stage();
      try {
        const file = join(staging.path, 'file');
        await writeFile(file, 'short');
        await expect(store.putFile(file, digestOf('longer'), 6)).rejects.toMatchObject({ code: 'STORE_SIZE_MISMATCH' });
        expect(await store.stat(digestOf('longer'))).toBeUndefined();
      } finally {
        await staging.remove();
      }
    });

    test('damage is found by readVerified', async () => {
      const digest = await store.put(Buffer.from('the bytes'));
      await under.damage(digest, Buffer.from('THE bytes'));
      await expect(store.readVerified(digest)).rejects.toMatchObject({ code: 'STORE_DIGEST_MISMATCH' });
      expect((await store.read(digest, 0, 3)).toString()).toBe('THE');
    });

    test('putting a blob again replaces one that was cut short', async () => {
      const bytes = Buffer.from('whole again');
      const digest = await store.put(bytes);
      await under.damage(digest, bytes.subarray(0, 5));
      await store.put(bytes);
      expect(await store.readVerified(digest)).toEqual(bytes);
      await under.damage(digest, Buffer.alloc(0));
      const staging = await store.stage();
      await writeFile(join(staging.path, 'f'), bytes);
      await store.putFile(join(staging.path, 'f'), digest, bytes.length);
      await staging.remove();
      expect(await store.readVerified(digest)).toEqual(bytes);
    });

    test('many writers of one blob all succeed', async () => {
      const bytes = someBytes(100_000, 'race');
      const others = await Promise.all(Array.from({ length: 8 }, () => under.again()));
      const digests = await Promise.all(others.map((other) => other.put(bytes)));
      expect(new Set(digests)).toEqual(new Set([digestOf(bytes)]));
      expect(digestOf(await store.readVerified(digestOf(bytes)))).toBe(digestOf(bytes));
    });

    test('a deleted blob is gone, and can be put again', async () => {
      const bytes = Buffer.from('on and off');
      const digest = await store.put(bytes);
      await store.deleteBlob(digest);
      await store.deleteBlob(digest);
      expect(await store.stat(digest)).toBeUndefined();
      await store.put(bytes);
      expect(await store.readVerified(digest)).toEqual(bytes);
    });

    test('put, putFile and renew make a blob young', async () => {
      const ageOf = async () => (await collected(store.listBlobs()))[0]!.modifiedMs;
      const before = Date.now();
      const digest = await store.put(Buffer.from('age'));
      const put = await ageOf();
      expect(put).toBeGreaterThanOrEqual(before - 1000);
      await new Promise((resolve) => setTimeout(resolve, under.ageStepMs ?? 30));
      expect(await store.renew(digest)).toEqual({ sizeBytes: 3 });
      const renewed = await ageOf();
      expect(renewed).toBeGreaterThan(put);
      await new Promise((resolve) => setTimeout(resolve, under.ageStepMs ?? 30));
      await store.put(Buffer.from('age'));
      expect(await ageOf()).toBeGreaterThan(renewed);
    });

    test('a live staging is known by its start', async () => {
      const before = Date.now();
      const staging = await store.stage();
      const oldest = await (await under.again()).oldestStagingMs();
      expect(oldest).toBeGreaterThanOrEqual(before - 1000);
      expect(oldest).toBeLessThanOrEqual(Date.now());
      await staging.remove();
      expect(await store.oldestStagingMs()).toBeUndefined();
    });

    test('refs are set, replaced, listed by name and deleted', async () => {
      await store.setRef({ name: 'b/c:1', manifest: { ...manifest('one'), annotations: { not: 'kept' } } });
      await store.setRef({ name: 'a', manifest: manifest('two') });
      await store.setRef({ name: 'a:other', manifest: manifest('three') });
      await store.setRef({ name: 'a:latest', manifest: manifest('four') });
      const other = await under.again();
      expect(await other.listRefs()).toEqual([
        { name: 'a:latest', manifest: manifest('four') },
        { name: 'a:other', manifest: manifest('three') },
        { name: 'b/c:1', manifest: manifest('one') },
      ]);
      expect(await other.getRef('a')).toEqual({ name: 'a:latest', manifest: manifest('four') });
      expect(await other.deleteRef('a:other')).toBe(true);
      expect(await other.deleteRef('a:other')).toBe(false);
      expect(await store.getRef('a:other')).toBeUndefined();
      expect((await store.listRefs()).map((ref) => ref.name)).toEqual(['a:latest', 'b/c:1']);
    });

    test('a damaged ref is told of, neither listed nor passed over', async () => {
      if (under.damageRef === undefined) return;
      await store.setRef({ name: 'a:1', manifest: manifest('one') });
      await store.setRef({ name: 'a/b:2', manifest: manifest('two') });
      for (const text of ['', '{"mediaType":', '\0\0\0', '{"mediaType":"m","digest":"sha256:12","size":1}']) {
        await under.damageRef('a/b', '2', text);
        const damaged: [string, Error][] = [];
        expect(await store.listRefs((name, problem) => damaged.push([name, problem]))).toEqual([
          { name: 'a:1', manifest: manifest('one') },
        ]);
        const problem = expect.objectContaining({ code: 'STORE_REF_DAMAGED' }) as Error;
        expect(damaged).toEqual([['a/b:2', problem]]);
        await expect(store.getRef('a/b:2')).rejects.toEqual(problem);
      }
      expect((await store.listRefs()).map((ref) => ref.name)).toEqual(['a:1']);
      expect(await store.deleteRef('a/b:2')).toBe(true);
      expect(await store.getRef('a/b:2')).toBeUndefined();
    });

    test('names that are parts of each other do not meet', async () => {
      const names = [
        'a:b',
        'a/b:c',
        'a/b/c:latest',
        'a:latest',
        'latest:a',
        'tags:x',
        'a/tags:x',
        'a/b:tags',
        'a.b:c',
        'a__b:c',
      ];
      for (const name of names) await store.setRef({ name, manifest: manifest(name) });
      expect((await store.listRefs()).map((ref) => ref.name)).toEqual([...names].sort());
      for (const name of names) expect((await store.getRef(name))!.manifest).toEqual(manifest(name));
      for (const name of names) {
        expect(await store.deleteRef(name)).toBe(true);
        expect(await store.getRef(name)).toBeUndefined();
      }
      expect(await store.listRefs()).toEqual([]);
    });

    test.each([
      '',
      ':',
      ':tag',
      'a:',
      'A:b',
      'a//b',
      '/a',
      'a/',
      '../a',
      'a/..',
      'a/../b',
      '.a',
      'a.',
      'a..b',
      '_a',
      'a_',
      'a___b',
      '_tags/a',
      'a/_tags:b',
      'a b',
      'a\0',
      'a\n',
      'ä',
      'a:.b',
      'a:-b',
      'a:b/c',
      'a:b:c',
      `a:${'t'.repeat(129)}`,
      `${'a'.repeat(256)}:t`,
      `sha256:${'0'.repeat(64)}`,
      'sha256:x',
    ])('the name %j is refused', async (name) => {
      const refused = { code: 'STORE_NAME', exit: 2 };
      await expect(store.getRef(name)).rejects.toMatchObject(refused);
      await expect(store.setRef({ name, manifest: manifest('x') })).rejects.toMatchObject(refused);
      await expect(store.deleteRef(name)).rejects.toMatchObject(refused);
    });

    test('the longest names there are work', async () => {
      const names = [`${'a'.repeat(200)}:${'t'.repeat(128)}`, `${'a/'.repeat(127)}a:_T.-9`];
      for (const name of names) await store.setRef({ name, manifest: manifest('x') });
      expect((await store.listRefs()).map((ref) => ref.name)).toEqual([...names].sort());
    });

    test('setting and deleting one ref at once never fails, and never tears', async () => {
      const others = await Promise.all([under.again(), under.again(), under.again()]);
      await Promise.all(
        others.map(async (other, k) => {
          for (let i = 0; i < 15; i++) {
            if (k === 2) await other.deleteRef('deep/er/name:t');
            else await other.setRef({ name: 'deep/er/name:t', manifest: manifest(`${k}`) });
            await other.getRef('deep/er/name:t');
            await other.listRefs();
          }
        }),
      );
      await store.setRef({ name: 'deep/er/name:t', manifest: manifest('end') });
      expect((await store.getRef('deep/er/name:t'))!.manifest).toEqual(manifest('end'));
    });

    test('records are kept by kind and key', async () => {
      await store.putRecord('conversion', 'abc', { layers: [1, null, 'x'] });
      await store.putRecord('other', 'abc', 7);
      await store.putRecord('conversion', 'abc', { layers: [2] });
      const other = await under.again();
      expect(await other.getRecord('conversion', 'abc')).toEqual({ layers: [2] });
      expect(await other.getRecord('other', 'abc')).toBe(7);
      expect(await other.getRecord('other', 'abd')).toBeUndefined();
      for (const bad of ['', '.', '..', '../x', 'a/b', 'A', 'a\0', 'a'.repeat(201)]) {
        await expect(store.putRecord('kind', bad, 1)).rejects.toMatchObject({ code: 'STORE_RECORD_KEY' });
        await expect(store.getRecord(bad, 'key')).rejects.toMatchObject({ code: 'STORE_RECORD_KEY' });
      }
    });

    test('records are listed by kind and beginning, and deleted', async () => {
      expect(await store.listRecords('kind')).toEqual([]);
      for (const key of ['b.2', 'a.1', 'b.1']) await store.putRecord('kind', key, { key });
      await store.putRecord('kinds', 'b.3', 1);
      const other = await under.again();
      expect(await other.listRecords('kind')).toEqual(['a.1', 'b.1', 'b.2']);
      expect(await other.listRecords('kind', 'b.')).toEqual(['b.1', 'b.2']);
      await other.deleteRecord('kind', 'b.1');
      await other.deleteRecord('kind', 'b.1');
      expect(await store.listRecords('kind', 'b')).toEqual(['b.2']);
      expect(await store.getRecord('kind', 'b.1')).toBeUndefined();
      expect(await store.getRecord('kinds', 'b.3')).toBe(1);
      await expect(store.listRecords('../kind')).rejects.toMatchObject({ code: 'STORE_RECORD_KEY' });
      await expect(store.deleteRecord('kind', '../b')).rejects.toMatchObject({ code: 'STORE_RECORD_KEY' });
    });

    test('collecting excludes publishing, publishing excludes only collecting', async () => {
      const other = await under.again();
      const log: string[] = [];
      const [first, second] = [await store.hold('publish'), await other.hold('publish')];
      const collecting = other.hold('collect').then((hold) => {
        log.push('collect');
        return hold;
      });
      await new Promise((resolve) => setTimeout(resolve, 20));
      log.push('first ends');
      await first.release();
      await new Promise((resolve) => setTimeout(resolve, 20));
      log.push('second ends');
      await second.release();
      await second.release();
      const collector = await collecting;
      const third = store.hold('publish').then(async (hold) => {
        log.push('third');
        await hold.release();
      });
      await new Promise((resolve) => setTimeout(resolve, 20));
      log.push('collect ends');
      await collector.release();
      await third;
      expect(log).toEqual(['first ends', 'second ends', 'collect', 'collect ends', 'third']);
    });
  });
}
