/**
 * docs/sdk.md: its quickstart as somebody new types it, who has a home of his own: what it installs (the wheel in a fresh environment, the package as it is
 * published) runs its examples as they are printed, against `dsec serve all`, which they find by its context.
 */
import { execFile, execFileSync } from 'node:child_process';
import * as fs from 'node:fs';
import { basename, join } from 'node:path';
import { promisify } from 'node:util';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { canRun, makeWorld, root, TREE, type World } from './sdk/world.ts';

const run = promisify(execFile);
const page = fs.readFileSync(join(root, 'docs/sdk.md'), 'utf8');
const readme = fs.readFileSync(join(root, 'README.md'), 'utf8');

function examples(language: string): string[] {
  return [...page.matchAll(new RegExp(`^\`\`\`${language}\n(.*?)^\`\`\``, 'gms'))].map(([, text]) => text!);
}

/** Indented lines below the heading, up to the first example. */
const typed = /^## Quickstart\n(.*?)^```/ms
  .exec(page)![1]!
  .split('\n')
  .filter((line) => line.startsWith('    '))
  .map((line) => line.trim());

describe('docs/sdk.md', () => {
  it('has every class of errors', () => {
    const rows = JSON.parse(fs.readFileSync(join(root, 'control/sdk/errors.json'), 'utf8')) as {
      class: string;
      means: string;
    }[];
    for (const { class: name, means } of rows) expect(page).toContain(`| \`${name}\` | ${means} |`);
  });
});

describe.skipIf(!canRun)('the quickstart', { timeout: 400_000 }, () => {
  let world: World;
  let home: string;
  let env: NodeJS.ProcessEnv;
  /** Undefined: done; else why not. */
  const lacking = new Map<string, string>();
  const shell = (line: string) =>
    run('sh', ['-c', line], { cwd: root, env, maxBuffer: 64 << 20 }).then(({ stdout }) => stdout);

  beforeAll(async () => {
    world = await makeWorld('web:1');
    home = join(world.folder, 'home');
    fs.mkdirSync(join(home, 'try'), { recursive: true });
    const caches = { PIP_CACHE_DIR: join(root, '.cache/pip'), npm_config_cache: join(root, '.cache/npm') };
    env = { ...world.env, ...caches, DSEC_API: '', DSEC_TOKEN: '', HOME: home };
    // Whoever types is root; what is left of the rest is where the image comes from.
    expect(typed[0]).toBe('sudo bin/dsec serve all &');
    const rest = typed
      .slice(1)
      .map((line) => line.replace(/^sudo /, '').replace('docker://alpine:3.20', `dir:${world.folder}/${TREE}`));
    expect(rest).toHaveLength(5);
    for (const line of rest) {
      const kind = /pip|venv/.test(line) ? 'python' : /^npm/.test(line) ? 'typescript' : 'all';
      if (lacking.has(kind)) continue;
      try {
        await shell(line);
      } catch (error) {
        const { stderr = '', message } = error as { stderr?: string; message: string };
        const why = `${line}: ${message}\n${stderr}`;
        // Where there is no registry nothing can be installed; whatever else fails is ours.
        const isAway =
          /ENOTFOUND|EAI_AGAIN|ECONNREFUSED|ETIMEDOUT|ensurepip|Connection|No matching distribution|proxy/i.test(why);
        if (kind === 'all' || !isAway) throw error;
        lacking.set(kind, why);
      }
    }
  }, 400_000);
  afterAll(() => world?.close(), 400_000);

  const program = async (text: string, name: string, ...words: string[]) => {
    const file = join(home, 'try', name);
    fs.writeFileSync(file, text);
    const line = [...words, file];
    return (await run(line[0]!, line.slice(1), { env, cwd: home })).stdout;
  };

  it('runs in Python', async (test) => {
    if (lacking.has('python')) return test.skip(lacking.get('python')!.slice(0, 500));
    const python = join(home, 'try/bin/python');
    const told: string[] = [];
    for (const text of examples('python')) told.push(await program(text, 'example.py', python, '-B'));
    expect(told).toEqual(['1\n2\n3\n', 'hello from /tmp\n']);
    const [text] = [...readme.matchAll(/(?:^ {4}.*\n|^\n)+/gm)]
      .map(([block]) => block)
      .filter((block) => /from libdsec/.test(block));
    expect(await program(text!.replace(/^ {4}/gm, ''), 'readme.py', python, '-B')).toBe('hello world\n');
  });

  it('runs in TypeScript', async (test) => {
    if (lacking.has('typescript')) return test.skip(lacking.get('typescript')!.slice(0, 500));
    const told: string[] = [];
    for (const text of examples('typescript'))
      told.push(await program(text, 'example.mts', 'npx', '--prefix', join(home, 'try'), 'tsx'));
    expect(told).toEqual(['1 2 3 7\n1\n2\n3\n']);
    const installed = fs.readdirSync(join(home, 'try/node_modules/libdsec'));
    expect(installed.sort()).toEqual(['README.md', 'dist', 'package.json']);
    expect(basename(execFileSync('sh', ['-c', 'ls ~/try/*.tgz'], { env, encoding: 'utf8' }).trim())).toBe(
      'libdsec-0.1.0.tgz',
    );
  });
});
