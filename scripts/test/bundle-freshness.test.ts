/** Whether a bundle is fresh, asked by a process that stays while its sources change. */
import { mkdirSync, mkdtempSync, renameSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { setTimeout as delay } from 'node:timers/promises';
import { afterEach, beforeEach, describe, expect, it } from 'vitest';
import { fileState, watchedFreshness } from '../bundle-stamp.mjs';

describe('watchedFreshness', () => {
  let root: string;
  beforeEach(() => {
    root = mkdtempSync(join(tmpdir(), 'dsec-fresh-'));
    for (const folder of ['dist/dsec-1', 'a', 'b/c']) mkdirSync(join(root, folder), { recursive: true });
    for (const path of ['a/one.ts', 'b/c/two.ts']) writeFileSync(join(root, path), path);
    stamp('dsec-1');
  });
  afterEach(() => rmSync(root, { recursive: true, force: true }));

  const stamp = (folder: string) => {
    const files = Object.fromEntries(
      ['a/one.ts', 'b/c/two.ts', 'b/none.ts'].map((path) => [path, fileState(join(root, path))]),
    );
    const staging = join(root, 'dist/.stamp');
    writeFileSync(staging, JSON.stringify({ folder, files }));
    renameSync(staging, join(root, 'dist/dsec.stamp.json'));
  };
  const open = (folder = 'dsec-1') => watchedFreshness(root, 'dsec', join(root, 'dist', folder));
  const becomes = async (isFresh: () => boolean, answer: boolean) => {
    const deadline = Date.now() + 30_000;
    while (isFresh() !== answer && Date.now() < deadline) await delay(5);
    expect(isFresh()).toBe(answer);
  };

  it.each([
    ['a source is edited', () => writeFileSync(join(root, 'b/c/two.ts'), 'longer than before')],
    [
      'a source is replaced',
      () => {
        writeFileSync(join(root, 'a/new'), 'other');
        renameSync(join(root, 'a/new'), join(root, 'a/one.ts'));
      },
    ],
    ['a source is removed', () => rmSync(join(root, 'a/one.ts'))],
    ['one appears that was not there', () => writeFileSync(join(root, 'b/none.ts'), '')],
    [
      'another build takes its place',
      () => {
        mkdirSync(join(root, 'dist/dsec-2'));
        stamp('dsec-2');
      },
    ],
    ['the build is removed', () => rmSync(join(root, 'dist/dsec-1'), { recursive: true })],
  ])('sees that %s', async (_what, change) => {
    const isFresh = open();
    expect([isFresh(), isFresh()]).toEqual([true, true]);
    change();
    await becomes(isFresh, false);
  });

  it('sees what was changed before the turn in which it is asked', async () => {
    const isFresh = open();
    expect(isFresh()).toBe(true);
    for (let i = 0; i < 20; i++) {
      writeFileSync(join(root, 'a/one.ts'), `edit ${i}, ${'x'.repeat(i)}`);
      await new Promise((resolve) => setTimeout(() => setImmediate(resolve), 0));
      expect(isFresh()).toBe(false);
      stamp('dsec-1');
      await becomes(isFresh, true);
    }
  });

  it('is never fresh for another build', () => {
    expect(open('dsec-9')()).toBe(false);
  });
});
