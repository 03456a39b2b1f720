/**
 * The kernel as Firecracker boots it: an ELF file. Distributions ship a bzImage, which is that file compressed behind a loader (the boot protocol's
 * header says where); it is unpacked once, beside the bzImage, and taken from there.
 */
import { existsSync, readFileSync, renameSync, rmSync, writeFileSync } from 'node:fs';
import { gunzipSync } from 'node:zlib';
import { messageOf } from '#base';
import { zstdLibrary } from '#linux';
import { fail } from '../../errors.ts';

const ELF = Buffer.from([0x7f, 0x45, 0x4c, 0x46]);
/** Of one that is unpacked: what a header may claim, not what kernels are (60 MiB). */
const MAX_KERNEL_BYTES = 512 * 2 ** 20;

/** The path of it. @throws VM_SPEC when the file is no kernel that can be read */
export function elfKernel(path: string, machine: string): string {
  const bad = (problem: string, cause?: unknown) =>
    fail('VM_SPEC', { id: machine, field: 'boot.kernel', problem: `${path}: ${problem}` }, cause);
  const unpacked = `${path}.elf`;
  if (existsSync(unpacked)) return unpacked;
  let image: Buffer;
  try {
    image = readFileSync(path);
  } catch (error) {
    throw bad(messageOf(error), error);
  }
  if (image.subarray(0, 4).equals(ELF)) return path;
  let elf: Buffer;
  try {
    elf = unpackKernel(image);
  } catch (error) {
    throw bad(messageOf(error), error);
  }
  const staged = `${unpacked}.${process.pid}`;
  try {
    writeFileSync(staged, elf, { mode: 0o644 });
    renameSync(staged, unpacked);
  } finally {
    rmSync(staged, { force: true });
  }
  return unpacked;
}

/** @throws Error that says what is wrong with it */
export function unpackKernel(image: Buffer): Buffer {
  if (image.length < 0x250 || image.toString('latin1', 0x202, 0x206) !== 'HdrS') {
    throw new Error('neither an ELF file nor a bzImage');
  }
  if (image.readUInt16LE(0x206) < 0x208) throw new Error('a bzImage of before Linux 2.6.24');
  const setupSectors = image[0x1f1] || 4;
  const start = (setupSectors + 1) * 512 + image.readUInt32LE(0x248);
  const length = image.readUInt32LE(0x24c);
  if (length < 8 || start + length > image.length) throw new Error('its payload does not fit into the file');
  const payload = image.subarray(start, start + length);
  const elf = inflate(payload);
  if (!elf.subarray(0, 4).equals(ELF)) throw new Error('its payload is no ELF file');
  return elf;
}

/** The last four bytes of a payload are its size when it is unpacked; only gzip’s are a part of its own format. */
function inflate(payload: Buffer): Buffer {
  const size = payload.readUInt32LE(payload.length - 4);
  if (size > MAX_KERNEL_BYTES) throw new Error(`its payload claims ${size} bytes`);
  const magic = payload.readUInt32LE(0);
  if (magic === 0xfd2fb528) {
    const zstd = zstdLibrary();
    if (zstd === undefined) throw new Error('it is compressed with zstd, and libzstd.so.1 is missing');
    const out = Buffer.alloc(size);
    const packed = payload.subarray(0, payload.length - 4);
    const got = zstd.decompress(out, size, packed, packed.length);
    if (got !== size) throw new Error(got < 0 ? `zstd: ${zstd.errorName(got)}` : 'its payload is shorter than it says');
    return out;
  }
  if ((magic & 0xffff) === 0x8b1f) return gunzipSync(payload, { maxOutputLength: MAX_KERNEL_BYTES });
  throw new Error('it is compressed with neither zstd nor gzip');
}
