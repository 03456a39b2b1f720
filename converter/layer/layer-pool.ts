/**
 * The converter's worker threads. Jobs wait for a free worker in the order they came; a stream source is fed from here
 * with a bounded window. `close` ends everything at once: an aborted conversion stops in the middle of a job.
 */
import { availableParallelism } from 'node:os';
import { MessageChannel, type Worker } from 'node:worker_threads';
import { spawnWorker } from '#base';
import { packError, unpackError } from './job-error.ts';
import type { Job, JobResults, StreamChunk, StreamGrant, WorkerReply } from './layer-job.ts';

interface Waiting {
  readonly job: Job;
  readonly transfer: MessagePortLike[];
  readonly onProgress: ((doneBytes: number) => void) | undefined;
  readonly onStart: (() => void) | undefined;
  readonly resolve: (result: never) => void;
  readonly reject: (error: Error) => void;
}

type MessagePortLike = MessageChannel['port1'];

interface Slot {
  readonly worker: Worker;
  current: Waiting | undefined;
}

export class LayerPool {
  readonly #size: number;
  readonly #slots: Slot[] = [];
  readonly #queue: Waiting[] = [];
  #nextId = 1;
  #closed: Error | undefined;

  constructor(size = Math.max(2, availableParallelism())) {
    this.#size = size;
  }

  run<J extends Job>(job: J, onProgress?: (doneBytes: number) => void): Promise<JobResults[J['op']]> {
    return this.#enqueue(job, [], onProgress, undefined);
  }

  /** A job whose source is a stream: `open` is called when a worker takes the job. */
  runStream<J extends Job & { op: 'spool' }>(
    makeJob: (port: MessagePortLike) => J,
    open: (signal: AbortSignal) => AsyncIterable<Buffer>,
    onProgress?: (doneBytes: number) => void,
  ): Promise<JobResults['spool']> {
    const { port1, port2 } = new MessageChannel();
    const abort = new AbortController();
    const result = this.#enqueue<'spool'>(makeJob(port2), [port2], onProgress, () => {
      void feed(port1, open(abort.signal));
    });
    return result.finally(() => {
      abort.abort();
      port1.close();
    });
  }

  #enqueue<O extends keyof JobResults>(
    job: Job,
    transfer: MessagePortLike[],
    onProgress: ((doneBytes: number) => void) | undefined,
    onStart: (() => void) | undefined,
  ): Promise<JobResults[O]> {
    return new Promise((resolve, reject) => {
      if (this.#closed) return reject(this.#closed);
      this.#queue.push({ job, transfer, onProgress, onStart, resolve, reject });
      this.#dispatch();
    });
  }

  #dispatch(): void {
    while (this.#queue.length > 0) {
      const slot = this.#slots.find((s) => s.current === undefined) ?? this.#addSlot();
      if (slot === undefined) return;
      const waiting = this.#queue.shift()!;
      slot.current = waiting;
      slot.worker.postMessage({ id: this.#nextId++, job: waiting.job }, waiting.transfer);
      waiting.onStart?.();
    }
  }

  #addSlot(): Slot | undefined {
    if (this.#slots.length >= this.#size) return undefined;
    const slot: Slot = {
      worker: spawnWorker('layer-worker', new URL('./layer-worker.ts', import.meta.url)),
      current: undefined,
    };
    this.#slots.push(slot);
    slot.worker.on('message', (reply: WorkerReply) => this.#answer(slot, reply));
    slot.worker.on('error', (error) => this.#lost(slot, error instanceof Error ? error : new Error(String(error))));
    slot.worker.on('exit', (code) => this.#lost(slot, new Error(`a conversion worker ended with status ${code}`)));
    return slot;
  }

  #answer(slot: Slot, reply: WorkerReply): void {
    const waiting = slot.current;
    if (waiting === undefined) return;
    if (reply.kind === 'progress') {
      waiting.onProgress?.(reply.doneBytes);
      return;
    }
    slot.current = undefined;
    if (reply.kind === 'done') waiting.resolve(reply.result as never);
    else waiting.reject(unpackError(reply.error));
    this.#dispatch();
  }

  #lost(slot: Slot, error: Error): void {
    const at = this.#slots.indexOf(slot);
    if (at >= 0) this.#slots.splice(at, 1);
    const waiting = slot.current;
    slot.current = undefined;
    waiting?.reject(error);
    if (this.#closed === undefined) this.#dispatch();
  }

  /** Ends the workers, whatever they do. Jobs not done fail with `reason`. */
  async close(reason = new Error('the conversion was ended')): Promise<void> {
    this.#closed ??= reason;
    for (const waiting of this.#queue.splice(0)) waiting.reject(reason);
    const slots = [...this.#slots];
    for (const slot of slots) {
      slot.current?.reject(reason);
      slot.current = undefined;
    }
    await Promise.all(slots.map((slot) => slot.worker.terminate()));
  }
}

/** Sends a stream's chunks as the worker grants room for them. */
async function feed(port: MessagePortLike, source: AsyncIterable<Buffer>): Promise<void> {
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
