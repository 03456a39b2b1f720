/** What every route of the runtime service's HTTP has in common: which sandbox and command it is about, and how it fails. */
import type { Static, TSchema } from '@sinclair/typebox';
import type { FastifyInstance, FastifyReply, FastifyRequest } from 'fastify';
import { DsecError, messageOf } from '#base';
import type { ExecHandle, NodeSandbox, SandboxNode } from '#runtime';
import { fail } from '../errors.ts';

/** What the routes need of a node: an edge puts what it knows of owners and amounts before it. */
export type Sandboxes = Pick<SandboxNode, 'create' | 'get' | 'list' | 'remove' | 'stop'>;

export const ONE_SANDBOX = '/v1/sandboxes/:name';

export interface Call<B extends TSchema, Q extends TSchema> {
  readonly sandbox: () => NodeSandbox;
  readonly command: () => ExecHandle;
  readonly id: number;
  readonly name: string;
  readonly body: Static<B>;
  readonly query: Static<Q>;
  readonly request: FastifyRequest;
  readonly reply: FastifyReply;
}

export type AddRoute = <B extends TSchema, Q extends TSchema>(
  method: 'GET' | 'POST' | 'PUT' | 'DELETE',
  url: string,
  schema: { readonly body?: B; readonly querystring?: Q },
  handler: (call: Call<B, Q>) => unknown,
) => void;

export function routeAdder(app: FastifyInstance, node: Pick<Sandboxes, 'get'>): AddRoute {
  return (method, url, schema, handler) => {
    app.route({
      method,
      url,
      schema,
      handler: (request, reply) => {
        const { name = '', id = '' } = request.params as { name?: string; id?: string };
        const sandbox = () => node.get(name);
        return handler({
          sandbox,
          command: () => sandbox().command(numberOf(id)),
          id: numberOf(id),
          name,
          body: (request.body ?? {}) as never,
          query: request.query as never,
          request,
          reply,
        });
      },
    });
  };
}

/** Aborted when whoever asked has gone. */
export function stopWith(reply: FastifyReply): AbortSignal {
  const stop = new AbortController();
  // Of the answer: its connection may serve many more.
  reply.raw.once('close', () => stop.abort(new Error('the reader has gone')));
  return stop.signal;
}

export function numberOf(text: string): number {
  return /^[1-9]\d{0,9}$/.test(text) ? Number(text) : 0;
}

export function errorOf(thrown: unknown): DsecError {
  if (thrown instanceof DsecError) return thrown;
  const { validation, statusCode } = (thrown ?? {}) as { validation?: unknown; statusCode?: unknown };
  if (validation !== undefined || (typeof statusCode === 'number' && statusCode < 500)) {
    return fail('SANDBOX_BAD_REQUEST', { problem: messageOf(thrown) }, thrown);
  }
  return fail('SANDBOX_INTERNAL', { problem: messageOf(thrown) }, thrown);
}
