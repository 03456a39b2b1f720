/**
 * Who is at work on an S3 store: what flock and the staging folder's lock are to a store in a folder. S3 has no locks, so these are
 * small objects that live as long as they are renewed; all times are the server's own, so clocks of machines do not matter.
 *
 * - `work/staging/<id>/start`, written once, and `…/beat`, written again each minute. Alive until an hour without a beat.
 * - `work/holds/<purpose>/<id>`, written again every few seconds. Alive until half a minute without.
 *
 * A hold is had by showing one's own first and looking for the other side's then. Reading after writing, and listing, are
 * consistent in S3, so of two sides that come together at least one sees the other. The publisher withdraws and waits; the collector
 * waits where it is. Of two collectors the one with the greater id withdraws.
 */
import { randomBytes } from 'node:crypto';
import { fail } from '../errors.ts';
import type { Hold } from './blob-store.ts';
import type { S3Page } from './s3-ranges.ts';

/** What leases need of a store; keys are without the store's prefix. */
export interface LeaseObjects {
  put(key: string, bytes: Buffer): Promise<void>;
  delete(key: string): Promise<void>;
  list(prefix: string): AsyncIterable<S3Page>;
}

export interface LeaseTimes {
  readonly stagingBeatMs?: number;
  readonly stagingSilentMs?: number;
  readonly holdBeatMs?: number;
  readonly holdSilentMs?: number;
  readonly holdTimeoutMs?: number;
}

const STAGING = 'work/staging/';
const HOLDS = 'work/holds/';
const FIRST_WAIT_MS = 10;
const LONGEST_WAIT_MS = 1000;

interface Lease {
  /** Safe to call twice. */
  end(): Promise<void>;
}

export class S3Leases {
  readonly #objects: LeaseObjects;
  readonly #store: string;
  readonly #times: Required<LeaseTimes>;
  /** When the hold to collect was last renewed; undefined when there is none. */
  #collectBeatMs: number | undefined;

  constructor(objects: LeaseObjects, store: string, times: LeaseTimes = {}) {
    this.#objects = objects;
    this.#store = store;
    this.#times = {
      stagingBeatMs: 60_000,
      stagingSilentMs: 3_600_000,
      holdBeatMs: 5_000,
      holdSilentMs: 25_000,
      holdTimeoutMs: 30_000,
      ...times,
    };
  }

  /** Says that someone makes an image. */
  async stage(id: string): Promise<Lease> {
    const [start, beat] = [`${STAGING}${id}/start`, `${STAGING}${id}/beat`];
    const text = Buffer.from(`${JSON.stringify({ pid: process.pid })}\n`);
    await this.#objects.put(start, text);
    return this.#kept(beat, text, this.#times.stagingBeatMs, async () => {
      await this.#objects.delete(beat);
      await this.#objects.delete(start);
    });
  }

  /** When the oldest staging that is alive began; those that are dead for certain are removed on the way. */
  async oldestStagingMs(): Promise<number | undefined> {
    const found = new Map<string, { startMs: number | undefined; beatMs: number }>();
    let nowMs = 0;
    for await (const { objects, serverNowMs } of this.#objects.list(STAGING)) {
      nowMs = serverNowMs;
      for (const { key, modifiedMs } of objects) {
        const [id, what] = key.slice(STAGING.length).split('/') as [string, string | undefined];
        const { startMs, beatMs = 0 } = found.get(id) ?? {};
        found.set(id, { startMs: what === 'start' ? modifiedMs : startMs, beatMs: Math.max(beatMs, modifiedMs) });
      }
    }
    let oldest: number | undefined;
    for (const [id, { startMs, beatMs }] of found) {
      if (nowMs - beatMs > this.#times.stagingSilentMs) {
        await this.#objects.delete(`${STAGING}${id}/start`);
        await this.#objects.delete(`${STAGING}${id}/beat`);
        continue;
      }
      // A beat alone is what a removal left, or a start that is still on its way.
      if (startMs !== undefined) oldest = Math.min(oldest ?? startMs, startMs);
    }
    return oldest;
  }

  /** @throws STORE_BUSY */
  async hold(purpose: 'publish' | 'collect'): Promise<Hold> {
    const id = randomBytes(8).toString('hex');
    const key = `${HOLDS}${purpose}/${id}`;
    const deadlineMs = Date.now() + this.#times.holdTimeoutMs;
    for (let waitMs = FIRST_WAIT_MS; ; waitMs = Math.min(LONGEST_WAIT_MS, waitMs * 2)) {
      const lease = await this.#show(purpose, key);
      try {
        for (;;) {
          const inTheWay = await this.#inTheWay(purpose, id);
          if (inTheWay === 'nothing') return { release: () => lease.end() };
          if (Date.now() > deadlineMs) throw fail('STORE_BUSY', { store: this.#store, path: `${HOLDS}*` });
          if (inTheWay === 'withdraw') break;
          await pause(waitMs);
          waitMs = Math.min(LONGEST_WAIT_MS, waitMs * 2);
        }
      } catch (error) {
        await lease.end().catch(() => {});
        throw error;
      }
      await lease.end();
      await pause(waitMs);
    }
  }

  /** Before something is deleted: whether our hold to collect, if there is one, is certain to be alive. @throws STORE_HOLD_LOST */
  checkCollecting(): void {
    if (this.#collectBeatMs === undefined) return;
    const silentMs = Date.now() - this.#collectBeatMs;
    if (silentMs > this.#times.holdSilentMs / 2 || silentMs < -1000)
      throw fail('STORE_HOLD_LOST', { store: this.#store, silentMs });
  }

  async #show(purpose: 'publish' | 'collect', key: string): Promise<Lease> {
    if (purpose === 'publish') {
      return this.#kept(key, Buffer.from('{}\n'), this.#times.holdBeatMs, () => this.#objects.delete(key));
    }
    const beat = (sentMs: number) => {
      this.#collectBeatMs = sentMs;
    };
    return this.#kept(
      key,
      Buffer.from('{}\n'),
      this.#times.holdBeatMs,
      async () => {
        this.#collectBeatMs = undefined;
        await this.#objects.delete(key);
      },
      beat,
    );
  }

  async #inTheWay(purpose: 'publish' | 'collect', id: string): Promise<'nothing' | 'wait' | 'withdraw'> {
    const collectors = await this.#living('collect');
    if (purpose === 'publish') return collectors.length === 0 ? 'nothing' : 'withdraw';
    const others = collectors.filter((other) => other !== id);
    if (others.some((other) => other < id)) return 'withdraw';
    if (others.length > 0) return 'wait';
    return (await this.#living('publish')).length === 0 ? 'nothing' : 'wait';
  }

  async #living(purpose: 'publish' | 'collect'): Promise<string[]> {
    const prefix = `${HOLDS}${purpose}/`;
    const ids: string[] = [];
    for await (const { objects, serverNowMs } of this.#objects.list(prefix)) {
      for (const { key, modifiedMs } of objects) {
        if (serverNowMs - modifiedMs > this.#times.holdSilentMs) await this.#objects.delete(key);
        else ids.push(key.slice(prefix.length));
      }
    }
    return ids;
  }

  /** An object that is written now and again each `everyMs`, until its end. */
  async #kept(
    key: string,
    bytes: Buffer,
    everyMs: number,
    remove: () => Promise<void>,
    onBeat?: (sentMs: number) => void,
  ): Promise<Lease> {
    const write = async () => {
      const sentMs = Date.now();
      await this.#objects.put(key, bytes);
      onBeat?.(sentMs);
    };
    await write();
    let ended: Promise<void> | undefined;
    let beating: Promise<void> | undefined;
    const timer = setInterval(() => {
      beating ??= write()
        .catch(() => {})
        .finally(() => {
          beating = undefined;
        });
    }, everyMs);
    timer.unref();
    return {
      end: () => {
        clearInterval(timer);
        // A beat on its way would bring the object back.
        ended ??= Promise.resolve(beating).then(remove);
        return ended;
      },
    };
  }
}

function pause(ms: number): Promise<void> {
  return new Promise((resolve) => setTimeout(resolve, ms * (0.5 + Math.random())));
}
