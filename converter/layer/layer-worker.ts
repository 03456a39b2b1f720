/** The worker thread's end of the layer pool: takes jobs one at a time, answers with results or errors. */
import { parentPort } from 'node:worker_threads';
import { digestOverRuns, hashChunks } from './hash-runs.ts';
import { packError, unpackError } from './job-error.ts';
import type { SpoolJob, StreamChunk, StreamGrant, WorkerReply, WorkerRequest } from './layer-job.ts';
import { transferList } from './spool-format.ts';
import { spoolLayer } from './spool-layer.ts';

const PROGRESS_BYTES = 4 << 20;
/** How far a stream may run ahead of the parser. */
const WINDOW_BYTES = 8 << 20;

const port = parentPort!;
const reply = (message: WorkerReply, transfer: ArrayBuffer[] = []) => port.postMessage(message, transfer);

port.on('message', async ({ id, job }: WorkerRequest) => {
  try {
    switch (job.op) {
      case 'spool': {
        const result = await spoolLayer(job, {
          openStream: () => streamOf(job),
          progress: throttled((doneBytes) => reply({ id, kind: 'progress', doneBytes })),
        });
        reply({ id, kind: 'done', result }, transferList(result.index));
        break;
      }
      case 'digest':
        reply({ id, kind: 'done', result: await digestOverRuns(job.runs) });
        break;
      case 'chunks':
        reply({ id, kind: 'done', result: await hashChunks(job.runs, job.out) });
        break;
    }
  } catch (error) {
    reply({ id, kind: 'failed', error: packError(error) });
  }
});

function throttled(report: (doneBytes: number) => void): (doneBytes: number) => void {
  let next = PROGRESS_BYTES;
  return (doneBytes) => {
    if (doneBytes < next) return;
    next = doneBytes + PROGRESS_BYTES;
    report(doneBytes);
  };
}

async function* streamOf(job: SpoolJob): AsyncGenerator<Buffer> {
  if (job.source.kind !== 'stream') throw new Error('not a stream job');
  const stream = job.source.port;
  const queue: StreamChunk[] = [];
  let wake: (() => void) | undefined;
  stream.on('message', (message: StreamChunk) => {
    queue.push(message);
    wake?.();
  });
  const grant = (grantBytes: number) => stream.postMessage({ grantBytes } satisfies StreamGrant);
  try {
    grant(WINDOW_BYTES);
    for (;;) {
      const message = queue.shift();
      if (message === undefined) {
        await new Promise<void>((resolve) => {
          wake = resolve;
        });
        continue;
      }
      if ('end' in message) return;
      if ('error' in message) throw unpackError(message.error);
      const bytes = Buffer.from(message.chunk.buffer, message.chunk.byteOffset, message.chunk.byteLength);
      yield bytes;
      grant(bytes.length);
    }
  } finally {
    stream.close();
  }
}
