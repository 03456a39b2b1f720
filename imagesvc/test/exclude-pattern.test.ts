import { readFileSync } from 'node:fs';
import { describe, expect, it } from 'vitest';
import { fromText } from '#base';
import { parseExcludePattern } from '../pack-diff/exclude-pattern.ts';
import { RESIDUE_PATTERNS } from '../pack-diff/residue-policy.ts';

const matches = (pattern: string, path: string, isDirectory = false) =>
  parseExcludePattern(pattern).matches(fromText(path), isDirectory);

describe('exclude patterns', () => {
  it.each([
    ['*.log', 'a.log', true],
    ['*.log', 'x/y/a.log', true],
    ['*.log', 'a.log/b', false],
    ['/a.log', 'a.log', true],
    ['/a.log', 'x/a.log', false],
    ['x/a', 'x/a', true],
    ['x/a', 'y/x/a', false],
    ['/tmp/**', 'tmp', false],
    ['/tmp/**', 'tmp/a', true],
    ['/tmp/**', 'tmp/a/b', true],
    ['**/c/**', 'c/a', true],
    ['**/c/**', 'x/y/c/a/b', true],
    ['**/c/**', 'x/c', false],
    ['**/c', 'c', true],
    ['a/**/b', 'a/b', true],
    ['a/**/b', 'a/x/y/b', true],
    ['a/**/b', 'a/x/y/bc', false],
    ['a/**/b/**/c', 'a/b/x/b/c', true],
    ['?', 'é', true],
    ['?', 'ab', false],
    ['[a-c]x', 'bx', true],
    ['[!a-c]x', 'bx', false],
    ['\\*', '*', true],
    ['\\*', 'a', false],
    ['core.[0-9]*', 'var/core.123', true],
    ['core.[0-9]*', 'core.js', false],
    ['[', '[', true],
    ['.', 'x', undefined],
    ['../x', 'x', undefined],
    ['', 'x', undefined],
    ['!x', 'x', undefined],
  ])('%s on %s: %s', (pattern, path, wanted) => {
    if (wanted === undefined)
      expect(() => matches(pattern, path)).toThrow(expect.objectContaining({ code: 'PACK_PATTERN' }));
    else expect(matches(pattern, path)).toBe(wanted);
  });

  it('takes a slash at the end for directories only', () => {
    expect(matches('build/', 'x/build', true)).toBe(true);
    expect(matches('build/', 'x/build', false)).toBe(false);
  });

  it('answers hostile patterns in steps that grow with the product of the lengths at most', () => {
    expect(matches(`${'*a'.repeat(2000)}b`, 'a'.repeat(4000))).toBe(false);
    expect(matches(`${'**/a/'.repeat(500)}b`, 'a/'.repeat(2000))).toBe(false);
  });

  it('has every residue pattern in docs/pack-diff.md', () => {
    const page = readFileSync(new URL('../../docs/pack-diff.md', import.meta.url), 'utf8');
    expect(RESIDUE_PATTERNS.filter((pattern) => !page.includes(`\`${pattern}\``))).toEqual([]);
  });
});
