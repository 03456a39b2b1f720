import { execFileSync, spawnSync } from 'node:child_process';
import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import type { Entry } from '../layer/entry.ts';
import { tarHeader, tarPadding } from '../layer/tar-header.ts';
import { END, header, noise, readAll } from './tar-bytes.ts';

function entry(path: string, more: Partial<Entry> = {}): Entry {
  return {
    path,
    kind: 'file',
    mode: 0o644,
    uid: 0,
    gid: 0,
    mtimeSec: 1_600_000_000,
    mtimeNsec: 0,
    sizeBytes: 0,
    target: '',
    major: 0,
    minor: 0,
    xattrs: undefined,
    ...more,
  };
}

const ENTRIES: Entry[] = [
  entry('plain', { sizeBytes: 5, mode: 0o4755, uid: 1000, gid: 1000 }),
  entry('dir/', { kind: 'dir', mode: 0o1777 }),
  entry('x'.repeat(100)),
  entry('x'.repeat(101)),
  entry(`${'p'.repeat(155)}/${'q'.repeat(100)}`),
  entry(`${'p'.repeat(156)}/${'q'.repeat(100)}`),
  entry(`${'a/'.repeat(130)}z`, { sizeBytes: 513 }),
  entry('caf\xc3\xa9'),
  entry('not-utf8-\xff\xfe'),
  entry('line\nbreak and = sign'),
  entry('link', { kind: 'symlink', mode: 0o777, target: 'to' }),
  entry('long-link', { kind: 'symlink', mode: 0o777, target: `t/\xe9${'u'.repeat(300)}` }),
  entry('hard', { kind: 'hardlink', target: 'plain' }),
  entry('null', { kind: 'char', major: 1, minor: 3 }),
  entry('disk', { kind: 'block', major: 4095, minor: 1048575 }),
  entry('wide', { kind: 'char', major: 1, minor: 0xffff_ffff }),
  entry('fifo', { kind: 'fifo' }),
  entry('ns', { mtimeSec: 1_600_000_000, mtimeNsec: 123_456_789 }),
  entry('tenth', { mtimeSec: 0, mtimeNsec: 100_000_000 }),
  entry('before', { mtimeSec: -2, mtimeNsec: 500_000_000 }),
  entry('just-before', { mtimeSec: -1, mtimeNsec: 999_999_999 }),
  entry('epoch-minus', { mtimeSec: -1 }),
  entry('far', { mtimeSec: 0o77777777777 + 1 }),
  entry('ids', { uid: 0o7777777 + 1, gid: 4294967294 }),
  entry('xattrs', {
    xattrs: new Map([
      ['user.\xff', Buffer.from('00ff0a3d', 'hex')],
      ['security.capability', noise(20)],
      ['user.empty', Buffer.alloc(0)],
      ['user.large', noise(65000)],
    ]),
  }),
];

/** Record lengths that count themselves change digits at 10, 100, 1000. */
for (const length of [1, 2, 90, 91, 92, 93, 983, 984, 985, 986, 987, 988]) {
  ENTRIES.push(entry(`len/${'\xe9'.repeat(length)}`));
}

function archive(entries: readonly Entry[]): Buffer {
  const parts: Buffer[] = [];
  for (const e of entries) {
    const size = e.kind === 'file' ? e.sizeBytes : 0;
    parts.push(tarHeader(e), noise(size, 3), Buffer.alloc(tarPadding(size)));
  }
  return Buffer.concat([...parts, END]);
}

describe('tarHeader', () => {
  it('is read back as it was', () => {
    const seen = readAll(archive(ENTRIES), 700);
    expect(seen.length).toBe(ENTRIES.length);
    for (const [i, e] of ENTRIES.entries()) {
      const { data, extents, xattrs, ...rest } = seen[i]!;
      const wanted = Object.fromEntries([...(e.xattrs ?? [])].map(([name, value]) => [name, value.toString('hex')]));
      expect({ ...rest, xattrs }).toEqual({ ...e, xattrs: wanted });
      if (e.kind !== 'file') continue;
      expect(data!.equals(noise(e.sizeBytes, 3))).toBe(true);
      expect(extents).toBe(e.sizeBytes ? `d${e.sizeBytes}` : '');
    }
  });

  it('is a single plain block where everything fits', () => {
    const block = tarHeader(ENTRIES[0]!);
    expect(block.length).toBe(512);
    const plain = { name: 'plain', size: 5, mode: 0o4755, uid: 1000, gid: 1000, major: 0, minor: 0 };
    expect(block.equals(header(plain))).toBe(true);
    expect(tarHeader(ENTRIES[4]!).length).toBe(512);
  });

  it('holds sizes past 8 GiB', () => {
    const sizeBytes = 2 ** 33 + 5;
    const header = tarHeader(entry('huge', { sizeBytes }));
    expect(() => readAll(header, 512, false)).toThrow(expect.objectContaining({ code: 'TAR_TRUNCATED' }));
    expect(header.includes('19 size=8589934597\n')).toBe(true);
  });

  it('orders xattrs by name, so that the same entry gives the same bytes', () => {
    const [a, b] = [Buffer.from('1'), Buffer.from('2')];
    const one = tarHeader(
      entry('x', {
        xattrs: new Map([
          ['user.a', a],
          ['user.b', b],
        ]),
      }),
    );
    const two = tarHeader(
      entry('x', {
        xattrs: new Map([
          ['user.b', b],
          ['user.a', a],
        ]),
      }),
    );
    expect(one.equals(two)).toBe(true);
  });

  it('refuses what a tar cannot hold', () => {
    expect(() => tarHeader(entry('s', { kind: 'socket' }))).toThrow(RangeError);
    expect(() => tarHeader(entry('w', { kind: 'whiteout' }))).toThrow(RangeError);
  });
});

describe('other readers', () => {
  let folder = '';
  beforeAll(() => {
    folder = mkdtempSync(join(tmpdir(), 'dsec-tar-'));
    writeFileSync(join(folder, 'a.tar'), archive(ENTRIES.filter((e) => e.path !== 'wide')));
  });
  afterAll(() => rmSync(folder, { recursive: true, force: true }));

  it('GNU tar lists every member without a complaint', (context) => {
    if (spawnSync('tar', ['--version']).status !== 0) return context.skip('tar is not installed');
    const args = ['-tvf', join(folder, 'a.tar'), '--numeric-owner', '--full-time', '--quoting-style=escape'];
    const run = spawnSync('tar', args, { encoding: 'latin1', env: { ...process.env, TZ: 'UTC', LC_ALL: 'C' } });
    expect([run.status, run.stderr]).toEqual([0, '']);
    const lines = run.stdout.trimEnd().split('\n');
    expect(lines.length).toBe(ENTRIES.length - 1);
    const line = (part: string) => lines.find((l) => l.includes(part))!.replace(/ +/g, ' ');
    expect(line(' plain')).toBe('-rwsr-xr-x 1000/1000 5 2020-09-13 12:26:40 plain');
    expect(line(' ns')).toContain('2020-09-13 12:26:40.123456789 ns');
    expect(line(' disk')).toContain(' 4095,1048575 ');
    expect(line(' ids')).toContain(' 2097152/4294967294 ');
    expect(line('hard')).toContain('hard link to plain');
    expect(line('not-utf8')).toContain('not-utf8-\\377\\376');
  });

  it("Python's tarfile reads the same names, times and xattrs", (context) => {
    if (spawnSync('python3', ['--version']).status !== 0) return context.skip('python3 is not installed');
    const script = `
import json, sys, tarfile
out = []
for m in tarfile.open(sys.argv[1], errors='surrogateescape', encoding='utf-8'):
    x = [k for k in m.pax_headers if k.startswith('SCHILY.xattr.')]
    out.append([m.name.encode('utf-8', 'surrogateescape').decode('latin-1'), m.size, m.uid, m.gid, m.mode, len(x), round(m.mtime * 1000)])
print(json.dumps(out))`;
    const seen = JSON.parse(execFileSync('python3', ['-c', script, join(folder, 'a.tar')], { encoding: 'utf8' }));
    const wanted = ENTRIES.filter((e) => e.path !== 'wide').map((e) => {
      // A hard link is shown with the size of what it names.
      const size = e.kind === 'hardlink' ? seen.find((s: [string]) => s[0] === e.path)[1] : e.sizeBytes;
      return [
        e.path.replace(/\/$/, ''),
        size,
        e.uid,
        e.gid,
        e.mode,
        e.xattrs?.size ?? 0,
        Math.round(e.mtimeSec * 1000 + e.mtimeNsec / 1e6) || 0,
      ];
    });
    expect(seen).toEqual(wanted);
  });
});
