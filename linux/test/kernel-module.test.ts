import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { expect, test } from 'vitest';
import { moduleState } from '../kernel-module.ts';

test('a module is found where the kernel keeps its lists', () => {
  const folder = mkdtempSync(join(tmpdir(), 'dsec-modules-'));
  writeFileSync(
    join(folder, 'modules.dep'),
    'kernel/fs/no_such.ko.xz: kernel/a/needed_by_it.ko.xz\nkernel/b/with-dash.ko:\n',
  );
  writeFileSync(join(folder, 'modules.builtin'), 'kernel/c/always_there.ko\n');
  expect(moduleState('no_such', folder)).toBe('not loaded');
  expect(moduleState('with_dash', folder)).toBe('not loaded');
  expect(moduleState('always_there', folder)).toBe('built in');
  expect(moduleState('needed_by_it', folder)).toBe('missing');
  expect(moduleState('no_such', join(folder, 'nowhere'))).toBe('missing');
  rmSync(folder, { recursive: true });
});
