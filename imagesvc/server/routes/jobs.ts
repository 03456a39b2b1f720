/** Jobs: asking for one, watching it, cancelling it. */
import { PassThrough } from 'node:stream';
import { Type } from '@sinclair/typebox';
import { fail } from '../../errors.ts';
import { parseImageName } from '../../store/image-name.ts';
import type { App, Shared } from '../app-types.ts';
import type { JobWork } from '../jobs/job.ts';
import { isEnded } from '../jobs/job.ts';
import type { JobEvent } from '../jobs/job-events.ts';
import { body, ConvertBody, described, JobParams, JobSchema, JobsQuery, PackDiffBody } from '../schemas.ts';
import { allows } from '../tokens.ts';

/** So that proxies and watchers see that the connection lives. */
const HEARTBEAT_MS = 15_000;
/** A watcher that is this far behind is let go; it comes back with the id of the last event it got. */
const MAX_BEHIND_BYTES = 1024 * 1024;

const IdempotencyHeader = Type.Object({
  'idempotency-key': Type.Optional(
    Type.String({
      minLength: 1,
      maxLength: 256,
      description: 'Asking again with the same key never starts an ended job again, whatever became of it',
    }),
  ),
});
const accepted = {
  200: described(JobSchema, 'The same work was asked for before, and this is its job'),
  202: described(JobSchema, 'The job was queued'),
};

export function jobRoutes(app: App, { queue, paths, streams, isDraining }: Shared): void {
  app.post(
    '/v1/convert',
    {
      config: { role: 'write' },
      schema: {
        operationId: 'convert',
        summary: 'Convert an image, as a job',
        description: 'The same request is the same job: while it waits or runs, asking again starts nothing.',
        tags: ['jobs'],
        headers: IdempotencyHeader,
        body: ConvertBody,
        response: accepted,
      },
    },
    async (request, reply) => {
      const { credentials, ...wanted } = request.body;
      const work: JobWork = {
        kind: 'convert',
        request: { ...wanted, source: paths.checkSource(wanted.source), name: parseImageName(wanted.name).full },
      };
      const idempotencyKey = request.headers['idempotency-key'];
      const { job, queued } = await queue.submit({ work, caller: request.caller.name, credentials, idempotencyKey });
      return reply
        .code(queued ? 202 : 200)
        .header('location', `/v1/jobs/${job.id}`)
        .send(job);
    },
  );

  app.post(
    '/v1/pack-diff',
    {
      config: { role: 'write' },
      schema: {
        operationId: 'packDiff',
        summary: 'Make an image of what changed in an upper folder of this node, as a job',
        description: 'Nothing may write to the folder until the job has ended.',
        tags: ['jobs'],
        headers: IdempotencyHeader,
        body: PackDiffBody,
        response: accepted,
      },
    },
    async (request, reply) => {
      const { upper, name, ...options } = request.body;
      const work: JobWork = {
        kind: 'pack-diff',
        request: { ...options, upper: paths.check(upper), name: parseImageName(name).full },
      };
      const idempotencyKey = request.headers['idempotency-key'];
      const { job, queued } = await queue.submit({ work, caller: request.caller.name, idempotencyKey });
      return reply
        .code(queued ? 202 : 200)
        .header('location', `/v1/jobs/${job.id}`)
        .send(job);
    },
  );

  app.get(
    '/v1/jobs',
    {
      config: { role: 'read' },
      schema: {
        operationId: 'listJobs',
        summary: 'List jobs, the latest first',
        tags: ['jobs'],
        querystring: JobsQuery,
        response: { 200: Type.Object({ jobs: Type.Array(JobSchema) }) },
      },
    },
    async (request) => ({ jobs: queue.list(request.query) }),
  );

  app.get(
    '/v1/jobs/:id',
    {
      config: { role: 'read' },
      schema: {
        operationId: 'getJob',
        summary: 'Show a job',
        tags: ['jobs'],
        params: JobParams,
        response: { 200: JobSchema },
      },
    },
    async (request) => queue.get(request.params.id),
  );

  app.delete(
    '/v1/jobs/:id',
    {
      config: { role: 'write' },
      schema: {
        operationId: 'cancelJob',
        summary: 'Cancel a job that waits or runs',
        description:
          'A running job is `cancelling` until it has stopped; nothing of it stays. Those of others need the role admin.',
        tags: ['jobs'],
        params: JobParams,
        response: {
          200: described(JobSchema, 'It is cancelled'),
          202: described(JobSchema, 'It was told to stop'),
        },
      },
    },
    async (request, reply) => {
      const { caller } = request;
      const owner = queue.get(request.params.id).caller;
      if (owner !== caller.name && !allows(caller, 'admin')) {
        throw fail('SERVER_FORBIDDEN', {
          what: `cancelling a job of ${owner}`,
          role: 'admin',
          caller: caller.name,
          has: caller.role,
        });
      }
      const job = await queue.cancel(request.params.id);
      return reply.code(isEnded(job.state) ? 200 : 202).send(job);
    },
  );

  app.get(
    '/v1/jobs/:id/events',
    {
      config: { role: 'read' },
      schema: {
        operationId: 'watchJob',
        summary: 'Watch a job: server-sent events until it has ended',
        description:
          'Events: `state` (the job) and `progress` (task, phase, doneBytes, totalBytes). The stream ends after the state in which the job ' +
          'has ended. After a broken connection, Last-Event-ID goes on where it was.',
        tags: ['jobs'],
        params: JobParams,
        headers: Type.Object({ 'last-event-id': Type.Optional(Type.String({ maxLength: 64 })) }),
        response: { 200: body('Events', 'text/event-stream') },
      },
    },
    async (request, reply) => {
      const { id } = request.params;
      const events = queue.events(id);
      const stream = new PassThrough({ highWaterMark: 64 * 1024 });
      let ended = false;
      const end = () => {
        if (ended) return;
        ended = true;
        clearInterval(heartbeat);
        unwatch();
        streams.delete(watcher);
        stream.end();
      };
      const send = (event: JobEvent) => {
        if (ended) return;
        stream.write(`id: ${event.id}\nevent: ${event.type}\ndata: ${JSON.stringify(event.data)}\n\n`);
        const over = event.type === 'state' && isEnded(event.data.state);
        if (over || stream.writableLength > MAX_BEHIND_BYTES) end();
      };
      const watcher = { end };
      const heartbeat = setInterval(() => stream.write(': still here\n\n'), HEARTBEAT_MS);
      const unwatch = events.watch(send);
      stream.once('close', end);
      streams.add(watcher);
      stream.write('retry: 1000\n\n');
      for (const event of events.since(request.headers['last-event-id'])) send(event);
      // Its end may be what was seen last.
      if (events.over || isDraining()) end();
      return reply
        .header('content-type', 'text/event-stream')
        .header('cache-control', 'no-store')
        .header('x-accel-buffering', 'no')
        .send(stream);
    },
  );
}
