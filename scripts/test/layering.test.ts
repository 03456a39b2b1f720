import { mkdirSync, mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { dirname, join } from 'node:path';
import { afterEach, beforeEach, describe, expect, it } from 'vitest';
import { findImports } from '../imports.mjs';
import { checkFile, checkLayering, violationText } from '../layering.mjs';

describe('findImports', () => {
  const specifiers = (source: string) => findImports(source).map((found) => found.specifier);

  it('finds every form of import, type imports too', () => {
    const source = [
      "import 'a';",
      "import b from 'b';",
      "import { x as y, type Z } from 'c';",
      "import type { T } from 'd';",
      "import * as e from 'e';",
      "export * from 'f';",
      "export * as g from 'g';",
      "export type { U } from 'h';",
      "export { default } from 'i';",
      "const j = await import('j');",
      "type K = import('k').K;",
      "const l = require('l');",
      "const m = new URL('./m.ts', import.meta.url);",
      'const n = await import(`n`);',
      'import {',
      '  long,',
      "} from 'o';",
    ].join('\n');
    expect(specifiers(source)).toEqual([...'abcdefghijkl', './m.ts', 'n', 'o']);
    expect(findImports(source).at(-1)?.line).toBe(17);
  });

  it('is not misled by comments, strings, templates, regular expressions and methods called import', () => {
    const source = [
      "// import 'no';",
      "/* import 'no'; */",
      `const s = "import 'no'";`,
      // biome-ignore lint/suspicious/noTemplateCurlyInString: the source under test holds a template
      "const t = `import x from 'no'; ${call(`nested ${1}`)} import 'no'`;",
      "const d = new URL('../no.md', import.meta.url);",
      "const r = /[/'\"]/.test(x) ? /import 'no'/ : 1 / 2;",
      "store.import('no');",
      "export const from = 'no';",
      "export function importAll() { return 'no'; }",
      "import 'yes';",
    ].join('\n');
    expect(findImports(source)).toEqual([{ specifier: 'yes', line: 10 }]);
  });

  it('looks into template expressions', () => {
    // biome-ignore lint/suspicious/noTemplateCurlyInString: the source under test holds a template
    expect(specifiers("const t = `${await import('inside')} ${`${await import('deeper')}`}`; import 'after';")).toEqual(
      ['inside', 'deeper', 'after'],
    );
  });
});

describe('checkFile', () => {
  const problems = (path: string, source: string) => checkFile(path, source).map(violationText);

  it('lets a folder import what stands below it through its door', () => {
    expect(
      problems('runtime/sandbox/run.ts', "import { a } from '#imagesvc';\nimport b from '#base';\nimport './c.ts';"),
    ).toEqual([]);
    expect(
      problems('runtime/sandbox/run.ts', "import '../errors.ts'; import 'node:fs'; import pino from 'pino';"),
    ).toEqual([]);
  });

  it.each([
    ['base/x.ts', "import '#linux';", 'base/x.ts:1: base must not import linux'],
    ['linux/x.ts', "import '#converter';", 'linux/x.ts:1: linux must not import converter'],
    ['converter/x.ts', "\nimport type { S } from '#imagesvc';", 'converter/x.ts:2: converter must not import imagesvc'],
    ['converter/x.ts', "import '#chunk-cache';", 'converter/x.ts:1: converter must not import chunk-cache'],
    ['imagesvc/x.ts', "export * from '#runtime';", 'imagesvc/x.ts:1: imagesvc must not import runtime'],
    ['imagesvc/x.ts', "import '#ublk-daemon';", 'imagesvc/x.ts:1: imagesvc must not import ublk-daemon'],
    ['runtime/x.ts', "await import('#control');", 'runtime/x.ts:1: runtime must not import control'],
    ['control/x.ts', "import '#bench';", 'control/x.ts:1: control must not import bench'],
    ['control/test/x.test.ts', "import '#bench';", 'control/test/x.test.ts:1: control must not import bench'],
  ])('refuses %s: %s', (path, source, expected) => {
    expect(problems(path, source)).toEqual([expected]);
  });

  it('refuses every way around the door', () => {
    expect(problems('imagesvc/a/x.ts', "import '../../converter/index.ts';")).toEqual([
      "imagesvc/a/x.ts:1: '../../converter/index.ts' leaves imagesvc/: import '#name' of the other folder",
    ]);
    expect(problems('imagesvc/x.ts', "new URL('../base/boot.mjs', import.meta.url)")).toHaveLength(1);
    expect(problems('imagesvc/x.ts', "import '#converter/erofs/layout.ts';")).toHaveLength(1);
    expect(problems('imagesvc/x.ts', "import '#nowhere';")).toHaveLength(1);
    expect(problems('imagesvc/x.ts', "import '/etc/x.ts';")).toHaveLength(1);
  });

  it('refuses the own door, except in tests', () => {
    expect(problems('imagesvc/x.ts', "import '#imagesvc';")).toHaveLength(1);
    expect(problems('imagesvc/test/x.test.ts', "import '#imagesvc';")).toEqual([]);
  });
});

describe('checkLayering', () => {
  let root: string;
  beforeEach(() => {
    root = mkdtempSync(join(tmpdir(), 'dsec-layering-'));
  });
  afterEach(() => rmSync(root, { recursive: true, force: true }));

  it('reads all source files of all folders, and names file and line', () => {
    const write = (path: string, text: string) => {
      mkdirSync(dirname(join(root, path)), { recursive: true });
      writeFileSync(join(root, path), text);
    };
    write('base/index.ts', "import '#linux';");
    write('converter/deep/er/x.ts', "import '#base';\n\nimport '#runtime';");
    write('converter/boot.mjs', "import '../base/x.mjs';");
    write('converter/notes.md', "import '#bench';");
    write('elsewhere/x.ts', "import '#bench';");
    expect(checkLayering(root).map(violationText)).toEqual([
      'base/index.ts:1: base must not import linux',
      "converter/boot.mjs:1: '../base/x.mjs' leaves converter/: import '#name' of the other folder",
      'converter/deep/er/x.ts:3: converter must not import runtime',
    ]);
  });
});
