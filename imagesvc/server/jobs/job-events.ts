/**
 * What happens to one job, numbered, for whoever watches: `state` (the whole job) and `progress`. The latest ones are kept, so
 * that a watcher whose connection broke goes on where it was (Last-Event-ID).
 *
 * Ids are `<attempt>-<n>`: they grow over restarts of the service too, since each restart is a new attempt of a job that
 * had not ended. When what a watcher has missed is not kept any more, it gets the job as it is now: progress is
 * news of the moment, and the state says all that lasts.
 */
import type { ProgressEvent } from '#base';
import type { JobView } from './job.ts';

export type JobEvent = { readonly id: string } & (
  | { readonly type: 'state'; readonly data: JobView }
  | { readonly type: 'progress'; readonly data: ProgressEvent }
);

const KEPT = 256;
/** Of one task in one phase, events come no closer than this. */
const PROGRESS_MS = 200;

export class JobEvents {
  #attempt = 0;
  #next = 1;
  #kept: JobEvent[] = [];
  #state: JobEvent | undefined;
  readonly #watchers = new Set<(event: JobEvent) => void>();
  readonly #latest = new Map<string, { phase: string; atMs: number }>();

  /** Whether the latest state that was told is one in which the job has ended. */
  get over(): boolean {
    return this.#state?.type === 'state' && this.#state.data.endedAt !== undefined;
  }

  get watchers(): number {
    return this.#watchers.size;
  }

  state(job: JobView): void {
    if (job.attempt !== this.#attempt) {
      this.#attempt = job.attempt;
      this.#next = 1;
      this.#latest.clear();
    }
    this.#state = this.#emit({ id: this.#newId(), type: 'state', data: job });
    // The end of an attempt sums up what came before.
    if (job.endedAt !== undefined) this.#kept = [this.#state];
  }

  progress(data: ProgressEvent, nowMs = Date.now()): void {
    const latest = this.#latest.get(data.task);
    if (latest !== undefined && latest.phase === data.phase && nowMs - latest.atMs < PROGRESS_MS) return;
    if (this.#latest.size > 4 * KEPT) this.#latest.clear();
    this.#latest.set(data.task, { phase: data.phase, atMs: nowMs });
    this.#emit({ id: this.#newId(), type: 'progress', data });
  }

  /** What came after `lastId`, or the latest state where that cannot be told. */
  since(lastId: string | undefined): readonly JobEvent[] {
    const now = this.#state === undefined ? [] : [this.#state];
    if (lastId === undefined) return now;
    const at = this.#kept.findIndex(({ id }) => id === lastId);
    if (at >= 0) return this.#kept.slice(at + 1);
    return now.filter(({ id }) => id !== lastId);
  }

  watch(watcher: (event: JobEvent) => void): () => void {
    this.#watchers.add(watcher);
    return () => this.#watchers.delete(watcher);
  }

  #newId(): string {
    return `${this.#attempt}-${this.#next++}`;
  }

  #emit(event: JobEvent): JobEvent {
    this.#kept.push(event);
    if (this.#kept.length > KEPT) this.#kept.splice(0, this.#kept.length - KEPT);
    for (const watcher of this.#watchers) watcher(event);
    return event;
  }
}
