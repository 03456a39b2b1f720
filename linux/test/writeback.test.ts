import { closeSync, mkdtempSync, openSync, readFileSync, rmSync, writeSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { expect, test } from 'vitest';
import { startWriteback } from '../writeback.ts';

test('a hint that never fails and changes nothing', () => {
  const dir = mkdtempSync(join(tmpdir(), 'dsec-writeback-'));
  const fd = openSync(join(dir, 'f'), 'w+');
  writeSync(fd, Buffer.alloc(100_000, 7));
  startWriteback(fd, 0, 100_000);
  startWriteback(fd, 1 << 30, 4096);
  startWriteback(9999, 0, 1);
  closeSync(fd);
  expect(readFileSync(join(dir, 'f'))).toEqual(Buffer.alloc(100_000, 7));
  rmSync(dir, { recursive: true });
});
