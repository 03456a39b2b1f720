/**
 * Decoded blocks of the ZFiles of a process whose sources have no memory of their own (local files), least recently used out first,
 * bounded in bytes. A block that is read again (file system metadata mostly) costs no decompression.
 */
import type { BlockMemory } from '../byte-source.ts';

/** Room for the block number beside the file's. */
const KEYS_A_FILE = 2 ** 31;

export class BlockCache {
  private files = 0;
  private readonly blocks = new Map<number, Buffer>();
  private readonly capacityBytes: number;
  private bytes = 0;

  constructor(capacityBytes: number) {
    this.capacityBytes = capacityBytes;
  }

  forFile(): BlockMemory {
    const base = this.files++ * KEYS_A_FILE;
    return {
      get: (block) => this.get(base + block),
      put: (block, bytes) => this.put(base + block, bytes),
    };
  }

  private get(key: number): Buffer | undefined {
    const block = this.blocks.get(key);
    if (block !== undefined) {
      this.blocks.delete(key);
      this.blocks.set(key, block);
    }
    return block;
  }

  private put(key: number, block: Buffer): void {
    if (this.blocks.has(key)) return;
    this.blocks.set(key, block);
    this.bytes += block.length;
    for (const [oldest, { length }] of this.blocks) {
      if (this.bytes <= this.capacityBytes) break;
      this.blocks.delete(oldest);
      this.bytes -= length;
    }
  }
}

export const sharedBlocks = new BlockCache(64 * 1024 * 1024);
