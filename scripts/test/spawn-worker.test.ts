import { execFileSync } from 'node:child_process';
import { mkdirSync, mkdtempSync, rmSync, symlinkSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { pathToFileURL } from 'node:url';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { spawnWorker } from '#base';
import { buildBundle } from '../../scripts/bundle.mjs';

const root = join(import.meta.dirname, '../..');

describe('spawnWorker', () => {
  let folder: string;
  beforeAll(() => {
    folder = mkdtempSync(join(tmpdir(), 'dsec-spawn-worker-'));
    // Types and a .ts import: a thread that does not know TypeScript fails on either.
    writeFileSync(join(folder, 'package.json'), '{"name":"dsec","type":"module"}');
    writeFileSync(join(folder, 'double.ts'), 'export const double = (n: number): number => 2 * n;\n');
    writeFileSync(
      join(folder, 'echo-worker.ts'),
      `import { parentPort, workerData } from 'node:worker_threads';
import { double } from './double.ts';
const sent: { n: number } = workerData;
parentPort!.postMessage({ doubled: double(sent.n), arguments: process.argv.slice(2) });
`,
    );
    symlinkSync(join(root, 'node_modules'), join(folder, 'node_modules'));
  });
  afterAll(() => rmSync(folder, { recursive: true, force: true }));

  const main = `import { spawnWorker } from ${JSON.stringify(join(root, 'base/spawn-worker.ts'))};
export const reply = await new Promise<unknown>((resolve, reject) => {
  const worker = spawnWorker('echo-worker', new URL('./echo-worker.ts', import.meta.url), { workerData: { n: 21 }, argv: ['a'] });
  worker.once('message', resolve).once('error', reject);
});
console.log(JSON.stringify(reply));
`;
  const expected = { doubled: 42, arguments: ['a'] };

  it('runs a TypeScript file in a test', async () => {
    const worker = spawnWorker('echo-worker', pathToFileURL(join(folder, 'echo-worker.ts')), {
      workerData: { n: 21 },
      argv: ['a'],
    });
    const reply = await new Promise((resolve, reject) => worker.once('message', resolve).once('error', reject));
    expect(reply).toEqual(expected);
    expect(await new Promise((resolve) => worker.once('exit', resolve))).toBe(0);
  });

  it('runs a TypeScript file under tsx', () => {
    const path = join(folder, 'main.ts');
    writeFileSync(path, main);
    const text = execFileSync(process.execPath, ['--import', 'tsx', path], { cwd: root, encoding: 'utf8' });
    expect(JSON.parse(text)).toEqual(expected);
  });

  it('runs the bundled file in a bundle, with the sources gone', async () => {
    const path = join(folder, 'main.ts');
    writeFileSync(path, main);
    mkdirSync(join(folder, 'scripts'), { recursive: true });
    const built = await buildBundle(folder, 'test', { main: path, 'echo-worker': join(folder, 'echo-worker.ts') });
    rmSync(join(folder, 'double.ts'));
    const text = execFileSync(process.execPath, [join(built, 'main.mjs')], { encoding: 'utf8' });
    expect(JSON.parse(text)).toEqual(expected);
  });
});
