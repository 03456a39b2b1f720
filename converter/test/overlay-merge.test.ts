import { describe, expect, test } from 'vitest';
import { isDsecError } from '#base';
import { GroupView } from '../tree/group-view.ts';
import { OverlayTree } from '../tree/overlay-merge.ts';
import { dir, file, gone, groupsOf, hardlink, layerOf, linesOf, opaque, symlink } from './tree-fixture.ts';

const codeOf = (act: () => unknown): string | undefined => {
  try {
    act();
  } catch (error) {
    return isDsecError(error) ? error.code : String(error);
  }
  return undefined;
};

describe('whiteouts', () => {
  const lower = [dir('d'), file('d/x'), file('d/y')];

  test('one group: the name is gone and no mark stays', () => {
    expect(groupsOf([lower, [gone('d/x')]], true)).toEqual([['d/', 'd/y']]);
  });

  test('a group of its own: the mark stays where a lower group has the name', () => {
    expect(groupsOf([lower, [gone('d/x'), gone('d/nothing')]])).toEqual([
      ['d/', 'd/x', 'd/y'],
      ['d/', '-d/x'],
    ]);
  });

  test('acts on lower layers whatever its place, and the same name of its own layer stays', () => {
    for (const layer of [
      [gone('d/x'), file('d/x')],
      [file('d/x'), gone('d/x')],
    ]) {
      expect(groupsOf([lower, layer])[1]).toEqual(['d/', 'd/x']);
    }
  });

  test('a name made and removed within one group leaves no mark', () => {
    const tree = new OverlayTree();
    tree.apply(layerOf([dir('d')]));
    tree.nextGroup();
    tree.apply(layerOf([file('d/new')]));
    tree.apply(layerOf([gone('d/new')]));
    expect(linesOf(tree.root, new GroupView(tree.group))).toEqual(['d/']);
  });

  test('removed in one layer of a group and made again in the next: no mark, the new file', () => {
    const tree = new OverlayTree();
    tree.apply(layerOf(lower));
    tree.nextGroup();
    tree.apply(layerOf([gone('d/x')]));
    tree.apply(layerOf([file('d/x')]));
    expect(linesOf(tree.root, new GroupView(tree.group))).toEqual(['d/', 'd/x']);
  });

  test('a bare one is refused, AUFS housekeeping is ignored', () => {
    expect(codeOf(() => groupsOf([[file('a/.wh.')]]))).toBe('LAYER_BARE_WHITEOUT');
    expect(groupsOf([[file('.wh..wh.aufs'), dir('.wh..wh.plnk'), file('.wh..wh.plnk/1.2')]])).toEqual([[]]);
  });

  test('of children of a directory that the same layer replaces are no error', () => {
    const layers = [
      [dir('d'), file('d/a')],
      [file('d'), gone('d/a')],
    ];
    expect(groupsOf(layers)[1]).toEqual(['d']);
    expect(groupsOf(layers, true)).toEqual([['d']]);
    expect(groupsOf([layers[0]!, [gone('d/a'), symlink('d', 'elsewhere')]], true)).toEqual([['d']]);
  });

  test('nothing may lie below a whiteout name', () => {
    expect(codeOf(() => groupsOf([[file('.wh.a/b')]]))).toBe('LAYER_WHITEOUT_NAME');
  });
});

describe('opaque directories', () => {
  test('hide the lower names; the mark stays in a group of its own', () => {
    const layers = [
      [dir('d'), file('d/a'), dir('d/s'), file('d/s/b')],
      [file('d/c'), opaque('d'), dir('d/s')],
    ];
    expect(groupsOf(layers, true)).toEqual([['d/', 'd/c', 'd/s/']]);
    expect(groupsOf(layers)[1]).toEqual(['d/!', 'd/c', 'd/s/']);
  });

  test('at the root, where OverlayFS knows no opaque mark, each name is hidden by itself', () => {
    expect(
      groupsOf([
        [dir('d'), file('d/a'), file('x')],
        [file('.wh..wh..opq'), dir('d'), file('new')],
      ])[1],
    ).toEqual(['d/!', 'new', '-x']);
  });

  test('a directory that replaces a removed one is opaque', () => {
    expect(
      groupsOf([
        [dir('d'), file('d/a')],
        [gone('d'), dir('d'), file('d/b')],
      ])[1],
    ).toEqual(['d/!', 'd/b']);
  });

  test('a directory that takes a file’s place is not', () => {
    expect(groupsOf([[file('p')], [dir('p'), file('p/x')]])[1]).toEqual(['p/', 'p/x']);
  });

  test('a directory that was replaced by a file and is back is opaque', () => {
    const tree = new OverlayTree();
    tree.apply(layerOf([dir('p'), file('p/old')]));
    tree.nextGroup();
    tree.apply(layerOf([file('p')]));
    tree.apply(layerOf([gone('p'), dir('p')]));
    expect(linesOf(tree.root, new GroupView(tree.group))).toEqual(['p/!']);
  });
});

describe('hard links', () => {
  test('share a node within a group, whatever layer made the names', () => {
    expect(groupsOf([[file('a')], [hardlink('b', 'a')]], true)).toEqual([['a=1', 'b=1']]);
  });

  test('into a lower group become one file of this group', () => {
    expect(groupsOf([[file('a')], [hardlink('b', 'a'), hardlink('c', 'a')]])[1]).toEqual(['b=1', 'c=1']);
  });

  test('reach what their own layer deletes', () => {
    expect(groupsOf([[file('a')], [hardlink('c', 'a'), gone('a')]])[1]).toEqual(['-a', 'c']);
    expect(
      groupsOf(
        [
          [dir('d'), file('d/a')],
          [hardlink('c', 'd/a'), hardlink('e', 'd/a'), gone('d')],
        ],
        true,
      ),
    ).toEqual([['c=1', 'e=1']]);
  });

  test('to nothing, before their target, in a circle and to directories are refused', () => {
    expect(codeOf(() => groupsOf([[hardlink('a', 'nothing')]]))).toBe('LAYER_LINK_TARGET');
    expect(codeOf(() => groupsOf([[hardlink('b', 'a'), file('a')]]))).toBe('LAYER_LINK_TARGET');
    expect(codeOf(() => groupsOf([[hardlink('a', 'b'), hardlink('b', 'a')]]))).toBe('LAYER_LINK_TARGET');
    expect(codeOf(() => groupsOf([[dir('d'), hardlink('a', 'd')]]))).toBe('LAYER_LINK_TO_DIRECTORY');
  });
});

describe('paths', () => {
  test('stay inside the root', () => {
    expect(groupsOf([[file('../../etc/x'), file('/abs'), file('a/../b'), file('./c//d')]])).toEqual([
      ['abs', 'b', 'c/', 'c/d', 'etc/', 'etc/x'],
    ]);
  });

  test('go through symlinks, inside the root', () => {
    expect(
      groupsOf([[dir('real'), symlink('l', '/real'), symlink('up', '../../real'), file('l/x'), file('up/y')]]),
    ).toEqual([['l', 'real/', 'real/x', 'real/y', 'up']]);
  });

  test('a loop of symlinks, a file as parent, long names and long paths are refused', () => {
    expect(codeOf(() => groupsOf([[symlink('a', 'b'), symlink('b', 'a'), file('a/x')]]))).toBe('LAYER_SYMLINK_LOOP');
    expect(codeOf(() => groupsOf([[file('a'), file('a/x')]]))).toBe('LAYER_PARENT_NOT_DIRECTORY');
    expect(codeOf(() => groupsOf([[file('n'.repeat(256))]]))).toBe('LAYER_NAME_TOO_LONG');
    expect(codeOf(() => groupsOf([[file('a/'.repeat(20_000))]]))).toBe('LAYER_PATH_TOO_LONG');
  });

  test('ten thousand levels are no problem', () => {
    const path = 'd/'.repeat(10_000);
    const tree = new OverlayTree();
    tree.apply(layerOf([file(`${path}x`)]));
    expect(tree.root.children.size).toBe(1);
  });
});

describe('attributes', () => {
  test('a directory that an upper group passes through keeps the lower ones', () => {
    const tree = new OverlayTree();
    tree.apply(layerOf([dir('etc', 0o700, { uid: 5, mtimeSec: 9 })]));
    tree.nextGroup();
    tree.apply(layerOf([file('etc/b')]));
    const etc = tree.root.children.get('etc')!;
    expect([etc.mode, etc.uid, etc.mtimeSec]).toEqual([0o700, 5, 9]);
    expect(linesOf(tree.root, new GroupView(1))).toEqual(['etc/', 'etc/b']);
  });

  test('those of OverlayFS, and those EROFS cannot hold, are left out with a note', () => {
    const tree = new OverlayTree();
    const xattrs = new Map([
      ['trusted.overlay.redirect', Buffer.from('/etc')],
      ['user.overlay.opaque', Buffer.from('y')],
      ['system.nfs4_acl', Buffer.from('x')],
      ['user.ok', Buffer.from('v')],
    ]);
    tree.apply(layerOf([dir('d', 0o755, { xattrs })]));
    expect([...tree.root.children.get('d')!.xattrs!.keys()]).toEqual(['user.ok']);
    expect(tree.notes).toHaveLength(3);
  });

  test('a 0:0 device is left out and removes nothing', () => {
    const tree = new OverlayTree();
    tree.apply(layerOf([file('w')]));
    tree.apply(layerOf([{ path: 'w', kind: 'char' }]));
    expect(tree.root.children.get('w')!.kind).toBe('file');
    expect(tree.notes[0]).toContain('0:0');
  });

  test('links to a 0:0 device are left out with it', () => {
    const tree = new OverlayTree();
    tree.apply(layerOf([{ path: 'a', kind: 'char' }, hardlink('b', 'a'), hardlink('c', 'b'), file('d')]));
    expect(linesOf(tree.root, new GroupView(0))).toEqual(['d']);
    expect(tree.notes).toHaveLength(3);
  });

  test('device numbers and link targets that Linux cannot hold are refused', () => {
    const device = (major: number, minor: number) =>
      codeOf(() => groupsOf([[{ path: 'd', kind: 'char', major, minor }]]));
    expect([device(4096, 0), device(0, 1 << 20), device(4095, 0xfffff)]).toEqual([
      'LAYER_DEVICE_NUMBER',
      'LAYER_DEVICE_NUMBER',
      undefined,
    ]);
    const link = (length: number) => codeOf(() => groupsOf([[symlink('l', 't'.repeat(length))]]));
    expect([link(0), link(4095), link(4096)]).toEqual(['LAYER_SYMLINK_TARGET', undefined, 'LAYER_SYMLINK_TARGET']);
  });
});

describe('an upper over an unknown base', () => {
  test('keeps every deletion and every opaque mark', () => {
    const tree = new OverlayTree({ unknownBase: true });
    tree.apply({
      ...layerOf([
        dir('etc'),
        { path: 'etc/gone', kind: 'whiteout' },
        dir('var'),
        { path: 'var', kind: 'opaque' },
        { path: 'top', kind: 'whiteout' },
        file('var/new'),
      ]),
      whiteoutNames: false,
    });
    expect(linesOf(tree.root, new GroupView(tree.group))).toEqual(['etc/', '-etc/gone', '-top', 'var/!', 'var/new']);
  });
});
