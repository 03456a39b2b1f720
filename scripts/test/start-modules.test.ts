/**
 * What keeps the start of `dsec` short, by value: a command loads what it needs and nothing else. The time itself is
 * `npm run bench -- cli-start`'s to measure.
 */
import { spawnSync } from 'node:child_process';
import { existsSync, mkdirSync, mkdtempSync, readFileSync, realpathSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { dirname, join, relative, resolve } from 'node:path';
import { fileURLToPath } from 'node:url';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';

const root = fileURLToPath(new URL('../..', import.meta.url));
const recorder = join(root, 'scripts/test/loaded-modules/record.mjs');

interface Loaded {
  /** npm packages of which any file was loaded. */
  readonly packages: string[];
  /** Our own folders, and of control/ those in it. */
  readonly folders: string[];
  /** Compiled code. */
  readonly addons: string[];
}

describe('a command loads', { timeout: 200_000 }, () => {
  let folder: string;
  beforeAll(() => {
    folder = realpathSync(mkdtempSync(join(tmpdir(), 'dsec-start-modules-')));
    mkdirSync(join(folder, 'tree'));
    writeFileSync(join(folder, 'tree/file'), 'content');
    loadedBy('convert', `dir:${folder}/tree`, '--name', 'image:1');
  });
  afterAll(() => rmSync(folder, { recursive: true, force: true }));

  function loadedBy(...args: string[]): Loaded {
    const record = join(folder, 'loaded');
    for (let tries = 0; ; tries++) {
      writeFileSync(record, '');
      const env = {
        ...process.env,
        DSEC_STORE: `file://${folder}/store`,
        DSEC_RUN: join(folder, 'run'),
        DSEC_STATE: join(folder, 'state'),
        DSEC_CACHE: join(folder, 'cache'),
        LOADED_MODULES: record,
      };
      const argv = ['--import', recorder, join(root, 'bin/dsec'), ...args];
      const { status, stderr } = spawnSync(process.execPath, argv, { encoding: 'utf8', env });
      const files = readFileSync(record, 'utf8').trimEnd().split('\n');
      // It built itself anew because a source was changed: what it loads then is another matter.
      if (status === 0 && tries < 20 && files.includes(join(root, 'scripts/bundle.mjs'))) continue;
      expect(status, stderr).toBe(0);
      return sourcesOf(files);
    }
  }

  it('of packages the parser of command lines alone, of compiled code none, when it prints the version', () => {
    expect(loadedBy('--version')).toEqual({
      packages: ['commander'],
      folders: ['base', 'bin', 'control/cli', 'linux', 'scripts'],
      addons: [],
    });
    expect(loadedBy('--help').packages).toEqual(['commander']);
  });

  it.each([
    [['images']],
    [['inspect', 'image:1']],
    [['ls', '-lR', 'image:1']],
    [['cat', 'image:1', '/file']],
    [['stat', 'image:1', '/file']],
  ])('neither S3 nor HTTP nor sandboxes nor compiled code: %s', (args) => {
    const { packages, folders, addons } = loadedBy(...args);
    expect([packages, addons]).toEqual([['commander'], []]);
    expect(folders).toEqual(['base', 'bin', 'chunk-cache', 'control/cli', 'converter', 'imagesvc', 'linux', 'scripts']);
  });

  it('system calls, but neither S3 nor HTTP, when it converts a folder', () => {
    const { packages, addons } = loadedBy('convert', `dir:${folder}/tree`, '--name', 'image:2', '--inline-limit', '0');
    // koffi keeps what is compiled for each platform in packages of its own.
    expect(packages.filter((name) => !name.startsWith('@koromix/koffi-'))).toEqual(['commander', 'koffi']);
    expect(addons.map((path) => /[^/]+$/.exec(path)![0])).toEqual(['koffi.node']);
  });

  // That what is not there would be seen if it were.
  it('an HTTP server, for a service', () => {
    const { packages } = loadedBy('serve', '--help');
    expect(packages).toEqual(expect.arrayContaining(['commander', 'fastify', '@sinclair/typebox']));
  });
});

function sourcesOf(files: readonly string[]): Loaded {
  const packages = new Set<string>();
  const folders = new Set<string>();
  const addons = new Set<string>();
  for (const file of files) {
    if (file.endsWith('.node')) addons.add(file);
    if (file.startsWith(dirname(recorder))) continue;
    for (const source of bundledIn(file)) {
      const path = relative(root, source);
      const installed = /(?:^|\/)node_modules\/((?:@[^/]+\/)?[^/]+)/.exec(path)?.[1];
      if (installed !== undefined) packages.add(installed);
      // The table of errors is everybody's.
      else if (path.startsWith('control/errors')) continue;
      else if (path.startsWith('control/')) folders.add(path.split('/').slice(0, 2).join('/'));
      else folders.add(path.split('/')[0]!);
    }
  }
  return { packages: [...packages].sort(), folders: [...folders].sort(), addons: [...addons] };
}

/** A chunk of the bundle is what its source map says that it is made of; any other file is itself. */
function bundledIn(file: string): string[] {
  if (!existsSync(`${file}.map`)) return [file];
  const { sources } = JSON.parse(readFileSync(`${file}.map`, 'utf8')) as { sources: string[] };
  return sources.map((source) => resolve(dirname(file), source));
}
