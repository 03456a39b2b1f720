/** That the comparison of trees sees every kind of difference: it decides what the tests of real images mean. */
import { execFileSync } from 'node:child_process';
import { chmodSync, chownSync, linkSync, mkdirSync, mkdtempSync, rmSync, symlinkSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, beforeEach, expect, it } from 'vitest';
import { lsetxattr } from '#linux';
import { attributesOf, differences } from './tree-attributes.ts';

let root: string;
beforeEach(() => {
  root = mkdtempSync(join(tmpdir(), 'dsec-attributes-'));
});
afterEach(() => rmSync(root, { recursive: true, force: true }));

function tree(name: string): string {
  const path = join(root, name);
  mkdirSync(join(path, 'folder'), { recursive: true });
  for (const file of ['a', 'b', 'c']) writeFileSync(join(path, 'folder', file), 'content');
  symlinkSync('a', join(path, 'folder/link'));
  linkSync(join(path, 'folder/a'), join(path, 'folder/a2'));
  resetTimes(path);
  return path;
}

/** So that a change shows by nothing but itself. */
function resetTimes(path: string): void {
  execFileSync('find', [path, '-exec', 'touch', '-h', '-d', '@1000', '{}', '+']);
}

const changes: Record<string, (path: string) => void> = {
  content: (path) => writeFileSync(join(path, 'folder/b'), 'CONTENT'),
  size: (path) => writeFileSync(join(path, 'folder/b'), 'content and more'),
  mode: (path) => chmodSync(join(path, 'folder/b'), 0o4755),
  'time, by nanoseconds': (path) =>
    execFileSync('touch', ['-d', '1970-01-01T00:16:40.000000100Z', join(path, 'folder/b')]),
  attribute: (path) => lsetxattr(join(path, 'folder/b'), 'user.x', Buffer.from([0])),
  type: (path) => {
    rmSync(join(path, 'folder/b'));
    mkdirSync(join(path, 'folder/b'));
  },
  'link target': (path) => {
    rmSync(join(path, 'folder/link'));
    symlinkSync('b', join(path, 'folder/link'));
  },
  'hard link': (path) => {
    rmSync(join(path, 'folder/b'));
    linkSync(join(path, 'folder/a'), join(path, 'folder/b'));
  },
  missing: (path) => rmSync(join(path, 'folder/c')),
  'one more': (path) => writeFileSync(join(path, 'folder/d'), ''),
};
if (process.getuid?.() === 0) {
  changes.owner = (path) => chownSync(join(path, 'folder/b'), 1, 0);
  changes.device = (path) => {
    rmSync(join(path, 'folder/b'));
    execFileSync('mknod', [join(path, 'folder/b'), 'c', '5', '1']);
  };
}

it('sees none between equal trees', () => {
  const found = attributesOf(tree('one'));
  expect([...found.keys()]).toEqual([
    '/',
    '/folder',
    '/folder/a',
    '/folder/a2',
    '/folder/b',
    '/folder/c',
    '/folder/link',
  ]);
  expect(differences(found, attributesOf(tree('two')))).toEqual([]);
});

it.each(Object.keys(changes))('sees a difference in %s', (name) => {
  const expected = attributesOf(tree('one'));
  const other = tree('two');
  changes[name]!(other);
  if (!name.startsWith('time')) resetTimes(other);
  expect(differences(expected, attributesOf(other))).not.toEqual([]);
});
