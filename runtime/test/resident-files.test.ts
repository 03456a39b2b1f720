/** Files of a sandbox from outside: whole trees there and back, and links that try to lead out. */
import { execFileSync } from 'node:child_process';
import * as fs from 'node:fs';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { findAgent } from '../backend/agent-binary.ts';
import type { NodeSandbox } from '../node/node-sandbox.ts';
import { ResidentSite, say } from './resident-fixture.ts';
import { TEST_IMAGES } from './resident-images.ts';
import { canRun } from './sandbox-fixture.ts';

const agent = findAgent();
if (agent === undefined) console.log('skipped: dsec-agent is not built');

describe.skipIf(agent === undefined || !canRun()).each(TEST_IMAGES)('files on $name', { timeout: 120_000 }, (image) => {
  let all: ResidentSite;
  let box: NodeSandbox;
  let host: string;
  beforeAll(async () => {
    all = await ResidentSite.open(image.name);
    box = await all.create();
    host = join(all.site.root, 'host');
    fs.mkdirSync(host);
  }, 120_000);
  afterAll(() => all.remove(), 120_000);
  const failure = (promise: Promise<unknown>) =>
    promise.then(
      () => 'done',
      (error: { params?: { code?: string } }) => error.params?.code ?? String(error),
    );

  it('are written, read, listed, renamed and removed', async () => {
    const { files } = box;
    const content = Buffer.alloc(700_000, Buffer.from([0, 255, 10, 13, 128]));
    await files.mkdir('/tmp/a/b/c', { parents: true });
    await files.write('/tmp/a/b/x', content, { mode: 0o4751, uid: 1000, gid: 1001 });
    expect((await files.read('/tmp/a/b/x')).equals(content)).toBe(true);
    expect(await files.stat('tmp/a//b/./x')).toMatchObject({ kind: 'file', uid: 1000, gid: 1001, size: 700_000 });
    expect((await files.stat('/tmp/a/b/x')).mode & 0o7777).toBe(0o4751);
    await files.write('/tmp/a/b/x', Buffer.from('short'));
    expect(String(await files.read('/tmp/a/b/x'))).toBe('short');
    await files.rename('/tmp/a/b/x', '/tmp/a/y');
    expect((await files.list('/tmp/a')).map(({ name, kind }) => [String(name), kind]).sort()).toEqual([
      ['b', 'directory'],
      ['y', 'file'],
    ]);
    expect(await failure(files.remove('/tmp/a'))).toBe('ENOTEMPTY');
    await files.remove('/tmp/a', { recursive: true });
    expect(await failure(files.stat('/tmp/a'))).toBe('ENOENT');
    expect(await failure(files.read('/tmp'))).toBe('EISDIR');
    expect(await failure(files.read('/dev/zero'))).toBe('EINVAL');
    expect(await failure(files.write('/tmp', Buffer.from('x')))).toBe('EISDIR');
    expect(await failure(files.remove('/'))).not.toBe('done');
    expect(await failure(files.remove('/tmp/..', { recursive: true }))).toBe('EINVAL');
    expect(String(await files.read('/proc/self/status'))).toContain('Name:\tdsec-agent');
  });

  it('of a folder with many come all', async () => {
    for (let n = 0; n < 600; n++) fs.mkdirSync(join(host, `many/${n}`), { recursive: true });
    await box.files.upload(join(host, 'many'), '/tmp/many');
    expect((await box.files.list('/tmp/many')).length).toBe(600);
  });

  it('go there and back as they are: modes, times, links, holes, names', async () => {
    const from = join(host, 'tree');
    fs.mkdirSync(join(from, 'sub/deep'), { recursive: true });
    fs.writeFileSync(join(from, 'sub/file'), 'content\0binary');
    fs.chmodSync(join(from, 'sub/file'), 0o640);
    fs.linkSync(join(from, 'sub/file'), join(from, 'hard'));
    fs.symlinkSync('/etc/passwd', join(from, 'absolute'));
    fs.symlinkSync('nowhere/at all', join(from, 'sub/dangling'));
    fs.writeFileSync(join(from, 'ü "quoted"\nname'), '');
    execFileSync('truncate', ['-s', '64M', join(from, 'sparse')]);
    const file = fs.openSync(join(from, 'sparse'), 'r+');
    fs.writeSync(file, 'in the middle', 33 << 20);
    fs.closeSync(file);
    fs.utimesSync(join(from, 'sub/file'), 1_000_000.25, 1_000_000.25);
    fs.chmodSync(join(from, 'sub/deep'), 0o2711);
    await box.files.upload(from, '/tmp/tree');
    expect((await box.files.stat('/tmp/tree/sparse')).blocks).toBeLessThan(4096);
    const back = join(host, 'back');
    await box.files.download('/tmp/tree', back);
    expect(execFileSync('diff', ['-r', '--no-dereference', from, back]).toString()).toBe('');
    const facts = (folder: string) =>
      ['sub/file', 'hard', 'sub', 'sub/deep'].map((name) => {
        const { mode, mtimeMs, nlink } = fs.lstatSync(join(folder, name));
        return [name, (mode & 0o777).toString(8), Math.round(mtimeMs), name === 'hard' ? nlink : 0];
      });
    expect(facts(back)).toEqual(facts(from));
    expect(fs.statSync(join(back, 'sparse')).blocks).toBeLessThan(4096);
  });

  it('never lie outside the root, whatever links say', async () => {
    const { files } = box;
    await files.symlink('/../../../../../../etc/passwd', '/tmp/up');
    await files.symlink('/proc/1/root/etc/passwd', '/tmp/magic');
    await files.symlink('/proc/self/fd', '/tmp/fds');
    expect(String(await files.read('/tmp/up'))).toContain('agent:x:1000');
    expect(await failure(files.read('/tmp/magic'))).toBe('ELOOP');
    expect(await failure(files.read('/tmp/fds/0'))).toBe('ELOOP');
    expect(String(await files.read('/../../etc/passwd'))).toContain('agent:x:1000');
    await files.write('/tmp/out', Buffer.from('x'));
    expect(fs.existsSync('/tmp/out')).toBe(false);
    await expect(files.write('a\0b', Buffer.from('x'))).rejects.toMatchObject({ code: 'RUNTIME_FILE' });
  });

  it.skipIf(!image.hasShell)('never lie outside it while links are swapped', async () => {
    const { files } = box;
    await say(box, 'mkdir -p /tmp/race/real /tmp/race/etc; echo inside > /tmp/race/real/hostname');
    const loop =
      'cd /tmp/race; while :; do ln -s real link; mv -T link d 2>/dev/null || mv link d; rm -rf d link; ln -s ../../../../../../../etc d; rm -f d; done';
    const swapping = await box.exec({ args: ['sh', '-c', loop] });
    const seen = new Set<string>();
    for (let n = 0; n < 300; n++) {
      const found = await files
        .read('/tmp/race/d/hostname')
        .then(String, (error: { params?: { code?: string } }) => String(error.params?.code));
      seen.add(found.trim());
    }
    await swapping.killTree();
    expect([...seen].filter((found) => !['inside', 'ENOENT', 'ESTALE'].includes(found))).toEqual([]);
  });
});
