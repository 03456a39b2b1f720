/** The public API in front of a made cluster, with the console: what the tests of the page talk to where no real cluster is needed. */
import { Readable } from 'node:stream';
import fastify, { type FastifyInstance, type FastifyReply } from 'fastify';
import { consoleRoutes } from '../../console/console-routes.ts';
import { outputFrame } from '../../runtime-service/output-frames.ts';
import * as made from './made-cluster.ts';
import { MadeShell } from './made-shell.ts';

export const TOKEN = 'dsec_test-token';
export const READER = 'dsec_reader-token';

export interface MadeServer {
  readonly url: string;
  /** Method, path and body of what asked for a change. */
  readonly asked: string[];
  readonly shells: MadeShell[];
  readonly nodes: made.MadeNode[];
  readonly sandboxes: Map<string, made.MadeSandbox>;
  /** How many listen to events. */
  readonly listeners: () => number;
  tell(event: string, data: object): void;
  /** Every token is refused from now on. */
  revoke(): void;
  close(): Promise<void>;
}

export async function startMadeServer(
  options: { readonly sandboxes?: number; readonly nodes?: number } = {},
): Promise<MadeServer> {
  const app = fastify({ logger: false, forceCloseConnections: true, routerOptions: { maxParamLength: 1000 } });
  const nodes = made.madeNodes(options.nodes);
  const sandboxes = new Map(made.madeSandboxes(options.sandboxes).map((one) => [one.id, one]));
  const asked: string[] = [];
  const shells: MadeShell[] = [];
  const streams = new Set<FastifyReply>();
  let revoked = false;
  app.addContentTypeParser('application/octet-stream', { parseAs: 'buffer' }, (_request, body, done) =>
    done(null, body),
  );
  const refuse = (reply: FastifyReply, status: number, code: string, message: string) =>
    reply.code(status).send({ error: { code, message, retryable: false, exit: 1, requestId: 'r-1' } });
  app.addHook('onRequest', async (request, reply) => {
    if (!request.url.startsWith('/v1/')) return;
    const token = request.headers.authorization?.replace('Bearer ', '');
    if (revoked || (token !== TOKEN && token !== READER)) {
      return refuse(reply, 401, 'IAM_TOKEN_INVALID', 'the token is not valid');
    }
    if (token === READER && request.url.startsWith('/v1/audit'))
      return refuse(reply, 403, 'IAM_DENIED', 'audit.read is needed');
    if (request.method !== 'GET') asked.push(`${request.method} ${request.url}`);
  });
  consoleRoutes(app);
  const known = (id: string) => sandboxes.get(id);
  type Sandbox = { Params: { id: string; n: string } };

  app.get('/v1/whoami', () => ({
    principal: 'ana',
    kind: 'user',
    project: 'root',
    tokenId: 't1',
    actions: [],
    policies: [],
  }));
  app.get('/v1/nodes', () => ({ epoch: 'w1', atMs: Date.now(), nodes }));
  app.post<{ Params: { edge: string }; Body: { on: boolean } }>('/v1/nodes/:edge/drain', ({ params, body }) => {
    const node = nodes.find(({ edge }) => edge === params.edge)!;
    node.report.state = body.on ? 'draining' : 'healthy';
    return {};
  });
  app.get<{ Querystring: { state?: string } }>('/v1/sandboxes', ({ query: { state } }) => {
    // Those that have ended have to be asked for.
    const shown = [...sandboxes.values()].filter((one) =>
      state === undefined ? one.state !== 'ended' : one.state === state,
    );
    return { sandboxes: shown, unreachable: [] };
  });
  app.get<Sandbox>('/v1/sandboxes/:id', ({ params }, reply) => {
    return known(params.id) ?? refuse(reply, 410, 'SANDBOX_GONE', `${params.id} is gone`);
  });
  app.delete<Sandbox>('/v1/sandboxes/:id', ({ params }) => {
    sandboxes.delete(params.id);
    return {};
  });
  for (const [what, state] of [
    ['stop', 'ended'],
    ['pause', 'paused'],
    ['resume', 'running'],
  ] as const) {
    app.post<Sandbox>(`/v1/sandboxes/:id/${what}`, ({ params }) => {
      known(params.id)!.state = state;
      return {};
    });
  }
  let cpuUsec = 9e8;
  app.get('/v1/sandboxes/:id/usage', () => {
    cpuUsec += 1.1e6 + Math.sin(Date.now() / 3000) * 5e5;
    const wave = 1 + Math.sin(Date.now() / 5000) / 3;
    return {
      atMs: Date.now(),
      cpuUsec,
      throttledUsec: 4e7,
      memory: { usedBytes: 7e8 * wave, totalBytes: 9e8, peakBytes: 1.1e9, outOfMemory: 0 },
      pids: Math.round(14 * wave),
      io: { readBytes: cpuUsec * 3, writeBytes: cpuUsec, reads: 10, writes: 10 },
      disk: { usedBytes: 8.8 * 2 ** 30, usedInodes: 5000, limitBytes: 10 * 2 ** 30 },
      limits: { cpus: 1, memoryBytes: 2 ** 30, pids: 4096, diskBytes: 10 * 2 ** 30 },
    };
  });
  const commands = [
    {
      id: 1,
      args: ['pip', 'install', '-r', 'requirements.txt'],
      startedMs: made.NOW - 90_000,
      running: false,
      result: { exitCode: 0, durationMs: 41_200 },
    },
    {
      id: 2,
      args: ['sh', '-c', `echo ${made.HOSTILE}`],
      startedMs: made.NOW - 60_000,
      running: false,
      result: { exitCode: 2, durationMs: 310 },
    },
    {
      id: 3,
      args: ['pytest', '-x'],
      startedMs: made.NOW - 30_000,
      running: false,
      result: { exitCode: 137, signal: 'SIGKILL', outOfMemory: true, durationMs: 20_000 },
    },
  ];
  app.get('/v1/sandboxes/:id/commands', () => [
    ...commands,
    ...shells.map(({ id, ended }) => ({ id, args: ['/bin/sh', '-c', 'shell'], startedMs: made.NOW, running: !ended })),
  ]);
  app.post<{ Body: { terminal?: { rows: number; columns: number } } }>(
    '/v1/sandboxes/:id/commands',
    ({ body }, reply) => {
      const shell = new MadeShell(10 + shells.length, body.terminal ?? { rows: 24, columns: 80 });
      shells.push(shell);
      reply.code(201);
      return { id: shell.id, running: true };
    },
  );
  const shellOf = ({ n }: { n: string }) => shells.find(({ id }) => id === Number(n));
  app.get<Sandbox & { Querystring: { stdout?: string } }>(
    '/v1/sandboxes/:id/commands/:n/output',
    ({ params, query }, reply) => {
      reply.type('application/octet-stream');
      const shell = shellOf(params);
      if (shell !== undefined) {
        shell.readers++;
        reply.raw.once('close', () => shell.readers--);
        return reply.send(shell.frames(Number(query.stdout ?? 0)));
      }
      const lines = Array.from(
        { length: 60 },
        (_, i) => `line ${i}: ${i === 3 ? made.HOSTILE : 'collected 412 items'}\n`,
      ).join('');
      return reply.send(
        Readable.from([
          outputFrame.part({ stream: 'stdout', offset: 0, bytes: Buffer.from(lines) }),
          outputFrame.part({ stream: 'stdout', offset: lines.length, missingBytes: 12_345 }),
          outputFrame.part({
            stream: 'stderr',
            offset: 0,
            bytes: Buffer.from('\x1b[31merror:\x1b[0m one test failed\n'),
          }),
          outputFrame.result({
            exitCode: 2,
            timedOut: false,
            outOfMemory: false,
            stdoutBytes: 1,
            stderrBytes: 1,
            durationMs: 3,
          }),
        ]),
      );
    },
  );
  app.post<Sandbox>('/v1/sandboxes/:id/commands/:n/stdin', ({ params, body }) => {
    shellOf(params)?.type(body as Buffer);
    return {};
  });
  app.post<Sandbox & { Body: { rows: number; columns: number } }>(
    '/v1/sandboxes/:id/commands/:n/resize',
    ({ params, body }) => {
      shellOf(params)!.size = body;
      return {};
    },
  );
  app.post<Sandbox>('/v1/sandboxes/:id/commands/:n/kill', ({ params }) => {
    shellOf(params)?.end(137, 'SIGKILL');
    return {};
  });
  app.get('/v1/sandboxes/:id/network/counters', () => ({
    allowedPackets: 91_234,
    allowedBytes: 7e7,
    deniedPackets: 412,
    deniedBytes: 30_000,
    unloggedPackets: 0,
    openedAddresses: 12,
  }));
  app.get<Sandbox>('/v1/sandboxes/:id/network/denied', ({ params }) => made.madeDenied(params.id));
  app.get('/v1/images', () => ({ images: made.madeImages() }));
  app.get<{ Params: { name: string } }>('/v1/images/:name', ({ params }) => made.madeImage(params.name));
  app.get<{ Params: { name: string } }>('/v1/images/:name/stats', ({ params }) => made.madeStats(params.name));
  app.get('/v1/denied', () => ({ denied: made.madeDenied() }));
  app.get('/v1/projects', () => ({ projects: made.madeProjects() }));
  app.get('/v1/quotas', () => ({ quotas: made.madeQuotas() }));
  app.get('/v1/audit', () => ({ records: made.madeAudit() }));
  app.get('/v1/events', (_request, reply) => {
    reply.hijack();
    reply.raw.writeHead(200, { 'content-type': 'text/event-stream' }).write(': hello\n\n');
    streams.add(reply);
    reply.raw.once('close', () => streams.delete(reply));
  });
  const url = await app.listen({ port: 0, host: '127.0.0.1' });
  return {
    url,
    asked,
    shells,
    nodes,
    sandboxes,
    listeners: () => streams.size,
    tell(event, data) {
      const text = JSON.stringify({ type: event, ...data });
      for (const { raw } of streams) raw.write(`event: ${event}\ndata: ${text}\n\n`);
    },
    revoke() {
      revoked = true;
    },
    close: () => closed(app),
  };
}

async function closed(app: FastifyInstance): Promise<void> {
  await app.close();
}
