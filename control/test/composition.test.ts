/** docs/composition.md end to end: a base, a workspace at a folder, a toolkit, and what becomes of the changes. */
import {
  copyFileSync,
  existsSync,
  mkdirSync,
  mkdtempSync,
  readdirSync,
  rmSync,
  symlinkSync,
  writeFileSync,
} from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { findOciRuntime } from '#runtime';
import { runCommand } from './command-run.ts';

function canRun(): boolean {
  if (process.getuid?.() !== 0) return false;
  try {
    findOciRuntime();
    if (existsSync('/bin/busybox')) return true;
  } catch {
    // Told below.
  }
  console.log('skipped: needs crun or runc, and busybox');
  return false;
}

describe.skipIf(!canRun())('a composed sandbox', () => {
  let folder: string;
  let store: string;
  const dsec = (command: string, ...argv: string[]) => runCommand(command, '--store', store, ...argv);
  const tree = (name: string, files: Record<string, string>) => {
    for (const [path, text] of Object.entries(files)) {
      mkdirSync(join(folder, name, path, '..'), { recursive: true });
      writeFileSync(join(folder, name, path), text, { mode: 0o755 });
    }
    return `dir:${folder}/${name}`;
  };
  beforeAll(async () => {
    folder = mkdtempSync(join(tmpdir(), 'dsec-composition-'));
    store = join(folder, 'store');
    process.env.DSEC_STATE = join(folder, 'state');
    process.env.DSEC_RUN = join(folder, 'run');
    process.env.DSEC_CACHE = join(folder, 'cache');
    const base = tree('base', { 'etc/passwd': 'root:x:0:0::/:/bin/sh\n' });
    mkdirSync(join(folder, 'base/bin'));
    copyFileSync('/bin/busybox', join(folder, 'base/bin/busybox'));
    for (const name of ['sh', 'cat', 'mv']) symlinkSync('busybox', join(folder, 'base/bin', name));
    await dsec('convert', base, '--name', 'base:1');
    const repo = tree('repo', { readme: 'to do\n' });
    await dsec('convert', repo, '--prefix', '/workspace', '--name', 'repo:1', '--kind', 'workspace');
    const tools = tree('tools', { tool: '#!/bin/sh\ncat readme > done\n' });
    await dsec('convert', tools, '--prefix', '/opt/tools', '--name', 'tools:1', '--kind', 'toolkit');
  });
  afterAll(() => {
    for (const name of ['DSEC_STATE', 'DSEC_RUN', 'DSEC_CACHE']) delete process.env[name];
    rmSync(folder, { recursive: true, force: true });
  });

  it('is packed with its changes alone as its own, and says so', async () => {
    const parts = ['--workspace', 'repo:1', '--toolkit', 'tools:1'];
    const ran = await dsec(
      'run',
      ...['--name', 'work', '--keep', '--workdir', '/workspace', ...parts, 'base:1', '--', '/opt/tools/tool'],
    );
    expect([ran.exitCode, ran.stderr]).toEqual([0, expect.stringMatching(/^dsec: kept as work; /)]);
    const packed = await dsec('pack-diff', 'work', '--name', 'repo:done', '--kind', 'toolkit');
    expect(packed.text).toContain(
      'its own layer holds the changes alone; below it, and not its own: repo:1, tools:1\n',
    );
    const again = JSON.parse((await dsec('pack-diff', 'work', '--name', 'repo:done', '--json', '--rm')).text);
    expect(again).toMatchObject({
      layers: 4,
      ownLayers: 1,
      composition: { base: { name: 'base:1' }, workspace: { name: 'repo:1' }, toolkits: [{ name: 'tools:1' }] },
    });

    const { text } = await dsec('inspect', 'repo:done');
    expect(text.match(/ (lower|image) /g)).toEqual([' lower ', ' lower ', ' lower ', ' image ']);
    expect((await dsec('cat', 'repo:done', '/workspace/done')).text).toBe('to do\n');

    const other = await dsec('run', '--toolkit', 'repo:done', 'base:1', '--', '/bin/cat', '/workspace/readme');
    expect(other.exitCode).toBe(1);
    expect((await dsec('run', '--toolkit', 'repo:done', 'base:1', '--', '/bin/cat', '/workspace/done')).exitCode).toBe(
      0,
    );
  });

  it('gets another version of a toolkit for the price of one layer', async () => {
    const blobs = () => readdirSync(join(store, 'blobs/sha256')).length;
    const inUse = ['--workspace', 'repo:1', '--toolkit', 'tools:1', 'base:1', '--', '/bin/sh', '/opt/tools/tool'];
    const before = blobs();
    const tools = tree('tools-2', { tool: '#!/bin/sh\necho second\n' });
    await dsec('convert', tools, '--prefix', '/opt/tools', '--name', 'tools:2', '--kind', 'toolkit');
    // A metadata image (the script is inside it) and a manifest; nothing of base or workspace is touched.
    expect(blobs() - before).toBe(2);
    const after = blobs();
    const second = inUse.map((part) => part.replace('tools:1', 'tools:2'));
    expect((await dsec('run', ...second)).exitCode).toBe(0);
    expect((await dsec('run', ...inUse.slice(0, -3), '--', '/bin/cat', '/opt/tools/tool')).exitCode).toBe(0);
    expect(blobs()).toBe(after);
  });
});
