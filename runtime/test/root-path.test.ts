import * as fs from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { makeDirectoryInRoot, readFileInRoot, resolveInRoot } from '../sandbox/root-path.ts';

describe('a path inside a root', () => {
  let outer: string;
  let root: string;
  beforeAll(() => {
    outer = fs.realpathSync(fs.mkdtempSync(join(tmpdir(), 'dsec-root-')));
    root = join(outer, 'root');
    fs.mkdirSync(join(root, 'a/b'), { recursive: true });
    fs.writeFileSync(join(outer, 'secret'), 'outside');
    fs.writeFileSync(join(root, 'secret'), 'inside');
    fs.writeFileSync(join(root, 'a/file'), 'file');
    const link = (target: string, at: string) => fs.symlinkSync(target, join(root, at));
    link('/secret', 'absolute');
    link('../../../secret', 'a/b/climbing');
    link('../../../../../..', 'a/b/top');
    link('/proc/self/root/etc/passwd', 'magic');
    link('loop', 'loop');
    link('missing', 'dangling');
    link('/a/b', 'dir');
    link(join(outer, 'secret'), 'host-path');
  });
  afterAll(() => fs.rmSync(outer, { recursive: true }));

  it.each([
    ['/', '/'],
    ['', '/'],
    ['/a/../../../..', '/'],
    ['/../secret', '/secret'],
    ['absolute', '/secret'],
    ['/a/b/climbing', '/secret'],
    ['/a/b/top', '/'],
    ['/a/b/top/../secret', '/secret'],
    ['/dir/climbing', '/secret'],
    ['/dir/..', '/a'],
    ['//a///./b/', '/a/b'],
    ['/a/new', '/a/new'],
    ['/dangling', '/missing'],
  ])('%s is %s', (path, inside) => {
    expect(resolveInRoot(root, path)).toMatchObject({ inside, host: inside === '/' ? root : join(root, inside) });
  });

  it.each(['/none/x', '/a/file/x', '/a/file/', '/a/file/..', '/magic', '/host-path'])('%s is nowhere', (path) => {
    expect(resolveInRoot(root, path)).toBeUndefined();
  });

  it('refuses a loop', () => {
    expect(() => resolveInRoot(root, '/loop')).toThrow(expect.objectContaining({ code: 'RUNTIME_PATH' }));
  });

  it('reads only regular files of bearable size, and those of the root', () => {
    expect(readFileInRoot(root, '/absolute', 100)?.toString()).toBe('inside');
    expect(readFileInRoot(root, '/a', 100)).toBeUndefined();
    expect(() => readFileInRoot(root, '/secret', 3)).toThrow(expect.objectContaining({ code: 'RUNTIME_PATH' }));
  });

  it('makes directories through links, but not out of the root', () => {
    expect(makeDirectoryInRoot(root, '/dir/x/y')).toEqual([join(root, 'a/b/x'), join(root, 'a/b/x/y')]);
    expect(makeDirectoryInRoot(root, '/dir/top/../../z')).toEqual([join(root, 'z')]);
    expect(makeDirectoryInRoot(root, '/')).toEqual([]);
    expect(() => makeDirectoryInRoot(root, '/a/file/x')).toThrow(expect.objectContaining({ code: 'RUNTIME_PATH' }));
    expect(fs.readdirSync(outer).sort()).toEqual(['root', 'secret']);
  });
});
