import { createHash, randomBytes, randomInt } from 'node:crypto';
import { mkdtempSync, readFileSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, beforeEach, expect, test } from 'vitest';
import { createSha256 } from '#linux';
import { DataFile } from '../layer/data-file.ts';
import { makeBlob } from '../layer/make-blob.ts';

let dir: string;
beforeEach(() => {
  dir = mkdtempSync(join(tmpdir(), 'dsec-data-file-'));
});
afterEach(() => rmSync(dir, { recursive: true, force: true }));

const sha = (bytes: Buffer) => createHash('sha256').update(bytes).digest('hex');
const chunks = (bytes: Buffer) =>
  Array.from({ length: Math.ceil(bytes.length / 262_144) }, (_, i) =>
    sha(bytes.subarray(i * 262_144, (i + 1) * 262_144)),
  ).join('');

test.each([
  ['through the page cache', undefined],
  ['directly', 0],
  ['directly from 5 MiB on', 5 << 20],
])(
  'appended, taken back, read back, hashed, written %s: always what a plain buffer would be',
  async (_, directFromBytes) => {
    const pool = randomBytes(8 << 20);
    const room = Buffer.alloc(100 << 20);
    for (let round = 0; round < 6; round++) {
      const path = join(dir, `data-${round}`);
      const file = new DataFile(path, { hash: round % 3 !== 2, directFromBytes });
      const streams = [createSha256(), createSha256()];
      const besides: Buffer[][] = [[], []];
      let model = room.subarray(0, 0);
      try {
        for (let step = 0; step < 20; step++) {
          // One "file" at a time: what was appended since its begin may be taken back to there.
          file.rewindPoint = file.length;
          const start = model.length;
          for (let parts = randomInt(1, 4); parts > 0; parts--) {
            const bytes = 4096 * [1, randomInt(1, 40), randomInt(1, 900)][randomInt(3)]!;
            const at = randomInt(pool.length - bytes);
            file.append([pool.subarray(at, at + bytes)]);
            pool.copy(room, model.length, at, at + bytes);
            model = room.subarray(0, model.length + bytes);
            const what = randomInt(4);
            if (what === 0) await file.drain();
            if (what < 2) {
              const dues = streams.slice(0, randomInt(3)).map((stream) => {
                const start = randomInt(1000);
                return { stream, bytes: pool.subarray(start, start + randomInt(1_300_000)) };
              });
              dues.forEach(({ bytes }, i) => {
                besides[i]!.push(bytes);
              });
              file.hash(dues);
            }
          }
          if (randomInt(3) === 0) {
            file.rewind(start);
            model = model.subarray(0, start);
          }
          if (model.length > 0) {
            const from = randomInt(model.length);
            const back = Buffer.alloc(randomInt(Math.min(3 << 20, model.length - from) + 1));
            file.readAt(from, back);
            expect(back.equals(model.subarray(from, from + back.length))).toBe(true);
          }
        }
        const digests = await file.finish();
        const written = readFileSync(path);
        expect(written.equals(model), `round ${round}`).toBe(true);
        expect(digests?.hex).toBe(round % 3 === 2 ? undefined : sha(model));
        if (digests !== undefined) expect(Buffer.from(digests.digests).toString('hex')).toBe(chunks(model));
        expect(streams.map((s) => s.digest().toString('hex'))).toEqual(besides.map((all) => sha(Buffer.concat(all))));
      } finally {
        await file.close();
      }
      rmSync(path);
    }
  },
);

test('memory stays bounded when nobody waits for the disk', () => {
  const before = process.memoryUsage().arrayBuffers;
  const file = new DataFile(join(dir, 'data'), { hash: true });
  const piece = randomBytes(1 << 20);
  for (let i = 0; i < 100; i++) file.append([piece]);
  expect(process.memoryUsage().arrayBuffers - before).toBeLessThan(32 << 20);
  return file.close();
});

test('a file that is closed while it is written ends quietly', async () => {
  for (let i = 0; i < 5; i++) {
    const file = new DataFile(join(dir, 'data'), { hash: false });
    file.append([randomBytes(9 << 20)]);
    await file.close();
  }
});

test('a failed write is told by whoever waits next, and by the end', async () => {
  const file = new DataFile('/dev/full', { hash: true, directFromBytes: 0 });
  const appending = async () => {
    for (;;) {
      file.append([Buffer.alloc(4 << 20, 1)]);
      await file.drain();
    }
  };
  await expect(appending()).rejects.toMatchObject({ code: 'ENOSPC' });
  await expect(file.finish()).rejects.toMatchObject({ code: 'ENOSPC' });
  await file.close();
});

test.each([0, 1, 7, 900])('a blob of %i runs', async (count) => {
  const sources = [randomBytes(9 << 20), randomBytes(5 << 20)].map((bytes, i) => {
    const path = join(dir, `source-${i}`);
    return { bytes, path };
  });
  const { writeFileSync } = await import('node:fs');
  for (const { bytes, path } of sources) writeFileSync(path, bytes);
  const runs = Array.from({ length: count }, () => {
    const { path, bytes } = sources[randomInt(2)]!;
    const length = 4096 * randomInt(1, count > 100 ? 10 : 1000);
    return { path, length, offset: 4096 * randomInt((bytes.length - length) / 4096) };
  });
  const model = Buffer.concat(
    runs.map(({ path, offset, length }) =>
      sources.find((s) => s.path === path)!.bytes.subarray(offset, offset + length),
    ),
  );
  for (const out of [undefined, join(dir, 'blob')]) {
    const { hex, digests } = await makeBlob(runs, out);
    expect(hex).toBe(sha(model));
    expect(Buffer.from(digests).toString('hex')).toBe(chunks(model));
    if (out !== undefined) expect(readFileSync(out).equals(model)).toBe(true);
  }
});

test('a run that is not there is an error', async () => {
  await expect(
    makeBlob([{ path: join(dir, 'none'), offset: 0, length: 4096 }], join(dir, 'blob')),
  ).rejects.toMatchObject({
    code: 'ENOENT',
  });
});
