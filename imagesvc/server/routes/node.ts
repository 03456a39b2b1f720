/** This node: its mounts, and garbage collection. */
import { Type } from '@sinclair/typebox';
import { openImage } from '../../catalog/catalog.ts';
import { reclaimDataServers } from '../../data-server/data-server.ts';
import { blobFilesFor } from '../../data-server/lazy-blob-files.ts';
import { fail } from '../../errors.ts';
import { collectNode } from '../../gc/collect-node.ts';
import { listMounts, mountImage, unmount } from '../../mount/image-mount.ts';
import type { MountRecord } from '../../mount/mount-record.ts';
import type { App, Shared } from '../app-types.ts';
import { GcBody, GcResult, MountBody, MountParams, UnmountQuery } from '../schemas.ts';

const MountSchema = Type.Object({
  id: Type.String(),
  target: Type.String(),
  image: Type.Optional(Type.Object({ name: Type.String(), manifest: Type.String() })),
  layers: Type.Array(Type.String(), { description: 'Metadata digests, bottom first' }),
  upper: Type.Optional(Type.String()),
  createdAt: Type.Optional(Type.String()),
  state: Type.Optional(Type.String()),
  lazy: Type.Optional(Type.Boolean({ description: 'Its data is fetched when it is read' })),
});

/** For answers: what a record says of data servers is this node's own business. */
function mountView({ lazy, layers, ...record }: MountRecord) {
  return { ...record, layers: [...layers], lazy: lazy?.some(({ served, reader }) => served && !reader) ?? false };
}

export function nodeRoutes(app: App, { store, paths, folders, inUse }: Shared): void {
  app.get(
    '/v1/mounts',
    {
      config: { role: 'read' },
      schema: {
        operationId: 'listMounts',
        summary: 'List the mounted images of this node',
        tags: ['node'],
        response: { 200: Type.Object({ mounts: Type.Array(MountSchema) }) },
      },
    },
    async () => ({ mounts: (await listMounts(folders)).map(mountView) }),
  );

  app.post(
    '/v1/mounts',
    {
      config: { role: 'admin' },
      schema: {
        operationId: 'mountImage',
        summary: 'Mount an image at a folder of this node',
        tags: ['node'],
        body: MountBody,
        response: { 201: MountSchema },
      },
    },
    async (request, reply) => {
      const { image: name, target, upper, lazy, prefetch = true } = request.body;
      const where = { target: paths.check(target), upper: upper === undefined ? undefined : paths.check(upper) };
      const image = await openImage(store, name);
      await reclaimDataServers(folders);
      const onTraceProblem = (text: string) => request.log.warn(text);
      const files = blobFilesFor({ ...folders, store, lazy, prefetch: prefetch ? [image] : [], onTraceProblem });
      const mounted = await mountImage({ ...folders, ...where, files, image });
      await files.handedOver?.();
      const named = { name: image.name, manifest: image.manifestDigest };
      return reply.code(201).send({ ...mounted, layers: [...mounted.layers], image: named });
    },
  );

  app.delete(
    '/v1/mounts/:id',
    {
      config: { role: 'admin' },
      schema: {
        operationId: 'unmountImage',
        summary: 'Unmount an image',
        tags: ['node'],
        params: MountParams,
        querystring: UnmountQuery,
        response: { 200: MountSchema },
      },
    },
    async (request) => {
      const { id } = request.params;
      const found = (await listMounts(folders)).find((record) => record.id === id);
      if (found === undefined) throw fail('MOUNT_NOT_FOUND', { target: id });
      // Others than those at allowed folders belong to sandboxes, or to whoever is at the console.
      paths.check(found.target);
      return mountView(await unmount(id, { ...folders, lazy: request.query.lazy }));
    },
  );

  app.post(
    '/v1/gc',
    {
      config: { role: 'admin' },
      schema: {
        operationId: 'collectGarbage',
        summary: 'Delete blobs that no name leads to, or say which',
        description: 'What is young, mounted on this node, or needed by a process at work, stays.',
        tags: ['node'],
        body: GcBody,
        response: { 200: GcResult },
      },
    },
    async (request) => {
      const collected = await collectNode(store, { ...folders, ...request.body, inUse: await inUse() });
      return { ...collected, deleted: [...collected.deleted] };
    },
  );
}
