/** Layers that are read and inflated by the native library itself: what comes out, what is hashed, and what is refused. */
import { createHash, randomBytes } from 'node:crypto';
import { mkdtempSync, rmSync, truncateSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { gzipSync } from 'node:zlib';
import { afterAll, describe, expect, test } from 'vitest';
import { isDsecError } from '#base';
import { createSha256, gunzipFallback, sha256Fallback } from '#linux';
import { GzipFile } from '../layer/gzip-file.ts';

const dir = mkdtempSync(join(tmpdir(), 'dsec-gzip-file-'));
afterAll(() => rmSync(dir, { recursive: true, force: true }));

const path = join(dir, 'layer.tar.gz');
const sha = (bytes: Buffer) => createHash('sha256').update(bytes).digest('hex');

interface Read {
  readonly content: string;
  readonly blob: string;
  readonly readBytes: number;
}

/** `late`: what was read is hashed at the end only, as far as that is possible. */
async function read(bytes: Buffer, late = false, offset = 0, sizeBytes = bytes.length): Promise<Read> {
  const hash = createSha256();
  const file = await GzipFile.open({ path, offset, sizeBytes }, 'detect', hash);
  const content = createHash('sha256');
  for await (const chunk of file!.chunks('layer', () => {})) {
    content.update(chunk);
    if (late) continue;
    const blob = file!.unhashed(chunk.length);
    hash.update(blob);
    file!.hashed(blob.length);
  }
  return { content: content.digest('hex'), blob: hash.digest().toString('hex'), readBytes: file!.readBytes };
}

async function refusal(bytes: Buffer, sizeBytes = bytes.length): Promise<string> {
  writeFileSync(path, bytes);
  return read(bytes, false, 0, sizeBytes).then(
    () => 'accepted',
    (error) => (isDsecError(error) ? error.code : String(error)),
  );
}

describe.skipIf(gunzipFallback() !== undefined || sha256Fallback() !== undefined)('a gzip file', () => {
  test('longer than all rings, hashed on the way or late', async () => {
    // Of what cannot be compressed, input fills its ring first; of zeros, output.
    const content = Buffer.concat([randomBytes(20 << 20), Buffer.alloc(80 << 20), randomBytes(1234567)]);
    const bytes = gzipSync(content, { level: 1 });
    writeFileSync(path, Buffer.concat([Buffer.alloc(77), bytes, Buffer.from('behind')]));
    for (const late of [false, true]) {
      expect(await read(bytes, late, 77)).toEqual({ content: sha(content), blob: sha(bytes), readBytes: bytes.length });
    }
  }, 300_000);

  test('two at once, one of them waiting', async () => {
    const content = randomBytes(20 << 20);
    const bytes = gzipSync(content, { level: 1 });
    writeFileSync(path, bytes);
    const ahead = (await GzipFile.open({ path, offset: 0, sizeBytes: bytes.length }, 'gzip', createSha256()))!;
    const chunks = ahead.chunks('layer', () => {});
    const first = await chunks.next();
    expect((await read(bytes)).content).toBe(sha(content));
    expect((first.value as Buffer).equals(content.subarray(0, (first.value as Buffer).length))).toBe(true);
    await chunks.return(undefined);
  }, 300_000);

  test('what is no stream, or not all of one, is refused', async () => {
    const content = Buffer.concat([randomBytes(200_000), Buffer.alloc(3 << 20)]);
    const whole = gzipSync(content);
    expect(await refusal(whole)).toBe('accepted');
    expect(await refusal(Buffer.concat([whole, Buffer.alloc(999)]))).toBe('accepted');
    expect(await refusal(whole.subarray(0, -1))).toBe('LAYER_TRUNCATED');
    expect(await refusal(Buffer.concat([whole, Buffer.from('x')]))).toBe('LAYER_TRAILING');
    const damaged = Buffer.from(whole);
    damaged[damaged.length - 7]! ^= 1;
    expect(await refusal(damaged)).toBe('LAYER_DAMAGED');
    expect(await refusal(whole, whole.length + 5)).toBe('LAYER_SIZE');
  });

  test('a file that is cut while it is read', async () => {
    const bytes = gzipSync(randomBytes(60 << 20), { level: 1 });
    writeFileSync(path, bytes);
    const file = (await GzipFile.open({ path, offset: 0, sizeBytes: bytes.length }, 'gzip', createSha256()))!;
    const reading = async () => {
      for await (const chunk of file.chunks('layer', () => {})) {
        if (chunk.length > 0) truncateSync(path, 50 << 20);
        file.hashed(file.unhashed(chunk.length).length);
      }
    };
    await expect(reading()).rejects.toMatchObject({ code: 'LAYER_SIZE' });
  }, 300_000);

  test('other formats go another way', async () => {
    const part = { path, offset: 0, sizeBytes: 3 };
    writeFileSync(path, 'tar');
    expect(await GzipFile.open(part, 'detect', undefined)).toBe(undefined);
    expect(await GzipFile.open(part, 'plain', undefined)).toBe(undefined);
    expect(await GzipFile.open({ ...part, sizeBytes: 0 }, 'detect', undefined)).toBe(undefined);
    await expect(GzipFile.open({ ...part, path: join(dir, 'none') }, 'gzip', undefined)).rejects.toThrow('ENOENT');
  });
});
