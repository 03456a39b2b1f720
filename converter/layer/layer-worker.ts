/** The worker thread's end of the layer pool: takes jobs one at a time, answers with results or errors. */
import { type MessagePort, parentPort } from 'node:worker_threads';
import { digestOverRuns, followSpool, hashChunks, SpoolHasher } from './hash-runs.ts';
import { packError, unpackError } from './job-error.ts';
import type {
  FollowJob,
  FollowMessage,
  SpoolJob,
  StreamChunk,
  StreamGrant,
  WorkerReply,
  WorkerRequest,
} from './layer-job.ts';
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
        const { follower } = job;
        const hasher = follower === 'self' ? new SpoolHasher(job.dataPath) : undefined;
        const settle = (message: FollowMessage) => {
          if (follower === 'self') hasher!.advance(message.settledBytes);
          else follower?.postMessage(message);
        };
        try {
          const result = await spoolLayer(job, {
            openStream: () => streamOf(job),
            progress: throttled((doneBytes) => reply({ id, kind: 'progress', doneBytes })),
            settled: (settledBytes) => settle({ settledBytes }),
          });
          settle({ settledBytes: result.dataBytes, end: true });
          reply({ id, kind: 'done', result: { ...result, digests: hasher?.finish() } }, transferList(result.index));
        } finally {
          hasher?.close();
        }
        break;
      }
      case 'follow':
        reply({ id, kind: 'done', result: await followSpool(job.path, settledOf(job)) });
        break;
      case 'digest':
        reply({ id, kind: 'done', result: await digestOverRuns(job.runs) });
        break;
      case 'chunks':
        reply({ id, kind: 'done', result: await hashChunks(job.runs, job.out) });
        break;
    }
  } catch (error) {
    // Whoever hashes the spool alongside must not wait for the rest of it.
    if (job.op === 'spool' && job.follower !== 'self') job.follower?.close();
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

async function* settledOf(job: FollowJob): AsyncGenerator<number> {
  for await (const { settledBytes, end } of messagesOf<FollowMessage>(job.port)) {
    yield settledBytes;
    if (end) return;
  }
  throw new Error('the spool ended early');
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
