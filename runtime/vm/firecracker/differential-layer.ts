/**
 * Firecracker's differential memory file as an LSMT layer: pages that were written since the snapshot before are data in it, all others are holes. It
 * tells what was written, not what changed; pages that are zeros take no room.
 */
import { randomUUID } from 'node:crypto';
import { type FileHandle, open } from 'node:fs/promises';
import { dataRuns } from '#linux';
import { commitLayer, FileSource, IndexBuilder, type LayerStack } from '#ublk-daemon';
import type { MemoryLayer } from '../snapshot/memory-layer.ts';

const PAGE = 4096;
const SECTOR = 512;
const CHUNK = 1024 * 1024;
const ZEROS = Buffer.alloc(PAGE);

/** @param base what the layer will lie on */
export async function writeDifferentialLayer(
  path: string,
  memoryPath: string,
  memoryBytes: number,
  base: LayerStack,
  signal?: AbortSignal,
): Promise<MemoryLayer> {
  const memory = await open(memoryPath, 'r');
  try {
    const index = new IndexBuilder(1024);
    let changedPages = 0;
    let zeroPages = 0;
    for (const { offset, length } of [...dataRuns(memory.fd, memoryBytes)]) {
      for (const [start, end, zeroed] of await runsOf(memory, offset, length, signal)) {
        index.add(start / SECTOR, end / SECTOR, start / SECTOR, zeroed, 0);
        changedPages += (end - start) / PAGE;
        if (zeroed) zeroPages += (end - start) / PAGE;
      }
    }
    const source = new FileSource(memoryPath, memoryBytes, memory, false);
    const identity = { virtualSize: memoryBytes, uuid: randomUUID(), parentUuid: base.uuid };
    const wish = signal === undefined ? identity : { ...identity, signal };
    const { sizeBytes } = await commitLayer(path, index.build(), [source], wish);
    return { sizeBytes, changedPages, zeroPages };
  } finally {
    await memory.close();
  }
}

type Run = [start: number, end: number, zeroed: boolean];

/** Whole pages. */
async function runsOf(memory: FileHandle, offset: number, length: number, signal?: AbortSignal): Promise<Run[]> {
  const runs: Run[] = [];
  const first = offset - (offset % PAGE);
  const last = Math.ceil((offset + length) / PAGE) * PAGE;
  const buffer = Buffer.alloc(CHUNK);
  for (let at = first; at < last; at += CHUNK) {
    signal?.throwIfAborted();
    const part = buffer.subarray(0, Math.min(CHUNK, last - at));
    part.fill(0);
    await memory.read(part, 0, part.length, at);
    for (let page = 0; page < part.length; page += PAGE) {
      const zeroed = part.compare(ZEROS, 0, PAGE, page, page + PAGE) === 0;
      const run = runs.at(-1);
      if (run !== undefined && run[1] === at + page && run[2] === zeroed) run[1] += PAGE;
      else runs.push([at + page, at + page + PAGE, zeroed]);
    }
  }
  return runs;
}
