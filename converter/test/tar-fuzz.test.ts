/** Damaged archives: whatever the bytes, an archive reads or is refused by an error of ours, soon and in little memory. */

import { expect, it } from 'vitest';
import { isDsecError } from '#base';
import { TarReader } from '../layer/tar-reader.ts';
import { END, file, fingerprint, GNU_MAGIC, header, long, noise, padded, pax, Recorder } from './tar-bytes.ts';

const field = (n: number) => `${n.toString(8).padStart(11, '0')}\0`;

const SEED = Buffer.concat([
  header({ name: 'd/', type: '5' }),
  file('d/a', noise(700)),
  pax([
    ['path', 'p\xe9'],
    ['mtime', '-12.5'],
    ['uid', '70000'],
    ['SCHILY.xattr.user.x', noise(40)],
  ]),
  file('p', 'x'),
  long('n'.repeat(200), 'L'),
  long('t'.repeat(120), 'K'),
  header({ name: 'n', type: '2', link: 't', magic: GNU_MAGIC }),
  pax([['mtime', '7']], 'g'),
  file('s', noise(300), {
    type: 'S',
    magic: GNU_MAGIC,
    patch: [
      [386, field(0) + field(100) + field(512) + field(200)],
      [483, field(900)],
    ],
  }),
  pax([
    ['GNU.sparse.size', '3000'],
    ['GNU.sparse.map', '1000,512,2000,300'],
  ]),
  file('q', noise(812)),
  pax([
    ['GNU.sparse.major', '1'],
    ['GNU.sparse.realsize', '3000'],
    ['GNU.sparse.name', 'r'],
  ]),
  file('r', Buffer.concat([padded(Buffer.from('2\n1000\n512\n2000\n300\n')), noise(812)])),
  header({ name: 'c', type: '3', major: 1, minor: 3 }),
  header({ name: 'h', type: '1', link: 'd/a' }),
  END,
]);

/** A small generator of our own, so that a failure can be repeated. */
function random(seed: number): () => number {
  let state = seed * 2654435761 + 1;
  return () => {
    state = (Math.imul(state ^ (state >>> 15), 2246822519) + 0x9e3779b9) | 0;
    return ((state ^ (state >>> 13)) >>> 0) / 2 ** 32;
  };
}

/** Makes every header's checksum right again: damage must get past it to be worth anything. */
function mend(tar: Buffer): void {
  for (let at = 0; at + 512 <= tar.length; at += 512) {
    if (tar.toString('latin1', at + 257, at + 262) !== 'ustar') continue;
    tar.fill(0x20, at + 148, at + 156);
    let sum = 0;
    for (let i = 0; i < 512; i++) sum += tar[at + i]!;
    tar.write(`${sum.toString(8).padStart(6, '0')}\0 `, at + 148, 'latin1');
  }
}

function mutate(seed: number): Buffer {
  const next = random(seed);
  const below = (n: number) => Math.floor(next() * n);
  let tar = Buffer.from(SEED);
  for (let changes = 1 + below(6); changes > 0; changes--) {
    const at = below(tar.length);
    switch (below(7)) {
      case 0:
        tar[at] = below(256);
        break;
      case 1:
        tar[at]! ^= 1 << below(8);
        break;
      case 2:
        tar[at] = [0, 0x20, 0x30, 0x37, 0x39, 0x3d, 0x0a, 0x2c, 0x2d, 0x80, 0xff][below(11)]!;
        break;
      case 3:
        tar = tar.subarray(0, at);
        break;
      case 4: {
        const block = below(tar.length / 512) * 512;
        tar = Buffer.concat([tar.subarray(0, block), tar.subarray(block + 512)]);
        break;
      }
      case 5: {
        const block = below(tar.length / 512) * 512;
        tar = Buffer.concat([tar.subarray(0, block + 512), tar.subarray(block)]);
        break;
      }
      default: {
        // A field of a header: the numbers, the type, the sparse map.
        const block = below(tar.length / 512) * 512;
        const where = block + [100, 108, 124, 136, 156, 257, 386, 398, 482, 483][below(10)]!;
        if (where + 12 > tar.length) break;
        const what = [
          '\xff\xff\xff\xff\xff\xff\xff\xff',
          '77777777777\0',
          '\x80\0\0\0\xff\xff\xff\xff\xff\xff\xff\xff',
          'S',
          'x',
          'g',
          '1',
          '00000000777\0',
        ];
        tar.write(what[below(what.length)]!, where, 'latin1');
      }
    }
    if (tar.length < 1024) tar = Buffer.from(SEED);
  }
  if (below(8) > 0) mend(tar);
  return tar;
}

/** What came out, and how it ended. */
function outcome(tar: Buffer, chunk: number): string[] {
  const recorder = new Recorder();
  const reader = new TarReader(recorder);
  let end = 'read';
  try {
    for (let at = 0; at < tar.length; at += chunk) reader.push(Buffer.from(tar.subarray(at, at + chunk)));
    reader.end();
  } catch (error) {
    if (!isDsecError(error)) throw error;
    if (/\{\w+\}/.test(error.message)) throw new Error(`unfilled: ${error.message}`);
    end = `${error.code} ${error.message}`;
  }
  return [end, ...fingerprint(recorder.seen)];
}

it('reads or refuses 2,000 damaged archives, in any chunks alike', () => {
  let refused = 0;
  for (let seed = 0; seed < 2000; seed++) {
    const tar = mutate(seed);
    const whole = outcome(tar, tar.length);
    if (whole[0] !== 'read') refused++;
    const parts = outcome(tar, 1 + (seed % 700));
    if (parts.join() !== whole.join()) expect(parts, `seed ${seed}`).toEqual(whole);
  }
  // Both kinds must be met, or the damage is of no use.
  expect(refused).toBeGreaterThan(300);
  expect(refused).toBeLessThan(1900);
});

it('holds little memory for archives that promise much', () => {
  const reader = new TarReader({ entry() {}, data() {}, hole() {}, fileEnd() {} });
  const block = Buffer.alloc(512, 0x31);
  block[504] = 1;
  reader.push(
    header({
      type: 'S',
      magic: GNU_MAGIC,
      size: 5,
      patch: [
        [482, '\x01'],
        [483, field(9)],
      ],
    }),
  );
  expect(() => {
    for (let i = 0; i < 1_000_000; i++) reader.push(block);
  }).toThrow(expect.objectContaining({ code: 'TAR_SPARSE' }));
});
