/**
 * Caches of a fixed number of chunks, told each visit of a chunk and answering whether it was there: the chunk cache's own policy
 * behind that interface, and the ones it is measured against.
 */
import { ChunkStates, EvictionPolicy, UseClock, VERIFIED } from '#chunk-cache';

const CHUNK_BYTES = 256 * 1024;

export interface Simulated {
  readonly name: string;
  /** True when the chunk was there; else it comes in, and others go. */
  visit(key: number): boolean;
}

export function lru(capacity: number): Simulated {
  const kept = new Set<number>();
  return {
    name: 'LRU',
    visit(key) {
      const hit = kept.delete(key);
      kept.add(key);
      if (kept.size > capacity) for (const oldest of kept) if (kept.delete(oldest)) break;
      return hit;
    },
  };
}

/** Second chance, one bit. */
export function clock(capacity: number): Simulated {
  const used = new Map<number, boolean>();
  return {
    name: 'CLOCK',
    visit(key) {
      if (used.has(key)) {
        used.set(key, true);
        return true;
      }
      while (used.size >= capacity) {
        const [oldest, wasUsed] = used.entries().next().value!;
        used.delete(oldest);
        if (wasUsed) used.set(oldest, false);
      }
      used.set(key, false);
      return false;
    },
  };
}

/** SIEVE: a queue whose hand moves from old to new and takes the first unused; what it passes keeps its place. */
export function sieve(capacity: number): Simulated {
  interface Node {
    key: number;
    used: boolean;
    newer: Node | undefined;
    older: Node | undefined;
  }
  const nodes = new Map<number, Node>();
  let newest: Node | undefined;
  let oldest: Node | undefined;
  let hand: Node | undefined;
  const evict = () => {
    let at = hand ?? oldest!;
    while (at.used) {
      at.used = false;
      at = at.newer ?? oldest!;
    }
    hand = at.newer;
    if (at.newer !== undefined) at.newer.older = at.older;
    else newest = at.older;
    if (at.older !== undefined) at.older.newer = at.newer;
    else oldest = at.newer;
    nodes.delete(at.key);
  };
  return {
    name: 'SIEVE',
    visit(key) {
      const known = nodes.get(key);
      if (known !== undefined) {
        known.used = true;
        return true;
      }
      if (nodes.size >= capacity) evict();
      const node: Node = { key, used: false, newer: undefined, older: newest };
      if (newest !== undefined) newest.newer = node;
      newest = node;
      oldest ??= node;
      nodes.set(key, node);
      return false;
    },
  };
}

/** The code that the cache runs. Each visit is four reads of a piece of the chunk, as a kernel's read-ahead makes of it. */
export function chunkCachePolicy(capacity: number, chunkCount: number): Simulated {
  const states = ChunkStates.make(chunkCount);
  const blob = { slot: 0, states, queue: new Uint8Array(chunkCount), pinned: false };
  const policy = new EvictionPolicy<typeof blob>(() => blob);
  const useClock = new UseClock();
  let kept = 0;
  return {
    name: 'chunk-cache (S3-FIFO)',
    visit(key) {
      const hit = states.state(key) === VERIFIED;
      if (!hit) {
        if (kept === capacity) {
          const victim = policy.victim();
          if (victim === undefined) throw new Error('nothing to evict');
          states.set(victim.index, 0);
          kept--;
        }
        states.noteArrival(key, useClock.tick);
        useClock.cameIn(CHUNK_BYTES, kept * CHUNK_BYTES);
        states.set(key, VERIFIED);
        policy.add(blob, key);
        kept++;
      }
      for (let piece = 0; piece < 4; piece++) states.noteUse(key, useClock.tick);
      return hit;
    },
  };
}
