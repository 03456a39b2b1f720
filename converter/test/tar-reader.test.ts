import { describe, expect, it } from 'vitest';
import { isDsecError } from '#base';
import {
  END,
  file,
  fingerprint,
  GNU_MAGIC,
  header,
  long,
  noise,
  padded,
  pax,
  readAll,
  type Seen,
} from './tar-bytes.ts';

const CHUNKS = [1, 7, 511, 512, 513, 65536];

/** Reads in one piece and in every chunk size; all must agree. */
function read(...parts: Buffer[]): Seen[] {
  const tar = Buffer.concat(parts);
  const whole = readAll(tar);
  for (const chunk of CHUNKS) expect(fingerprint(readAll(tar, chunk))).toEqual(fingerprint(whole));
  return whole;
}

/** The code of the error that reading ends with, the same for every chunk size. */
function refusal(...parts: Buffer[]): string {
  const tar = Buffer.concat(parts);
  const tryRead = (chunk: number): string => {
    try {
      readAll(tar, chunk);
    } catch (error) {
      if (isDsecError(error)) return `${error.code} ${error.message}`;
      throw error;
    }
    return 'accepted';
  };
  const whole = tryRead(tar.length);
  for (const chunk of CHUNKS) expect(tryRead(chunk)).toBe(whole);
  expect(whole).not.toContain('{');
  return whole;
}

function base256(value: bigint, width: number): Buffer {
  const b = Buffer.alloc(width);
  let rest = BigInt.asUintN(8 * width, value);
  for (let at = width - 1; at >= 0; at--, rest >>= 8n) b[at] = Number(rest & 0xffn);
  b[0]! |= 0x80;
  return b;
}

describe('plain headers', () => {
  it('reads every field of a ustar file', () => {
    const data = noise(700, 1);
    const [seen] = read(file('a/b', data, { mode: 0o104755, uid: 17, gid: 18, mtime: 1234567890 }), END);
    expect(seen).toEqual({
      path: 'a/b',
      kind: 'file',
      mode: 0o4755,
      uid: 17,
      gid: 18,
      mtimeSec: 1234567890,
      mtimeNsec: 0,
      sizeBytes: 700,
      target: '',
      major: 0,
      minor: 0,
      xattrs: {},
      data,
      extents: 'd700',
    });
  });

  it('reads each kind, and ignores sizes on what has no data', () => {
    const seen = read(
      header({ name: 'h', type: '1', link: 'a', size: 5 }),
      header({ name: 's', type: '2', link: 'to' }),
      header({ name: 'c', type: '3', major: 1, minor: 3 }),
      header({ name: 'b', type: '4', major: 8, minor: 0o777777 }),
      header({ name: 'd/', type: '5', size: 512 }),
      header({ name: 'f', type: '6' }),
      file('7', 'x', { type: '7' }),
      file('n', 'y', { type: '\0' }),
      header({ name: 'nd/', type: '\0' }),
      header({ name: 'slash/', type: '0' }),
      END,
    );
    expect(seen.map((s) => `${s.kind} ${s.path} ${s.target} ${s.major} ${s.minor} ${s.sizeBytes}`)).toEqual([
      'hardlink h a 0 0 0',
      'symlink s to 0 0 0',
      'char c  1 3 0',
      `block b  8 ${0o777777} 0`,
      'dir d/  0 0 0',
      'fifo f  0 0 0',
      'file 7  0 0 1',
      'file n  0 0 1',
      'dir nd/  0 0 0',
      'file slash/  0 0 0',
    ]);
  });

  it('joins prefix and name only in POSIX headers, and takes names that fill their field', () => {
    const seen = read(
      file('q'.repeat(100), '', { prefix: 'p'.repeat(155) }),
      file('g', '', { prefix: 'not', magic: GNU_MAGIC }),
      file('v', '', { prefix: 'not', magic: '' }),
      file('star', '', {
        prefix: 'p',
        patch: [
          [476, '01234567012'],
          [508, 'tar\0'],
        ],
      }),
    );
    expect(seen.map((s) => s.path)).toEqual([`${'p'.repeat(155)}/${'q'.repeat(100)}`, 'g', 'v', 'p/star']);
  });

  it('keeps names and targets that are not UTF-8, byte for byte', () => {
    const [seen] = read(header({ name: 'caf\xe9\xff\x01', type: '2', link: '\xc3\x28' }));
    expect([seen!.path, seen!.target]).toEqual(['caf\xe9\xff\x01', '\xc3\x28']);
  });

  it('reads numbers padded with spaces, and empty ones', () => {
    const [seen] = read(
      header({
        size: 0,
        patch: [
          [100, '   644 \0'],
          [108, '    17 \0'],
          [116, '\0\0\0\0\0\0\0\0'],
          [136, '13145606603 '],
        ],
      }),
    );
    expect([seen!.mode, seen!.uid, seen!.gid, seen!.mtimeSec]).toEqual([0o644, 15, 0, 0o13145606603]);
  });

  it('reads base-256 numbers, negative times too', () => {
    const [a, b] = read(
      header({
        patch: [
          [108, base256(4294967294n, 8)],
          [116, base256(-2n, 8)],
          [136, base256(-1n, 12)],
        ],
      }),
      header({
        patch: [
          [124, base256(0n, 12)],
          [136, base256(-(1n << 40n), 12)],
        ],
      }),
    );
    expect([a!.uid, a!.gid, a!.mtimeSec, a!.mtimeNsec]).toEqual([4294967294, 4294967294, -1, 0]);
    expect(b!.mtimeSec).toBe(-(2 ** 40));
  });

  it('takes checksums of signed bytes', () => {
    expect(read(header({ name: '\xff\xfe', signedSum: true }))[0]!.path).toBe('\xff\xfe');
  });

  it('refuses a wrong checksum and names byte, member and layer', () => {
    expect(refusal(file('x', '1'), header({ name: 'y', wrong: 7 }))).toMatch(
      /^TAR_CHECKSUM layer: byte 1024: the header of y \(after x\)/,
    );
  });

  it('refuses unknown types, malformed and unbearable numbers', () => {
    expect(refusal(header({ name: 'm', type: 'M' }))).toMatch(/^TAR_TYPE .*byte 0: m: members of type M/);
    expect(refusal(header({ patch: [[124, '9'.padStart(11)]] }))).toMatch(/^TAR_NUMBER .*size is not a number/);
    expect(refusal(header({ patch: [[124, base256(1n << 60n, 12)]] }))).toMatch(/^TAR_NUMBER .*size is out of range/);
    expect(refusal(header({ patch: [[124, base256(-1n, 12)]] }))).toMatch(/^TAR_NUMBER/);
    expect(refusal(header({ patch: [[108, base256(1n << 32n, 8)]] }))).toMatch(/^TAR_NUMBER .*uid/);
    expect(refusal(header({ patch: [[108, base256(-1n, 8)]] }))).toMatch(/^TAR_NUMBER .*uid/);
    expect(refusal(header({ patch: [[136, base256(1n << 90n, 12)]] }))).toMatch(/^TAR_NUMBER .*mtime/);
    expect(refusal(header({ patch: [[136, '123x56789\0']] }))).toMatch(/^TAR_NUMBER .*mtime/);
  });
});

describe('ends', () => {
  it('needs no end blocks and no padding, and ignores what follows the end', () => {
    const whole = read(file('a', 'abc'), file('b', 'd'));
    expect(read(file('a', 'abc'), file('b', 'd').subarray(0, 513))).toEqual(whole);
    expect(read(file('a', 'abc'), file('b', 'd'), Buffer.alloc(512))).toEqual(whole);
    expect(read(file('a', 'abc'), file('b', 'd'), Buffer.alloc(100))).toEqual(whole);
    expect(read(file('a', 'abc'), file('b', 'd'), END, noise(3000))).toEqual(whole);
    expect(read()).toEqual([]);
  });

  it('refuses members that are cut off', () => {
    expect(refusal(file('a', 'abc'), file('b', noise(2000)).subarray(0, 1000))).toMatch(
      /^TAR_TRUNCATED layer: byte 1024: b: the archive ends at byte 2024/,
    );
    expect(refusal(file('a', 'abc'), header({ name: 'b' }).subarray(0, 300))).toMatch(/^TAR_TRUNCATED .*byte 1024/);
    expect(refusal(pax([['path', 'p']]))).toMatch(/^TAR_TRUNCATED/);
    expect(refusal(long('n', 'L'))).toMatch(/^TAR_TRUNCATED/);
    expect(refusal(header({ name: 'x', size: 2 ** 32 }), Buffer.alloc(700))).toMatch(/^TAR_TRUNCATED/);
  });
});

describe('long names', () => {
  it('takes GNU names and links for one member only', () => {
    const name = 'n/'.repeat(200);
    const seen = read(
      long('t'.repeat(300), 'K'),
      long(name, 'L'),
      header({ name: 'cut', type: '2', link: 'cut', magic: GNU_MAGIC }),
      header({ name: 'next', type: '2', link: 'plain', magic: GNU_MAGIC }),
    );
    expect(seen.map((s) => [s.path, s.target])).toEqual([
      [name, 't'.repeat(300)],
      ['next', 'plain'],
    ]);
  });

  it('refuses names and headers without measure', () => {
    expect(refusal(header({ type: 'L', size: 2 ** 21 }), Buffer.alloc(9))).toMatch(/^TAR_LIMIT/);
    expect(refusal(header({ type: 'x', size: 2 ** 32 }), Buffer.alloc(9))).toMatch(/^TAR_LIMIT/);
  });

  it('refuses global headers that add up', () => {
    const big = Buffer.alloc(3 << 20, 0x61);
    const parts = [1, 2, 3].map((i) => pax([[`SCHILY.xattr.user.${i}`, big]], 'g'));
    expect(() => readAll(Buffer.concat(parts))).toThrow(expect.objectContaining({ code: 'TAR_LIMIT' }));
  });
});

describe('PAX', () => {
  it('overrides header fields', () => {
    const data = noise(700, 3);
    const [seen] = read(
      pax([
        ['path', 'real'],
        ['size', '700'],
        ['uid', '70000'],
        ['gid', '4294967295'],
        ['mtime', '1111111111.5'],
      ]),
      header({ name: 'fake', size: 0, uid: 1, gid: 2, mtime: 3 }),
      padded(data),
      END,
    );
    expect([seen!.path, seen!.uid, seen!.gid, seen!.mtimeSec, seen!.mtimeNsec]).toEqual([
      'real',
      70000,
      4294967295,
      1111111111,
      500_000_000,
    ]);
    expect(seen!.data).toEqual(data);
  });

  it.each([
    ['0', 0, 0],
    ['1600000000.123456789', 1600000000, 123456789],
    ['1600000000.1234567899', 1600000000, 123456789],
    ['1.000000001', 1, 1],
    ['.25', 0, 250_000_000],
    ['5.', 5, 0],
    ['-1', -1, 0],
    ['-1.5', -2, 500_000_000],
    ['-0.000000001', -1, 999_999_999],
    ['-0.0000000001', 0, 0],
    ['-2208988800.000000001', -2208988801, 999_999_999],
    ['9007199254740991.999999999', 9007199254740991, 999_999_999],
  ])('reads the time %s exactly', (text, seconds, nanoseconds) => {
    const [seen] = read(pax([['mtime', text]]), header());
    expect([seen!.mtimeSec, seen!.mtimeNsec]).toStrictEqual([seconds, nanoseconds]);
  });

  it('goes by record lengths, not by lines', () => {
    const evil = 'harmless\n22 linkpath=/etc/evil\n';
    const seen = read(
      pax([['linkpath', evil]]),
      header({ name: 's', type: '2' }),
      pax([
        ['comment', '\n11 uid=99\n'],
        ['path', 'name\nwith\n10 path=x\n'],
        ['uid', '3'],
      ]),
      header({ name: 'n' }),
    );
    expect([seen[0]!.target, seen[1]!.path, seen[1]!.uid]).toEqual([evil, 'name\nwith\n10 path=x\n', 3]);
  });

  it('keeps binary xattrs, also empty ones, and those of libarchive', () => {
    const value = Buffer.from('00ff0a3d0d0a80', 'hex');
    const [seen] = read(
      pax([
        ['SCHILY.xattr.user.b\xff=', value],
        ['SCHILY.xattr.user.empty', ''],
        ['SCHILY.xattr.user.both', 'schily'],
        ['LIBARCHIVE.xattr.user.both', Buffer.from('other').toString('base64')],
        ['LIBARCHIVE.xattr.user%2Eonly%0a', value.toString('base64').replace(/=+$/, '')],
      ]),
      header(),
    );
    expect(seen!.xattrs).toEqual({
      'user.b\xff': `3d${value.toString('hex')}`,
      'user.empty': '',
      'user.both': Buffer.from('schily').toString('hex'),
      'user.only\n': value.toString('hex'),
    });
  });

  it('applies global records to members without their own; empty values take back', () => {
    const seen = read(
      pax(
        [
          ['mtime', '5'],
          ['uid', '7'],
          ['SCHILY.xattr.user.g', 'g'],
        ],
        'g',
      ),
      header({ name: 'a', uid: 1 }),
      pax([
        ['mtime', '6.5'],
        ['uid', ''],
        ['SCHILY.xattr.user.l', 'l'],
      ]),
      header({ name: 'b', uid: 1 }),
      header({ name: 'c', uid: 1 }),
      pax([['uid', '']], 'g'),
      header({ name: 'd', uid: 1 }),
    );
    expect(seen.map((s) => [s.path, s.uid, s.mtimeSec, Object.keys(s.xattrs).join()])).toEqual([
      ['a', 7, 5, 'user.g'],
      ['b', 1, 6, 'user.g,user.l'],
      ['c', 7, 5, 'user.g'],
      ['d', 1, 5, 'user.g'],
    ]);
  });

  it('takes the last of duplicate keys, and the last of two headers', () => {
    const seen = read(
      pax([
        ['path', 'one'],
        ['path', 'two'],
      ]),
      header(),
      pax([
        ['path', 'one'],
        ['uid', '5'],
      ]),
      pax([['path', 'two']]),
      header(),
    );
    expect(seen.map((s) => [s.path, s.uid])).toEqual([
      ['two', 0],
      ['two', 0],
    ]);
  });

  it.each([
    ['NUL in a path', pax([['path', 'etc/pass\0wd']])],
    ['NUL in a target', pax([['linkpath', 'a\0']])],
    ['NUL in a key', pax([['a\0b', 'c']])],
    ['no key', pax([['', 'c']])],
    ['no equals sign', file('x', '8 abcde\n', { type: 'x' })],
    ['a length past the end', file('x', '99 path=a\n', { type: 'x' })],
    ['a length too short', file('x', '4 a=\n', { type: 'x' })],
    ['no newline', file('x', '9 path=a1', { type: 'x' })],
    ['no length', file('x', ' path=a\n', { type: 'x' })],
    ['only digits', file('x', '12345', { type: 'x' })],
    ['an endless length', file('x', `${'9'.repeat(400)} a=b\n`, { type: 'x' })],
    ['a bad size', pax([['size', '-1']])],
    ['a size with an exponent', pax([['size', '1e3']])],
    ['a bad time', pax([['mtime', '1.2.3']])],
    ['a time of nothing', pax([['mtime', '-.']])],
    ['a bad owner', pax([['uid', '0x10']])],
    ['a sparse map of letters', pax([['GNU.sparse.map', '1,a']])],
  ])('refuses %s', (_, bytes) => {
    expect(refusal(bytes, header({ name: 'm' }), END)).toMatch(/^TAR_PAX layer: byte 0: /);
  });

  it('refuses owners that are no 32 bit number', () => {
    expect(refusal(pax([['uid', '4294967296']]), header({ name: 'm' }))).toMatch(
      /^TAR_NUMBER layer: byte 0: m: field uid/,
    );
  });
});

describe('sparse files', () => {
  const a = noise(512, 1);
  const b = noise(300, 2);
  const whole = Buffer.concat([Buffer.alloc(1000), a, Buffer.alloc(488), b, Buffer.alloc(700)]);
  const extents = 'h1000 d512 h488 d300 h700';
  const field = (n: number) => `${n.toString(8).padStart(11, '0')}\0`;
  const pairs = (...list: [number, number][]) => list.map(([o, n]) => field(o) + field(n)).join('');
  const stored = Buffer.concat([a, b]);

  it('reads old GNU ones, with the map in the header', () => {
    const map = pairs([1000, 512], [2000, 300], [3000, 0]);
    const [seen, after] = read(
      file('s', stored, {
        type: 'S',
        magic: GNU_MAGIC,
        patch: [
          [386, map],
          [483, field(3000)],
        ],
      }),
      file('after', 'ok'),
    );
    expect([seen!.data, seen!.extents, seen!.kind, after!.path]).toEqual([whole, extents, 'file', 'after']);
  });

  it('reads old GNU ones with extension blocks', () => {
    const list = Array.from({ length: 60 }, (_, i): [number, number] => [i * 100, 10]);
    const block = (part: [number, number][], more: boolean) => {
      const out = Buffer.alloc(512);
      out.write(pairs(...part), 0, 'latin1');
      out[504] = more ? 1 : 0;
      return out;
    };
    const data = noise(600, 5);
    const head = header({
      name: 's',
      type: 'S',
      magic: GNU_MAGIC,
      size: 600,
      patch: [
        [386, pairs(...list.slice(0, 4))],
        [482, '\x01'],
        [483, field(7000)],
      ],
    });
    const [seen, after] = read(
      head,
      block(list.slice(4, 25), true),
      block(list.slice(25, 46), true),
      block(list.slice(46), false),
      padded(data),
      file('after', 'ok'),
    );
    const expected = Buffer.alloc(7000);
    for (let i = 0; i < 60; i++) data.copy(expected, i * 100, i * 10, i * 10 + 10);
    expect([seen!.data, after!.path]).toEqual([expected, 'after']);
  });

  it.each([
    [
      '0.0',
      [
        ['GNU.sparse.size', '3000'],
        ['GNU.sparse.numblocks', '2'],
        ['GNU.sparse.offset', '1000'],
        ['GNU.sparse.numbytes', '512'],
        ['GNU.sparse.offset', '2000'],
        ['GNU.sparse.numbytes', '300'],
        ['path', 'dir/s'],
      ],
      stored,
    ],
    [
      '0.1',
      [
        ['GNU.sparse.size', '3000'],
        ['GNU.sparse.name', 'dir/s'],
        ['GNU.sparse.map', '1000,512,2000,300'],
      ],
      stored,
    ],
    [
      '1.0',
      [
        ['GNU.sparse.major', '1'],
        ['GNU.sparse.minor', '0'],
        ['GNU.sparse.name', 'dir/s'],
        ['GNU.sparse.realsize', '3000'],
      ],
      Buffer.concat([padded(Buffer.from('2\n1000\n512\n2000\n300\n')), stored]),
    ],
  ] as const)('reads PAX %s ones', (_, records, data) => {
    const [seen, after] = read(pax(records), file('GNUSparseFile.0/s', data), file('after', 'ok'));
    expect([seen!.path, seen!.sizeBytes, seen!.data, seen!.extents]).toEqual(['dir/s', 3000, whole, extents]);
    expect(after!.path).toBe('after');
  });

  it('reads files that are all hole, and skips stored bytes that no extent names', () => {
    const seen = read(
      pax([
        ['GNU.sparse.size', '900'],
        ['GNU.sparse.map', ''],
      ]),
      file('a', noise(600)),
      pax([
        ['GNU.sparse.major', '1'],
        ['GNU.sparse.realsize', '0'],
      ]),
      file('b', padded(Buffer.from('0\n'))),
      pax([
        ['GNU.sparse.major', '1'],
        ['GNU.sparse.realsize', '3'],
      ]),
      file('c', '0\n'),
      file('after', 'ok'),
    );
    expect(seen.map((s) => `${s.path} ${s.extents}`)).toEqual(['a h900', 'b ', 'c h3', 'after d2']);
  });

  it.each([
    ['overlap', '0,10,5,10'],
    ['disorder', '20,10,0,10'],
    ['an extent past the end', '2999,2'],
    ['more than is stored', '0,3000'],
    ['an odd list', '0,10,20'],
  ])('refuses %s', (_, map) => {
    const bytes = [
      pax([
        ['GNU.sparse.size', '3000'],
        ['GNU.sparse.map', map],
      ]),
      file('s', noise(100)),
    ];
    expect(refusal(...bytes)).toMatch(/^TAR_SPARSE layer: byte 0: s: /);
  });

  it('refuses maps that do not end, promise too much, or belong to no known format', () => {
    const one = (text: string) =>
      refusal(
        pax([
          ['GNU.sparse.major', '1'],
          ['GNU.sparse.realsize', '9'],
        ]),
        file('s', text),
      );
    expect(one('2\n0\n1\n')).toMatch(/^TAR_SPARSE/);
    expect(one('')).toMatch(/^TAR_SPARSE/);
    expect(one('99999999999\n')).toMatch(/^TAR_SPARSE/);
    expect(one('x\n')).toMatch(/^TAR_SPARSE/);
    expect(one('0'.repeat(600))).toMatch(/^TAR_SPARSE/);
    expect(refusal(pax([['GNU.sparse.major', '1']]), file('s', '0\n'))).toMatch(/^TAR_SPARSE/);
    expect(refusal(pax([['GNU.sparse.major', '2']]), file('s', '0\n'))).toMatch(/^TAR_SPARSE/);
    expect(refusal(header({ type: 'S', size: 0 }))).toMatch(/^TAR_SPARSE/);
    expect(
      refusal(
        pax([
          ['GNU.sparse.size', '9'],
          ['GNU.sparse.offset', '1'],
        ]),
        file('s', 'x'),
      ),
    ).toMatch(/^TAR_SPARSE/);
  });
});
