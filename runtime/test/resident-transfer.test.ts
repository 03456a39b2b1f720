/** Transfers that break: what is at the path is whole, old or new, and what has come is not sent again. */
import { createHash, randomBytes } from 'node:crypto';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { findAgent } from '../backend/agent-binary.ts';
import type { NodeSandbox } from '../node/node-sandbox.ts';
import type { UploadSpec } from '../sandbox-api/files.ts';
import { ResidentSite } from './resident-fixture.ts';
import { TEST_IMAGES } from './resident-images.ts';
import { canRun } from './sandbox-fixture.ts';

const agent = findAgent();
if (agent === undefined) console.log('skipped: dsec-agent is not built');
const can = agent !== undefined && canRun();

async function* broken(bytes: Buffer, after: number): AsyncGenerator<Buffer> {
  for (let at = 0; at < after; at += 10_000) yield bytes.subarray(at, Math.min(at + 10_000, after));
  throw new Error('the line is cut');
}

async function* once(bytes: Buffer): AsyncGenerator<Buffer> {
  yield bytes;
}

describe.skipIf(!can).each(TEST_IMAGES)('transfers on $name', { timeout: 120_000 }, (image) => {
  let all: ResidentSite;
  let box: NodeSandbox;
  beforeAll(async () => {
    all = await ResidentSite.open(image.name);
    box = await all.create();
  }, 120_000);
  afterAll(() => all.remove(), 120_000);
  const names = async (folder: string) => (await box.files.list(folder)).map(({ name }) => String(name)).sort();
  const specOf = (path: string, bytes: Buffer): UploadSpec => ({
    path,
    size: bytes.length,
    sha256: createHash('sha256').update(bytes).digest('hex'),
  });

  it('of a write that breaks leave what was there', async () => {
    const { files } = box;
    await files.mkdir('/work/w');
    await files.write('/work/w/x', Buffer.from('old'), { mode: 0o640, uid: 1000, gid: 1001 });
    const bytes = randomBytes(900_000);
    await expect(files.write('/work/w/x', broken(bytes, 500_000))).rejects.toThrow('the line is cut');
    expect(String(await files.read('/work/w/x'))).toBe('old');
    expect(await names('/work/w')).toEqual(['x']);
    await files.write('/work/w/x', once(bytes));
    expect((await files.read('/work/w/x')).equals(bytes)).toBe(true);
    expect(await files.stat('/work/w/x')).toMatchObject({ mode: 0o100640, uid: 1000, gid: 1001 });
    // Through a link, which stays one.
    await files.symlink('x', '/work/w/link');
    await files.write('/work/w/link', once(Buffer.from('through')));
    expect(String(await files.read('/work/w/x'))).toBe('through');
    expect((await files.stat('/work/w/link', { follow: false })).kind).toBe('symlink');
  });

  it('go on where they were, and take their place when all is right', async () => {
    const { files } = box;
    await files.mkdir('/work/u');
    await files.write('/work/u/x', Buffer.from('old'), { mode: 0o600 });
    const bytes = Buffer.concat([randomBytes(400_000), Buffer.alloc(1 << 20), randomBytes(100_001)]);
    const spec = specOf('/work/u/x', bytes);
    expect(await files.uploadState(spec)).toEqual({ offset: 0, complete: false });
    await expect(files.uploadPart(spec, 0, broken(bytes, 300_000))).rejects.toThrow('the line is cut');
    expect(await files.uploadState(spec)).toEqual({ offset: 300_000, complete: false });
    expect(String(await files.read('/work/u/x'))).toBe('old');
    await expect(files.uploadPart(spec, 0, once(bytes))).rejects.toMatchObject({
      code: 'RUNTIME_UPLOAD_OFFSET',
      params: { expected: 300_000 },
    });
    // The runtime service dies meanwhile.
    await all.restart();
    box = all.node.get(box.name);
    const again = box.files;
    expect(await again.uploadPart(spec, 300_000, once(bytes.subarray(300_000, 900_000)))).toEqual({
      offset: 900_000,
      complete: false,
    });
    const rest = { ...spec, uid: 1000, gid: 1001, modifiedMs: 1_000_000_250 };
    const done = { offset: bytes.length, complete: true };
    expect(await again.uploadPart(rest, 900_000, once(bytes.subarray(900_000)))).toEqual(done);
    expect((await again.read('/work/u/x')).equals(bytes)).toBe(true);
    expect(await again.stat('/work/u/x')).toMatchObject({
      mode: 0o100600,
      uid: 1000,
      gid: 1001,
      modifiedMs: 1_000_000_250,
    });
    expect(await again.digest('/work/u/x')).toBe(spec.sha256);
    expect(await names('/work/u')).toEqual(['x']);
    // Asked again, by one that has not heard of it.
    expect(await again.uploadState(spec)).toEqual(done);
    const empty = specOf('/work/u/empty', Buffer.alloc(0));
    expect(await again.uploadPart(empty, 0, once(Buffer.alloc(0)))).toEqual({ offset: 0, complete: true });
  });

  it('that are something else never arrive', async () => {
    const { files } = box;
    await files.mkdir('/work/v');
    const bytes = randomBytes(50_000);
    const spec = specOf('/work/v/x', bytes);
    await expect(files.uploadPart(spec, 0, once(randomBytes(50_000)))).rejects.toMatchObject({
      code: 'RUNTIME_UPLOAD_DIGEST',
    });
    await expect(files.uploadPart(spec, 0, once(randomBytes(50_001)))).rejects.toMatchObject({
      params: { code: 'EFBIG' },
    });
    expect(await files.uploadPart(spec, 0, once(bytes))).toMatchObject({ complete: true });
    const wrong = { ...spec, sha256: 'x' };
    await expect(files.uploadState(wrong)).rejects.toMatchObject({ params: { code: 'EINVAL' } });
    await expect(files.uploadState(specOf('a\0b', bytes))).rejects.toMatchObject({ code: 'RUNTIME_FILE' });
    await expect(files.uploadPart(specOf('/work/none/x', bytes), 0, once(bytes))).rejects.toMatchObject({
      params: { code: 'ENOENT' },
    });
    await files.mkdir('/work/v/folder');
    await expect(files.uploadPart(specOf('/work/v/folder', bytes), 0, once(bytes))).rejects.toMatchObject({
      code: 'RUNTIME_FILE',
    });
    // Two at a time: one after the other.
    const two = specOf('/work/v/two', bytes);
    await Promise.all([files.uploadPart(two, 0, once(bytes)), files.uploadPart(two, 0, once(bytes))]);
    expect(await files.digest('/work/v/two')).toBe(two.sha256);
  });

  it('do not write through links that somebody inside has planted', async () => {
    const { files } = box;
    const bytes = randomBytes(20_000);
    const spec = specOf('/tmp/planted', bytes);
    await files.write('/work/secret', Buffer.from('secret'));
    await expect(files.uploadPart(spec, 0, broken(bytes, 10_000))).rejects.toThrow();
    const part = (await names('/tmp')).find((name) => name.startsWith('.dsec-part-'))!;
    await files.remove(`/tmp/${part}`);
    await files.symlink('/work/secret', `/tmp/${part}`);
    expect(await files.uploadState(spec)).toEqual({ offset: 0, complete: false });
    expect(await files.uploadPart(spec, 0, once(bytes))).toMatchObject({ complete: true });
    expect(String(await files.read('/work/secret'))).toBe('secret');
  });

  it('from an offset', async () => {
    const bytes = randomBytes(600_000);
    await box.files.write('/work/from', bytes);
    const parts: Buffer[] = [];
    for await (const piece of box.files.pieces('/work/from', 123_456)) parts.push(Buffer.from(piece.bytes));
    expect(Buffer.concat(parts).equals(bytes.subarray(123_456))).toBe(true);
  });
});
