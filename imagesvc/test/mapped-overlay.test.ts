/** An overlay whose layers and upper have shifted owners, made in both ways that kernels want it. */
import { execFileSync, spawn } from 'node:child_process';
import * as fs from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { attachMount, createMount, type DetachedMount, mountsAt, readMountInfo, SyscallError, umount } from '#linux';
import { composeMapped, type MappedPaths } from '../mount/mapped-overlay.ts';

const BASE = 0xbffe_0000;

/** A namespace that maps 0 and up to BASE and up; undefined where this kernel lets nobody have one. */
async function userNamespace(): Promise<number | undefined> {
  const holder = spawn('unshare', ['--user', '--kill-child', 'cat'], { stdio: ['pipe', 'pipe', 'ignore'] });
  try {
    holder.stdin.write('?');
    await new Promise<void>((resolve, reject) => {
      holder.stdout.once('data', () => resolve());
      holder.once('exit', () => reject(new Error('refused')));
    });
    for (const file of ['uid_map', 'gid_map']) fs.writeFileSync(`/proc/${holder.pid}/${file}`, `0 ${BASE} 65536\n`);
    return fs.openSync(`/proc/${holder.pid}/ns/user`, 'r');
  } catch {
    return undefined;
  } finally {
    holder.kill('SIGKILL');
  }
}

describe.skipIf(process.getuid?.() !== 0)('a shifted overlay', () => {
  let root: string;
  let namespace: number | undefined;
  beforeAll(async () => {
    root = fs.realpathSync(fs.mkdtempSync(join(tmpdir(), 'dsec-mapped-')));
    namespace = await userNamespace();
    for (const name of ['low', 'high', 'target', 'work', 'upper']) fs.mkdirSync(join(root, name));
    fs.writeFileSync(join(root, 'low', 'file'), 'x');
    fs.chownSync(join(root, 'low', 'file'), 7, 8);
    fs.writeFileSync(join(root, 'high', 'gone'), 'x');
  });
  afterAll(() => {
    if (namespace !== undefined) fs.closeSync(namespace);
    fs.rmSync(root, { recursive: true, force: true });
  });

  const create = ({ lowers, upper, work }: MappedPaths): DetachedMount =>
    createMount('overlay', [
      ...lowers.map((path) => ['lowerdir+', path] as const),
      ['upperdir', upper!],
      ['workdir', work!],
    ]);

  it.each(['at once', 'only where they are mounted'])('of layers that the kernel takes %s', (way) => {
    if (namespace === undefined) return console.log('skipped: no user namespaces');
    const [target, stage] = [join(root, 'target'), join(root, 'stage')];
    const seen: MappedPaths[] = [];
    const paths = {
      lowers: [join(root, 'high'), join(root, 'low')],
      upper: join(root, 'upper'),
      work: join(root, 'work'),
    };
    const made = composeMapped(paths, { userNamespace: namespace, owner: BASE }, stage, (given) => {
      seen.push(given);
      if (way !== 'at once' && seen.length === 1)
        throw new SyscallError('fsconfig', 'create', 22, 'as older kernels say');
      return create(given);
    });
    attachMount(made, target);
    try {
      expect(seen.at(-1)!.lowers.every((path) => path.startsWith(way === 'at once' ? '/proc/self/fd/' : stage))).toBe(
        true,
      );
      expect(fs.statSync(join(target, 'file'))).toMatchObject({ uid: BASE + 7, gid: BASE + 8 });
      fs.rmSync(join(target, 'gone'));
      fs.chownSync(join(target, 'file'), BASE + 1, BASE + 2);
    } finally {
      umount(target);
    }
    // Nothing of the way stays.
    expect(readMountInfo().filter((row) => row.mountPoint.startsWith(root))).toEqual([]);
    expect(mountsAt(stage)).toEqual([]);
    expect(fs.statSync(join(root, 'upper', 'file'))).toMatchObject({ uid: 1, gid: 2 });
    // A whiteout, by whoever is root in there.
    expect(fs.lstatSync(join(root, 'upper', 'gone'))).toMatchObject({ uid: 0, gid: 0, rdev: 0 });
    execFileSync('rm', ['-rf', join(root, 'upper'), join(root, 'work')]);
    for (const name of ['work', 'upper']) fs.mkdirSync(join(root, name));
  });

  it('says which file system cannot', () => {
    if (namespace === undefined) return;
    const attempt = () =>
      composeMapped({ lowers: ['/proc'] }, { userNamespace: namespace!, owner: BASE }, join(root, 'stage'), create);
    expect(attempt).toThrow(expect.objectContaining({ code: 'MOUNT_ID_MAPPING' }));
    // Whatever failed, this thread is root again.
    fs.writeFileSync(join(root, 'mine'), '');
    expect(fs.statSync(join(root, 'mine')).uid).toBe(0);
  });
});
