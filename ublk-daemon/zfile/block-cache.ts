/**
 * Decoded blocks of all ZFiles of a process, least recently used out first, bounded in bytes. A block that is read again (file
 * system metadata mostly) costs no decompression.
 */
export class BlockCache {
  private readonly blocks = new Map<string, Buffer>();
  private readonly capacityBytes: number;
  private bytes = 0;

  constructor(capacityBytes: number) {
    this.capacityBytes = capacityBytes;
  }

  get(key: string): Buffer | undefined {
    const block = this.blocks.get(key);
    if (block !== undefined) {
      this.blocks.delete(key);
      this.blocks.set(key, block);
    }
    return block;
  }

  put(key: string, block: Buffer): void {
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
