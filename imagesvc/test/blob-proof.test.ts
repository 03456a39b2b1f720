/** Proofs: made once, remembered while the file is the same, never taken on trust. */
import {
  existsSync,
  linkSync,
  mkdtempSync,
  readdirSync,
  readFileSync,
  rmSync,
  statSync,
  unlinkSync,
  utimesSync,
  writeFileSync,
} from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { setTimeout as delay } from 'node:timers/promises';
import { afterEach, beforeEach, expect, it, vi } from 'vitest';
import { digestOf, hexOf } from '#base';
import { storeSink } from '../convert/store-sink.ts';
import { openProven, recordProof } from '../mount/blob-proof.ts';
import { openStore } from '../store/open-store.ts';

const BYTES = Buffer.from('the blob');
const DIGEST = digestOf(BYTES);
let folder: string;
let path: string;
let cache: string;
let proof: () => string;

beforeEach(() => {
  folder = mkdtempSync(join(tmpdir(), 'dsec-proof-'));
  path = join(folder, 'blob');
  cache = join(folder, 'cache');
  writeFileSync(path, BYTES);
  proof = () => {
    const { dev, ino } = statSync(path, { bigint: true });
    return join(cache, 'proofs', `${hexOf(DIGEST)}-${dev}-${ino}`);
  };
});
afterEach(() => rmSync(folder, { recursive: true, force: true }));

const open = async () => (await openProven(path, DIGEST, BYTES.length, cache)).close();
const mismatch = { code: 'MOUNT_DIGEST_MISMATCH' };

it('a publisher’s proof is remembered: the blob is not read again', async () => {
  await recordProof(path, DIGEST, cache);
  const line = readFileSync(proof(), 'utf8');
  expect(line).toMatch(/^\d+:\d+:8:\d+:\d+\n$/);
  // Shown by a proof that is not true: only a hash could tell.
  const wrong = digestOf('another');
  const { dev, ino } = statSync(path, { bigint: true });
  writeFileSync(join(cache, 'proofs', `${hexOf(wrong)}-${dev}-${ino}`), line);
  (await openProven(path, wrong, BYTES.length, cache)).close();
  rmSync(join(cache, 'proofs', `${hexOf(wrong)}-${dev}-${ino}`));
  await expect(openProven(path, wrong, BYTES.length, cache)).rejects.toMatchObject(mismatch);
});

it('a change of content, with size and times put back, is seen', async () => {
  await delay(30);
  await open();
  expect(readFileSync(proof(), 'utf8')).not.toBe('');
  const { atime, mtime } = statSync(path);
  writeFileSync(path, 'THE BLOB');
  utimesSync(path, atime, mtime);
  await expect(open()).rejects.toMatchObject(mismatch);
});

/** Bytes that this process has read, from anywhere. */
const readBytes = () => Number(/^rchar: (\d+)$/m.exec(readFileSync('/proc/self/io', 'utf8'))![1]);

it('a blob whose times and links move while it is hashed is no damaged blob', async () => {
  const large = Buffer.alloc(48 * 1024 * 1024, 7);
  writeFileSync(path, large);
  const digest = digestOf(large);
  let changes = 0;
  let stop = false;
  const moving = (async () => {
    for (; !stop; changes++) {
      if (changes % 2 === 0) linkSync(path, join(folder, 'link'));
      else unlinkSync(join(folder, 'link'));
      if (changes % 5 === 0) utimesSync(path, new Date(), new Date());
      await delay(1);
    }
  })();
  try {
    (await openProven(path, digest, large.length, cache)).close();
  } finally {
    stop = true;
    await moving;
  }
  expect(changes).toBeGreaterThan(0);
  // Once it rests, it is hashed again, and then no more.
  await delay(30);
  (await openProven(path, digest, large.length, cache)).close();
  const before = readBytes();
  (await openProven(path, digest, large.length, cache)).close();
  expect(readBytes() - before).toBeLessThan(large.length / 2);
  writeFileSync(path, Buffer.alloc(large.length, 8));
  await expect(openProven(path, digest, large.length, cache)).rejects.toMatchObject(mismatch);
});

it('what makes a blob in a store young again costs no mount a hash', async () => {
  const store = await openStore(join(folder, 'store'));
  const large = Buffer.alloc(48 * 1024 * 1024, 7);
  const digest = digestOf(large);
  const publish = async () => {
    const staging = await store.stage();
    writeFileSync(join(staging.path, 'f'), large);
    const sink = storeSink(store, staging);
    await sink.putFile(join(staging.path, 'f'), digest, large.length);
    await staging.remove();
    await sink.recordProofs();
  };
  const mounted = async () => {
    const before = readBytes();
    (await openProven(store.localPath(digest)!, digest, large.length, cache)).close();
    return readBytes() - before < large.length / 2 ? 'not read' : 'read';
  };
  vi.stubEnv('DSEC_CACHE', cache);
  vi.spyOn(process, 'getuid').mockReturnValue(0);
  try {
    await publish();
    expect(await mounted()).toBe('not read');
    await store.renew(digest);
    await publish();
    expect(await mounted()).toBe('not read');
    // The publisher's word is for its own bytes, not for what it found in their place.
    const damaged = Buffer.alloc(large.length, 8);
    writeFileSync(store.localPath(digest)!, damaged);
    await delay(30);
    await publish();
    await expect(mounted()).rejects.toMatchObject(mismatch);
  } finally {
    vi.unstubAllEnvs();
    vi.restoreAllMocks();
  }
});

it('a file that was changed a moment ago is proved, but not remembered', async () => {
  writeFileSync(path, BYTES);
  await open();
  const { ctimeMs } = statSync(path);
  // On a machine that stalls for long the proof may be old enough to keep.
  if (Date.now() - ctimeMs < 15) expect(readFileSync(proof(), 'utf8')).toBe('');
});

it('damaged, cut and stale proofs are no proofs', async () => {
  await recordProof(path, DIGEST, cache);
  const good = readFileSync(proof(), 'utf8');
  for (const bad of ['', 'x', good.slice(0, -1), `${good}more`, good.replace(/:8:/, ':9:'), '\0'.repeat(100)]) {
    writeFileSync(proof(), bad);
    await open();
    expect(readFileSync(proof(), 'utf8')).toBe(good);
  }
});

it('wrong size, wrong bytes and missing files are refused, with nothing remembered', async () => {
  await expect(openProven(path, DIGEST, 7, cache)).rejects.toThrow('8 bytes instead of 7');
  await delay(30);
  writeFileSync(path, 'the blop');
  await expect(open()).rejects.toMatchObject(mismatch);
  await delay(30);
  await expect(open()).rejects.toMatchObject(mismatch);
  rmSync(path);
  await expect(open()).rejects.toMatchObject({ code: 'MOUNT_BLOB_MISSING', exit: 4 });
  for (const name of readdirSync(join(cache, 'proofs'))) {
    expect(readFileSync(join(cache, 'proofs', name), 'utf8')).toBe('');
  }
});

it('a cache that cannot be written is no error: each time is hashed', async () => {
  writeFileSync(join(folder, 'cache'), 'a file');
  await open();
  writeFileSync(path, 'THE BLOB');
  await expect(open()).rejects.toMatchObject(mismatch);
  await recordProof(path, DIGEST, cache);
  await recordProof(join(folder, 'missing'), DIGEST, cache);
  expect(existsSync(join(folder, 'missing'))).toBe(false);
});
