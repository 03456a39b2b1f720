import { createHash, randomBytes } from 'node:crypto';
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, expect, test } from 'vitest';
import { bareEntry } from '../layer/entry.ts';
import { LayerPool } from '../layer/layer-pool.ts';
import { tarHeader } from '../layer/tar-header.ts';

const dir = mkdtempSync(join(tmpdir(), 'dsec-layer-pool-'));
afterAll(() => rmSync(dir, { recursive: true, force: true }));

test('a spool that becomes a blob is hashed while it grows', async () => {
  const file = randomBytes(13 << 20);
  const tar = Buffer.concat([
    tarHeader({ ...bareEntry('big', 'file'), sizeBytes: file.length }),
    file,
    Buffer.alloc(1024),
  ]);
  writeFileSync(join(dir, 'layer.tar'), tar);
  const pool = new LayerPool();
  try {
    const dataPath = join(dir, 'data');
    const { digests, dataBytes } = await pool.spool({
      job: {
        op: 'spool',
        label: 'layer',
        layer: 0,
        compression: 'plain',
        digest: undefined,
        sizeBytes: undefined,
        diffId: undefined,
        dataPath,
        tailPath: join(dir, 'tails'),
        tailLimitBytes: 0,
        prefix: undefined,
        codec: undefined,
        becomesBlob: true,
      },
      source: { kind: 'file', path: join(dir, 'layer.tar'), offset: 0, sizeBytes: tar.length },
    });
    const data = readFileSync(dataPath);
    const sha = (bytes: Buffer) => createHash('sha256').update(bytes).digest();
    expect(data.length).toBe(dataBytes);
    expect(digests!.hex).toBe(sha(data).toString('hex'));
    const chunks = Array.from({ length: Math.ceil(data.length / 262144) }, (_, i) =>
      sha(data.subarray(i * 262144, (i + 1) * 262144)),
    );
    expect(Buffer.from(digests!.digests).equals(Buffer.concat(chunks))).toBe(true);
  } finally {
    await pool.close();
  }
});
