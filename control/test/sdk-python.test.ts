/** libdsec in Python: the wheel is built, installed into an environment of its own, and its tests run against a real service. */
import { execFile, spawnSync } from 'node:child_process';
import * as fs from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { promisify } from 'node:util';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { pythonWithLibdsec } from './sdk/python-environment.ts';
import { canRun, IMAGE, makeWorld, root, type World } from './sdk/world.ts';

const run = promisify(execFile);
/** Of sandboxes with rules. */
const hasNetwork = ['nft', 'ip'].every((tool) => spawnSync(tool, ['-V']).error === undefined);
if (!hasNetwork) console.log('without its network rules: listing 1 of the paper: no nft or ip');
const python = canRun ? await pythonWithLibdsec() : undefined;
const source = join(root, 'control/sdk/python');

describe.skipIf(python === undefined)('libdsec, Python', { timeout: 400_000 }, () => {
  let world: World;
  let folder: string;

  beforeAll(async () => {
    folder = fs.mkdtempSync(join(tmpdir(), 'dsec-pytest-'));
    world = await makeWorld();
  }, 400_000);
  afterAll(async () => {
    await world?.close();
    fs.rmSync(folder, { recursive: true, force: true });
  }, 400_000);

  it('has types that hold, strictly', async () => {
    const args = ['-m', 'mypy', '--cache-dir', join(root, '.cache/mypy')];
    expect((await run(python!, args, { cwd: source })).stdout).toMatch(/^Success: /);
  });

  it('passes its tests, the scenarios of both libraries among them', async () => {
    const env = {
      ...world.env,
      PYTHONDONTWRITEBYTECODE: '1',
      DSEC_TEST_IMAGE: IMAGE,
      DSEC_TEST_SCENARIOS: join(root, 'control/sdk/scenarios.json'),
      DSEC_TEST_ERRORS: join(root, 'control/sdk/errors.json'),
      DSEC_TEST_NETWORK: hasNetwork ? 'yes' : 'no',
    };
    const args = [
      '-m',
      'pytest',
      '-q',
      '-p',
      'no:cacheprovider',
      '--tb=short',
      '--basetemp',
      join(folder, 'tmp'),
      join(source, 'tests'),
    ];
    const { stdout } = await run(python!, args, { env, cwd: folder, maxBuffer: 64 << 20 }).catch(
      (error) => error as { stdout: string },
    );
    expect(stdout).toMatch(/\n\d+ passed[^\n]*\n?$/);
    expect(stdout).not.toMatch(/failed|error/);
  });
});
