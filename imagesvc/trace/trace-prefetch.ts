/**
 * Has a data server fetch what the traces of the images say a start reads, as soon as each blob can be read, behind whatever
 * readers ask for. Nothing waits for it and nothing fails with it: without it every byte comes when it is read.
 */
import { type Digest, messageOf } from '#base';
import type { Image } from '../catalog/image.ts';
import type { BlobStore } from '../store/blob-store.ts';
import { type PlannedRange, planPrefetch } from './prefetch-plan.ts';
import { mergedTrace } from './trace-store.ts';

/** Who fetches: the data server. */
export interface Prefetcher {
  /** Returns when it has begun. */
  prefetch(digest: Digest, ranges: readonly PlannedRange[]): Promise<unknown>;
}

export class TracePrefetch {
  readonly #plans: Promise<readonly Map<Digest, PlannedRange[]>[]>;
  readonly #onProblem: (text: string) => void;
  readonly #begun = new Map<Digest, Promise<void>>();

  /** Begins to load the traces. */
  constructor(store: BlobStore, images: readonly Image[], onProblem: (text: string) => void = () => {}) {
    this.#onProblem = onProblem;
    const load = async (image: Image) => {
      const problem = (error: unknown) => onProblem(`not fetched ahead: ${messageOf(error)}`);
      const trace = await mergedTrace(store, image, problem).catch((error: unknown) => {
        problem(error);
        return undefined;
      });
      return trace === undefined ? new Map<Digest, PlannedRange[]>() : planPrefetch(trace);
    };
    this.#plans = Promise.all(images.map(load));
  }

  /** The blob can be read now. */
  begin(by: Prefetcher, digest: Digest): void {
    if (this.#begun.has(digest)) return;
    this.#begun.set(digest, this.#begin(by, digest));
  }

  async #begin(by: Prefetcher, digest: Digest): Promise<void> {
    const ranges = (await this.#plans).flatMap((plan) => plan.get(digest) ?? []);
    if (ranges.length === 0) return;
    try {
      await by.prefetch(digest, ranges);
    } catch (error) {
      this.#onProblem(`not fetched ahead: ${messageOf(error)}`);
    }
  }

  /** When everything that has begun has been handed over. */
  async handedOver(): Promise<void> {
    await Promise.all(this.#begun.values());
  }
}
