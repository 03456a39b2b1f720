/** Nodes, images and what happens: what is asked of the cluster rather than of one sandbox. */
import { Type } from '@sinclair/typebox';
import {
  blobMapSvg,
  type HttpApp,
  type ImageStats,
  imageStats,
  inspectImage,
  jsonText,
  listImages,
  openImage,
} from '#imagesvc';
import { fail } from '../errors.ts';
import { ROOT } from '../iam/project-path.ts';
import { whose } from './access.ts';
import type { ApiParts } from './api-parts.ts';
import { deniedAttempts } from './denied.ts';
import { DrainBody, ProjectPath, SandboxQuery } from './request-schemas.ts';
import { callerOf } from './sandbox-routes.ts';

const StatsQuery = Type.Object(
  { depth: Type.Optional(Type.Integer({ minimum: 1, maximum: 16 })) },
  { additionalProperties: false },
);
const ProjectQuery = Type.Object({ project: Type.Optional(ProjectPath) }, { additionalProperties: false });

export function clusterRoutes(app: HttpApp, parts: ApiParts): void {
  const { access, edges, events, store } = parts;

  app.get('/v1/nodes', { config: { hot: true } }, async (request) => {
    await access.allow(request, 'node.read', ROOT);
    return { atMs: Date.now(), heardMsAgo: edges.heardMsAgo, nodes: edges.nodes };
  });
  app.post('/v1/nodes/:edge/drain', { schema: { body: DrainBody } }, async (request) => {
    const { edge } = request.params as { edge: string };
    await access.allow(request, 'node.drain', ROOT, edge);
    const { on } = request.body;
    await edges.ask(edge, { method: 'POST', path: '/v1/drain', body: { on } });
    const entry = {
      ...whose(request.identity),
      action: 'node.drain',
      project: ROOT,
      target: edge,
      requestId: request.id,
    };
    await access.audit({ ...entry, outcome: 'done', detail: { on } });
    await edges.poll();
    return { edge, draining: on };
  });
  app.delete('/v1/nodes/:edge/reservations', {}, async (request) => {
    const { edge } = request.params as { edge: string };
    await access.allow(request, 'node.drain', ROOT, edge);
    if (edges.isAlive(edge)) throw fail('EDGE_ALIVE', { edge });
    const released = await parts.iam.reconcile(edge, { epoch: 'gone', writtenAtMs: Date.now(), reservations: [] });
    const entry = {
      ...whose(request.identity),
      action: 'node.drain',
      project: ROOT,
      target: edge,
      requestId: request.id,
    };
    await access.audit({ ...entry, outcome: 'done', detail: { released: released.length } });
    return { edge, released: released.length };
  });

  app.get('/v1/images', {}, async (request) => {
    await access.allow(request, 'image.read', request.identity.project);
    return { images: await listImages(store) };
  });
  app.get('/v1/images/:name', {}, async (request) => {
    const { name } = request.params as { name: string };
    await access.allow(request, 'image.read', request.identity.project, name);
    return { ...(await inspectImage(store, name)) };
  });
  app.get('/v1/images/:name/stats', { schema: { querystring: StatsQuery } }, async (request) => {
    const { name } = request.params as { name: string };
    await access.allow(request, 'image.read', request.identity.project, name);
    return statsView(await imageStats(store, await openImage(store, name), { depth: request.query.depth ?? 1 }));
  });
  app.get('/v1/images/:name/stats.svg', { schema: { querystring: StatsQuery } }, async (request, reply) => {
    const { name } = request.params as { name: string };
    await access.allow(request, 'image.read', request.identity.project, name);
    const stats = await imageStats(store, await openImage(store, name), { depth: request.query.depth ?? 1 });
    return reply.header('content-type', 'image/svg+xml').send(blobMapSvg(stats));
  });

  app.get('/v1/denied', { schema: { querystring: SandboxQuery } }, async (request, reply) => {
    const { gone } = callerOf(request, reply);
    return deniedAttempts(parts, request.identity, request.query, gone);
  });

  app.get('/v1/events', { schema: { querystring: ProjectQuery } }, async (request, reply) => {
    const { project } = request.query;
    if (project !== undefined) await access.allow(request, 'sandbox.read', project);
    const { identity } = request;
    const mayRead = await access.readable(identity);
    const seesNodes = (await parts.iam.scope(identity, 'node.read'))(ROOT);
    events.stream(reply, request.id, (of) => {
      if (of === undefined) return seesNodes;
      const within = project === undefined || of === project || of.startsWith(`${project}/`);
      return within && mayRead(of);
    });
    return reply;
  });
}

function statsView({ blobs, directories, ...rest }: ImageStats): Record<string, unknown> {
  return {
    ...rest,
    blobs: blobs.map(({ chunks, ...blob }) => ({ ...blob, chunks: chunks.join('') })),
    directories: directories.map(({ path, ...heat }) => ({ ...jsonText('path', path), ...heat })),
  };
}
