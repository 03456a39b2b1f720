/** The worker thread's end of the layer pool: takes jobs one at a time, answers with results or errors. */
import { type MessagePort, parentPort } from 'node:worker_threads';
import { packError, unpackError } from './job-error.ts';
import type { SpoolJob, SpoolResult, StreamChunk, StreamGrant, WorkerReply, WorkerRequest } from './layer-job.ts';
import { loadLibraries } from './libraries.ts';
import { runJob } from './run-job.ts';
import { transferList } from './spool-format.ts';

/** How far a stream may run ahead of the parser. */
const WINDOW_BYTES = 8 << 20;

const port = parentPort!;
// Libraries are loaded while there is no job yet.
loadLibraries();
const reply = (message: WorkerReply, transfer: ArrayBuffer[] = []) => port.postMessage(message, transfer);
reply({ kind: 'ready' });

port.on('message', async ({ id, job }: WorkerRequest) => {
  try {
    const result = await runJob(job, {
      openStream: streamOf,
      progress: (part, doneBytes) => reply({ id, kind: 'progress', part, doneBytes }),
      part: (part, layer) => reply({ id, kind: 'part', part, result: layer }, transferList(layer.index)),
    });
    const transfer = job.op === 'spool' ? transferList((result as SpoolResult).index) : [];
    reply({ id, kind: 'done', result }, transfer);
  } catch (error) {
    reply({ id, kind: 'failed', error: packError(error) });
  }
});

async function* streamOf(job: SpoolJob): AsyncGenerator<Buffer> {
  if (job.source.kind !== 'stream') throw new Error('not a stream job');
  const stream = job.source.port;
  const grant = (grantBytes: number) => stream.postMessage({ grantBytes } satisfies StreamGrant);
  grant(WINDOW_BYTES);
  for await (const message of messagesOf<StreamChunk>(stream)) {
    if ('end' in message) return;
    if ('error' in message) throw unpackError(message.error);
    const bytes = Buffer.from(message.chunk.buffer, message.chunk.byteOffset, message.chunk.byteLength);
    yield bytes;
    grant(bytes.length);
  }
}

/** A port's messages until it is closed from either end. */
async function* messagesOf<T>(from: MessagePort): AsyncGenerator<T> {
  const queue: T[] = [];
  let open = true;
  let wake: (() => void) | undefined;
  from.on('message', (message: T) => {
    queue.push(message);
    wake?.();
  });
  from.on('close', () => {
    open = false;
    wake?.();
  });
  try {
    for (;;) {
      const message = queue.shift();
      if (message !== undefined) {
        yield message;
      } else if (!open) {
        return;
      } else {
        await new Promise<void>((resolve) => {
          wake = resolve;
        });
      }
    }
  } finally {
    from.close();
  }
}
