/** The decorators around range sources, with clocks of the test's own. */
import { describe, expect, test } from 'vitest';
import { DsecError, digestOf, type StopSignal } from '#base';
import type { FetchPriority, RangeSource } from '#chunk-cache';
import { fail } from '../errors.ts';
import { RetryAllowance, type RetryClock } from '../store/decorators/retry-call.ts';
import { withFaults } from '../store/decorators/with-faults.ts';
import { type HedgeClock, withHedge } from '../store/decorators/with-hedge.ts';
import { withLimit } from '../store/decorators/with-limit.ts';
import { withMetrics } from '../store/decorators/with-metrics.ts';
import { withRetry } from '../store/decorators/with-retry.ts';
import { MemoryStore } from '../store/memory-store.ts';
import { storeRangeSource } from '../store/store-range-source.ts';

const blob = digestOf('blob');
const now = { priority: 'interactive' } as const;
const again = (more = {}) => fail('STORE_REMOTE', { store: 's', action: 'a', reason: 'r', ...more });
const settled = () => new Promise((resolve) => setImmediate(resolve));

/** A source whose answers the test gives, in its own order. */
class Asked implements RangeSource {
  readonly calls: {
    offset: number;
    priority: FetchPriority;
    signal: StopSignal | undefined;
    answer(bytes?: Buffer): void;
    refuse(error: unknown): void;
  }[] = [];

  readRange(
    _: unknown,
    offset: number,
    length: number,
    options: Parameters<RangeSource['readRange']>[3],
  ): Promise<Buffer> {
    return new Promise((resolve, reject) => {
      const { priority, signal } = options;
      const answer = (bytes = Buffer.alloc(length, offset)) => resolve(bytes);
      this.calls.push({ offset, priority, signal, answer, refuse: reject });
      signal?.addEventListener('abort', () => reject(signal.reason), { once: true });
    });
  }
}

describe('withRetry', () => {
  class TestClock implements RetryClock {
    ms = 0;
    readonly slept: number[] = [];
    now = () => this.ms;
    random = () => 1;
    sleep = async (ms: number) => {
      this.ms += ms;
      this.slept.push(ms);
    };
  }
  const failing = (...errors: (Error | undefined)[]): RangeSource & { calls: number } => {
    const source = {
      calls: 0,
      readRange: async (_: unknown, __: number, length: number) => {
        const error = errors[Math.min(source.calls++, errors.length - 1)];
        if (error !== undefined) throw error;
        return Buffer.alloc(length);
      },
    };
    return source;
  };

  test('waits twice as long each time, up to the limit, and no longer than it may', async () => {
    const clock = new TestClock();
    const source = failing(again(), again(), again(), again(), undefined);
    const read = withRetry(source, { clock, baseDelayMs: 10, maxDelayMs: 60 }).readRange(blob, 0, 4, now);
    expect(await read).toEqual(Buffer.alloc(4));
    expect(clock.slept).toEqual([20, 40, 60, 60]);
  });

  test('ends with the last error: after the tries, at the end of the budget, or at once for a permanent one', async () => {
    const tries = failing(again());
    await expect(
      withRetry(tries, { clock: new TestClock(), attempts: 3 }).readRange(blob, 0, 1, now),
    ).rejects.toMatchObject({ code: 'STORE_REMOTE' });
    expect(tries.calls).toBe(3);
    const clock = new TestClock();
    const budget = failing(again());
    const options = { clock, attempts: 1000, budgetMs: 500, baseDelayMs: 100, maxDelayMs: 100 };
    await expect(withRetry(budget, options).readRange(blob, 0, 1, now)).rejects.toBeInstanceOf(DsecError);
    expect(clock.ms).toBeLessThan(500);
    expect(budget.calls).toBe(5);
    const permanent = failing(fail('STORE_BLOB_MISSING', { digest: blob, store: 's' }));
    await expect(withRetry(permanent).readRange(blob, 0, 1, now)).rejects.toMatchObject({ code: 'STORE_BLOB_MISSING' });
    const bug = failing(new TypeError('bug'));
    await expect(withRetry(bug).readRange(blob, 0, 1, now)).rejects.toThrow('bug');
    expect([permanent.calls, bug.calls]).toEqual([1, 1]);
  });

  test("keeps to the server's Retry-After, and does not wait for one beyond the budget", async () => {
    const clock = new TestClock();
    await withRetry(failing(again({ retryAfterMs: 9000 }), undefined), { clock }).readRange(blob, 0, 1, now);
    expect(clock.slept).toEqual([9000]);
    const source = failing(again({ retryAfterMs: 90_000 }));
    await expect(withRetry(source, { clock }).readRange(blob, 0, 1, now)).rejects.toMatchObject({
      code: 'STORE_REMOTE',
    });
    expect(source.calls).toBe(1);
  });

  test('when most reads fail, retries run out, and come back with successes', async () => {
    const allowance = new RetryAllowance(4, 0.5);
    const clock = new TestClock();
    const bad = failing(again());
    const source = withRetry(bad, { clock, allowance, attempts: 3 });
    for (let i = 0; i < 6; i++) await source.readRange(blob, 0, 1, now).catch(() => {});
    // 6 first tries, 4 retries.
    expect(bad.calls).toBe(10);
    const good = withRetry(failing(undefined), { clock, allowance });
    for (let i = 0; i < 2; i++) await good.readRange(blob, 0, 1, now);
    await source.readRange(blob, 0, 1, now).catch(() => {});
    expect(bad.calls).toBe(12);
  });

  test('a failure without a retry left is told after a pause, so that asking again at once is no busy loop', async () => {
    const clock = new TestClock();
    const source = withRetry(failing(again()), { clock, allowance: new RetryAllowance(0) });
    for (let i = 0; i < 3; i++) {
      await expect(source.readRange(blob, 0, 1, now)).rejects.toMatchObject({ code: 'STORE_REMOTE' });
    }
    expect(clock.slept).toEqual([500, 500, 500]);
    const aborted = AbortSignal.abort(new Error('enough'));
    await expect(source.readRange(blob, 0, 1, { ...now, signal: aborted })).rejects.toThrow('enough');
  });

  test('a patient reader tries until the time is up, slowly without retries left; a prefetch does not', async () => {
    const clock = new TestClock();
    const bad = failing(again());
    const source = withRetry(bad, { clock, patient: true });
    await expect(source.readRange(blob, 0, 1, now)).rejects.toMatchObject({ code: 'STORE_REMOTE' });
    expect(clock.ms).toBeGreaterThan(54_000);
    expect(clock.ms).toBeLessThan(60_000);
    const tries = bad.calls;
    const spent = withRetry(bad, { clock, patient: true, allowance: new RetryAllowance(0) });
    await expect(spent.readRange(blob, 0, 1, now)).rejects.toMatchObject({ code: 'STORE_REMOTE' });
    // One at once, then one in 5 s.
    expect(bad.calls - tries).toBe(12);
    const before = bad.calls;
    await source.readRange(blob, 0, 1, { priority: 'prefetch' }).catch(() => {});
    expect(bad.calls - before).toBe(6);
    const back = failing(again(), again(), again(), again(), again(), again(), again(), again(), undefined);
    expect(await withRetry(back, { clock, patient: true }).readRange(blob, 0, 4, now)).toEqual(Buffer.alloc(4));
  });

  test('a prefetch of a store that is away leaves the readers their retries', async () => {
    const clock = new TestClock();
    const bad = failing(again());
    const source = withRetry(bad, { clock, attempts: 3 });
    for (let i = 0; i < 100; i++) await source.readRange(blob, 0, 1, { priority: 'prefetch' }).catch(() => {});
    const before = bad.calls;
    await source.readRange(blob, 0, 1, now).catch(() => {});
    expect(bad.calls - before).toBe(3);
  });

  test('a try that does not listen to its signal is left behind', async () => {
    let calls = 0;
    const deaf: RangeSource = {
      readRange: async () => (calls++ === 0 ? new Promise(() => {}) : Buffer.from('x')),
    };
    const source = withRetry(deaf, { tryTimeoutMs: 20, baseDelayMs: 1 });
    expect((await source.readRange(blob, 0, 1, now)).toString()).toBe('x');
    const never = withRetry(
      { readRange: () => new Promise(() => {}) },
      { tryTimeoutMs: 10, attempts: 2, baseDelayMs: 1 },
    );
    await expect(never.readRange(blob, 5, 7, now)).rejects.toMatchObject({
      code: 'STORE_TIMEOUT',
      message: expect.stringContaining('bytes 5 to 11') as string,
    });
  });

  test('what brings many bytes gets more time', async () => {
    const late: RangeSource = {
      readRange: (_, __, length) => new Promise((resolve) => setTimeout(() => resolve(Buffer.alloc(length)), 120)),
    };
    const source = withRetry(late, { tryTimeoutMs: 20, attempts: 1 });
    await expect(source.readRange(blob, 0, 1000, now)).rejects.toMatchObject({ code: 'STORE_TIMEOUT' });
    expect(await source.readRange(blob, 0, 4 * 1024 * 1024, now)).toHaveLength(4 * 1024 * 1024);
  });

  test('an abort ends a try and a wait', async () => {
    const asked = new Asked();
    const ending = new AbortController();
    const reading = withRetry(asked).readRange(blob, 0, 1, { ...now, signal: ending.signal });
    ending.abort(new Error('enough'));
    await expect(reading).rejects.toThrow('enough');
    expect(asked.calls[0]!.signal!.aborted).toBe(true);
    const waiting = new AbortController();
    const source = withRetry(failing(again({ retryAfterMs: 50_000 })));
    const reading2 = source.readRange(blob, 0, 1, { ...now, signal: waiting.signal });
    await settled();
    waiting.abort(new Error('enough'));
    await expect(reading2).rejects.toThrow('enough');
    await expect(source.readRange(blob, 0, 1, { ...now, signal: waiting.signal })).rejects.toThrow('enough');
  });
});

describe('withHedge', () => {
  class TestClock implements HedgeClock {
    ms = 0;
    timers: { atMs: number; work: () => void }[] = [];
    now = () => this.ms;
    after = (ms: number, work: () => void) => {
      const timer = { atMs: this.ms + ms, work };
      this.timers.push(timer);
      return () => {
        this.timers = this.timers.filter((other) => other !== timer);
      };
    };
    pass(ms: number) {
      this.ms += ms;
      for (const timer of this.timers.filter(({ atMs }) => atMs <= this.ms)) {
        this.timers = this.timers.filter((other) => other !== timer);
        timer.work();
      }
    }
  }
  const prepared = async (options = {}) => {
    const asked = new Asked();
    const clock = new TestClock();
    const source = withHedge(asked, { clock, minSamples: 20, minDelayMs: 1, ...options });
    for (let i = 0; i < 20; i++) {
      const reading = source.readRange(blob, 0, 4096, now);
      clock.pass(10);
      asked.calls.at(-1)!.answer();
      await reading;
    }
    expect(asked.calls).toHaveLength(20);
    asked.calls.length = 0;
    return { asked, clock, source };
  };

  test('the second request starts after the usual time; the first answer wins, the other is aborted', async () => {
    const { asked, clock, source } = await prepared();
    const reading = source.readRange(blob, 0, 4096, now);
    clock.pass(9);
    expect(asked.calls).toHaveLength(1);
    clock.pass(2);
    expect(asked.calls).toHaveLength(2);
    asked.calls[1]!.answer(Buffer.from('second'));
    expect((await reading).toString()).toBe('second');
    expect(asked.calls[0]!.signal!.aborted).toBe(true);
    const other = source.readRange(blob, 0, 4096, now);
    clock.pass(11);
    asked.calls[2]!.answer(Buffer.from('first'));
    expect((await other).toString()).toBe('first');
    expect(asked.calls[3]!.signal!.aborted).toBe(true);
    expect(clock.timers).toEqual([]);
  });

  test('one that fails leaves it to the other; when both fail, the last says why', async () => {
    const { asked, clock, source } = await prepared();
    const reading = source.readRange(blob, 0, 4096, now);
    clock.pass(11);
    asked.calls[0]!.refuse(again());
    await settled();
    asked.calls[1]!.answer(Buffer.from('second'));
    expect((await reading).toString()).toBe('second');
    const failing = source.readRange(blob, 0, 4096, now);
    clock.pass(11);
    asked.calls[2]!.refuse(new Error('first'));
    await settled();
    asked.calls[3]!.refuse(new Error('second'));
    await expect(failing).rejects.toThrow('second');
    const early = source.readRange(blob, 0, 4096, now);
    asked.calls[4]!.refuse(new Error('early'));
    await expect(early).rejects.toThrow('early');
    expect(clock.timers).toEqual([]);
  });

  test('prefetch, and sizes of which nothing is known, are not hedged', async () => {
    const { asked, clock, source } = await prepared();
    void source.readRange(blob, 0, 4096, { priority: 'prefetch' });
    void source.readRange(blob, 0, 4 * 1024 * 1024, now);
    clock.pass(1000);
    expect(asked.calls).toHaveLength(2);
  });

  test('when everything is slow, few reads are hedged', async () => {
    const { asked, clock, source } = await prepared({ maxShare: 0.1 });
    const readings = Array.from({ length: 100 }, () => source.readRange(blob, 0, 4096, now));
    clock.pass(50);
    expect(asked.calls).toHaveLength(110);
    for (const call of asked.calls) call.answer();
    await Promise.all(readings);
  });

  test('an abort ends both', async () => {
    const { asked, clock, source } = await prepared();
    const ending = new AbortController();
    const reading = source.readRange(blob, 0, 4096, { ...now, signal: ending.signal });
    clock.pass(11);
    ending.abort(new Error('enough'));
    await expect(reading).rejects.toThrow('enough');
    expect(asked.calls.map((call) => call.signal!.aborted)).toEqual([true, true]);
    await expect(source.readRange(blob, 0, 1, { ...now, signal: ending.signal })).rejects.toThrow('enough');
    expect(asked.calls).toHaveLength(2);
  });
});

describe('withLimit', () => {
  const read = (source: RangeSource, offset: number, priority: FetchPriority, signal?: AbortSignal) => {
    const reading = source.readRange(blob, offset, 1, { priority, signal });
    reading.catch(() => {});
    return reading;
  };
  const offsets = (asked: Asked) => asked.calls.map((call) => call.offset);

  test('interactive reads go first, prefetch leaves places free', async () => {
    const asked = new Asked();
    const source = withLimit(asked, { concurrency: 4, prefetch: 2 });
    for (const offset of [1, 2, 3, 4]) read(source, offset, 'prefetch');
    await settled();
    expect(offsets(asked)).toEqual([1, 2]);
    for (const offset of [11, 12, 13, 14]) read(source, offset, 'interactive');
    await settled();
    expect(offsets(asked)).toEqual([1, 2, 11, 12]);
    expect(source.load).toEqual({ running: 4, waiting: 4 });
    asked.calls[0]!.answer();
    await settled();
    asked.calls[2]!.refuse(again());
    await settled();
    expect(offsets(asked)).toEqual([1, 2, 11, 12, 13, 14]);
    for (const call of asked.calls.slice(1)) call.answer();
    await settled();
    expect(offsets(asked)).toEqual([1, 2, 11, 12, 13, 14, 3, 4]);
    for (const call of asked.calls) call.answer();
    await settled();
    expect(source.load).toEqual({ running: 0, waiting: 0 });
  });

  test('who gives up while waiting leaves the queue', async () => {
    const asked = new Asked();
    const source = withLimit(asked, { concurrency: 1 });
    read(source, 1, 'interactive');
    const ending = new AbortController();
    const waiting = read(source, 2, 'interactive', ending.signal);
    const last = read(source, 3, 'interactive');
    await settled();
    ending.abort(new Error('enough'));
    await expect(waiting).rejects.toThrow('enough');
    await expect(read(source, 4, 'interactive', ending.signal)).rejects.toThrow('enough');
    asked.calls[0]!.answer();
    await settled();
    asked.calls[1]!.answer();
    await last;
    expect(offsets(asked)).toEqual([1, 3]);
    expect(source.load).toEqual({ running: 0, waiting: 0 });
  });
});

test('withMetrics counts reads, bytes, times, errors and aborts apart', async () => {
  const asked = new Asked();
  let ms = 0;
  const source = withMetrics(asked, () => ms);
  const first = source.readRange(blob, 0, 100, now);
  const second = source.readRange(blob, 0, 50, { priority: 'prefetch' });
  const ending = new AbortController();
  const third = source.readRange(blob, 0, 1, { ...now, signal: ending.signal });
  expect(source.metrics().inFlight).toBe(3);
  ms = 7;
  asked.calls[0]!.answer();
  await first;
  asked.calls[1]!.refuse(again());
  await expect(second).rejects.toThrow();
  ending.abort(new Error('enough'));
  await expect(third).rejects.toThrow('enough');
  ms = 100_000;
  const slow = source.readRange(blob, 0, 1, now);
  ms = 200_000;
  asked.calls[3]!.answer();
  await slow;
  const { inFlight, interactive, prefetch } = source.metrics();
  expect(inFlight).toBe(0);
  expect(interactive).toEqual({
    reads: 2,
    bytes: 101,
    aborted: 1,
    errors: {},
    latency: [0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1],
    latencySumMs: 100_007,
  });
  expect(prefetch).toMatchObject({ reads: 0, errors: { STORE_REMOTE: 1 } });
});

describe('withFaults', () => {
  const store = new MemoryStore();
  const read = async (source: RangeSource, signal?: AbortSignal) => {
    const digest = await store.put(Buffer.alloc(1000, 7));
    return source.readRange(digest, 0, 1000, { ...now, signal });
  };
  const outcome = (reading: Promise<Buffer>) =>
    reading.then(
      (bytes) => (bytes.length < 1000 ? 'short' : bytes.equals(Buffer.alloc(1000, 7)) ? 'right' : 'corrupt'),
      (error) => (error as DsecError).code,
    );

  test('each seed has its own fate, always the same', async () => {
    const run = async (seed: number) => {
      const source = withFaults(storeRangeSource(store), { seed, rates: { error: 0.1, short: 0.1, corrupt: 0.1 } });
      const outcomes: string[] = [];
      for (let i = 0; i < 300; i++) outcomes.push(await outcome(read(source)));
      return { outcomes, injected: { ...source.injected } };
    };
    const first = await run(1);
    expect(await run(1)).toEqual(first);
    expect((await run(2)).outcomes).not.toEqual(first.outcomes);
    for (const [fault, name] of [
      ['error', 'STORE_FAULT'],
      ['short', 'short'],
      ['corrupt', 'corrupt'],
    ] as const) {
      expect(first.injected[fault]).toBeGreaterThan(15);
      expect(first.injected[fault]).toBeLessThan(50);
      expect(first.outcomes.filter((one) => one === name)).toHaveLength(first.injected[fault]);
    }
  });

  test('a stall ends with its signal; the store keeps its own bytes', async () => {
    const ending = new AbortController();
    const reading = read(withFaults(storeRangeSource(store), { rates: { stall: 1 } }), ending.signal);
    setTimeout(() => ending.abort(new Error('enough')), 5);
    await expect(reading).rejects.toThrow('enough');
    const source = withFaults(storeRangeSource(store), { rates: { late: 1 }, lateMs: 1 });
    expect(await outcome(read(source))).toBe('right');
    await read(withFaults(storeRangeSource(store), { rates: { corrupt: 1 } }));
    expect(await outcome(read(storeRangeSource(store)))).toBe('right');
  });
});
