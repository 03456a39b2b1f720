/** A Python environment with pytest and libdsec as its wheel has it, kept in .cache/ as long as the library's sources are the same. */
import { execFile } from 'node:child_process';
import { createHash } from 'node:crypto';
import * as fs from 'node:fs';
import { join } from 'node:path';
import { promisify } from 'node:util';
import { lock } from '#linux';
import { root } from './world.ts';

const run = promisify(execFile);
/** pip may have much to fetch. */
const MAKING_MS = 300_000;
const source = join(root, 'control/sdk/python');

/** Path of its interpreter; undefined, with the reason printed, where there can be none. */
export async function pythonWithLibdsec(): Promise<string | undefined> {
  const folder = join(root, '.cache/sdk-python', stampOf());
  const python = join(folder, 'bin/python');
  fs.mkdirSync(join(root, '.cache'), { recursive: true });
  // Another test file may be at it.
  const held = await lock(join(root, '.cache/sdk-python.lock'), { timeoutMs: MAKING_MS });
  try {
    if (fs.existsSync(join(folder, 'ready'))) return python;
    fs.rmSync(join(root, '.cache/sdk-python'), { recursive: true, force: true });
    await run('python3', ['-m', 'venv', folder]);
    const quiet = ['-q', '--disable-pip-version-check'];
    await run(python, ['-m', 'pip', 'install', ...quiet, 'pytest', 'mypy', 'setuptools>=64', 'wheel']);
    // A copy: building leaves files beside the sources.
    const copy = join(folder, 'source');
    // What somebody has built there would be taken for what is to be built.
    fs.cpSync(source, copy, { recursive: true, filter: (path) => !/\/(build|[^/]*\.egg-info)$/.test(path) });
    await run(python, [
      '-m',
      'pip',
      'wheel',
      ...quiet,
      '--no-build-isolation',
      '--no-deps',
      '-w',
      join(folder, 'wheel'),
      copy,
    ]);
    const [wheel] = fs.readdirSync(join(folder, 'wheel'));
    await run(python, ['-m', 'pip', 'install', ...quiet, join(folder, 'wheel', wheel!)]);
    fs.writeFileSync(join(folder, 'ready'), '');
    return python;
  } catch (error) {
    console.log(`skipped: no Python environment with libdsec: ${(error as Error).message.slice(0, 500)}`);
    return undefined;
  } finally {
    held.release();
  }
}

function stampOf(): string {
  const hash = createHash('sha256');
  for (const path of [
    'pyproject.toml',
    ...fs
      .readdirSync(join(source, 'src/libdsec'))
      .sort()
      .map((name) => `src/libdsec/${name}`),
  ]) {
    const file = join(source, path);
    if (fs.statSync(file).isFile()) hash.update(`${path}\0`).update(fs.readFileSync(file));
  }
  return hash.digest('hex').slice(0, 16);
}
