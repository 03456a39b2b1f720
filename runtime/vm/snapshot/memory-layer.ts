/**
 * A guest's memory as an LSMT layer. Found by comparing, page by page, with the snapshot before: exact, and without asking the kernel or the driver
 * to keep track of what a guest writes. Holes of the memory file are not read; pages of zeros take no room.
 */
import { randomUUID } from 'node:crypto';
import { type FileHandle, open } from 'node:fs/promises';
import { setImmediate as nextTurn } from 'node:timers/promises';
import { dataRuns } from '#linux';
import { commitLayer, FileSource, IndexBuilder, type LayerStack, Pieces, type SegmentIndex } from '#ublk-daemon';

const PAGE = 4096;
const SECTOR = 512;
const PAGE_SECTORS = PAGE / SECTOR;
const CHUNK = 1024 * 1024;
const ZEROS = Buffer.alloc(CHUNK);
const NOTHING_BELOW = -1;

export interface MemoryLayer {
  readonly sizeBytes: number;
  readonly changedPages: number;
  /** Of the pages that changed, those that are zeros now. */
  readonly zeroPages: number;
}

/** @param base what the layer will lie on */
export async function writeMemoryLayer(
  path: string,
  memoryPath: string,
  memoryBytes: number,
  base: LayerStack | undefined,
  signal?: AbortSignal,
): Promise<MemoryLayer> {
  const memory = await open(memoryPath, 'r');
  try {
    const found = await changedPages(memory, memoryBytes, base, signal);
    const source = new FileSource(memoryPath, memoryBytes, memory, false);
    const identity = {
      virtualSize: memoryBytes,
      uuid: randomUUID(),
      ...(base === undefined ? {} : { parentUuid: base.uuid }),
    };
    const wish = signal === undefined ? identity : { ...identity, signal };
    const { sizeBytes } = await commitLayer(path, found.index, [source], wish);
    return { sizeBytes, changedPages: found.changedPages, zeroPages: found.zeroPages };
  } finally {
    await memory.close();
  }
}

interface Changes {
  readonly index: SegmentIndex;
  readonly changedPages: number;
  readonly zeroPages: number;
}

async function changedPages(
  memory: FileHandle,
  memoryBytes: number,
  base: LayerStack | undefined,
  signal?: AbortSignal,
): Promise<Changes> {
  const changes = new ChangedRuns();
  const now = Buffer.allocUnsafe(CHUNK);
  const before = Buffer.allocUnsafe(CHUNK);
  const pieces = new Pieces();
  // At once: the machine stands still, and the descriptor's position is the only state.
  const runs = [...dataRuns(memory.fd, memoryBytes)];
  let nextRun = 0;
  for (let at = 0; at < memoryBytes; at += CHUNK) {
    signal?.throwIfAborted();
    const length = Math.min(CHUNK, memoryBytes - at);
    while (nextRun < runs.length && runs[nextRun]!.offset + runs[nextRun]!.length <= at) nextRun++;
    const hasData = nextRun < runs.length && runs[nextRun]!.offset < at + length;
    const below = base === undefined ? NOTHING_BELOW : await readBelow(base, at, before.subarray(0, length), pieces);
    if (!hasData && below === NOTHING_BELOW) continue;
    if (hasData) await readWhole(memory, now.subarray(0, length), at);
    else now.fill(0);
    changes.compare(
      at,
      now.subarray(0, length),
      below === NOTHING_BELOW ? ZEROS.subarray(0, length) : before.subarray(0, length),
    );
    await nextTurn();
  }
  return changes.finish();
}

/** Collects runs of pages that differ. */
class ChangedRuns {
  private readonly index = new IndexBuilder(1024);
  private changed = 0;
  private zeros = 0;
  private start = 0;
  private end = 0;
  private zeroed = false;

  compare(at: number, now: Buffer, before: Buffer): void {
    if (now.equals(before)) return;
    for (let page = 0; page < now.length; page += PAGE) {
      if (now.compare(before, page, page + PAGE, page, page + PAGE) === 0) continue;
      const zeroed = now.compare(ZEROS, 0, PAGE, page, page + PAGE) === 0;
      this.changed++;
      if (zeroed) this.zeros++;
      this.add((at + page) / SECTOR, zeroed);
    }
  }

  finish(): Changes {
    this.flush();
    return { index: this.index.build(), changedPages: this.changed, zeroPages: this.zeros };
  }

  private add(sector: number, zeroed: boolean): void {
    if (this.end !== sector || this.zeroed !== zeroed) {
      this.flush();
      this.start = sector;
      this.zeroed = zeroed;
    }
    this.end = sector + PAGE_SECTORS;
  }

  private flush(): void {
    if (this.end > this.start) this.index.add(this.start, this.end, this.start, this.zeroed, 0);
    this.start = 0;
    this.end = 0;
  }
}

/** NOTHING_BELOW when all of it was never written, or is zeros. */
async function readBelow(base: LayerStack, at: number, into: Buffer, pieces: Pieces): Promise<number> {
  pieces.clear();
  base.index.lookup(at / SECTOR, (at + into.length) / SECTOR, pieces);
  if (pieces.count === 1 && pieces.layers[0]! < 0) return NOTHING_BELOW;
  for (let i = 0; i < pieces.count; i++) {
    const from = pieces.starts[i]! * SECTOR - at;
    const part = into.subarray(from, pieces.ends[i]! * SECTOR - at);
    const layer = pieces.layers[i]!;
    if (layer < 0) part.fill(0);
    else await base.sources[layer]!.read(part, pieces.moffsets[i]! * SECTOR);
  }
  return into.length;
}

async function readWhole(file: FileHandle, into: Buffer, at: number): Promise<void> {
  for (let done = 0; done < into.length; ) {
    const { bytesRead } = await file.read(into, done, into.length - done, at + done);
    if (bytesRead === 0) throw new Error(`the memory file ends at ${at + done}`);
    done += bytesRead;
  }
}

/** All of it into a file of zeros. */
export async function readMemoryInto(file: FileHandle, stack: LayerStack): Promise<void> {
  const { index, sources } = stack;
  const buffer = Buffer.allocUnsafe(CHUNK);
  for (let at = 0; at < index.count; at++) {
    if (index.isZeroed(at)) continue;
    const source = sources[index.layer(at)]!;
    const [start, end] = [index.start(at) * SECTOR, index.end(at) * SECTOR];
    for (let done = 0; start + done < end; done += CHUNK) {
      const part = buffer.subarray(0, Math.min(CHUNK, end - start - done));
      await source.read(part, index.moffset(at) * SECTOR + done);
      for (let written = 0; written < part.length; ) {
        const { bytesWritten } = await file.write(part, written, part.length - written, start + done + written);
        written += bytesWritten;
      }
    }
  }
}
