/**
 * The description of the public API: /openapi.json, and for people /docs. The routes of this service describe themselves; those of one sandbox, which are
 * passed on, are described by the very routes that the edge answers with, so that neither can be forgotten.
 */
import swagger from '@fastify/swagger';
import type { FastifyInstance } from 'fastify';
import { docsPage, type HttpApp } from '#imagesvc';
import { sandboxApp } from '../runtime-service/sandbox-routes.ts';

const ONE = '/v1/sandboxes/{id}';

interface Described {
  readonly summary: string;
  readonly description?: string;
  readonly answer?: object;
  readonly status?: number;
  readonly type?: string;
}

const text = { type: 'string' };
const ref = (name: string) => ({ $ref: `#/components/schemas/${name}` });
const listed = (name: string, items: object, more: object = {}) => ({
  type: 'object',
  properties: { [name]: { type: 'array', items }, ...more },
  required: [name],
});

/** By method and path, as the routes have them. */
const ROUTES: Readonly<Record<string, Described>> = {
  'POST /v1/sandboxes': {
    summary: 'Makes a sandbox; the same requestId gives the same one',
    description:
      'Amounts that are not limited count as the defaults of the server. Answers when it is ready for commands.',
    answer: ref('Sandbox'),
    status: 201,
  },
  'POST /v1/sandboxes/batch': {
    summary: 'Makes up to 32,000 sandboxes',
    description:
      'Either {request, count} or {requests}. A line of JSON for each as it becomes ready: {index, sandbox}, or {index, error}. Closing the connection stops what has not begun. A requestId stands for all: each sandbox has one of its own made of it.',
    answer: { ...text, description: 'lines of JSON' },
    type: 'application/x-ndjson',
  },
  'GET /v1/sandboxes': {
    summary: 'The sandboxes that the caller may read',
    description:
      '`unreachable`: edges that did not answer. Ended ones only with state=ended. `name` is without the edge: any edge may have one of that name. At most `limit` of them (10,000); with `continue` in the answer there are more, and the same request with it gives the next.',
    answer: listed('sandboxes', ref('Sandbox'), {
      unreachable: { type: 'array', items: text },
      continue: text,
    }),
  },
  'GET /v1/sandboxes/:id': { summary: 'One sandbox', answer: ref('Sandbox') },
  'POST /v1/sandboxes/:id/resume': { summary: 'Thaws a paused sandbox', answer: ref('Sandbox') },
  'POST /v1/sandboxes/:id/fork': {
    summary: 'New sandboxes on the same edge, with the files of this one as they are now',
    description:
      '`memory`: of a virtual machine, with its memory: its processes go on in each. No image is made of it.',
    answer: listed('sandboxes', ref('Sandbox'), {
      snapshot: { type: 'object' },
      notes: { type: 'array', items: text },
    }),
    status: 201,
  },
  'POST /v1/sandboxes/:id/pack-diff': {
    summary: 'Makes an image of what a sandbox has changed, while it runs',
    answer: { type: 'object' },
  },
  'PUT /v1/sandboxes/:id/limits': {
    summary: 'Changes limits of a sandbox that runs, and what it counts as',
    answer: { type: 'object' },
  },
  'GET /v1/nodes': {
    summary: 'The edges: their reports, when they were heard, whether they live',
    answer: listed('nodes', { type: 'object' }, { atMs: { type: 'number' }, heardMsAgo: { type: 'number' } }),
  },
  'POST /v1/nodes/:edge/drain': { summary: 'Has an edge take nothing new, or again', answer: { type: 'object' } },
  'DELETE /v1/nodes/:edge/reservations': {
    summary: 'Releases what is reserved on an edge that is gone for good',
    answer: { type: 'object', properties: { edge: text, released: { type: 'integer' } } },
  },
  'GET /v1/images': { summary: 'The images of the store, by name', answer: listed('images', { type: 'object' }) },
  'GET /v1/images/:name': { summary: 'Layers, sizes and config of an image', answer: { type: 'object' } },
  'GET /v1/images/:name/stats': { summary: 'What of an image was ever read', answer: { type: 'object' } },
  'GET /v1/images/:name/stats.svg': { summary: 'The same as a map of its blobs', answer: text, type: 'image/svg+xml' },
  'POST /v1/fncall/run': {
    summary: 'Runs a task, which leaves nothing behind',
    description: 'On one of the nodes that run tasks (docs/fncall.md). 429 with Retry-After when all are busy.',
    answer: { type: 'object' },
  },
  'POST /run_code': {
    summary: 'The same as SandboxFusion has it',
    description: '`pool` in the query names a pool; `default` otherwise.',
    answer: { type: 'object' },
  },
  'GET /v1/fncall/languages': {
    summary: 'The languages of the table: how each is compiled and run',
    answer: { type: 'object' },
  },
  'GET /v1/fncall/pools': {
    summary: 'The pools of all nodes that run tasks',
    answer: { type: 'array', items: { type: 'object' } },
  },
  'PUT /v1/fncall/pools/:name': {
    summary: 'Makes a pool on every node that runs tasks, or changes it; needs node.drain',
    answer: { type: 'array', items: { type: 'object' } },
  },
  'DELETE /v1/fncall/pools/:name': {
    summary: 'Removes a pool from every node; needs node.drain',
    answer: { type: 'object', properties: { removed: text } },
  },
  'GET /v1/denied': {
    summary: 'Denied network attempts of the sandboxes that the caller may read',
    answer: listed('denied', { type: 'object' }, { unreachable: { type: 'array', items: text } }),
  },
  'GET /v1/events': {
    summary: 'What happens, as server-sent events',
    description:
      'sandbox.created, sandbox.changed, sandbox.ended, sandbox.gone; node.up, node.down, node.draining, node.gone. A stream begins with what happens after it was opened.',
    answer: text,
    type: 'text/event-stream',
  },
};

const SANDBOX = {
  type: 'object',
  properties: {
    id: { ...text, description: 'NAME.EDGE' },
    name: text,
    edge: text,
    state: { ...text, description: 'running, paused or ended' },
    project: text,
    user: text,
    job: text,
    createdAt: text,
    expiresAt: text,
  },
  required: ['id', 'name', 'edge'],
  additionalProperties: true,
};

const ERROR = {
  type: 'object',
  properties: {
    error: {
      type: 'object',
      properties: {
        code: text,
        message: text,
        hint: text,
        retryable: { type: 'boolean' },
        exit: { type: 'integer' },
        requestId: text,
      },
      required: ['code', 'message', 'retryable'],
    },
  },
  required: ['error'],
};

const NOT_FOR_CLIENTS: ReadonlySet<string> = new Set([
  '/v1/sandboxes',
  '/v1/sandboxes/{name}/files/upload',
  '/v1/sandboxes/{name}/files/download',
]);

/** Before any route is added. */
export async function describeApi(app: HttpApp, version: string): Promise<void> {
  await (app as unknown as FastifyInstance).register(swagger, {
    openapi: {
      openapi: '3.1.0',
      info: {
        title: 'DSec API',
        version,
        description:
          'Sandboxes of a cluster. Every request carries `Authorization: Bearer TOKEN`. Errors are {error: {code, message, hint, retryable, exit, requestId}}; 429 and 503 carry Retry-After where waiting helps.',
      },
      components: { securitySchemes: { token: { type: 'http', scheme: 'bearer' } } },
      security: [{ token: [] }],
    },
    transform: ({ schema, url, route }) => {
      const method = String(Array.isArray(route.method) ? route.method[0] : route.method);
      const known = ROUTES[`${method} ${url}`];
      const tag = url.split('/')[2] ?? 'other';
      if (known === undefined) return { schema: { tags: [tag], ...schema } as never, url };
      const { summary, description, answer = {}, status = 200, type = 'application/json' } = known;
      const response = { [status]: { description: summary, content: { [type]: { schema: answer } } } };
      return { schema: { ...schema, summary, description, tags: [tag], response } as never, url };
    },
  });
  let document: Promise<object> | undefined;
  const whole = () => {
    document ??= documentOf(app as unknown as FastifyInstance);
    return document;
  };
  const open = { schema: { hide: true } as object, config: { role: 'open', hot: true } as const };
  app.get('/openapi.json', open, async (_request, reply) => {
    return reply.header('content-type', 'application/json').send(JSON.stringify(await whole()));
  });
  app.get('/docs', open, async (_request, reply) => {
    return reply.header('content-type', 'text/html; charset=utf-8').send(docsPage(await whole()));
  });
}

type Operation = { parameters?: { in: string; name: string }[]; tags?: string[]; responses?: Record<string, unknown> };
interface Document {
  paths: Record<string, Record<string, Operation>>;
  components?: { schemas?: Record<string, unknown> };
}

async function documentOf(app: FastifyInstance): Promise<object> {
  const own = structuredClone(app.swagger()) as unknown as Document;
  const passed = await sandboxDocument();
  for (const [path, item] of Object.entries(passed.paths)) {
    if (NOT_FOR_CLIENTS.has(path)) continue;
    const here = path
      .replace('/v1/sandboxes/{name}', ONE)
      .replace(/\{id\}(?=\/|$)/g, (whole, at: number) => (at < ONE.length ? whole : '{number}'));
    const inner = own.paths[here] ?? {};
    for (const [method, operation] of Object.entries(item)) {
      inner[method] ??= { ...operation, parameters: operation.parameters?.map(renamed) };
    }
    own.paths[here] = inner;
  }
  for (const port of ['', '/{path}']) {
    const one = `${ONE}/ports/{port}${port}`;
    own.paths[one] = { get: portOperation(port) };
  }
  for (const item of Object.values(own.paths)) {
    for (const operation of Object.values(item)) {
      operation.responses = {
        ...operation.responses,
        default: { description: 'An error', content: { 'application/json': { schema: ref('Error') } } },
      };
    }
  }
  own.components = { ...own.components, schemas: { ...own.components?.schemas, Sandbox: SANDBOX, Error: ERROR } };
  return own;
}

/** As an edge has them, of a sandbox that nobody asks for. */
async function sandboxDocument(): Promise<Document> {
  const app = await sandboxApp({} as Parameters<typeof sandboxApp>[0]);
  try {
    await app.ready();
    return app.swagger() as unknown as Document;
  } finally {
    await app.close();
  }
}

function renamed(parameter: { in: string; name: string }) {
  if (parameter.in !== 'path') return parameter;
  if (parameter.name === 'name') return { ...parameter, name: 'id' };
  return parameter.name === 'id' ? { ...parameter, name: 'number' } : parameter;
}

function portOperation(path: string): Operation & { summary: string } {
  const names = path === '' ? ['id', 'port'] : ['id', 'port', 'path'];
  return {
    summary:
      path === ''
        ? 'Upgraded to dsec-tcp: bytes to and from a port inside, both ways'
        : 'Any request, and any upgrade, goes to what listens at the port inside',
    tags: ['sandboxes'],
    parameters: names.map((name) => ({ in: 'path', name, required: true, schema: text }) as never),
    responses: { [path === '' ? 101 : 200]: { description: 'As it answers' } },
  };
}
