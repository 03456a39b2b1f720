/**
 * Memory of a conversion is bounded: it follows the number of files, never their bytes. Promised is 1.5 GiB for a million files and a
 * layer of 10 GiB (`npm run bench -- convert-memory --full` measures that); here a tenth of either.
 *
 * What does not grow is measured on a small image: the process itself, the rings that inflating fills, the blocks of memory that writing
 * fills. The rest of the 1.5 GiB is what a million files may take. A tenth of the files may take a tenth of it, twice: a
 * small heap may hold as much garbage as life before V8 collects it, where a large one is collected earlier.
 */
import { createHash } from 'node:crypto';
import { closeSync, mkdirSync, mkdtempSync, openSync, readFileSync, rmSync, writeSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { gzipSync } from 'node:zlib';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { digestFromHex } from '#base';
import { type ConvertedJson, DsecCommand, projectRoot } from '../dsec-command.ts';
import { memberHeader, writeManyFiles } from '../generated-tar.ts';
import { type LayoutLayer, writeLayout } from '../image-layout.ts';
import { timedCommand } from '../timed-command.ts';

const MIB = 2 ** 20;
const PROMISED_BYTES = 1536 * MIB;
const PROMISED_FILES = 1_000_000;
const FILES = PROMISED_FILES / 10;
const LARGE_BYTES = 1024 * MIB;
/** More than the rings of all that inflates hold, so that they are full in the small image too. */
const SMALL_BYTES = 128 * MIB;
/** What is on its way to the disk: 8 blocks of 2 MiB for each of two layers; and what Node has not given back of it yet. */
const ON_ITS_WAY_BYTES = 64 * MIB;

describe('the memory of a conversion', { timeout: 600_000 }, () => {
  let folder: string;
  let dsec: DsecCommand;
  let smallBytes: number;

  beforeAll(async () => {
    folder = mkdtempSync(join(tmpdir(), 'dsec-convert-memory-'));
    dsec = new DsecCommand(folder);
    smallBytes = await peakOf(1000, SMALL_BYTES);
  }, 600_000);
  afterAll(() => rmSync(folder, { recursive: true, force: true }));

  it('grows by no more for 100,000 files than what is promised allows', async () => {
    const eachBytes = (PROMISED_BYTES - smallBytes) / PROMISED_FILES;
    const peakBytes = await peakOf(FILES, SMALL_BYTES);
    console.log(`${mib(smallBytes)} for the small image, ${mib(peakBytes)} for ${FILES} files`);
    expect(peakBytes).toBeLessThan(smallBytes + 2 * FILES * eachBytes);
  });

  it('does not grow with the bytes of a layer', async () => {
    const peakBytes = await peakOf(1000, LARGE_BYTES);
    console.log(`${mib(smallBytes)} for the small image, ${mib(peakBytes)} for a layer of ${mib(LARGE_BYTES)}`);
    expect(peakBytes).toBeLessThan(smallBytes + ON_ITS_WAY_BYTES);
  });

  /** Converts a layer of so many files, and a gzip layer of so many bytes, in a process of its own. */
  async function peakOf(files: number, largeBytes: number): Promise<number> {
    const place = join(folder, 'image');
    mkdirSync(place);
    const layers = [
      writeManyFiles(join(place, 'many.tar'), files),
      writeLargeGzip(join(place, 'large.tar.gz'), largeBytes),
    ];
    const source = `oci:${writeLayout(join(place, 'layout'), 'big', layers)}`;
    const args = ['convert', source, '--name', 'big:1', '--json'];
    const program = `const { main } = await import(${JSON.stringify(await bundle())}); await main(${JSON.stringify(args)});`;
    const { stdout, peakBytes } = await timedCommand([process.execPath, '--input-type=module', '-e', program], {
      env: dsec.env,
      sampleMemoryMs: 10,
    });
    const { stats } = JSON.parse(stdout) as ConvertedJson;
    expect(stats!.inodes).toBeGreaterThan(files);
    expect(stats!.tarBytes).toBeGreaterThan(largeBytes);
    await dsec.emptyStore();
    rmSync(place, { recursive: true });
    return peakBytes!;
  }

  /** Not bin/dsec itself: it would build anew, in the process that is measured, when a source was changed meanwhile. */
  async function bundle(): Promise<string> {
    await dsec.warmUp();
    const dist = join(projectRoot(), 'dist');
    const { folder } = JSON.parse(readFileSync(join(dist, 'dsec.stamp.json'), 'utf8')) as { folder: string };
    return join(dist, folder, 'dsec.mjs');
  }
});

/** Files of 64 MiB, each of its own content; a member of gzip for each MiB, most of them the same, so that making it costs little. */
function writeLargeGzip(path: string, totalBytes: number): LayoutLayer {
  const text = Buffer.from('a line of some file, as long as most of them\n'.repeat(MIB / 40)).subarray(0, MIB);
  const packed = gzipSync(text, { level: 1 });
  const out = openSync(path, 'w');
  const tar = createHash('sha256');
  const blob = createHash('sha256');
  let sizeBytes = 0;
  const put = (bytes: Buffer, member = gzipSync(bytes, { level: 1 })) => {
    tar.update(bytes);
    blob.update(member);
    sizeBytes += writeSync(out, member);
  };
  for (let i = 0; i * 64 * MIB < totalBytes; i++) {
    put(memberHeader(`large-${i}`, 'file', 64 * MIB));
    put(Buffer.concat([Buffer.from(`file ${i}\n`), text]).subarray(0, MIB));
    for (let k = 1; k < 64; k++) put(text, packed);
  }
  put(Buffer.alloc(1024));
  closeSync(out);
  return {
    path,
    digest: digestFromHex(blob.digest('hex')),
    diffId: digestFromHex(tar.digest('hex')),
    sizeBytes,
    compressed: true,
  };
}

function mib(bytes: number): string {
  return `${Math.round(bytes / MIB)} MiB`;
}
