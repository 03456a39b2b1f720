/** The description of the runtime service's HTTP, at /openapi.json and, for people, at /docs. Every route has its line here. */
import swagger from '@fastify/swagger';
import type { FastifyInstance } from 'fastify';
import { docsPage } from '#imagesvc';

const SANDBOX = '/v1/sandboxes/:name';

/** By method and path. */
const SUMMARIES: Readonly<Record<string, string>> = {
  'GET /v1/sandboxes': 'The sandboxes of this machine that run',
  'POST /v1/sandboxes': 'Makes a sandbox; the same requestId gives the same one',
  [`GET ${SANDBOX}`]: 'One sandbox',
  [`DELETE ${SANDBOX}`]: 'Removes a sandbox that has ended, with what it changed; with force ends it first',
  [`POST ${SANDBOX}/stop`]: 'Ends a sandbox; what it changed stays until it is removed',
  [`POST ${SANDBOX}/pause`]: 'Freezes a sandbox and gives its memory back',
  [`POST ${SANDBOX}/resume`]: 'Thaws a paused sandbox',
  [`POST ${SANDBOX}/pack-diff`]: 'Makes an image of what a sandbox has changed, while it runs',
  [`POST ${SANDBOX}/fork`]:
    'New sandboxes with the files of this one as they are now; with `memory` its processes go on in each',
  [`PUT ${SANDBOX}/limits`]: 'Changes limits of a sandbox that runs',
  [`GET ${SANDBOX}/usage`]: 'Processor time, memory, processes, input and output, disk',
  [`GET ${SANDBOX}/network`]: 'The network policy of a sandbox',
  [`PUT ${SANDBOX}/network`]: 'Changes the network policy, at once and for all connections',
  [`GET ${SANDBOX}/network/denied`]: 'Attempts that the policy denied',
  [`GET ${SANDBOX}/network/counters`]: 'Packets and bytes, allowed and denied',
  [`GET ${SANDBOX}/commands`]: 'Commands of a sandbox, oldest first',
  [`POST ${SANDBOX}/commands`]: 'Starts a command; the same requestId gives the same one',
  [`GET ${SANDBOX}/commands/:id`]: 'One command, with its result once it has ended',
  [`GET ${SANDBOX}/commands/:id/output`]: 'Its output from an offset of each stream, as frames',
  [`POST ${SANDBOX}/commands/:id/stdin`]: 'Bytes for its input, which is closed behind them unless close=false',
  [`POST ${SANDBOX}/commands/:id/signal`]: 'A signal to its process group',
  [`POST ${SANDBOX}/commands/:id/resize`]: 'Another size of its terminal',
  [`POST ${SANDBOX}/commands/:id/kill`]: 'SIGKILL to all that it has started',
  [`POST ${SANDBOX}/shells`]: 'Opens a shell session',
  [`POST ${SANDBOX}/shells/:id/run`]: 'Runs a command in the session, after those before it',
  [`POST ${SANDBOX}/shells/:id/expect`]: 'Waits until a text or a pattern is in the session’s output',
  [`POST ${SANDBOX}/shells/:id/stdin`]: 'Bytes for what runs in the session, on a terminal',
  [`GET ${SANDBOX}/shells/:id/output`]: 'The session’s output from an offset of each stream, as frames',
  [`POST ${SANDBOX}/shells/:id/resize`]: 'Another size of the session’s terminal',
  [`POST ${SANDBOX}/shells/:id/interrupt`]: 'SIGINT to what runs in the session',
  [`DELETE ${SANDBOX}/shells/:id`]: 'Ends the session with all that it started',
  [`GET ${SANDBOX}/screen`]: 'A picture of the screen of a full machine, as PNG',
  [`POST ${SANDBOX}/screen/input`]: 'Keys, text and mouse of a full machine, in order',
  [`GET ${SANDBOX}/screen/clipboard`]: 'What is in a clipboard of its guest; 204: nothing of this type',
  [`PUT ${SANDBOX}/screen/clipboard`]: 'Puts text or a picture there',
  [`GET ${SANDBOX}/console`]: 'What a full machine wrote to its serial console last; with follow what comes, too',
  [`POST ${SANDBOX}/console`]: 'Bytes for its serial console',
  [`GET ${SANDBOX}/files`]: 'The content of a file',
  [`PUT ${SANDBOX}/files`]: 'Writes a file, whole or not at all',
  [`DELETE ${SANDBOX}/files`]: 'Removes a file, or a folder with recursive',
  [`GET ${SANDBOX}/files/stat`]: 'What a path is',
  [`GET ${SANDBOX}/files/list`]: 'The entries of a folder',
  [`GET ${SANDBOX}/files/watch`]: 'What happens to a file or folder, a line of JSON an event, until whoever reads goes',
  [`GET ${SANDBOX}/files/parts`]: 'How far an upload has come: where to go on',
  [`PUT ${SANDBOX}/files/parts`]: 'Goes on with an upload; at its end it is verified and takes its place',
  [`GET ${SANDBOX}/files/digest`]: 'The sha256 of a file',
  [`GET ${SANDBOX}/files/link`]: 'Where a symbolic link leads',
  [`POST ${SANDBOX}/files/symlink`]: 'Makes a symbolic link at `to` that leads to `from`',
  [`POST ${SANDBOX}/files/mkdir`]: 'Makes a folder',
  [`POST ${SANDBOX}/files/rename`]: 'Renames a file or folder',
  [`POST ${SANDBOX}/files/upload`]: 'Copies a file or tree of this machine into the sandbox',
  [`POST ${SANDBOX}/files/download`]: 'Copies a file or tree of the sandbox to this machine',
};

export function summaryOf(method: string, path: string): string | undefined {
  return SUMMARIES[`${method} ${path}`];
}

/** Before any route is added. */
export async function describeRoutes(app: FastifyInstance): Promise<void> {
  await app.register(swagger, {
    openapi: {
      openapi: '3.1.0',
      info: {
        title: 'DSec runtime service',
        version: '1',
        description: 'Sandboxes of this machine: commands, shells, files, network, limits.',
      },
    },
    transform: ({ schema, url, route }) => {
      const method = String(Array.isArray(route.method) ? route.method[0] : route.method);
      const tags = [url.split('/')[4] ?? 'sandboxes'];
      return { schema: { ...schema, summary: summaryOf(method, url), tags }, url };
    },
  });
  app.get('/openapi.json', { schema: { hide: true } }, async (_request, reply) =>
    reply.header('content-type', 'application/json').send(JSON.stringify(app.swagger())),
  );
  app.get('/docs', { schema: { hide: true } }, async (_request, reply) =>
    reply.header('content-type', 'text/html; charset=utf-8').send(docsPage(app.swagger())),
  );
}
