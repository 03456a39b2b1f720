import {
  chmodSync,
  existsSync,
  mkdirSync,
  mkdtempSync,
  readdirSync,
  readFileSync,
  rmSync,
  symlinkSync,
  writeFileSync,
} from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { parseBatch } from '../cli/batch-file.ts';
import { runCommand } from './command-run.ts';

/** Each command once, on images made of a small folder. What the libraries do is tested where they are. */
describe('commands', () => {
  let folder: string;
  let store: string;
  const run = (...argv: string[]) => runCommand(...argv, '--store', store);
  const json = async (...argv: string[]) => JSON.parse((await run(...argv, '--json')).text);

  beforeAll(async () => {
    folder = mkdtempSync(join(tmpdir(), 'dsec-commands-'));
    store = join(folder, 'store');
    mkdirSync(join(folder, 'tree/etc'), { recursive: true });
    chmodSync(join(folder, 'tree'), 0o755);
    writeFileSync(join(folder, 'tree/etc/motd'), 'welcome\n');
    writeFileSync(join(folder, 'tree/large'), Buffer.alloc(300_000, 7));
    symlinkSync('etc/motd', join(folder, 'tree/link'));
    await run('convert', `dir:${folder}/tree`, '--name', 'web:1');
    writeFileSync(join(folder, 'tree/etc/motd'), 'welcome back\n');
    rmSync(join(folder, 'tree/link'));
    await run('convert', `dir:${folder}/tree`, '--name', 'web:2', '--compress', 'lz4');
  });
  afterAll(() => rmSync(folder, { recursive: true, force: true }));

  it('convert prints a digest, the same for the same input', async () => {
    const first = await json('convert', `dir:${folder}/tree`, '--name', 'same:1');
    expect(first).toMatchObject({ name: 'same:1', digest: expect.stringMatching(/^sha256:[0-9a-f]{64}$/), layers: 1 });
    expect((await json('convert', `dir:${folder}/tree`, '--name', 'same:2')).digest).toBe(first.digest);
    await run('rm', 'same:1', 'same:2');
  });

  it('convert takes an inline limit up to what fits into a block beside an inode, and refuses more', async () => {
    const convert = (limit: string) =>
      run('convert', `dir:${folder}/tree`, '--name', 'inline:1', '--inline-limit', limit);
    await expect(convert('4001')).rejects.toMatchObject({
      code: 'CLI_USAGE',
      message: '--inline-limit 4001: at most 4000 bytes fit into a block beside an inode',
    });
    expect((await convert('4000')).exitCode).toBe(0);
    await run('rm', 'inline:1');
  });

  it('damage to a ref, and a folder in the place of a blob, are shown, and verify ends with 3', async () => {
    const own = join(folder, 'own-store');
    const there = (...argv: string[]) => runCommand(...argv, '--store', own);
    const source = `dir:${folder}/tree`;
    const image = JSON.parse((await there('convert', source, '--name', 'a:1', '--json')).text);
    await there('convert', source, '--name', 'b:1');
    writeFileSync(join(own, 'refs/a/_tags/1'), 'garbage');
    const listed = await there('images');
    expect(listed.text).toMatch(/^a:1 +damaged/m);
    expect(listed.stderr).toContain('the ref of a:1 is damaged');
    const verified = await there('verify', '--all');
    expect(verified.exitCode).toBe(3);
    expect(verified.text).toMatch(/^a:1: .*the ref of a:1 is damaged/m);
    expect(verified.text).toMatch(/^b:1: ok/m);
    await expect(there('gc', '--grace', '0s')).rejects.toMatchObject({ code: 'CATALOG_GC_UNSAFE' });
    await there('rm', 'a:1');
    expect((await there('verify', '--all')).exitCode).toBe(0);

    const config = JSON.parse((await there('inspect', 'b:1', '--json')).text).manifest.config.digest as string;
    for (const digest of [image.digest as string, config]) {
      const path = join(own, 'blobs/sha256', digest.slice('sha256:'.length));
      rmSync(path);
      mkdirSync(path);
      const damaged = await there('verify', '--all');
      expect(damaged.exitCode).toBe(3);
      expect(damaged.text).toContain(path);
      await there('convert', source, '--name', 'b:1');
      expect((await there('verify', '--all')).exitCode).toBe(0);
      rmSync(path);
      mkdirSync(path);
      expect((await there('verify', '--repair', 'b:1')).exitCode).toBe(3);
      expect(existsSync(path)).toBe(false);
      await there('convert', source, '--name', 'b:1');
      expect((await there('verify', '--all')).exitCode).toBe(0);
    }
  });

  it('convert refuses what it does not know before it works', async () => {
    const source = `dir:${folder}/tree`;
    const usage = expect.objectContaining({ code: 'CLI_USAGE', exit: 2 });
    await expect(run('convert', source)).rejects.toEqual(usage);
    await expect(run('convert')).rejects.toEqual(usage);
    await expect(run('convert', source, '--name', 'x:1', '--compress', 'rar')).rejects.toEqual(usage);
    await expect(run('convert', source, '--name', 'x:1', '--kind', 'odd')).rejects.toEqual(usage);
    await expect(run('convert', source, '--batch', 'x')).rejects.toEqual(usage);
    await expect(run('convert', source, '--name', 'x:1', '--collapse-limit', '3 apples')).rejects.toMatchObject({
      code: 'CLI_SIZE',
      message: '--collapse-limit 3 apples: not a size',
    });
    expect((await json('images')).map((image: { name: string }) => image.name)).toEqual(['web:1', 'web:2']);
  });

  it('convert --batch converts each line and fails when one of them does', async () => {
    const batch = join(folder, 'batch');
    writeFileSync(batch, `# two images\n\ndir:${folder}/tree batch:1\ndir:${folder}/nothing batch:2\n`);
    const { exitCode, stderr } = await run('convert', '--batch', batch);
    expect(exitCode).toBe(4);
    expect(stderr).toBe(
      `dsec: batch:2: ${folder}/nothing: no such folder\n      check the path\ndsec: 1 of 2 images failed\n`,
    );
    expect((await json('images')).map((image: { name: string }) => image.name)).toContain('batch:1');
    await run('rm', 'batch:1');
    writeFileSync(batch, 'dir:only-a-source\n');
    await expect(run('convert', '--batch', batch)).rejects.toMatchObject({
      code: 'CLI_BATCH_LINE',
      message: `${batch}:1: "dir:only-a-source" has no name`,
    });
    writeFileSync(batch, 'dir:a x:1 y:1\n');
    await expect(run('convert', '--batch', batch)).rejects.toMatchObject({
      code: 'CLI_BATCH_LINE',
      message: `${batch}:1: "y:1" follows the name x:1`,
    });
    expect(parseBatch('f', '"dir:/with blanks" x:1\n  # no\n\ndir:b\ty:1')).toEqual([
      { source: 'dir:/with blanks', name: 'x:1' },
      { source: 'dir:b', name: 'y:1' },
    ]);
    writeFileSync(batch, 'dir:a x:1\ndir:b x:1\n');
    await expect(run('convert', '--batch', batch)).rejects.toMatchObject({
      message: `${batch}:2: x:1 is in line 1 already`,
    });
    await expect(run('convert', '--batch', join(folder, 'no-file'))).rejects.toMatchObject({
      code: 'CLI_INPUT_MISSING',
      exit: 4,
    });
  });

  it('images and inspect show both images', async () => {
    const { text } = await run('images');
    expect(text).toMatch(/^NAME +KIND +LAYERS +METADATA +DATA +DIGEST\nweb:1 +base +1 .*\nweb:2 +base +1 .*\n$/);
    expect((await run('inspect', 'web:1')).text).toMatch(/^name +web:1\ndigest +sha256:[0-9a-f]{64}\nkind +base\n/);
    expect(await json('inspect', 'web:1')).toMatchObject({
      name: 'web:1',
      kind: 'base',
      manifest: { schemaVersion: 2 },
    });
  });

  it('ls, cat and stat read files', async () => {
    expect((await run('ls', 'web:1')).text).toBe('etc\nlarge\nlink\n');
    expect((await run('ls', 'web:1', '/etc', '/')).text).toBe('/etc:\nmotd\n/:\netc\nlarge\nlink\n');
    expect((await run('ls', '-lR', 'web:1')).text).toContain(' link -> etc/motd\n');
    expect((await run('cat', 'web:1', '/link', '/etc/motd')).text).toBe('welcome\nwelcome\n');
    expect((await run('cat', 'web:2', '/large')).stdout.equals(Buffer.alloc(300_000, 7))).toBe(true);
    expect(await json('cat', 'web:1', '/link')).toEqual({
      path: '/link',
      contentBase64: Buffer.from('welcome\n').toString('base64'),
    });
    expect(await json('stat', 'web:1', '/link')).toMatchObject({ path: '/link', kind: 'symlink', target: 'etc/motd' });
    expect(await json('stat', '-L', 'web:1', '/link')).toMatchObject({ path: '/etc/motd', kind: 'file', sizeBytes: 8 });
    await expect(run('cat', 'web:1', '/none')).rejects.toMatchObject({ exit: 4 });
    await expect(run('ls', 'none:1')).rejects.toMatchObject({ code: 'CATALOG_NOT_FOUND', exit: 4 });
  });

  it('diff tells what changed, and the status when asked', async () => {
    const { text, exitCode } = await run('diff', '--ignore-mtime', 'web:1', 'web:2');
    expect(text).toBe('C /etc/motd (content) 8 -> 13\nD /link\n');
    expect(exitCode).toBe(0);
    expect((await run('diff', '--exit-code', 'web:1', 'web:2')).exitCode).toBe(1);
    expect((await run('diff', '--exit-code', 'web:1', 'web:1')).exitCode).toBe(0);
  });

  it('export writes a tar to a file, whole or not at all, or to stdout', async () => {
    const path = join(folder, 'out.tar');
    const result = await run('export', 'web:1', '-o', path);
    expect(result.text).toBe('');
    const tar = readFileSync(path);
    expect(tar.length % 512).toBe(0);
    expect((await run('export', 'web:1')).stdout.equals(tar)).toBe(true);
    expect(readdirSync(folder).filter((name) => name.includes('partial'))).toEqual([]);
    expect(await json('export', 'web:1', '-o', path)).toMatchObject({
      image: 'web:1',
      file: path,
      sizeBytes: tar.length,
    });
    await expect(run('export', 'none:1', '-o', join(folder, 'none.tar'))).rejects.toMatchObject({ exit: 4 });
    expect(readdirSync(folder)).not.toContain('none.tar');
    const nowhere = join(folder, 'no-folder', 'x.tar');
    await expect(run('export', 'web:1', '-o', nowhere)).rejects.toMatchObject({
      code: 'CLI_OUTPUT_FILE',
      message: `cannot write ${nowhere}: ENOENT`,
    });
    await run('export', 'web:1', '-o', '/dev/null');
  });

  it('verify finds a changed byte, names its blob and exits with 3', async () => {
    expect((await run('verify', 'web:1')).text).toMatch(/^web:1: ok \(1 layer, 5 inodes, /);
    await run('convert', `dir:${folder}/tree`, '--name', 'bad:1', '--inline-limit', '0');
    const { layers } = await json('inspect', 'bad:1');
    const blob = layers[0].devices[0].digest.slice('sha256:'.length);
    const path = join(store, 'blobs/sha256', blob);
    const bytes = readFileSync(path);
    bytes[100] = bytes[100]! ^ 1;
    chmodSync(path, 0o600);
    writeFileSync(path, bytes);
    const { text, exitCode } = await run('verify', '--all');
    expect(exitCode).toBe(3);
    expect(text).toContain(`bad:1: sha256:${blob}: `);
    expect(text).toContain('bad:1: DAMAGED');
    expect(text).toContain('web:1: ok');
    // Converting again takes the damaged blob for whole, until it is set aside.
    await run('convert', `dir:${folder}/tree`, '--name', 'bad:1', '--inline-limit', '0');
    expect((await run('verify', 'bad:1')).exitCode).toBe(3);
    const repaired = await run('verify', '--repair', 'bad:1');
    expect(repaired.exitCode).toBe(3);
    expect(repaired.text).toContain('bad:1: set 1 damaged blob aside; now convert or pull it again\n');
    await expect(run('cat', 'bad:1', '/large')).rejects.toMatchObject({
      code: 'STORE_BLOB_MISSING',
      hint: 'run "dsec verify --repair IMAGE", then convert or pull it again',
    });
    await run('convert', `dir:${folder}/tree`, '--name', 'bad:1', '--inline-limit', '0');
    expect((await run('verify', '--repair', 'bad:1')).exitCode).toBe(0);
    await run('rm', 'bad:1');
    await expect(run('verify')).rejects.toMatchObject({ code: 'CLI_USAGE' });
  });

  it('verify reports a damaged manifest and goes on; repaired, the image can be converted again', async () => {
    const source = `dir:${folder}/tree`;
    const { digest } = await json('convert', source, '--name', 'bad:2', '--kind', 'toolkit');
    const path = join(store, 'blobs/sha256', digest.slice('sha256:'.length));
    const whole = readFileSync(path);
    chmodSync(path, 0o600);
    writeFileSync(path, Buffer.alloc(whole.length, 32));
    const { text, exitCode } = await run('verify', '--all', '--repair');
    expect(exitCode).toBe(3);
    expect(text).toContain('bad:2: set 1 damaged blob aside');
    expect(text).toContain('web:2: ok');
    await run('convert', source, '--name', 'bad:2', '--kind', 'toolkit');
    expect(readFileSync(path).equals(whole)).toBe(true);
    await run('rm', 'bad:2');
  });

  it('verify --all of an empty store says that there is nothing', async () => {
    const empty = await runCommand('verify', '--all', '--store', join(folder, 'empty'));
    expect(empty).toMatchObject({ exitCode: 0, text: '', stderr: expect.stringContaining('nothing to verify') });
    expect((await runCommand('verify', '--all', '--json', '--store', join(folder, 'empty'))).text).toBe('[]\n');
  });

  it('usage errors name the help of their own command', async () => {
    const hintOf = (...argv: string[]) =>
      runCommand(...argv).then(
        () => 'no error',
        (error) => error.hint,
      );
    expect(await hintOf('convert', 'dir:x', '--kind', 'odd')).toBe('`dsec convert --help` shows how it is used');
    expect(await hintOf('convert', '--wrong')).toBe('`dsec convert --help` shows how it is used');
    expect(await hintOf('sandbox', 'rm')).toBe('`dsec sandbox rm --help` shows how it is used');
    expect(await hintOf('nothing')).toBe('`dsec --help` shows how it is used');
    expect((await runCommand('sandbox', 'rm', '--help')).text).toContain('Examples:\n  # one\n  dsec sandbox rm work');
  });

  it('dump shows superblocks and inodes', async () => {
    expect(await json('dump', 'web:1', '/etc/motd')).toMatchObject({ image: 'web:1', path: '/etc/motd' });
    expect((await run('dump', 'web:1')).text).toContain('superblock:');
    await expect(run('dump', 'web:1', '--nid', 'x')).rejects.toMatchObject({ code: 'CLI_USAGE' });
    await expect(run('dump', 'web:1', '/etc', '--nid', 'root')).rejects.toMatchObject({ code: 'CLI_USAGE' });
    // As the help has it.
    expect((await json('dump', 'web:1', '--layer', '1', '--nid', 'root')).inodes).toMatchObject([
      { layer: 1, kind: 'dir' },
    ]);
    await expect(run('dump', 'web:1', '--nid', '1')).rejects.toMatchObject({
      code: 'TREE_NO_INODE',
      hint: expect.stringMatching(/the root of this layer is inode \d+$/),
    });
  });

  it('push and pull move an image through an OCI layout', async () => {
    const layout = `oci:${folder}/layout:web`;
    const pushed = await json('push', 'web:1', layout);
    const other = join(folder, 'other');
    const { text } = await runCommand('pull', layout, '--store', other, '--json');
    expect(JSON.parse(text)).toMatchObject({ name: 'layout:web', digest: pushed.digest });
    expect((await runCommand('cat', 'layout:web', '/etc/motd', '--store', other)).text).toBe('welcome\n');
  });

  it('tag gives further names, and takes them from what had them', async () => {
    const { digest } = await json('inspect', 'web:1');
    const { digest: other } = await json('inspect', 'web:2');
    expect((await run('tag', 'web:1', 'same', 'same:2')).text).toBe(`same:latest: ${digest}\nsame:2: ${digest}\n`);
    expect((await run('tag', digest.slice(7, 27), 'same:2')).text).toBe(`same:2: ${digest}\n`);
    expect(await json('tag', 'web:2', 'same:2')).toEqual([{ name: 'same:2', digest: other, replaced: digest }]);
    expect((await run('tag', 'web:1', 'same:2')).text).toBe(`same:2: ${digest}, was ${other}\n`);
    expect((await run('cat', 'same:2', '/etc/motd')).text).toBe('welcome\n');
    await expect(run('tag', 'none:1', 'new:1')).rejects.toMatchObject({ code: 'CATALOG_NOT_FOUND' });
    await expect(run('tag', 'web:1', 'new:1', 'Not A Name')).rejects.toMatchObject({ code: 'STORE_NAME' });
    await run('rm', 'same:2', 'same:latest');
    expect((await run('cat', 'web:1', '/etc/motd')).text).toBe('welcome\n');
    expect((await json('images')).map((image: { name: string }) => image.name)).toEqual(['web:1', 'web:2']);
  });

  it('rm removes what is there and fails for what is not', async () => {
    await run('convert', `dir:${folder}/tree`, '--name', 'gone:1');
    expect((await run('rm', '--dry-run', 'gone:1')).text).toMatch(/^gone:1: would free /);
    const failure = run('rm', 'none:1', 'gone:1');
    await expect(failure).rejects.toMatchObject({ code: 'CATALOG_NOT_FOUND' });
    const { digest } = await json('inspect', 'web:1');
    for (const reference of [digest, digest.slice(0, 20), digest.slice(7, 20)]) {
      await expect(run('rm', reference)).rejects.toMatchObject({
        code: 'CATALOG_NOT_NAME',
        exit: 2,
        hint: expect.stringContaining('its names: web:1;'),
      });
    }
    expect((await json('images')).map((image: { name: string }) => image.name)).toEqual(['web:1', 'web:2']);
  });

  it('rm keeps what a kept container ran on, and says so', async () => {
    const state = join(folder, 'state');
    const { digest } = await json('convert', `dir:${folder}/tree`, '--name', 'kept:1', '--kind', 'toolkit');
    mkdirSync(join(state, 'sandboxes/work'), { recursive: true });
    const record = {
      version: 1,
      name: 'work',
      id: 'work-1',
      state: 'kept',
      keep: true,
      createdAt: new Date(0).toISOString(),
      backend: 'crun',
      store: `file://${store}`,
      base: { name: 'kept:1', digest },
      toolkits: [],
      owner: { pid: 1, startTicks: '1', bootId: 'x' },
      mountPoints: [],
    };
    writeFileSync(join(state, 'sandboxes/work/record.json'), JSON.stringify(record));
    const before = process.env.DSEC_STATE;
    process.env.DSEC_STATE = state;
    try {
      const { text } = await run('rm', 'kept:1');
      expect(text).toMatch(/^kept:1: removed, freed 0 blobs, 0 B\nkept:1: kept \d blobs?: sandbox work ran on it\n$/);
      expect((await run('cat', digest, '/etc/motd')).text).toBe('welcome back\n');
      rmSync(join(state, 'sandboxes/work'), { recursive: true });
      expect((await json('gc', '--grace', '0')).deleted).toContain(digest);
    } finally {
      if (before === undefined) delete process.env.DSEC_STATE;
      else process.env.DSEC_STATE = before;
    }
  });

  it('doctor lists features and tools, and exits with 0', async () => {
    const result = await runCommand('doctor', '--json', '--store', store);
    expect(result.exitCode).toBe(0);
    const { ok, features, tools, disks, runtime } = JSON.parse(result.text);
    expect(ok).toBe(true);
    expect(disks.map((row: { name: string }) => row.name)).toEqual(expect.arrayContaining(['ublk']));
    for (const feature of [...features, ...disks]) {
      expect(feature).toEqual({
        name: expect.any(String),
        present: expect.any(Boolean),
        detail: expect.any(String),
        usedFor: expect.stringMatching(/./),
        fallback: expect.stringMatching(/./),
      });
    }
    // What nothing uses yet promises nothing.
    expect(runtime.map((feature: { name: string }) => feature.name)).not.toContain('firecracker');
    const all = JSON.parse((await runCommand('doctor', '--json', '--all', '--store', store)).text).runtime;
    expect(all).toContainEqual(expect.objectContaining({ name: 'firecracker', later: true }));
    expect(features.map((feature: { name: string }) => feature.name)).toEqual(
      expect.arrayContaining(['erofs', 'overlay']),
    );
    for (const tool of tools) {
      expect(tool).toMatchObject({
        present: expect.any(Boolean),
        purpose: expect.stringMatching(/./),
        without: expect.stringMatching(/./),
      });
    }
    expect((await runCommand('doctor', '--store', store)).text).toMatch(/^dsec .*\n\nKERNEL .*\n(.*\n)+\nTOOL /);
  });
});

describe.skipIf(process.getuid?.() !== 0)('main-job', () => {
  it('takes an image without a shell through the whole line and leaves nothing', async () => {
    const folder = mkdtempSync(join(tmpdir(), 'dsec-main-job-test-'));
    try {
      mkdirSync(join(folder, 'tree'));
      writeFileSync(join(folder, 'tree/file'), 'content');
      const { text } = await runCommand('main-job', `dir:${folder}/tree`, '--json');
      const result = JSON.parse(text.trimEnd().split('\n').at(-1)!);
      expect(Object.keys(result)).toEqual([
        'image',
        'files',
        'bytesIn',
        'bytesStored',
        'bytesRead',
        'timeToFirstOutputMs',
        'packDiff',
        'verified',
      ]);
      expect(result).toMatchObject({ verified: true, packDiff: { added: 1, deleted: 0 } });
      expect(text).toContain('\n  A /dsec-note 23\n');
      const mine = new RegExp(`^dsec-main-job-${process.pid}-`);
      expect(readdirSync(tmpdir()).filter((name) => mine.test(name))).toEqual([]);
      expect((await runCommand('mounts', '--json')).text).not.toContain(`dsec-main-job-${process.pid}-`);
    } finally {
      rmSync(folder, { recursive: true, force: true });
    }
  });
});
