/** Trees below a folder of the image, and the folders they may be placed at. */
import { describe, expect, it } from 'vitest';
import { fromText } from '#base';
import { bareEntry, type Entry, type EntryHandler } from '../layer/entry.ts';
import { underPrefix } from '../layer/entry-prefix.ts';
import { openSource } from '../source/open-source.ts';
import { treePrefix } from '../source/tree-prefix.ts';

function placed(prefix: string, ...entries: Partial<Entry>[]): Entry[] {
  const seen: Entry[] = [];
  const handler: EntryHandler = {
    entry: (entry) => seen.push(entry),
    data: () => {},
    hole: () => {},
    fileEnd: () => {},
  };
  const under = underPrefix(fromText(prefix), handler);
  for (const entry of entries) under.entry({ ...bareEntry(fromText(''), 'file'), ...entry } as Entry);
  return seen;
}

describe('a tree below a folder', () => {
  it('gets the folders on the way first, 0755 root:root, time 0', () => {
    expect(placed('a/b')).toEqual([
      { ...bareEntry(fromText('a'), 'dir'), mode: 0o755 },
      { ...bareEntry(fromText('a/b'), 'dir'), mode: 0o755 },
    ]);
  });

  it.each([
    ['f', 'w/f'],
    ['/abs/f', 'w//abs/f'],
    ['./', 'w/./'],
    ['', 'w/'],
    ['.wh.gone', 'w/.wh.gone'],
    ['d/.wh..wh..opq', 'w/d/.wh..wh..opq'],
    ['../../etc/passwd', 'w/etc/passwd'],
    ['a/../../../b', 'w/b'],
    ['a..b/..c', 'w/a..b/..c'],
    ['..', 'w/'],
  ])('places %s at %s', (path, at) => {
    expect(placed('w', { path: fromText(path) })[1]!.path).toBe(at);
  });

  it('moves the targets of hard links along, and leaves those of symlinks', () => {
    const [, hard, soft] = placed(
      'w',
      { path: fromText('l'), kind: 'hardlink', target: fromText('/../f') },
      { path: fromText('s'), kind: 'symlink', target: fromText('/etc/f') },
    );
    expect([hard!.target, soft!.target]).toEqual(['w/f', '/etc/f']);
  });

  it('without a prefix is the tree itself', () => {
    const handler = { entry() {}, data() {}, hole() {}, fileEnd() {} };
    expect(underPrefix(undefined, handler)).toBe(handler);
  });
});

describe('a prefix', () => {
  it.each([
    ['/workspace', 'workspace'],
    ['//srv///work/', 'srv/work'],
  ])('%s is %s', (text, prefix) => expect(treePrefix(text)).toBe(prefix));

  it.each([
    '',
    'workspace',
    './w',
    '/',
    '//',
    '/a/../b',
    '/.',
    '/a\0b',
    '/.wh.a',
    `/${'x'.repeat(256)}`,
    '/ab'.repeat(400),
  ])('refuses %j', (text) => {
    expect(() => treePrefix(text)).toThrow(expect.objectContaining({ code: 'SOURCE_PREFIX', exit: 2 }));
  });

  it('is refused for an image', async () => {
    await expect(openSource('oci:somewhere:1', { prefix: '/w' })).rejects.toMatchObject({ code: 'SOURCE_PREFIX' });
  });
});
