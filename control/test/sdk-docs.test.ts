/** docs/sdk.md: its examples run as they are printed, against `dsec serve all`, which they find by its context. */
import { execFile } from 'node:child_process';
import * as fs from 'node:fs';
import { join } from 'node:path';
import { promisify } from 'node:util';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { pythonWithLibdsec } from './sdk/python-environment.ts';
import { canRun, makeWorld, root, type World } from './sdk/world.ts';

const run = promisify(execFile);
const page = fs.readFileSync(join(root, 'docs/sdk.md'), 'utf8');
const python = canRun ? await pythonWithLibdsec() : undefined;

function examples(language: string): string[] {
  return [...page.matchAll(new RegExp(`^\`\`\`${language}\n(.*?)^\`\`\``, 'gms'))].map(([, text]) => text!);
}

describe('docs/sdk.md', () => {
  it('has every class of errors', () => {
    const rows = JSON.parse(fs.readFileSync(join(root, 'control/sdk/errors.json'), 'utf8')) as {
      class: string;
      means: string;
    }[];
    for (const { class: name, means } of rows) expect(page).toContain(`| \`${name}\` | ${means} |`);
  });
});

describe.skipIf(!canRun)('the examples of docs/sdk.md', { timeout: 180_000 }, () => {
  let world: World;
  let env: NodeJS.ProcessEnv;

  beforeAll(async () => {
    world = await makeWorld('alpine:3.20');
    env = { ...world.env, DSEC_API: '', DSEC_TOKEN: '' };
  }, 400_000);
  afterAll(() => world?.close(), 400_000);

  it.skipIf(python === undefined)('run in Python', async () => {
    const told: string[] = [];
    for (const text of examples('python')) {
      const file = join(world.folder, `example-${told.length}.py`);
      fs.writeFileSync(file, text);
      told.push((await run(python!, ['-B', file], { env, cwd: world.folder })).stdout);
    }
    expect(told).toEqual(['1\n2\n3\n', 'hello from /tmp\n']);
  });

  it('run in TypeScript', async () => {
    const source = join(root, 'control/sdk/typescript');
    await run(join(root, 'node_modules/.bin/tsc'), ['-p', source]);
    fs.mkdirSync(join(world.folder, 'node_modules'));
    fs.symlinkSync(source, join(world.folder, 'node_modules/libdsec'));
    const told: string[] = [];
    for (const text of examples('typescript')) {
      const file = join(world.folder, `example-${told.length}.mts`);
      fs.writeFileSync(file, text);
      const tsx = join(root, 'node_modules/tsx/dist/cli.mjs');
      told.push((await run(process.execPath, [tsx, file], { env, cwd: world.folder })).stdout);
    }
    expect(told).toEqual(['1 2 3 7\n1\n2\n3\n']);
  });
});
