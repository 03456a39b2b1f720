/**
 * The queue of jobs. What it promises:
 *
 * - A job that was accepted is on disk, and is run to its end whatever happens to this process: one that was running when the
 *   process died is queued again (and given up after it has seen three processes die).
 * - The same work asked for again is the same job. While it waits or runs, nothing starts; when it is done and its result
 *   cannot have changed, that is the answer; otherwise it is queued again under its id, which costs little where nothing has
 *   changed, since conversion finds its results in the store.
 * - A bounded number run at once, and callers take turns: the next to run is of the caller with the fewest running.
 */
import { DsecError, messageOf, type Progress } from '#base';
import { fail } from '../../errors.ts';
import { isEnded, type Job, type JobError, type JobResult, type JobView, type JobWork, jobId, jobView } from './job.ts';
import { JobEvents } from './job-events.ts';
import type { JobStore } from './job-store.ts';

export interface JobRunner {
  /** Rejects when `signal` is aborted; whatever it had begun is then undone. */
  run(job: Job, options: { progress: Progress; signal: AbortSignal }): Promise<JobResult>;
  /** Whether doing the job again could only give what it gave before. */
  stillHolds(job: Job): Promise<boolean>;
}

export interface JobQueueOptions {
  readonly store: JobStore;
  readonly runner: JobRunner;
  /** How many run at once: 2 by default. */
  readonly concurrency?: number;
  /** How many one caller may have waiting and running: 32 by default. */
  readonly perCaller?: number;
  /** How many may wait in all: 1000 by default. */
  readonly waiting?: number;
  /** How long ended jobs are remembered: a week by default. */
  readonly keepMs?: number;
  readonly onError?: (error: unknown, job: Job) => void;
}

export interface Submission {
  readonly work: JobWork;
  readonly caller: string;
  readonly credentials?: string;
  readonly idempotencyKey?: string;
}

const MAX_CRASHES = 3;
const MAX_ENDED = 5000;
const WEEK_MS = 7 * 24 * 3600_000;

/** Reasons to stop a running job. */
const CANCELLED = new Error('cancelled');
const DRAINING = new Error('the service is shutting down');

export class JobQueue {
  readonly #options: Required<Omit<JobQueueOptions, 'onError'>> & Pick<JobQueueOptions, 'onError'>;
  /** In the order they were queued. */
  readonly #jobs = new Map<string, Job>();
  readonly #events = new Map<string, JobEvents>();
  readonly #running = new Map<string, { stop: AbortController; ended: Promise<void> }>();
  #draining = false;

  private constructor(options: JobQueueOptions) {
    const { concurrency = 2, perCaller = 32, waiting = 1000, keepMs = WEEK_MS } = options;
    this.#options = { ...options, concurrency, perCaller, waiting, keepMs };
  }

  /** Takes up what an earlier process left. */
  static async open(options: JobQueueOptions): Promise<JobQueue> {
    const queue = new JobQueue(options);
    for (const job of await options.store.readAll()) {
      queue.#jobs.set(job.id, job);
      if (!isEnded(job.state)) queue.#takeUp(job);
      queue.#eventsOf(job).state(jobView(job));
      await options.store.write(job);
    }
    await queue.#forgetOld();
    queue.#startNext();
    return queue;
  }

  #takeUp(job: Job): void {
    if (job.state === 'running') job.crashes++;
    job.attempt++;
    if (job.cancelling) end(job, 'cancelled');
    else if (job.crashes >= MAX_CRASHES) {
      end(job, 'failed', fail('SERVER_JOB_CRASHED', { id: job.id, count: job.crashes }));
    } else {
      job.state = 'queued';
      delete job.startedAt;
    }
  }

  /** @throws SERVER_DRAINING, SERVER_TOO_MANY_JOBS, SERVER_QUEUE_FULL */
  async submit(submission: Submission): Promise<{ job: JobView; queued: boolean }> {
    const { work, caller, credentials, idempotencyKey } = submission;
    const id = jobId(work, credentials);
    const found = this.#jobs.get(id);
    if (found !== undefined) {
      if (!isEnded(found.state) && !found.cancelling) return this.#accepted(found, false);
      const sameKey = idempotencyKey !== undefined && found.idempotencyKey === idempotencyKey;
      if (sameKey || (found.state === 'done' && (await this.#options.runner.stillHolds(found)))) {
        return this.#accepted(found, false);
      }
      // Meanwhile somebody else may have asked, too.
      if (this.#jobs.get(id) !== found) return this.submit(submission);
      if (!isEnded(found.state)) {
        // It is being cancelled: then it is done anew.
        await this.#running.get(id)?.ended;
        return this.submit(submission);
      }
    }
    this.#admit(caller);
    const now = new Date().toISOString();
    const job: Job = {
      version: 1,
      id,
      work,
      caller,
      createdAt: found?.createdAt ?? now,
      queuedAt: now,
      state: 'queued',
      attempt: (found?.attempt ?? 0) + 1,
      crashes: 0,
      credentials,
      idempotencyKey,
    };
    // The latest at the end: the order of the map is that of the queue.
    this.#jobs.delete(id);
    this.#jobs.set(id, job);
    try {
      await this.#options.store.write(job);
    } catch (error) {
      if (this.#jobs.get(id) === job) {
        if (found === undefined) this.#jobs.delete(id);
        else this.#jobs.set(id, found);
      }
      throw error;
    }
    const view = jobView(job);
    this.#eventsOf(job).state(view);
    await this.#forgetOld();
    this.#startNext();
    return { job: view, queued: true };
  }

  /** A job that another request is just writing is accepted when it is on disk. */
  async #accepted(job: Job, queued: boolean): Promise<{ job: JobView; queued: boolean }> {
    if (job.state === 'queued') await this.#options.store.write(job);
    return { job: jobView(job), queued };
  }

  #admit(caller: string): void {
    if (this.#draining) throw fail('SERVER_DRAINING');
    const { perCaller, waiting } = this.#options;
    const count = this.#count((job) => job.caller === caller && !isEnded(job.state));
    if (count >= perCaller) throw fail('SERVER_TOO_MANY_JOBS', { caller, count });
    const queued = this.#count((job) => job.state === 'queued');
    if (queued >= waiting) throw fail('SERVER_QUEUE_FULL', { count: queued });
  }

  #count(wanted: (job: Job) => boolean): number {
    let count = 0;
    for (const job of this.#jobs.values()) if (wanted(job)) count++;
    return count;
  }

  /** @throws SERVER_JOB_NOT_FOUND */
  get(id: string): JobView {
    return jobView(this.#job(id));
  }

  #job(id: string): Job {
    const job = this.#jobs.get(id);
    if (job === undefined) throw fail('SERVER_JOB_NOT_FOUND', { id });
    return job;
  }

  /** The latest first. */
  list(filter: { state?: string; caller?: string; limit?: number } = {}): JobView[] {
    const { state, caller, limit = 100 } = filter;
    return [...this.#jobs.values()]
      .filter((job) => (state === undefined || job.state === state) && (caller === undefined || job.caller === caller))
      .reverse()
      .slice(0, limit)
      .map(jobView);
  }

  /** How many are in each state. */
  counts(): Record<string, number> {
    const counts: Record<string, number> = { queued: 0, running: 0, done: 0, failed: 0, cancelled: 0 };
    for (const { state } of this.#jobs.values()) counts[state]!++;
    return counts;
  }

  /**
   * A waiting job is cancelled at once, a running one is told to stop and is `cancelling` until it has.
   * @throws SERVER_JOB_NOT_FOUND, SERVER_JOB_ENDED
   */
  async cancel(id: string): Promise<JobView> {
    const job = this.#job(id);
    if (isEnded(job.state)) throw fail('SERVER_JOB_ENDED', { id, state: job.state });
    job.cancelling = true;
    const running = this.#running.get(id);
    if (running === undefined) end(job, 'cancelled');
    await this.#options.store.write(job);
    this.#eventsOf(job).state(jobView(job));
    running?.stop.abort(CANCELLED);
    return jobView(job);
  }

  /** @throws SERVER_JOB_NOT_FOUND */
  events(id: string): JobEvents {
    return this.#eventsOf(this.#job(id));
  }

  #eventsOf(job: Job): JobEvents {
    let events = this.#events.get(job.id);
    if (events === undefined) {
      events = new JobEvents();
      this.#events.set(job.id, events);
    }
    return events;
  }

  /** Starts nothing more, gives what runs `graceMs` to end, and queues the rest for the next process. */
  async drain(graceMs: number): Promise<void> {
    this.#draining = true;
    const timer = setTimeout(() => this.stopRunning(), graceMs);
    await Promise.all([...this.#running.values()].map(({ ended }) => ended));
    clearTimeout(timer);
    await this.#options.store.close();
  }

  /** Ends what still runs while draining; it is queued for the next process. */
  stopRunning(): void {
    for (const { stop } of this.#running.values()) stop.abort(DRAINING);
  }

  #startNext(): void {
    while (!this.#draining && this.#running.size < this.#options.concurrency) {
      const job = this.#nextJob();
      if (job === undefined) return;
      const stop = new AbortController();
      const ended = this.#run(job, stop.signal).finally(() => {
        this.#running.delete(job.id);
        this.#startNext();
      });
      this.#running.set(job.id, { stop, ended });
    }
  }

  /** Of the caller with the fewest running jobs, the one that has waited longest. */
  #nextJob(): Job | undefined {
    const runningOf = new Map<string, number>();
    for (const id of this.#running.keys()) {
      const caller = this.#jobs.get(id)?.caller ?? '';
      runningOf.set(caller, (runningOf.get(caller) ?? 0) + 1);
    }
    let next: Job | undefined;
    for (const job of this.#jobs.values()) {
      if (job.state !== 'queued' || this.#running.has(job.id)) continue;
      if (next === undefined || (runningOf.get(job.caller) ?? 0) < (runningOf.get(next.caller) ?? 0)) next = job;
    }
    return next;
  }

  async #run(job: Job, signal: AbortSignal): Promise<void> {
    const events = this.#eventsOf(job);
    try {
      job.state = 'running';
      job.startedAt = new Date().toISOString();
      await this.#options.store.write(job);
      events.state(jobView(job));
      // A runner may only listen for what happens from now on.
      signal.throwIfAborted();
      job.result = await this.#options.runner.run(job, { progress: (event) => events.progress(event), signal });
      end(job, 'done');
    } catch (error) {
      if (signal.aborted && signal.reason === CANCELLED) end(job, 'cancelled');
      else if (signal.aborted && signal.reason === DRAINING) {
        job.state = 'queued';
        delete job.startedAt;
      } else {
        if (!(error instanceof DsecError)) this.#options.onError?.(error, job);
        end(job, 'failed', error);
      }
    }
    try {
      await this.#options.store.write(job);
    } catch (error) {
      // The file says `running`: the next process does it again, and finds the result in the store.
      this.#options.onError?.(error, job);
    }
    // It may have been asked for again meanwhile: then its next attempt is what watchers see.
    if (this.#jobs.get(job.id) === job) events.state(jobView(job));
  }

  async #forgetOld(): Promise<void> {
    const beforeMs = Date.now() - this.#options.keepMs;
    const ended = [...this.#jobs.values()].filter((job) => isEnded(job.state));
    const surplus = ended.length - MAX_ENDED;
    for (const [k, job] of ended.entries()) {
      if (k >= surplus && Date.parse(job.endedAt ?? job.createdAt) >= beforeMs) continue;
      if ((this.#events.get(job.id)?.watchers ?? 0) > 0) continue;
      this.#jobs.delete(job.id);
      this.#events.delete(job.id);
      await this.#options.store.remove(job.id);
    }
  }
}

function end(job: Job, state: 'done' | 'failed' | 'cancelled', error?: unknown): void {
  job.state = state;
  job.endedAt = new Date().toISOString();
  delete job.credentials;
  delete job.cancelling;
  if (state === 'failed') job.error = jobError(error);
}

function jobError(error: unknown): JobError {
  if (error instanceof DsecError) {
    const { code, message, hint, exit, retryable } = error;
    return { code, message, hint, exit, retryable };
  }
  return { code: 'SERVER_INTERNAL', message: messageOf(error), exit: 1, retryable: false };
}
