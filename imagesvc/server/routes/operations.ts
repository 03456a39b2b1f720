/** For whoever runs the service: whether it lives, whether it is ready, its figures, its documentation. */
import { Type } from '@sinclair/typebox';
import { fail } from '../../errors.ts';
import type { App, Shared } from '../app-types.ts';
import { docsPage } from '../docs-page.ts';
import { body } from '../schemas.ts';

const Ok = Type.Object({ status: Type.String() });

export function operationRoutes(app: App, { store, metrics, isDraining }: Shared): void {
  app.get(
    '/healthz',
    {
      config: { role: 'open', hot: true },
      schema: {
        operationId: 'healthz',
        summary: 'Whether the process lives',
        tags: ['operations'],
        response: { 200: Ok },
      },
    },
    async () => ({ status: 'ok' }),
  );

  app.get(
    '/readyz',
    {
      config: { role: 'open', hot: true },
      schema: {
        operationId: 'readyz',
        summary: 'Whether it takes requests: not while it shuts down, nor when the store cannot be read',
        tags: ['operations'],
        response: { 200: Ok },
      },
    },
    async () => {
      if (isDraining()) throw fail('SERVER_DRAINING');
      await store.getRef('readyz:probe');
      return { status: 'ready' };
    },
  );

  app.get(
    '/metrics',
    {
      config: { role: 'read', hot: true },
      schema: {
        operationId: 'metrics',
        summary: "Figures in Prometheus' text format",
        tags: ['operations'],
        response: { 200: body('Figures', 'text/plain') },
      },
    },
    async (_request, reply) => reply.header('content-type', 'text/plain; version=0.0.4').send(metrics.text()),
  );

  app.get(
    '/openapi.json',
    {
      config: { role: 'open' },
      schema: {
        operationId: 'openapi',
        summary: 'This API as an OpenAPI 3.1 document',
        tags: ['operations'],
        response: { 200: body('The document', 'application/json', Type.Unknown()) },
      },
    },
    async (_request, reply) => reply.header('content-type', 'application/json').send(JSON.stringify(app.swagger())),
  );

  app.get(
    '/docs',
    {
      config: { role: 'open' },
      schema: {
        operationId: 'docs',
        summary: 'This API as a page',
        tags: ['operations'],
        response: { 200: body('The page', 'text/html') },
      },
    },
    async (_request, reply) =>
      reply
        .header('content-type', 'text/html; charset=utf-8')
        .header('content-security-policy', "default-src 'none'; style-src 'unsafe-inline'")
        .send(docsPage(app.swagger())),
  );
}
