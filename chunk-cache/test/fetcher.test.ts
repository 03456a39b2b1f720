/** The order and the number of reads of the source: priority, bounds, joining, giving up, wrong bytes, read-ahead. */
import { setTimeout as delay } from 'node:timers/promises';
import { describe, expect, it } from 'vitest';
import type { StopSignal } from '#base';
import { ArrivalDigests } from '../arrival-digests.ts';
import { openChunkCache } from '../cache.ts';
import { CHUNK_BYTES } from '../chunk.ts';
import { ReadAhead } from '../read-ahead.ts';
import { type Asked, MadeUpSource, makeBlob, ROOMY, temporaryFolder } from './made-up-source.ts';

const MIB = 2 ** 20;

/** A source that holds every read until it is let go. */
class HeldSource extends MadeUpSource {
  readonly held: { asked: Asked; signal: StopSignal | undefined; go(error?: Error): void }[] = [];
  override meddle = (asked: Asked, right: Buffer, signal?: StopSignal) =>
    new Promise<Buffer>((resolve, reject) => {
      const go = (error?: Error) => {
        this.held.splice(
          this.held.findIndex((one) => one.asked === asked),
          1,
        );
        if (error === undefined) resolve(right);
        else reject(error);
      };
      this.held.push({ asked, signal, go });
      signal?.addEventListener('abort', () => go(new Error('aborted')));
    });

  /** Answers whatever comes until `work` is done. */
  async during<T>(work: Promise<T>): Promise<T> {
    let done = false;
    const finished = work.finally(() => {
      done = true;
    });
    finished.catch(() => {});
    while (!done) {
      for (const one of [...this.held]) one.go();
      await delay(1);
    }
    return finished;
  }
}

const chunkAt = ({ offset }: Asked) => offset / CHUNK_BYTES;

describe('priority', () => {
  it('lets a reader pass what is only prefetched, and makes a prefetch urgent that a reader waits for', async () => {
    const blob = makeBlob(200 * CHUNK_BYTES);
    const source = new HeldSource(blob);
    const cache = await openChunkCache({ folder: temporaryFolder(), source, maxInFlight: 1, ...ROOMY });
    const cached = cache.open(blob);
    const prefetch = cached.prefetch([{ offset: 0, length: 100 * CHUNK_BYTES }]);
    await delay(1);
    const cold = cached.read(150 * CHUNK_BYTES, 10);
    const queued = cached.read(70 * CHUNK_BYTES, 10);
    await delay(1);
    expect(source.asked.map(chunkAt)).toEqual([0]);
    for (let i = 0; i < 3; i++) {
      source.held[0]!.go();
      while (source.held.length === 0) await delay(1);
    }
    expect(source.asked.slice(1, 3).map((one) => [chunkAt(one), one.length / CHUNK_BYTES, one.priority])).toEqual([
      [150, 1, 'interactive'],
      [70, 1, 'interactive'],
    ]);
    expect(source.asked[3]!.priority).toBe('prefetch');
    await source.during(Promise.all([prefetch, cold, queued]));
    // No chunk twice.
    expect(Math.max(...source.chunkCounts(blob.digest).values())).toBe(1);
    await cache.close();
  });

  it('keeps places free for readers', async () => {
    const blob = makeBlob(400 * CHUNK_BYTES);
    const source = new HeldSource(blob);
    const cache = await openChunkCache({ folder: temporaryFolder(), source, maxInFlight: 4, ...ROOMY });
    const cached = cache.open(blob);
    const prefetch = cached.prefetch([{ offset: 0, length: blob.sizeBytes }]);
    await delay(5);
    expect(source.inFlight).toBe(3);
    const read = cached.read(399 * CHUNK_BYTES, 10);
    await delay(5);
    expect(source.held.map(({ asked }) => chunkAt(asked))).toEqual([0, 16, 32, 399]);
    await source.during(Promise.all([prefetch, read]));
    expect(source.mostInFlight).toBe(4);
    await cache.close();
  });
});

describe('giving up', () => {
  it('never sends what nobody waits for any more, and aborts what is under way', async () => {
    const blob = makeBlob(100 * CHUNK_BYTES);
    const source = new HeldSource(blob);
    const cache = await openChunkCache({ folder: temporaryFolder(), source, maxInFlight: 1, ...ROOMY });
    const cached = cache.open(blob);
    const [first, second] = [new AbortController(), new AbortController()];
    const sent = cached.read(0, 10, { signal: first.signal });
    const joined = cached.read(5, 10, { signal: second.signal });
    const unsent = cached.read(50 * CHUNK_BYTES, 10, { signal: first.signal });
    await delay(1);
    const { signal } = source.held[0]!;
    const reason = new Error('gone');
    first.abort(reason);
    await expect(sent).rejects.toBe(reason);
    await expect(unsent).rejects.toBe(reason);
    // The other reader still waits.
    expect(signal!.aborted).toBe(false);
    second.abort(reason);
    await expect(joined).rejects.toBe(reason);
    expect(signal!.aborted).toBe(true);
    expect(cache.stats().queued).toBe(0);
    // Who asks again gets a flight of his own.
    expect(await source.during(cached.read(0, 10))).toEqual(blob.bytes.subarray(0, 10));
    expect(source.asked.map(chunkAt)).toEqual([0, 0]);
    await cache.close();
  });

  it('ends readers when the cache closes', async () => {
    const blob = makeBlob(50 * CHUNK_BYTES);
    const source = new HeldSource(blob);
    const cache = await openChunkCache({ folder: temporaryFolder(), source, maxInFlight: 1, ...ROOMY });
    const reads = [0, 20, 40].map((i) => cache.open(blob).read(i * CHUNK_BYTES, 10));
    const outcomes = Promise.allSettled(reads);
    await delay(1);
    await cache.close();
    for (const outcome of await outcomes) {
      expect(outcome).toMatchObject({ status: 'rejected', reason: { code: 'CACHE_CLOSED' } });
    }
    expect(() => cache.open(blob)).toThrow(expect.objectContaining({ code: 'CACHE_CLOSED' }));
    expect(source.inFlight).toBe(0);
    await cache.close();
  });
});

describe('failures', () => {
  it('asks again for a chunk that came wrong, alone, and gives it up after three times', async () => {
    const blob = makeBlob(8 * CHUNK_BYTES);
    const source = new MadeUpSource(blob);
    let times = 0;
    source.meddle = ({ offset, length }, right) => {
      const at = 3 * CHUNK_BYTES - offset;
      if (at >= 0 && at < length && times++ < 2) right[at + 5]! ^= 0x80;
      return right;
    };
    const cache = await openChunkCache({ folder: temporaryFolder(), source, ...ROOMY });
    const cached = cache.open(blob);
    expect((await cached.read(0, blob.sizeBytes)).equals(blob.bytes)).toBe(true);
    expect(source.asked.map((one) => [chunkAt(one), one.length / CHUNK_BYTES])).toEqual([
      [0, 8],
      [3, 1],
      [3, 1],
    ]);
    expect(cache.stats().mismatches).toBe(2);
    await cache.remove(blob.digest);
    cached.release();
    times = Number.NEGATIVE_INFINITY;
    source.asked.length = 0;
    const again = cache.open(blob);
    const good = again.read(0, CHUNK_BYTES);
    const bad = again.read(3 * CHUNK_BYTES - 1, 2);
    expect((await good).equals(blob.bytes.subarray(0, CHUNK_BYTES))).toBe(true);
    await expect(bad).rejects.toMatchObject({ code: 'CACHE_CHUNK_MISMATCH', params: { chunk: 3, tries: 3 } });
    expect(source.chunkCounts(blob.digest).get(3)).toBe(3);
    expect(again.chunkState(3)).toBe('cold');
    await cache.close();
  });

  it('is not deceived by a source that hashes the bytes as they come', async () => {
    const blob = makeBlob(3.5 * CHUNK_BYTES);
    const source = new MadeUpSource(blob);
    const spoilt = new Map([
      [1, 1],
      [3, 9],
    ]);
    source.meddle = ({ offset, length, hashed }, right) => {
      expect(hashed).toBe(true);
      const bytes = Buffer.alloc(length);
      const digests = new ArrivalDigests(bytes);
      for (let at = 0; at < length; at += 100_000) {
        right.copy(bytes, at, at, at + 100_000);
        for (const [chunk, times] of spoilt) {
          const wrong = chunk * CHUNK_BYTES + 5 - offset;
          if (times === 0 || wrong < at || wrong >= Math.min(length, at + 100_000)) continue;
          bytes[wrong]! ^= 1;
          spoilt.set(chunk, times - 1);
        }
        digests.cameTo(Math.min(length, at + 100_000));
      }
      return bytes;
    };
    const cache = await openChunkCache({ folder: temporaryFolder(), source, ...ROOMY });
    const cached = cache.open(blob);
    const first = cached.read(0, 3 * CHUNK_BYTES);
    const last = cached.read(3 * CHUNK_BYTES, CHUNK_BYTES);
    expect((await first).equals(blob.bytes.subarray(0, 3 * CHUNK_BYTES))).toBe(true);
    await expect(last).rejects.toMatchObject({ code: 'CACHE_CHUNK_MISMATCH', params: { chunk: 3 } });
    await cache.flush();
    expect(cached.chunkState(2)).not.toBe('cold');
    expect(cached.chunkState(3)).toBe('cold');
    await cache.close();
  });

  it('takes a short answer for a wrong one, and never gives out a part of it', async () => {
    const blob = makeBlob(4 * CHUNK_BYTES);
    const source = new MadeUpSource(blob);
    source.meddle = (_, right) => right.subarray(0, right.length - 1);
    const cache = await openChunkCache({ folder: temporaryFolder(), source, ...ROOMY });
    await expect(cache.open(blob).read(0, 10)).rejects.toMatchObject({ code: 'CACHE_CHUNK_MISMATCH' });
    await cache.close();
  });

  it('passes the source’s error to all who wait, and asks anew for the next', async () => {
    const blob = makeBlob(4 * CHUNK_BYTES);
    const source = new HeldSource(blob);
    const cache = await openChunkCache({ folder: temporaryFolder(), source, ...ROOMY });
    const cached = cache.open(blob);
    const reads = Promise.allSettled([cached.read(0, 10), cached.read(20, 10)]);
    await delay(1);
    const error = new Error('reset');
    source.held[0]!.go(error);
    expect((await reads).map((one) => one.status === 'rejected' && one.reason)).toEqual([error, error]);
    expect(await source.during(cached.read(0, 10))).toEqual(blob.bytes.subarray(0, 10));
    await cache.close();
  });

  it('tries once for a reader whose chunk was on its way as a prefetch that failed', async () => {
    const blob = makeBlob(4 * CHUNK_BYTES);
    const source = new HeldSource(blob);
    const cache = await openChunkCache({ folder: temporaryFolder(), source, ...ROOMY });
    const cached = cache.open(blob);
    const prefetch = cached.prefetch([{ offset: 0, length: 10 }]);
    await delay(1);
    const read = cached.read(0, 10);
    source.held[0]!.go(new Error('reset'));
    await expect(prefetch).rejects.toThrow('reset');
    expect(await source.during(read)).toEqual(blob.bytes.subarray(0, 10));
    expect(source.asked.map(({ priority }) => priority)).toEqual(['prefetch', 'interactive']);
    await cache.close();
  });
});

describe('a prefetch that stalls', () => {
  const stalled = async () => {
    const blob = makeBlob(4 * CHUNK_BYTES);
    const source = new HeldSource(blob);
    const cache = await openChunkCache({ folder: temporaryFolder(), source, ...ROOMY, patienceMs: 50 });
    const cached = cache.open(blob);
    const prefetch = cached.prefetch([{ offset: 0, length: blob.sizeBytes }]);
    await delay(1);
    const read = cached.read(2 * CHUNK_BYTES, 10);
    while (source.held.length < 2) await delay(10);
    expect(source.asked.map((one) => [chunkAt(one), one.length / CHUNK_BYTES, one.priority])).toEqual([
      [0, 4, 'prefetch'],
      [2, 1, 'interactive'],
    ]);
    return { blob, source, cache, cached, prefetch, read };
  };

  it('does not stall who needs its chunk, and gives the others when it comes', async () => {
    const { blob, source, cache, cached, prefetch, read } = await stalled();
    source.held[1]!.go();
    expect(await read).toEqual(blob.bytes.subarray(2 * CHUNK_BYTES, 2 * CHUNK_BYTES + 10));
    source.held[0]!.go();
    await prefetch;
    await cache.flush();
    expect(cached.isComplete).toBe(true);
    expect(cache.stats().storedBytes).toBe(blob.sizeBytes);
    expect((await cached.read(0, blob.sizeBytes)).equals(blob.bytes)).toBe(true);
    expect(source.asked.length).toBe(2);
    await cache.close();
  });

  it('and the other way round: the prefetch comes first', async () => {
    const { blob, source, cache, cached, prefetch, read } = await stalled();
    const [first, second] = source.held;
    first!.go();
    expect(await read).toEqual(blob.bytes.subarray(2 * CHUNK_BYTES, 2 * CHUNK_BYTES + 10));
    await prefetch;
    second!.go(new Error('too late'));
    await cache.flush();
    expect(cached.isComplete).toBe(true);
    expect(cache.stats().storedBytes).toBe(blob.sizeBytes);
    await cache.close();
  });

  it('ends with the cache', async () => {
    const { cache, prefetch, read } = await stalled();
    const ends = Promise.allSettled([prefetch, read]);
    await cache.close();
    expect((await ends).map(({ status }) => status)).toEqual(['rejected', 'rejected']);
  });
});

describe('read-ahead', () => {
  it('grows for who reads on, and not for who jumps', () => {
    const ahead = new ReadAhead(1000);
    expect(ahead.note(10, 10)).toBeUndefined();
    expect(ahead.note(10, 10)).toBeUndefined();
    expect(ahead.note(11, 11)).toEqual({ from: 12, to: 14 });
    expect(ahead.note(12, 12)).toEqual({ from: 14, to: 15 });
    const asked: number[] = [];
    for (let i = 13; i < 200; i++) {
      const range = ahead.note(i, i);
      if (range === undefined) continue;
      asked.push(range.to - range.from);
      // If it ended here, little would have been fetched for nothing.
      expect(range.to - (i + 1)).toBeLessThanOrEqual(Math.max(2, (i + 1 - 10) / 2));
    }
    // At least half of the largest window, once it has grown.
    expect(asked.slice(-6).every((count) => count >= 15 && count <= 32)).toBe(true);
    for (const i of [900, 3, 500, 250, 777]) expect(ahead.note(i, i)).toBeUndefined();
  });

  it('follows several readers, and one whose hits are answered elsewhere', () => {
    const ahead = new ReadAhead(10_000);
    for (const start of [100, 2000, 4000]) ahead.note(start, start);
    for (const start of [100, 2000, 4000]) expect(ahead.note(start + 1, start + 1)).toBeDefined();
    // What was read ahead for the first ends at 104; its reader asks for 104 next.
    expect(ahead.note(104, 104)).toEqual({ from: 105, to: 107 });
    expect(new ReadAhead(3).note(0, 2)).toBeUndefined();
  });

  it('fetches a sequential blob once, in large reads', async () => {
    const blob = makeBlob(40 * MIB);
    const source = new MadeUpSource(blob);
    source.meddle = async (_, right) => {
      await delay(1);
      return right;
    };
    const cache = await openChunkCache({ folder: temporaryFolder(), source, ...ROOMY });
    const cached = cache.open(blob);
    for (let offset = 0; offset < blob.sizeBytes; offset += 65_536) {
      const bytes = cached.readNow(offset, 65_536) ?? (await cached.read(offset, 65_536));
      if (!bytes.equals(blob.bytes.subarray(offset, offset + 65_536))) expect.fail(`wrong bytes at ${offset}`);
    }
    const counts = [...source.chunkCounts(blob.digest).values()];
    expect(counts).toHaveLength(160);
    expect(Math.max(...counts)).toBe(1);
    // 160 chunks; a read each would be 160.
    expect(source.asked.length).toBeLessThan(25);
    await cache.close();
  });

  it('fetches little beside what a random reader reads', async () => {
    const blob = makeBlob(100 * MIB);
    const source = new MadeUpSource(blob);
    const cache = await openChunkCache({ folder: temporaryFolder(), source, ...ROOMY });
    const cached = cache.open(blob);
    for (let i = 0; i < 60; i++) await cached.read(((i * 149) % 400) * CHUNK_BYTES, 4096);
    expect(source.asked.length).toBe(60);
    await cache.close();
  });
});

describe('memory', () => {
  it('stays below its bound, however much comes in', async () => {
    const blob = makeBlob(96 * MIB);
    const source = new MadeUpSource(blob);
    const [memoryBytes, maxInFlight] = [4 * MIB, 2];
    const options = { folder: temporaryFolder(), source, memoryBytes, maxInFlight, ...ROOMY };
    const cache = await openChunkCache(options);
    const cached = cache.open(blob);
    let most = 0;
    const watch = setInterval(() => {
      most = Math.max(most, cache.stats().memoryBytes);
    }, 0);
    const prefetch = cached.prefetch([{ offset: 0, length: blob.sizeBytes }]);
    for (let i = 0; i < 100; i++) await cached.read((i * 37 * CHUNK_BYTES) % blob.sizeBytes, 100);
    await prefetch;
    clearInterval(watch);
    expect(most).toBeGreaterThan(0);
    expect(most).toBeLessThanOrEqual(memoryBytes + maxInFlight * 4 * MIB);
    await cache.flush();
    expect(cache.stats().memoryBytes).toBeLessThanOrEqual(memoryBytes);
    await cache.close();
  });
});
