/** Archives as real tools write them, and the reference reader's word on every image case. */
import { execFileSync, spawnSync } from 'node:child_process';
import { createHash } from 'node:crypto';
import {
  existsSync,
  linkSync,
  mkdirSync,
  mkdtempSync,
  readFileSync,
  rmSync,
  symlinkSync,
  truncateSync,
  utimesSync,
  writeFileSync,
} from 'node:fs';
import { tmpdir } from 'node:os';
import { join, resolve } from 'node:path';
import { isDeepStrictEqual } from 'node:util';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { isDsecError } from '#base';
import { fingerprint, noise, readAll, type Seen } from './tar-bytes.ts';

describe.skipIf(spawnSync('tar', ['--version']).status !== 0)('GNU tar', () => {
  let folder = '';
  const sparse = Buffer.alloc(900_000);
  beforeAll(() => {
    folder = mkdtempSync(join(tmpdir(), 'dsec-tar-'));
    const root = join(folder, 'root');
    const deep = join(root, 'd'.repeat(90), 'e'.repeat(90), 'f'.repeat(90));
    mkdirSync(deep, { recursive: true });
    writeFileSync(join(deep, 'g'.repeat(90)), noise(5000, 1));
    writeFileSync(join(root, 'a'), noise(70_000, 2));
    linkSync(join(root, 'a'), join(root, 'hard'));
    symlinkSync('t'.repeat(200), join(root, 'soft'));
    writeFileSync(join(root, 'empty'), '');
    utimesSync(join(root, 'a'), 1_500_000_000.25, 1_500_000_000.25);
    // Data between holes, as the file system keeps them, in more extents than a header holds.
    for (let i = 0; i < 12; i++) noise(4096, i).copy(sparse, 16384 + i * 65536);
    writeFileSync(join(root, 'sparse'), '');
    truncateSync(join(root, 'sparse'), sparse.length);
    for (let i = 0; i < 12; i++) {
      const at = 16384 + i * 65536;
      execFileSync(
        'dd',
        [`of=${join(root, 'sparse')}`, 'conv=notrunc', 'bs=4096', `seek=${at / 4096}`, 'status=none'],
        {
          input: sparse.subarray(at, at + 4096),
        },
      );
    }
  });
  afterAll(() => rmSync(folder, { recursive: true, force: true }));

  const write = (args: string[]): Seen[] => {
    const path = join(folder, 'a.tar');
    execFileSync('tar', ['-cf', path, '--sort=name', '-C', join(folder, 'root'), ...args, '.']);
    const tar = readFileSync(path);
    const whole = readAll(tar);
    expect(fingerprint(readAll(tar, 4099))).toEqual(fingerprint(whole));
    return whole;
  };

  it.each([
    ['gnu', ['--format=gnu']],
    ['oldgnu', ['--format=oldgnu']],
    ['pax', ['--format=pax']],
    ['gnu sparse', ['--format=gnu', '--sparse']],
    ['pax sparse 0.0', ['--format=pax', '--sparse', '--sparse-version=0.0']],
    ['pax sparse 0.1', ['--format=pax', '--sparse', '--sparse-version=0.1']],
    ['pax sparse 1.0', ['--format=pax', '--sparse', '--sparse-version=1.0']],
  ])('writes %s archives that read as the tree', (name, args) => {
    const seen = new Map(write(args).map((s) => [s.path.replace(/^\.\/|\/$/g, ''), s]));
    const long = `${'d'.repeat(90)}/${'e'.repeat(90)}/${'f'.repeat(90)}/${'g'.repeat(90)}`;
    expect(seen.get(long)!.data!.equals(noise(5000, 1))).toBe(true);
    expect(seen.get('soft')!.target).toBe('t'.repeat(200));
    expect(seen.get('a')!.data!.equals(noise(70_000, 2))).toBe(true);
    expect(seen.get('hard')).toMatchObject({ kind: 'hardlink', target: './a' });
    expect(seen.get('empty')!.data!.length).toBe(0);
    expect(seen.get('sparse')!.data!.equals(sparse)).toBe(true);
    if (name.includes('sparse')) expect(seen.get('sparse')!.extents).toMatch(/^h\d+ d4096 h/);
    if (name.includes('pax')) expect(seen.get('a')).toMatchObject({ mtimeSec: 1_500_000_000, mtimeNsec: 250_000_000 });
  });

  it('writes v7 and ustar archives of short names', () => {
    for (const format of ['v7', 'ustar']) {
      const seen = write([`--format=${format}`, '--exclude=d*', '--exclude=soft']);
      expect(seen.map((s) => `${s.kind} ${s.path} ${s.sizeBytes}`)).toEqual([
        'dir ./ 0',
        'file ./a 70000',
        'file ./empty 0',
        'hardlink ./hard 0',
        'file ./sparse 900000',
      ]);
    }
  });
});

const CASES = resolve(import.meta.dirname, '../../../shared/image-cases');

interface Member {
  path: string;
  type: string;
  mode: number;
  uid: number;
  gid: number;
  /** Nanoseconds, decimal. */
  mtime: string;
  rdev: [number, number] | null;
  target: string;
  xattrs: Record<string, string>;
  sha256: string;
}

/** Reads every layer of every case with the reference reader. */
const SCRIPT = `
import glob, hashlib, importlib, json, os, sys
sys.path.insert(0, sys.argv[1])
import case, model
for p in sorted(glob.glob(os.path.join(sys.argv[1], 'cases_*.py'))):
    importlib.import_module(os.path.basename(p)[:-3])
out = []
for name, build in case.CASES:
    for i, layer in enumerate(build().layers):
        path = os.path.join(sys.argv[2], '%s.%d.tar' % (name, i))
        with open(path, 'wb') as fh:
            fh.write(layer.tar)
        try:
            members = [dict(path=e.name.decode('latin-1'), type=e.type.decode('latin-1'), mode=e.mode, uid=e.uid, gid=e.gid,
                            mtime=str(e.mtime), rdev=e.rdev, target=e.link.decode('latin-1'),
                            xattrs={k.decode('latin-1'): v.hex() for k, v in e.xattrs.items()},
                            sha256=hashlib.sha256(e.data).hexdigest()) for e in model.read_tar(layer.tar)]
        except model.Bad as e:
            members = str(e)
        out.append(dict(file=path, members=members))
json.dump(out, open(os.path.join(sys.argv[2], 'all.json'), 'w'))
`;

const TYPES: Record<string, string> = {
  '0': 'file',
  '1': 'hardlink',
  '2': 'symlink',
  '3': 'char',
  '4': 'block',
  '5': 'dir',
  '6': 'fifo',
};

describe('image cases', () => {
  it('read as the reference reader reads them', (context) => {
    if (!existsSync(CASES)) return context.skip(`${CASES} is not there`);
    if (spawnSync('python3', ['--version']).status !== 0) return context.skip('python3 is not installed');
    const folder = mkdtempSync(join(tmpdir(), 'dsec-tar-'));
    try {
      execFileSync('python3', ['-c', SCRIPT, CASES, folder], { env: { ...process.env, PYTHONDONTWRITEBYTECODE: '1' } });
      const layers: { file: string; members: Member[] | string }[] = JSON.parse(
        readFileSync(join(folder, 'all.json'), 'utf8'),
      );
      expect(layers.length).toBeGreaterThan(60);
      for (const { file, members } of layers) {
        const tar = readFileSync(file);
        for (const chunk of [tar.length, 4099]) {
          const got = attempt(tar, chunk);
          if (!isDeepStrictEqual(got, wanted(members))) expect(got, file).toEqual(wanted(members));
        }
      }
    } finally {
      rmSync(folder, { recursive: true, force: true });
    }
  });
});

function attempt(tar: Buffer, chunk: number): unknown {
  let seen: Seen[];
  try {
    seen = readAll(tar, Math.max(1, chunk));
  } catch (error) {
    if (isDsecError(error)) return 'refused';
    throw error;
  }
  return seen.map((s) => ({
    path: s.path,
    kind: s.kind,
    mode: s.mode,
    uid: s.uid,
    gid: s.gid,
    mtime: String(BigInt(s.mtimeSec) * 1_000_000_000n + BigInt(s.mtimeNsec)),
    rdev: s.kind === 'char' || s.kind === 'block' ? [s.major, s.minor] : null,
    target: s.target,
    xattrs: s.xattrs,
    sha256: createHash('sha256')
      .update(s.data ?? '')
      .digest('hex'),
  }));
}

function wanted(members: Member[] | string): unknown {
  if (typeof members === 'string') return 'refused';
  return members.map(({ type, target, ...rest }) => {
    const kind = TYPES[type];
    return { ...rest, kind, target: kind === 'symlink' || kind === 'hardlink' ? target : '' };
  });
}
