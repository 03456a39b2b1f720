/** The exit status of `dsec run` when dsec itself fails, and the commands that end and remove sandboxes. */
import { mkdirSync, mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { runCommand } from './command-run.ts';

let folder: string;
let store: string;
beforeAll(async () => {
  folder = mkdtempSync(join(tmpdir(), 'dsec-run-status-'));
  store = join(folder, 'store');
  process.env.DSEC_STATE = join(folder, 'state');
  process.env.DSEC_RUN = join(folder, 'run');
  process.env.DSEC_CACHE = join(folder, 'cache');
  mkdirSync(join(folder, 'tree/etc'), { recursive: true });
  writeFileSync(join(folder, 'tree/etc/passwd'), 'root:x:0:0::/:/bin/sh\n');
  writeFileSync(join(folder, 'tree/plain'), 'text');
  await runCommand('convert', `dir:${folder}/tree`, '--name', 'tree:1', '--store', store);
});
afterAll(() => {
  for (const name of ['DSEC_STATE', 'DSEC_RUN', 'DSEC_CACHE']) delete process.env[name];
  rmSync(folder, { recursive: true, force: true });
});
const run = (...argv: string[]) => runCommand('run', '--store', store, ...argv);

describe('dsec run', () => {
  it('fails with 125 for an image that is not there', async () => {
    const ran = await run('nothing:1', '--', '/bin/true');
    expect(ran.exitCode).toBe(125);
    expect(ran.stderr).toMatch(/^dsec: no image "nothing:1" in .*\n {6}\S/);
    expect(JSON.parse((await run('nothing:1', '--json')).stderr).error.code).toBe('CATALOG_NOT_FOUND');
  });

  it('fails with 2 for wrong usage', async () => {
    await expect(run('tree:1', '--network', 'some')).rejects.toMatchObject({ exit: 2 });
    await expect(run()).rejects.toMatchObject({ exit: 2 });
    await expect(run('--nonsense', 'tree:1')).rejects.toMatchObject({ exit: 2 });
  });

  it('says that a base is no workspace', async () => {
    const ran = await run('nothing:1', '--workspace', 'tree:1', '--', '/bin/true');
    expect(ran.stderr).toContain('dsec: --workspace tree:1: an image of kind base');
    expect(ran.stderr).toContain('--prefix /workspace');
  });
});

describe.skipIf(process.getuid?.() !== 0)('dsec run, as root', () => {
  it.each([
    [125, ['--user', 'nobody', 'tree:1', '--', '/plain']],
    [125, ['--workdir', '/plain', 'tree:1', '--', '/plain']],
    [126, ['tree:1', '--', '/plain']],
    [127, ['tree:1', '--', '/nope']],
  ])('fails with %i: %j', async (status, argv) => {
    const ran = await run(...argv);
    expect([ran.exitCode, ran.stderr.startsWith('dsec: ')]).toEqual([status, true]);
  });

  it('fails with 2 where the command line is at fault', async () => {
    await expect(run('--name', 'A B', 'tree:1', '--', '/plain')).rejects.toMatchObject({ exit: 2 });
    await expect(run('-e', '=x', 'tree:1', '--', '/plain')).rejects.toMatchObject({ exit: 2 });
    await expect(run('tree:1')).rejects.toMatchObject({ exit: 2 });
  });

  it('stop and rm --force say that there is no such sandbox', async () => {
    for (const argv of [['stop'], ['stop', '--time', '3'], ['rm', '--force']]) {
      await expect(runCommand('sandbox', ...argv, 'nobody')).rejects.toMatchObject({ exit: 4 });
    }
    await expect(runCommand('sandbox', 'stop', 'nobody', '--time', 'soon')).rejects.toMatchObject({ exit: 2 });
  });
});
