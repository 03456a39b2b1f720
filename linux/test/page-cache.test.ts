import { mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { cachedBytes, dropCached } from '../page-cache.ts';

describe('page cache', () => {
  let folder: string;
  beforeAll(() => {
    folder = mkdtempSync(join(tmpdir(), 'dsec-page-cache-'));
  });
  afterAll(() => rmSync(folder, { recursive: true, force: true }));

  it('tells how much of a file is in memory, before and after it is dropped', (context) => {
    const path = join(folder, 'file');
    writeFileSync(path, Buffer.alloc(1 << 20, 1));
    const written = cachedBytes(path);
    if (written === undefined) return context.skip('this kernel has no cachestat');
    expect(written).toBe(1 << 20);
    dropCached(path);
    // tmpfs has nowhere else to keep them.
    if (cachedBytes(path) === written) return context.skip('the temporary folder is in memory');
    expect(cachedBytes(path)).toBe(0);
    readFileSync(path);
    expect(cachedBytes(path)).toBe(1 << 20);
  });

  it('fails for a file that is not there', () => {
    expect(() => cachedBytes(join(folder, 'nothing'))).toThrow(expect.objectContaining({ code: 'ENOENT' }));
  });
});
