/**
 * Creations over one request that stays open: a line of JSON for each, `{n, requestId, create}`, and a line for each answer as it is known,
 * `{n, sandbox}` or `{n, status, error}`, in whatever order. A burst of thousands costs neither side a request for each.
 *
 * `create` is what POST /v1/sandboxes takes. An edge that is about to end says `{"end": true}`, and answers what comes until its client has ended the
 * request with SERVICE_DRAINING. A connection that breaks ends no creation: whoever asks again, by the same request id, gets its sandbox.
 */
import type { TSchema } from '@sinclair/typebox';
import { messageOf } from '#base';
import type { HttpApp } from '#imagesvc';
import { fail } from '../errors.ts';
import { LineReader, LineWriter } from '../service-base/ndjson.ts';
import type { Service } from '../service-base/service-app.ts';
import { errorBody, serviceErrorOf } from '../service-base/service-errors.ts';

export const CREATE_STREAM = '/v1/creates';
export const NDJSON = 'application/x-ndjson';

interface CreateLine {
  readonly n: number;
  readonly requestId?: string;
  readonly create: unknown;
}

const MOST_LINE_BYTES = 8 << 20;
/** Under way at once on one stream; what comes then waits in its connection. */
const MOST_UNDER_WAY = 4096;

/** `create` gets what `schema` has let pass. */
export function createStream<B>(
  service: Pick<Service, 'app' | 'draining' | 'onDraining'>,
  schema: TSchema,
  create: (asked: B) => Promise<object>,
): void {
  const app: HttpApp = service.app;
  const open = new Set<LineWriter>();
  service.onDraining(() => {
    for (const answers of open) answers.write({ end: true });
  });
  app.addContentTypeParser(NDJSON, (_request, payload, done) => done(null, payload));
  app.post(CREATE_STREAM, { config: { hot: true } }, (request, reply) => {
    const validate = request.compileValidationSchema(schema as never, 'body') as ((value: unknown) => boolean) & {
      errors?: readonly { readonly instancePath?: string; readonly message?: string }[] | null;
    };
    const { raw: input } = request;
    const { raw: output } = reply;
    reply.hijack();
    output.writeHead(200, { 'content-type': NDJSON, 'x-request-id': request.id });
    output.flushHeaders();
    output.on('error', () => {});
    const lines = new LineReader(MOST_LINE_BYTES);
    const answers = new LineWriter(output);
    let underWay = 0;
    let ended = false;
    open.add(answers);
    output.once('close', () => open.delete(answers));
    const finish = () => {
      if (ended && underWay === 0) answers.end();
    };

    const one = async ({ n, requestId, create: asked }: CreateLine) => {
      try {
        if (service.draining) throw fail('SERVICE_DRAINING', { service: 'edge' });
        if (!validate(asked)) {
          const { instancePath = '', message = '' } = validate.errors?.[0] ?? {};
          throw fail('SERVICE_BAD_REQUEST', { problem: `create${instancePath} ${message}` });
        }
        answers.write({ n, sandbox: await create(asked as B) });
      } catch (thrown) {
        const error = serviceErrorOf(thrown);
        answers.write({ n, status: error.http, ...errorBody(error, requestId) });
      }
      underWay--;
      if (underWay < MOST_UNDER_WAY && input.isPaused()) input.resume();
      finish();
    };
    input.on('data', (bytes: Buffer) => {
      try {
        for (const line of lines.take(bytes)) {
          const asked = JSON.parse(line) as CreateLine;
          if (!Number.isSafeInteger(asked?.n)) throw new Error('a line without its number');
          underWay++;
          void one(asked);
        }
        if (underWay >= MOST_UNDER_WAY) input.pause();
      } catch (error) {
        // What follows a line that is none cannot be trusted to be one.
        request.log.warn({ problem: messageOf(error) }, 'creations');
        output.destroy();
      }
    });
    input.once('end', () => {
      ended = true;
      finish();
    });
    input.on('error', () => output.destroy());
    if (service.draining) answers.write({ end: true });
  });
}
