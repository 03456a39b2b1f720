/** What a guest is told about its memory, as words and as files: values. And the kernel as Firecracker boots it. */
import { mkdtempSync, readdirSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { gzipSync } from 'node:zlib';
import { afterAll, describe, expect, it } from 'vitest';
import { blockZstd } from '#linux';
import { elfKernel, unpackKernel } from '../vm/firecracker/kernel-image.ts';
import {
  COLD_AFTER_MS,
  DEFAULT_GUEST_MEMORY,
  guestMemory,
  memoryGuestWrites,
  memoryKernelArguments,
} from '../vm/guest-memory.ts';

const driver = { name: 'qemu', features: { pmem: true, freePageReporting: true } };
const poor = { name: 'other', features: { pmem: false, freePageReporting: false } };

describe('memory of a guest', () => {
  it('is what was asked for, else the default where there is such a thing', () => {
    expect(guestMemory(undefined, driver)).toEqual({ pmem: true, reporting: true, damon: true });
    expect(guestMemory({ pmem: false }, driver)).toEqual({ pmem: false, reporting: true, damon: true });
    expect(guestMemory({ reporting: false, damon: false }, driver)).toEqual({
      pmem: true,
      reporting: false,
      damon: false,
    });
    expect(guestMemory({}, poor)).toEqual({ pmem: false, reporting: false, damon: true });
    const code = 'RUNTIME_UNSUPPORTED';
    for (const [asked, what] of [
      [{ pmem: true }, 'virtio-pmem'],
      [{ reporting: true }, 'free page reporting'],
    ] as const) {
      expect(() => guestMemory(asked, poor)).toThrow(
        expect.objectContaining({ code, message: expect.stringContaining(what) }),
      );
      expect(() => guestMemory(asked, poor)).toThrow('other');
    }
  });

  it('is a word of the command line, and files of a guest that boots; what switches DAMON on comes last', () => {
    expect(memoryKernelArguments(DEFAULT_GUEST_MEMORY)).toEqual([
      'swiotlb=noforce',
      'page_reporting.page_reporting_order=4',
    ]);
    expect(memoryKernelArguments({ pmem: true, reporting: false, damon: true })).toEqual(['swiotlb=noforce']);
    expect(memoryGuestWrites({ ...DEFAULT_GUEST_MEMORY, damon: false }, 2 ** 30)).toEqual([]);
    const files = (memoryBytes: number, coldMs = COLD_AFTER_MS) =>
      memoryGuestWrites(DEFAULT_GUEST_MEMORY, memoryBytes, coldMs).map(({ path, value }) => {
        expect(path.startsWith('/sys/kernel/mm/damon/admin/kdamonds/')).toBe(true);
        return `${path.slice('/sys/kernel/mm/damon/admin/kdamonds/'.length)}=${value}`;
      });
    expect(files(2 ** 30)).toEqual([
      'nr_kdamonds=1',
      '0/contexts/nr_contexts=1',
      '0/contexts/0/operations=paddr',
      '0/contexts/0/monitoring_attrs/intervals/sample_us=400000',
      '0/contexts/0/monitoring_attrs/intervals/aggr_us=2000000',
      '0/contexts/0/monitoring_attrs/nr_regions/min=64',
      '0/contexts/0/monitoring_attrs/nr_regions/max=1000',
      '0/contexts/0/targets/nr_targets=1',
      '0/contexts/0/targets/0/regions/nr_regions=1',
      '0/contexts/0/targets/0/regions/0/start=0',
      '0/contexts/0/targets/0/regions/0/end=1073741824',
      '0/contexts/0/schemes/nr_schemes=1',
      '0/contexts/0/schemes/0/action=pageout',
      '0/contexts/0/schemes/0/access_pattern/sz/min=4096',
      '0/contexts/0/schemes/0/access_pattern/sz/max=18446744073709551615',
      '0/contexts/0/schemes/0/access_pattern/nr_accesses/min=0',
      '0/contexts/0/schemes/0/access_pattern/nr_accesses/max=0',
      '0/contexts/0/schemes/0/access_pattern/age/min=15',
      '0/contexts/0/schemes/0/access_pattern/age/max=4294967295',
      '0/contexts/0/schemes/0/quotas/bytes=67108864',
      '0/contexts/0/schemes/0/quotas/reset_interval_ms=1000',
      '0/contexts/0/schemes/0/watermarks/metric=none',
      '0/contexts/0/schemes/0/filters/nr_filters=1',
      '0/contexts/0/schemes/0/filters/0/type=anon',
      '0/contexts/0/schemes/0/filters/0/matching=Y',
      '0/state=on',
    ]);
    expect(files(6 * 2 ** 30).filter((line) => line.includes('regions/'))).toEqual(
      expect.arrayContaining([
        '0/contexts/0/targets/0/regions/nr_regions=2',
        `0/contexts/0/targets/0/regions/0/end=${3 * 2 ** 30}`,
        `0/contexts/0/targets/0/regions/1/start=${4 * 2 ** 30}`,
        `0/contexts/0/targets/0/regions/1/end=${8 * 2 ** 30}`,
      ]),
    );
    expect(files(2 ** 30, 3000)).toContain('0/contexts/0/monitoring_attrs/intervals/aggr_us=200000');
  });
});

/** A bzImage with nothing in it but its header and a payload. */
function bzImage(payload: Buffer, { sectors = 4, version = 0x20f, length = payload.length, offset = 32 } = {}): Buffer {
  const image = Buffer.alloc((sectors + 1) * 512 + 32 + payload.length);
  image[0x1f1] = sectors;
  image.write('HdrS', 0x202, 'latin1');
  image.writeUInt16LE(version, 0x206);
  image.writeUInt32LE(offset, 0x248);
  image.writeUInt32LE(length, 0x24c);
  payload.copy(image, (sectors + 1) * 512 + 32);
  return image;
}

const elf = Buffer.concat([Buffer.from('\x7fELF', 'latin1'), Buffer.alloc(100_000, 'kernel ')]);
const sized = (packed: Buffer, size = elf.length) => {
  const end = Buffer.alloc(4);
  end.writeUInt32LE(size);
  return Buffer.concat([packed, end]);
};
const zstd = blockZstd();

describe('a kernel for Firecracker', () => {
  const folder = mkdtempSync(join(tmpdir(), 'dsec-kernel-'));
  afterAll(() => rmSync(folder, { recursive: true, force: true }));

  it('is an ELF file, or unpacked from a bzImage, once', () => {
    const path = join(folder, 'vmlinux');
    writeFileSync(path, elf);
    expect(elfKernel(path, 'm')).toBe(path);
    const packed = join(folder, 'vmlinuz');
    writeFileSync(packed, bzImage(gzipSync(elf)));
    expect(elfKernel(packed, 'm')).toBe(`${packed}.elf`);
    expect(readFileSync(`${packed}.elf`)).toEqual(elf);
    writeFileSync(packed, 'gone');
    expect(elfKernel(packed, 'm')).toBe(`${packed}.elf`);
    expect(readdirSync(folder).sort()).toEqual(['vmlinux', 'vmlinuz', 'vmlinuz.elf']);
  });

  it.skipIf(zstd === undefined)('is unpacked from zstd, as Debian has it', () => {
    expect(unpackKernel(bzImage(sized(zstd!.compress(elf, 3))))).toEqual(elf);
    expect(() => unpackKernel(bzImage(sized(zstd!.compress(elf, 3), 50)))).toThrow('zstd');
    expect(() => unpackKernel(bzImage(sized(zstd!.compress(elf, 3), elf.length + 9)))).toThrow('shorter');
    expect(() => unpackKernel(bzImage(sized(zstd!.compress(elf, 3), 2 ** 31)))).toThrow('claims');
  });

  it('is refused with a reason when the file is something else, or ends early', () => {
    const good = bzImage(gzipSync(elf));
    for (const [image, reason] of [
      [Buffer.alloc(0), 'neither'],
      [Buffer.alloc(4096), 'neither'],
      [bzImage(gzipSync(elf), { version: 0x200 }), 'before Linux'],
      [bzImage(gzipSync(elf), { length: 2 ** 31 }), 'does not fit'],
      [bzImage(gzipSync(elf), { offset: 2 ** 31 }), 'does not fit'],
      [bzImage(gzipSync(elf), { length: 4 }), 'does not fit'],
      [bzImage(gzipSync(Buffer.from('no kernel at all'))), 'no ELF'],
      [bzImage(sized(Buffer.from('BZh91AY and so on'))), 'neither zstd nor gzip'],
    ] as const) {
      expect(() => unpackKernel(image)).toThrow(reason);
    }
    for (let cut = 0; cut < good.length; cut += 97) expect(() => unpackKernel(good.subarray(0, cut))).toThrow();
    expect(() => elfKernel(join(folder, 'none'), 'm')).toThrow(expect.objectContaining({ code: 'VM_SPEC' }));
  });
});
