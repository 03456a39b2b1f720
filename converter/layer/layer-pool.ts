/**
 * The converter's worker threads. Jobs wait for a free worker in the order they came; a stream source is fed from here with a
 * bounded window. `close` ends everything: an aborted conversion stops in the middle of a job.
 *
 * With `here`, what would keep one worker busy and this thread waiting is done by this thread: a worker takes a tenth of a second to
 * start, of which most is loading code that this one has loaded.
 */
import { availableParallelism } from 'node:os';
import { MessageChannel, type MessagePort, type Worker } from 'node:worker_threads';
import { spawnWorker } from '#base';
import type { BlobDigests } from '#linux';
import { packError, unpackError } from './job-error.ts';
import type {
  Job,
  JobResults,
  SpoolJob,
  SpoolResult,
  StackJob,
  StreamChunk,
  StreamGrant,
  WorkerReply,
} from './layer-job.ts';
import { runJob } from './run-job.ts';

interface Waiting {
  readonly job: Job;
  readonly transfer: MessagePort[];
  readonly onProgress: ((doneBytes: number, part: number) => void) | undefined;
  readonly onPart: ((part: number, result: SpoolResult) => void) | undefined;
  readonly onStart: (() => void) | undefined;
  readonly resolve: (result: never) => void;
  readonly reject: (error: Error) => void;
}

interface Lane {
  readonly worker: Worker;
  readonly jobs: Map<number, Waiting>;
  /** Its libraries are loaded, or it is gone: ended while it loads them, it would end the process with it. */
  readonly ready: Promise<void>;
}

export interface SpoolRequest {
  /** `source` of kind `stream` for a layer that `open` delivers. */
  readonly job: Omit<SpoolJob, 'source'>;
  readonly source:
    | Exclude<SpoolJob['source'], { kind: 'stream' }>
    | { readonly kind: 'stream'; open(signal: AbortSignal): AsyncIterable<Buffer> };
  readonly onProgress?: (doneBytes: number) => void;
  /** No other layer is converted meanwhile. */
  readonly isAlone?: boolean;
}

export interface LayerPoolOptions {
  /** This thread has nothing else to do while a stack, a layer alone or a blob is made. */
  readonly here?: boolean | undefined;
}

export class LayerPool {
  readonly #size: number;
  readonly #here: boolean;
  /** What this thread does itself. */
  readonly #running = new Set<Promise<unknown>>();
  readonly #ending = new AbortController();
  readonly #lanes: Lane[] = [];
  readonly #queue: Waiting[] = [];
  #nextId = 1;
  #closed: Error | undefined;

  constructor({ here = false }: LayerPoolOptions = {}) {
    this.#size = Math.max(2, availableParallelism());
    this.#here = here;
  }

  /** Starts a worker, for a job that will come soon. */
  warm(): void {
    if (this.#lanes.length === 0 && !this.#here) this.#lanes.push(this.#startLane());
  }

  run<J extends Job>(job: J): Promise<JobResults[J['op']]> {
    return this.#here && job.op === 'blob' ? this.#runHere(job, {}) : this.#enqueue(job, {});
  }

  /** Threads that work at once. */
  get size(): number {
    return this.#size;
  }

  async spool({ job, source, onProgress, isAlone }: SpoolRequest): Promise<SpoolResult> {
    if (source.kind === 'file' && isAlone === true && this.#here) {
      return this.#runHere<'spool'>({ ...job, source }, { onProgress });
    }
    if (source.kind !== 'stream') return this.#enqueue<'spool'>({ ...job, source }, { onProgress });
    const abort = new AbortController();
    const stream = new MessageChannel();
    try {
      const streamed: SpoolJob = { ...job, source: { kind: 'stream', port: stream.port2 } };
      return await this.#enqueue<'spool'>(streamed, {
        transfer: [stream.port2],
        onProgress,
        onStart: () => void feed(stream.port1, source.open(abort.signal)),
      });
    } finally {
      abort.abort();
      stream.port1.close();
    }
  }

  /** Each layer's result as soon as it is there, and the digests of the file that holds the data of all. */
  stack(
    job: StackJob,
    onProgress: (doneBytes: number, part: number) => void,
  ): { readonly layers: readonly Promise<SpoolResult>[]; readonly digests: Promise<BlobDigests | undefined> } {
    const resolvers: ((result: SpoolResult) => void)[] = [];
    const hooks: Partial<Waiting> = { onProgress, onPart: (part, result) => resolvers[part]!(result) };
    const digests = this.#here ? this.#runHere<'stack'>(job, hooks) : this.#enqueue<'stack'>(job, hooks);
    const layers = job.layers.map(
      () =>
        new Promise<SpoolResult>((resolve, reject) => {
          resolvers.push(resolve);
          // What is there already stays; the layer that failed and those behind it fail with its error.
          digests.catch(reject);
        }),
    );
    return { layers, digests };
  }

  async #runHere<O extends keyof JobResults>(
    job: Job,
    { onProgress, onPart }: Partial<Waiting>,
  ): Promise<JobResults[O]> {
    if (this.#closed) throw this.#closed;
    const running = runJob(job, {
      openStream: () => {
        throw new Error('streams go to workers');
      },
      progress: (part, doneBytes) => onProgress?.(doneBytes, part),
      part: (part, result) => onPart?.(part, result),
      signal: this.#ending.signal,
    });
    this.#running.add(running);
    try {
      return (await running) as JobResults[O];
    } finally {
      this.#running.delete(running);
    }
  }

  #enqueue<O extends keyof JobResults>(
    job: Job,
    { transfer = [], onProgress, onPart, onStart }: Partial<Waiting>,
  ): Promise<JobResults[O]> {
    return new Promise((resolve, reject) => {
      if (this.#closed) return reject(this.#closed);
      this.#queue.push({ job, transfer, onProgress, onPart, onStart, resolve, reject });
      this.#dispatch();
    });
  }

  #dispatch(): void {
    while (this.#queue.length > 0) {
      let lane = this.#lanes.find((l) => l.jobs.size === 0);
      if (lane === undefined) {
        if (this.#lanes.length >= this.#size) return;
        lane = this.#startLane();
        this.#lanes.push(lane);
      }
      this.#send(lane, this.#queue.shift()!);
    }
  }

  #startLane(): Lane {
    const worker = spawnWorker('layer-worker', new URL('./layer-worker.ts', import.meta.url));
    const ready = new Promise<void>((resolve) => {
      worker.once('message', () => resolve());
      worker.once('exit', () => resolve());
    });
    const lane: Lane = { worker, jobs: new Map(), ready };
    lane.worker.on('message', (reply: WorkerReply) => this.#answer(lane, reply));
    lane.worker.on('error', (error) => this.#lost(lane, error instanceof Error ? error : new Error(String(error))));
    lane.worker.on('exit', (code) => this.#lost(lane, new Error(`a conversion worker ended with status ${code}`)));
    return lane;
  }

  #send(lane: Lane, waiting: Waiting): void {
    const id = this.#nextId++;
    lane.jobs.set(id, waiting);
    lane.worker.postMessage({ id, job: waiting.job }, waiting.transfer);
    waiting.onStart?.();
  }

  #answer(lane: Lane, reply: WorkerReply): void {
    if (reply.kind === 'ready') return;
    const waiting = lane.jobs.get(reply.id);
    if (waiting === undefined) return;
    if (reply.kind === 'progress') {
      waiting.onProgress?.(reply.doneBytes, reply.part);
      return;
    }
    if (reply.kind === 'part') {
      waiting.onPart?.(reply.part, reply.result);
      return;
    }
    lane.jobs.delete(reply.id);
    if (reply.kind === 'done') waiting.resolve(reply.result as never);
    else waiting.reject(unpackError(reply.error));
    this.#dispatch();
  }

  #lost(lane: Lane, error: Error): void {
    const at = this.#lanes.indexOf(lane);
    if (at >= 0) this.#lanes.splice(at, 1);
    for (const waiting of lane.jobs.values()) waiting.reject(error);
    lane.jobs.clear();
    if (this.#closed === undefined) this.#dispatch();
  }

  /** Ends the workers, whatever they do. Jobs not done fail with `reason`. */
  async close(reason = new Error('the conversion was ended')): Promise<void> {
    this.#closed ??= reason;
    this.#ending.abort(reason);
    for (const waiting of this.#queue.splice(0)) waiting.reject(reason);
    for (const lane of this.#lanes) {
      for (const waiting of lane.jobs.values()) waiting.reject(reason);
      lane.jobs.clear();
    }
    const ending = this.#lanes.map(async ({ worker, ready }) => {
      await ready;
      await worker.terminate();
    });
    await Promise.all([...ending, Promise.allSettled(this.#running)]);
  }
}

/** Sends a stream's chunks as the worker grants room for them. */
async function feed(port: MessagePort, source: AsyncIterable<Buffer>): Promise<void> {
  let room = 0;
  let wake: (() => void) | undefined;
  let open = true;
  port.on('message', ({ grantBytes }: StreamGrant) => {
    room += grantBytes;
    wake?.();
  });
  port.on('close', () => {
    open = false;
    wake?.();
  });
  const send = (message: StreamChunk, transfer: ArrayBuffer[] = []) => port.postMessage(message, transfer);
  try {
    for await (const bytes of source) {
      while (room <= 0 && open) {
        await new Promise<void>((resolve) => {
          wake = resolve;
        });
      }
      if (!open) return;
      room -= bytes.length;
      // A copy of its own: what arrives is often a view into a pool, which cannot be transferred.
      const chunk = new Uint8Array(bytes);
      send({ chunk }, [chunk.buffer]);
    }
    send({ end: true });
  } catch (error) {
    if (open) send({ error: packError(error) });
  }
}
