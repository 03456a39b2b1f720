/** What a real OverlayFS leaves in its upper, told as a layer. Root only: the uppers come from real mounts. */
import { execFileSync } from 'node:child_process';
import * as fs from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, beforeEach, describe, expect, it } from 'vitest';
import type { Entry, EntryHandler } from '#converter';
import { readFolder } from '#converter';
import { lsetxattr } from '#linux';
import { readUpper } from '../pack-diff/upper-reader.ts';

const root = process.getuid?.() === 0;

interface Told {
  entry: Entry;
  content: Buffer;
  /** `d5 h4096`: the data and hole calls, neighbours joined. */
  shape: string;
}

function collector(): { handler: EntryHandler; told: Told[]; text(): string[] } {
  const told: Told[] = [];
  let shape: [string, number][] = [];
  let open: Told | undefined;
  const add = (kind: string, size: number) => {
    const last = shape[shape.length - 1];
    if (last?.[0] === kind) last[1] += size;
    else shape.push([kind, size]);
  };
  const handler: EntryHandler = {
    entry(entry) {
      expect(open).toBeUndefined();
      const one = { entry, content: Buffer.alloc(0), shape: '' };
      told.push(one);
      if (entry.kind === 'file') {
        open = one;
        shape = [];
      }
    },
    data(bytes) {
      open!.content = Buffer.concat([open!.content, bytes]);
      add('d', bytes.length);
    },
    hole(size) {
      open!.content = Buffer.concat([open!.content, Buffer.alloc(size)]);
      add('h', size);
    },
    fileEnd() {
      expect(open!.content.length).toBe(open!.entry.sizeBytes);
      open!.shape = shape.map(([kind, size]) => `${kind}${size}`).join(' ');
      open = undefined;
    },
  };
  return {
    handler,
    told,
    text: () =>
      told.map(({ entry }) => `${entry.kind} ${entry.path}${entry.target === '' ? '' : ` -> ${entry.target}`}`),
  };
}

/** A file capability (version 2, effective): cap_net_raw. */
const NET_RAW = Buffer.from('0100000200200000000000000000000000000000', 'hex');

let work: string;
const at = (path: string) => join(work, 'merged', path);
const sh = (script: string) =>
  execFileSync('sh', ['-ec', script], { cwd: join(work, 'merged'), stdio: ['ignore', 'pipe', 'inherit'] });

function lower(path: string): 'dir' | 'other' | undefined {
  const stat = fs.lstatSync(join(work, 'lower', path), { throwIfNoEntry: false });
  return stat === undefined ? undefined : stat.isDirectory() ? 'dir' : 'other';
}

beforeEach(() => {
  work = fs.mkdtempSync(join(tmpdir(), 'dsec-upper-'));
  for (const name of ['lower', 'upper', 'work', 'merged']) fs.mkdirSync(join(work, name));
  fs.mkdirSync(join(work, 'lower/dir/sub'), { recursive: true });
  fs.writeFileSync(join(work, 'lower/dir/a'), 'a');
  fs.writeFileSync(join(work, 'lower/dir/sub/b'), 'b');
  fs.writeFileSync(join(work, 'lower/file'), 'lower file');
});

afterEach(() => {
  if (root) execFileSync('sh', ['-c', `mountpoint -q ${work}/merged && umount ${work}/merged; true`]);
  fs.rmSync(work, { recursive: true, force: true });
});

function mount(): void {
  const options = `lowerdir=${work}/lower,upperdir=${work}/upper,workdir=${work}/work,redirect_dir=off,metacopy=off,index=off`;
  execFileSync('mount', ['-t', 'overlay', 'overlay', '-o', options, join(work, 'merged')]);
}

describe.skipIf(!root)('an OverlayFS upper as a layer', () => {
  async function read(change: string | (() => void), options: Parameters<typeof readUpper>[2] = { lower }) {
    mount();
    if (typeof change === 'string') sh(change);
    else change();
    execFileSync('umount', [join(work, 'merged')]);
    const got = collector();
    const summary = await readUpper(join(work, 'upper'), got.handler, options);
    return { ...got, ...summary };
  }

  it('is the root alone when nothing changed', async () => {
    expect((await read('true')).text()).toEqual(['dir .']);
  });

  it('tells a deleted file and a deleted directory as whiteouts', async () => {
    expect((await read('rm file; rm -r dir/sub')).text()).toEqual([
      'dir .',
      'dir dir',
      'whiteout dir/sub',
      'whiteout file',
    ]);
  });

  it('tells many whiteouts that share one inode each for itself, not as hard links', async () => {
    const got = await read('rm dir/a dir/sub/b file');
    expect(got.text().filter((line) => line.startsWith('whiteout'))).toEqual([
      'whiteout dir/a',
      'whiteout dir/sub/b',
      'whiteout file',
    ]);
  });

  it('replaces a directory by a file, and a directory by a new one (opaque)', async () => {
    const got = await read('rm -r dir/sub; echo x > dir/sub');
    expect(got.text()).toEqual(['dir .', 'dir dir', 'file dir/sub']);
  });

  it('marks a directory that was deleted and made again as opaque, after its entry', async () => {
    const got = await read('rm -r dir; mkdir -m 0711 dir; echo n > dir/new');
    expect(got.text()).toEqual(['dir .', 'dir dir', 'opaque dir', 'file dir/new']);
    expect(got.told[1]!.entry.mode).toBe(0o711);
    expect(got.told[1]!.entry.xattrs).toBeUndefined();
  });

  it('drops an opaque mark with nothing below it (with index or redirects on, OverlayFS marks every new directory)', async () => {
    const mark = () => {
      fs.mkdirSync(at('opt'));
      lsetxattr(join(work, 'upper/opt'), 'trusted.overlay.opaque', Buffer.from('y'));
    };
    expect((await read(mark)).text()).toEqual(['dir .', 'dir opt']);
  });

  it('keeps every opaque mark when nobody says what is below', async () => {
    const mark = () => {
      fs.mkdirSync(at('opt'));
      lsetxattr(join(work, 'upper/opt'), 'trusted.overlay.opaque', Buffer.from('y'));
    };
    expect((await read(mark, {})).text()).toEqual(['dir .', 'dir opt', 'opaque opt']);
  });

  it('carries a change of mode alone, with the content', async () => {
    const got = await read('chown 12:34 file; chmod 4750 file');
    const { entry, content } = got.told[1]!;
    expect([entry.mode, entry.uid, entry.gid, content.toString()]).toEqual([0o4750, 12, 34, 'lower file']);
  });

  it('tells hard links by their first path in byte order', async () => {
    const got = await read('mkdir z; echo one > z/first; ln z/first b; ln -s nowhere l; ln l m');
    expect(got.text()).toEqual([
      'dir .',
      'file b',
      'symlink l -> nowhere',
      'hardlink m -> l',
      'dir z',
      'hardlink z/first -> b',
    ]);
  });

  it('keeps a renamed directory whole (OverlayFS copies it)', async () => {
    const got = await read('mv dir moved');
    expect(got.text()).toEqual([
      'dir .',
      'whiteout dir',
      'dir moved',
      'file moved/a',
      'dir moved/sub',
      'file moved/sub/b',
    ]);
  });

  it('refuses an upper written with redirect_dir on', async () => {
    fs.mkdirSync(join(work, 'upper/moved'));
    lsetxattr(join(work, 'upper/moved'), 'trusted.overlay.redirect', Buffer.from('/dir'));
    await expect(readUpper(join(work, 'upper'), collector().handler)).rejects.toMatchObject({
      code: 'LAYER_UPPER_REDIRECT',
      message: expect.stringContaining('upper/moved'),
    });
  });

  it('keeps attributes, without those of OverlayFS', async () => {
    const got = await read(() => {
      lsetxattr(at('file'), 'user.note', Buffer.from([0, 255, 10]));
      lsetxattr(at('file'), 'security.capability', NET_RAW);
      lsetxattr(at('dir'), 'trusted.mine', Buffer.from('t'));
      lsetxattr(at('dir'), 'user.overlay.opaque', Buffer.from('y'));
      lsetxattr(at('dir'), 'trusted.overlay.opaque', Buffer.from('y'));
    });
    const [, dir, file] = got.told;
    expect([...dir!.entry.xattrs!.keys()]).toEqual([
      'trusted.mine',
      'trusted.overlay.overlay.opaque',
      'user.overlay.opaque',
    ]);
    expect(file!.entry.xattrs!.get('user.note')).toEqual(Buffer.from([0, 255, 10]));
    expect(file!.entry.xattrs!.get('security.capability')).toEqual(NET_RAW);
    expect(got.text()).not.toContain('opaque dir');
  });

  it('leaves sockets and pipes out with a note, and still hides what they replaced', async () => {
    const got = await read(
      `rm file; mkfifo file pipe; node -e "require('net').createServer().listen('sock', () => process.exit())"`,
    );
    // Node removes its socket on exit; make sure that one is there.
    expect(got.text()).toEqual(['dir .', 'whiteout file']);
    expect(got.notes).toContain('pipe pipe left out');
    expect(got.notes).toContain('pipe file left out');
  });

  it('leaves a socket out with a note', async () => {
    mount();
    const { createServer } = await import('node:net');
    const server = createServer();
    await new Promise<void>((resolve) => server.listen(at('sock'), resolve));
    const got = collector();
    const summary = await readUpper(join(work, 'upper'), got.handler);
    await new Promise((resolve) => server.close(resolve));
    expect([got.text(), summary.notes]).toEqual([['dir .'], ['socket sock left out']]);
  });

  it('tells holes as holes', async () => {
    const got = await read(
      'truncate -s 1M h; printf end | dd of=h bs=1 seek=524288 conv=notrunc status=none; truncate -s 4096 empty',
    );
    const byName = new Map(got.told.map((one) => [one.entry.path, one]));
    expect(byName.get('h')!.shape).toBe('h524288 d4096 h520192');
    expect(byName.get('h')!.content.subarray(524288, 524291).toString()).toBe('end');
    expect(byName.get('empty')!.shape).toBe('h4096');
  });

  it('carries names that are not UTF-8, devices, times before 1970 to the nanosecond', async () => {
    const got = await read(
      `touch "$(printf 'n\\377x')"; mknod dev c 300 70000; touch -d '1965-03-04 05:06:07.123456789 UTC' file`,
    );
    const byName = new Map(got.told.map((one) => [one.entry.path, one.entry]));
    expect(byName.has('n\xffx')).toBe(true);
    expect(byName.get('dev')).toMatchObject({ kind: 'char', major: 300, minor: 70000 });
    expect(byName.get('file')).toMatchObject({ mtimeSec: Date.UTC(1965, 2, 4, 5, 6, 7) / 1000, mtimeNsec: 123456789 });
  });

  it('reads trees deeper than PATH_MAX', async () => {
    const name = 'd'.repeat(200);
    const got = await read(`for i in $(seq 30); do mkdir ${name}; cd -P ./${name}; done; echo deep > f`);
    expect(got.told[got.told.length - 1]!.entry.path).toBe(`${`${name}/`.repeat(30)}f`);
    expect(got.told[got.told.length - 1]!.content.toString()).toBe('deep\n');
    // Node's rm needs a path; the shell does not.
    execFileSync('rm', ['-rf', join(work, 'upper')]);
  });

  it('fails when a file changes while it is read', async () => {
    const file = join(work, 'upper/grows');
    fs.writeFileSync(file, Buffer.alloc(2_000_000));
    const got = collector();
    const handler: EntryHandler = {
      ...got.handler,
      data(bytes) {
        got.handler.data(bytes);
        fs.appendFileSync(file, 'x');
      },
    };
    await expect(readUpper(join(work, 'upper'), handler)).rejects.toMatchObject({ code: 'LAYER_FILE_CHANGED' });
  });

  it('drops residue, but keeps its folders, and every deletion with the parents it needs', async () => {
    fs.mkdirSync(join(work, 'lower/var/cache/apt/archives'), { recursive: true });
    fs.writeFileSync(join(work, 'lower/var/cache/apt/archives/old.deb'), 'x');
    const got = await read(
      `mkdir -p tmp root/.cache/pip/http var/lib/apt/lists; chmod 1777 tmp; echo 1 > tmp/x; echo 1 > root/.cache/pip/http/y
       echo 1 > root/.bash_history; echo 1 > root/kept; echo 1 > var/lib/apt/lists/z
       rm var/cache/apt/archives/old.deb; echo 1 > var/cache/apt/pkgcache.bin`,
    );
    expect(got.text()).toEqual([
      'dir .',
      'dir root',
      'dir root/.cache',
      'dir root/.cache/pip',
      'file root/kept',
      'dir tmp',
      'dir var',
      'dir var/cache',
      'dir var/cache/apt',
      'dir var/cache/apt/archives',
      'whiteout var/cache/apt/archives/old.deb',
      'dir var/lib',
      'dir var/lib/apt',
      'dir var/lib/apt/lists',
    ]);
    expect(got.skipped).toContain('root/.bash_history');
    expect(got.skipped).toContain('var/cache/apt/pkgcache.bin');
  });

  it('keeps everything with the policy off', async () => {
    expect((await read('mkdir tmp; echo 1 > tmp/x', { policy: false, lower })).text()).toEqual([
      'dir .',
      'dir tmp',
      'file tmp/x',
    ]);
  });

  it('keeps the deletion when an excluded file took the place of a directory', async () => {
    const got = await read('rm -r dir/sub; echo x > dir/sub', { exclude: ['sub'], lower });
    expect(got.text()).toEqual(['dir .', 'dir dir', 'whiteout dir/sub']);
  });

  it('takes patterns of the caller', async () => {
    const script = 'mkdir -p src/build lib; touch src/build/o src/x.log lib/x.log x.log keep';
    const got = await read(script, { exclude: ['build/', '/x.log', 'lib/**'], lower });
    expect(got.text()).toEqual(['dir .', 'file keep', 'dir lib', 'dir src', 'file src/x.log']);
  });

  it('refuses a pattern that it cannot keep', async () => {
    await expect(readUpper(work, collector().handler, { exclude: ['!keep'] })).rejects.toMatchObject({
      code: 'PACK_PATTERN',
    });
  });
});

describe('a folder as a layer', () => {
  it('takes nothing for a mark of OverlayFS', async () => {
    const got = collector();
    await readFolder(join(work, 'lower'), got.handler);
    expect(got.text()).toEqual(['dir .', 'dir dir', 'file dir/a', 'dir dir/sub', 'file dir/sub/b', 'file file']);
  });

  it('names the folder that is missing', async () => {
    await expect(readFolder(join(work, 'none'), collector().handler)).rejects.toMatchObject({
      code: 'LAYER_FOLDER_READ',
      message: expect.stringContaining('/none: cannot be read: ENOENT'),
    });
  });

  it('does not follow a directory that became a symlink', async () => {
    const got = collector();
    fs.mkdirSync(join(work, 'upper/a'));
    fs.mkdirSync(join(work, 'upper/b'));
    fs.writeFileSync(join(work, 'upper/b/secret'), 's');
    const handler: EntryHandler = {
      ...got.handler,
      entry(entry) {
        got.handler.entry(entry);
        if (entry.path !== 'a') return;
        fs.rmdirSync(join(work, 'upper/a'));
        fs.symlinkSync('b', join(work, 'upper/a'));
      },
    };
    await expect(readFolder(join(work, 'upper'), handler)).rejects.toMatchObject({ code: 'LAYER_FILE_CHANGED' });
    expect(got.text()).toEqual(['dir .', 'dir a']);
  });
});
