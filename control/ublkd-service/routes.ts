/** What can be asked about disks: attaching and detaching, and the work on a disk while it is used. */
import type { FastifyReply } from 'fastify';
import type { HttpApp } from '#imagesvc';
import type { DiskDaemon, ZfileOptions } from '#ublk-daemon';
import { fail } from '../errors.ts';
import {
  AttachBody,
  CompactDone,
  Detached,
  DetachQuery,
  DiskDetails,
  DiskList,
  DiskParams,
  DiskSchema,
  ExportBody,
  ExportDone,
  PackBody,
  PackDone,
  ResizeBody,
  ResizeDone,
  SnapshotBody,
  SnapshotMade,
} from './schemas.ts';

const tags = ['disks'];

export function diskRoutes(app: HttpApp, daemon: DiskDaemon): void {
  app.get(
    '/v1/disks',
    {
      config: { hot: true },
      schema: {
        operationId: 'listDisks',
        summary: 'What is attached, and what should be and is not',
        tags,
        response: { 200: DiskList },
      },
    },
    async () => ({
      disksFolder: daemon.disksRoot,
      disks: daemon.list().map((disk) => ({ ...disk, working: [...disk.working] })),
    }),
  );

  app.post(
    '/v1/disks',
    {
      schema: {
        operationId: 'attachDisk',
        summary: 'Attach a disk or a raw file',
        description: 'Asked again for the same, it gives what there is (200). One that failed is tried again.',
        tags,
        body: AttachBody,
        response: { 200: DiskSchema, 201: DiskSchema },
      },
    },
    async (request, reply) => {
      const { disk, file, ...wish } = request.body;
      if ((disk === undefined) === (file === undefined)) {
        throw fail('UBLKD_REQUEST', { problem: 'give disk or file' });
      }
      const named = disk === undefined ? { kind: 'file' as const, name: file! } : { kind: 'disk' as const, name: disk };
      const attached = await daemon.attach({ ...named, ...wish });
      return reply.code(attached.created ? 201 : 200).send({ ...attached.disk, working: [...attached.disk.working] });
    },
  );

  app.get(
    '/v1/disks/:name',
    {
      schema: {
        operationId: 'showDisk',
        summary: 'One disk with its figures',
        tags,
        params: DiskParams,
        response: { 200: DiskDetails },
      },
    },
    async (request) => {
      const view = daemon.view(request.params.name);
      const seen = { ...view, working: [...view.working] };
      if (view.state !== 'attached') return seen;
      const { attachment, source } = daemon.attached(view.name);
      const { opened, target } = source;
      return {
        ...seen,
        usedBy: await attachment.usedBy(),
        layers: opened?.disk.layerCount,
        ...opened?.disk.usage,
        lastError: target.lastError,
        operations: target.counts,
      };
    },
  );

  app.delete(
    '/v1/disks/:name',
    {
      schema: {
        operationId: 'detachDisk',
        summary: 'Detach a disk',
        description:
          'Refused while it is in use, unless forced: then its users get errors. Everything answered before is flushed.',
        tags,
        params: DiskParams,
        querystring: DetachQuery,
        response: { 200: Detached },
      },
    },
    async (request) => daemon.detach(request.params.name, { force: request.query.force === true }),
  );

  app.post(
    '/v1/disks/:name/snapshot',
    {
      schema: {
        operationId: 'snapshotDisk',
        summary: 'Keep the disk as it is now under a name',
        description: 'Writes wait for about as long as a flush takes.',
        tags,
        params: DiskParams,
        body: SnapshotBody,
        response: { 200: SnapshotMade },
      },
    },
    async (request) => {
      const { snapshot } = request.body;
      const { name } = request.params;
      const { uuid, path } = await daemon.attached(name).snapshot(snapshot);
      return { disk: name, snapshot, uuid, layer: path };
    },
  );

  app.post(
    '/v1/disks/:name/compact',
    {
      schema: {
        operationId: 'compactDisk',
        summary: 'Give back the room that overwritten and discarded data takes',
        tags,
        params: DiskParams,
        response: { 200: CompactDone },
      },
    },
    async (request) => ({ disk: request.params.name, ...(await daemon.attached(request.params.name).compact()) }),
  );

  app.post(
    '/v1/disks/:name/pack-diff',
    {
      schema: {
        operationId: 'packDiff',
        summary: 'Write what was changed as one OverlayBD layer, as of now',
        description: 'A file of this machine. A caller who goes away ends it, and nothing of the file stays.',
        tags,
        params: DiskParams,
        body: PackBody,
        response: { 200: PackDone },
      },
    },
    async (request, reply) => {
      const { compress, blockSizeKiB = 4, ...wish } = request.body;
      if (wish.since !== undefined && wish.whole)
        throw fail('UBLKD_REQUEST', { problem: 'give since or whole, not both' });
      const zfile: ZfileOptions | undefined =
        compress === undefined ? undefined : { algorithm: compress, blockSize: blockSizeKiB * 1024 };
      const disk = daemon.attached(request.params.name);
      return { disk: request.params.name, ...(await disk.packDiff({ ...wish, zfile, signal: goneSignal(reply) })) };
    },
  );

  app.post(
    '/v1/disks/:name/resize',
    {
      schema: {
        operationId: 'resizeDisk',
        summary: 'Make the disk larger',
        tags,
        params: DiskParams,
        body: ResizeBody,
        response: { 200: ResizeDone },
      },
    },
    async (request) => {
      const { name } = request.params;
      return { disk: name, ...(await daemon.attached(name).resize(request.body.sizeBytes)) };
    },
  );

  app.post(
    '/v1/disks/:name/export',
    {
      schema: {
        operationId: 'exportDisk',
        summary: 'Write what the disk holds now as a raw file or as qcow2',
        tags,
        params: DiskParams,
        body: ExportBody,
        response: { 200: ExportDone },
      },
    },
    async (request, reply) => {
      const { format, output } = request.body;
      const disk = daemon.attached(request.params.name);
      const { sizeBytes } = await disk.exportTo(format, output, goneSignal(reply));
      return { disk: request.params.name, format, file: output, sizeBytes };
    },
  );
}

/** Aborted when the caller goes away before there is an answer. */
function goneSignal(reply: FastifyReply): AbortSignal {
  const gone = new AbortController();
  reply.raw.once('close', () => {
    if (!reply.raw.writableFinished) gone.abort(fail('UBLKD_CALLER_GONE'));
  });
  return gone.signal;
}
