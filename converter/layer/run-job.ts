/**
 * Carries out one of the converter's jobs in the thread that calls it: a worker (layer-worker.ts), or the thread of a converter
 * that has nothing else to do meanwhile (layer-pool.ts).
 */
import type { Job, SpoolJob, SpoolResult } from './layer-job.ts';
import { makeBlob } from './make-blob.ts';
import { type SpoolContext, spoolLayer, spoolStack } from './spool-layer.ts';

const PROGRESS_BYTES = 4 << 20;

export interface JobHooks {
  /** The bytes of a `stream` source. */
  openStream(job: SpoolJob): AsyncIterable<Buffer>;
  /** `part`: which layer of a stack. */
  progress(part: number, doneBytes: number): void;
  part(part: number, result: SpoolResult): void;
  /** Ends the job between two pieces of its data. */
  readonly signal?: AbortSignal | undefined;
}

/** The job's entry of JobResults. */
export async function runJob(job: Job, hooks: JobHooks): Promise<unknown> {
  const { signal } = hooks;
  const contextOf = (spool: SpoolJob, part: number): SpoolContext => ({
    openStream: () => hooks.openStream(spool),
    progress: throttled((doneBytes) => hooks.progress(part, doneBytes)),
    signal,
  });
  switch (job.op) {
    case 'spool':
      return spoolLayer(job, contextOf(job, 0));
    case 'stack':
      return spoolStack(job, (part) => contextOf(job.layers[part]!, part), hooks.part);
    case 'blob':
      return makeBlob(job.runs, job.out, signal);
  }
}

function throttled(report: (doneBytes: number) => void): (doneBytes: number) => void {
  let next = PROGRESS_BYTES;
  return (doneBytes) => {
    if (doneBytes < next) return;
    next = doneBytes + PROGRESS_BYTES;
    report(doneBytes);
  };
}
