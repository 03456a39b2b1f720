/**
 * The memory that a conversion takes at its worst: one layer of very many small files and one of very many bytes, converted
 * together. By default a scaled-down image; with --full the promised one: a million files and 10 GiB, within 1.5 GiB.
 */
import { join } from 'node:path';
import { humanSize } from '#base';
import { atMost, type Benchmark, type Result, round } from './benchmark.ts';
import { DsecCommand } from './dsec-command.ts';
import { writeLargeFiles, writeManyFiles } from './generated-tar.ts';
import { writeLayout } from './image-layout.ts';
import { hasFlag } from './options.ts';
import { needSpace, withScratch } from './work-folder.ts';

const GIB = 2 ** 30;
const LIMIT_BYTES = 1.5 * GIB;
const SAMPLE_MS = 50;

export const benchmark: Benchmark = {
  name: 'convert-memory',
  about:
    'memory at its peak for very many files and a very large layer (--full: a million and 10 GiB), against 1.5 GiB',
  run: () => withScratch('convert-memory', measure),
};

async function measure(folder: string): Promise<Result> {
  const full = hasFlag('full');
  const files = full ? 1_000_000 : 200_000;
  const largeBytes = full ? 10 * GIB : GIB;
  // The tars, what is unpacked of them, the blobs: all at once.
  needSpace(folder, 3.2 * largeBytes + 3 * 4096 * files);
  console.log(`making layers of ${files} files and of ${humanSize(largeBytes)}`);
  const layers = [
    writeManyFiles(join(folder, 'many.tar'), files),
    writeLargeFiles(join(folder, 'large.tar'), largeBytes),
  ];
  const dsec = new DsecCommand(folder);
  const source = `oci:${writeLayout(join(folder, 'layout'), 'big', layers)}`;
  await dsec.warmUp();
  const { ms, peakBytes, image } = await dsec.convert(source, 'big:1', [], { sampleMemoryMs: SAMPLE_MS });
  console.log(`${humanSize(peakBytes!)} at the peak, ${(ms / 1000).toFixed(1)} s, ${image.layers} EROFS layers`);
  const ratio = round(peakBytes! / LIMIT_BYTES);
  return {
    ratio,
    ...atMost(1, ratio),
    against: `${humanSize(LIMIT_BYTES)} of memory (VmHWM of the process tree)`,
    n: 1,
    p50: peakBytes!,
    p99: peakBytes!,
    unit: 'bytes',
    full,
    files,
    largeBytes,
    convertMs: Math.round(ms),
    image: { layers: image.layers, metaBytes: image.metaBytes, dataBytes: image.dataBytes },
  };
}
