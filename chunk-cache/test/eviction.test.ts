import { describe, expect, it } from 'vitest';
import { ChunkStates, COLD, VERIFIED } from '../chunk-states.ts';
import { EvictionPolicy } from '../eviction.ts';
import { MemoryLevel } from '../memory-level.ts';
import { UseClock } from '../use-clock.ts';

function madeUpBlob(slot: number, count: number) {
  return { slot, states: ChunkStates.make(count), queue: new Uint8Array(count), pinned: false };
}
type MadeUp = ReturnType<typeof madeUpBlob>;

function policyOver(...blobs: MadeUp[]) {
  const policy = new EvictionPolicy<MadeUp>((slot) => blobs[slot]);
  const add = (blob: MadeUp, index: number, tick = 0) => {
    blob.states.noteArrival(index, tick);
    blob.states.set(index, VERIFIED);
    policy.add(blob, index);
  };
  const evict = () => {
    const victim = policy.victim();
    victim?.blob.states.set(victim.index, COLD);
    return victim && [victim.blob.slot, victim.index];
  };
  return { policy, add, evict };
}

describe('eviction', () => {
  it('takes what was never used in the order it came, and keeps what was', () => {
    const blob = madeUpBlob(0, 10);
    const { add, evict } = policyOver(blob);
    for (let i = 0; i < 6; i++) add(blob, i);
    blob.states.noteUse(1, 5);
    blob.states.noteUse(3, 5);
    expect([evict(), evict(), evict(), evict()]).toEqual([
      [0, 0],
      [0, 2],
      [0, 4],
      [0, 5],
    ]);
    expect([evict(), evict(), evict()]).toEqual([[0, 1], [0, 3], undefined]);
  });

  it('counts the pieces of one pass as one use, and none for the pass that brought the chunk', () => {
    const states = ChunkStates.make(1);
    states.noteArrival(0, 3);
    for (let i = 0; i < 64; i++) expect(states.noteUse(0, 3)).toBe(false);
    expect(states.useCount(0)).toBe(0);
    for (let i = 0; i < 64; i++) states.noteUse(0, 4);
    expect(states.useCount(0)).toBe(1);
    for (let tick = 5; tick < 20; tick++) states.noteUse(0, tick);
    expect(states.useCount(0)).toBe(3);
    expect(states.touched[0]).toBe(1);
  });

  it('remembers what left: when it comes again soon it stays longer than what is new', () => {
    const blob = madeUpBlob(0, 100);
    const { add, evict } = policyOver(blob);
    for (let i = 0; i < 20; i++) add(blob, i);
    expect(evict()).toEqual([0, 0]);
    add(blob, 0);
    const order = Array.from({ length: 20 }, () => evict()![1]);
    // Of main, a tenth short of being the last.
    expect(order.indexOf(0)).toBeGreaterThan(15);
  });

  it('lets a scan pass through: what is used again and again stays', () => {
    const blob = madeUpBlob(0, 10_000);
    const { add, evict } = policyOver(blob);
    const clock = new UseClock();
    const hot = Array.from({ length: 50 }, (_, i) => i);
    for (const i of hot) add(blob, i, clock.tick);
    for (let i = 50; i < 5000; i++) {
      if (i % 20 === 0) {
        clock.advance();
        for (const one of hot) blob.states.noteUse(one, clock.tick);
      }
      if (i >= 100) evict();
      add(blob, i, clock.tick);
    }
    expect(hot.every((i) => blob.states.state(i) === VERIFIED)).toBe(true);
  });

  it('never takes pinned chunks, steps over those that vanished, and ends', () => {
    const [pinned, other, gone] = [madeUpBlob(0, 5), madeUpBlob(1, 5), madeUpBlob(2, 5)];
    const { policy, add, evict } = policyOver(pinned, other, gone);
    pinned.pinned = true;
    for (let i = 0; i < 5; i++) for (const blob of [pinned, other, gone]) add(blob, i);
    policy.forget(gone);
    other.states.set(2, COLD);
    expect([evict(), evict(), evict(), evict(), evict()]).toEqual([[1, 0], [1, 1], [1, 3], [1, 4], undefined]);
    expect(evict()).toBeUndefined();
    pinned.pinned = false;
    expect(evict()![0]).toBe(0);
  });
});

describe('states', () => {
  it('change their word whenever a chunk leaves, so that a reader notices', () => {
    const states = ChunkStates.make(3);
    const other = ChunkStates.attach(3, states.shared);
    const words = new Set<number>();
    for (let i = 0; i < 100; i++) {
      states.set(1, VERIFIED);
      words.add(other.word(1));
      states.set(1, COLD);
    }
    expect(words.size).toBe(100);
    expect([other.state(0), other.state(1), states.verifiedCount, states.storedCount]).toEqual([0, 0, 0, 0]);
  });
});

describe('memory level', () => {
  const chunk = () => Buffer.alloc(10);
  it('keeps what was asked for again from a scan, within its bound', () => {
    const memory = new MemoryLevel(100);
    for (let key = 0; key < 5; key++) memory.put(key, chunk());
    for (let key = 0; key < 5; key++) memory.get(key, true);
    for (let key = 100; key < 200; key++) memory.put(key, chunk());
    expect([0, 1, 2, 3, 4].every((key) => memory.has(key))).toBe(true);
    expect(memory.usedBytes).toBe(100);
    // Without a use in between, none is promoted.
    for (let key = 195; key < 200; key++) memory.get(key, false);
    memory.put(300, chunk());
    expect(memory.has(195)).toBe(false);
  });

  it('shrinks for what it has to hold elsewhere', () => {
    const memory = new MemoryLevel(100);
    for (let key = 0; key < 10; key++) memory.put(key, chunk());
    memory.reserve(70);
    expect([memory.usedBytes, memory.has(6), memory.has(7)]).toEqual([100, false, true]);
    memory.unreserve(70);
    memory.delete(9);
    expect(memory.usedBytes).toBe(20);
    memory.clear();
    expect(memory.usedBytes).toBe(0);
  });
});
