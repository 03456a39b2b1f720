/** The catalog, and images browsed without mounting them. Listings are one JSON object a line: they may be very long. */
import { Readable } from 'node:stream';
import { Type } from '@sinclair/typebox';
import type { FastifyReply, FastifyRequest } from 'fastify';
import { type ByteString, byteString, display, fromText, hexOf } from '#base';
import { inspectImage, listImages, removeImage } from '../../catalog/catalog.ts';
import { fail } from '../../errors.ts';
import { changeJson, diffTrees } from '../../reader/diff-trees.ts';
import { isRegular } from '../../reader/inode.ts';
import { list } from '../../reader/list.ts';
import { statJson, statPath } from '../../reader/stat.ts';
import type { App, Shared } from '../app-types.ts';
import { parseRange } from '../byte-range.ts';
import type { BorrowedTree } from '../open-trees.ts';
import { body, CatQuery, DiffQuery, ImageParams, ListQuery, RemoveQuery, StatQuery } from '../schemas.ts';

const ImageRow = Type.Object({
  name: Type.String(),
  digest: Type.Optional(Type.String({ description: 'Left out when the ref is damaged' })),
  kind: Type.Optional(Type.String()),
  layers: Type.Integer(),
  metaBytes: Type.Number(),
  dataBytes: Type.Number(),
  sizeBytes: Type.Number(),
  problem: Type.Optional(Type.String({ description: 'Why it cannot be read' })),
});
const Anything = Type.Record(Type.String(), Type.Unknown());

export function imageRoutes(app: App, shared: Shared): void {
  const { store, trees } = shared;

  app.get(
    '/v1/images',
    {
      config: { role: 'read' },
      schema: {
        operationId: 'listImages',
        summary: 'List images, by name',
        tags: ['images'],
        response: { 200: Type.Object({ images: Type.Array(ImageRow) }) },
      },
    },
    async () => ({ images: await listImages(store) }),
  );

  app.get(
    '/v1/images/:image',
    {
      config: { role: 'read' },
      schema: {
        operationId: 'inspectImage',
        summary: 'Show layers, sizes and config of an image',
        tags: ['images'],
        params: ImageParams,
        response: { 200: Anything },
      },
    },
    async (request) => ({ ...(await inspectImage(store, request.params.image)) }),
  );

  app.delete(
    '/v1/images/:image',
    {
      config: { role: 'admin' },
      schema: {
        operationId: 'removeImage',
        summary: "Remove an image's name, and the blobs that nothing else needs",
        tags: ['images'],
        params: ImageParams,
        querystring: RemoveQuery,
        response: {
          200: Type.Object({
            name: Type.String(),
            digest: Type.Optional(Type.String()),
            deleted: Type.Array(Type.String()),
            freedBytes: Type.Number(),
            kept: Type.Integer(),
            traces: Type.Integer(),
            problem: Type.Optional(Type.String()),
          }),
        },
      },
    },
    async (request) => {
      const { dryRun } = request.query;
      const removed = await removeImage(store, request.params.image, {
        dryRun,
        inUse: await shared.inUse(),
      });
      return { ...removed, deleted: [...removed.deleted] };
    },
  );

  app.get(
    '/v1/images/:image/ls',
    {
      config: { role: 'read', hot: true },
      schema: {
        operationId: 'listFiles',
        summary: 'List a folder of an image, one JSON object a line',
        tags: ['files'],
        params: ImageParams,
        querystring: ListQuery,
        response: { 200: body('path, kind, mode, sizeBytes, nlink, uid, gid, mtimeSec, ...', 'application/x-ndjson') },
      },
    },
    async (request, reply) => {
      const borrowed = await trees.borrow(request.params.image);
      const { recursive } = request.query;
      return sendLines(reply, borrowed, list(borrowed.tree, pathOf(request.query), { json: true, recursive }));
    },
  );

  app.get(
    '/v1/images/:image/stat',
    {
      config: { role: 'read', hot: true },
      schema: {
        operationId: 'statFile',
        summary: 'Show all attributes of a path in an image, and where its bytes lie',
        tags: ['files'],
        params: ImageParams,
        querystring: StatQuery,
        response: { 200: Anything },
      },
    },
    async (request) => {
      const borrowed = await trees.borrow(request.params.image);
      try {
        return statJson(statPath(borrowed.tree, pathOf(request.query), request.query.follow ?? false));
      } finally {
        borrowed.release();
      }
    },
  );

  app.route({
    method: ['GET', 'HEAD'],
    url: '/v1/images/:image/cat',
    config: { role: 'read', hot: true },
    schema: {
      operationId: 'readFile',
      summary: 'Read a file of an image, or a range of it',
      description:
        'Links are followed inside the image. Every byte is verified. Takes Range, If-Range and If-None-Match.',
      tags: ['files'],
      params: ImageParams,
      querystring: CatQuery,
      response: {
        200: body('The file', 'application/octet-stream'),
        206: body('A range of it', 'application/octet-stream'),
        304: { type: 'null', description: 'It is what If-None-Match names' },
      },
    },
    handler: async (request, reply) => {
      const borrowed = await trees.borrow((request.params as { image: string }).image);
      return sendFile(request, reply, borrowed, pathOf(request.query as { path?: string; pathBase64?: string }));
    },
  });

  app.get(
    '/v1/images/:image/diff',
    {
      config: { role: 'read' },
      schema: {
        operationId: 'diffImages',
        summary: 'What the image `with` has that this one has not, and the other way round, one JSON object a line',
        tags: ['files'],
        params: ImageParams,
        querystring: DiffQuery,
        response: { 200: body('path, change, kind, what, sizeBefore, sizeAfter', 'application/x-ndjson') },
      },
    },
    async (request, reply) => {
      const { with: other, ignoreMtime } = request.query;
      const before = await trees.borrow(request.params.image);
      const after = await trees.borrow(other).catch((error) => {
        before.release();
        throw error;
      });
      const both = {
        release() {
          before.release();
          after.release();
        },
      };
      const changes = diffTrees(before.tree, after.tree, { ignoreMtime });
      return sendLines(
        reply,
        both,
        (async function* () {
          for await (const change of changes) yield `${JSON.stringify(changeJson(change))}\n`;
        })(),
      );
    },
  );
}

function pathOf({ path, pathBase64 }: { path?: string; pathBase64?: string }): ByteString {
  if (pathBase64 !== undefined) return byteString(Buffer.from(pathBase64, 'base64'));
  return fromText(path ?? '/');
}

/** What fails before the first piece becomes an error answer; what fails later breaks the connection off. */
async function sendLines(
  reply: FastifyReply,
  borrowed: Pick<BorrowedTree, 'release'>,
  pieces: Iterable<string> | AsyncIterable<string>,
): Promise<FastifyReply> {
  const stream = await begun(pieces, () => borrowed.release());
  return reply.header('content-type', 'application/x-ndjson').send(stream);
}

async function begun<T extends string | Buffer>(
  pieces: Iterable<T> | AsyncIterable<T>,
  release: () => void,
): Promise<Readable> {
  const iterator = Symbol.asyncIterator in pieces ? pieces[Symbol.asyncIterator]() : pieces[Symbol.iterator]();
  let first: IteratorResult<T>;
  try {
    first = await iterator.next();
  } catch (error) {
    release();
    throw error;
  }
  const all = async function* () {
    for (let piece = first; !piece.done; piece = await iterator.next()) yield piece.value;
  };
  const stream = Readable.from(all(), { objectMode: false });
  stream.once('close', release);
  return stream;
}

async function sendFile(
  request: FastifyRequest,
  reply: FastifyReply,
  borrowed: BorrowedTree,
  path: ByteString,
): Promise<FastifyReply> {
  const { tree, digest } = borrowed;
  try {
    const node = tree.lookup(path, true);
    if (!isRegular(node.inode)) {
      throw fail('TREE_NOT_A_FILE', { image: tree.name, path: display(path), kind: node.kind });
    }
    const size = node.inode.sizeBytes;
    const etag = `"${hexOf(digest).slice(0, 32)}-${node.layer}-${node.inode.nid}"`;
    reply.header('etag', etag).header('accept-ranges', 'bytes').header('content-type', 'application/octet-stream');
    // Whatever a browser would make of the bytes, it must not.
    reply.header('content-security-policy', "default-src 'none'; sandbox");
    if (request.headers['if-none-match']?.split(',').some((tag) => tag.trim() === etag || tag.trim() === '*')) {
      borrowed.release();
      return reply.code(304).send();
    }
    const ifRange = request.headers['if-range'];
    const wanted = ifRange === undefined || ifRange === etag ? parseRange(request.headers.range, size) : undefined;
    if (wanted === 'unsatisfiable') {
      reply.header('content-range', `bytes */${size}`);
      throw fail('SERVER_RANGE', { range: request.headers.range, size, path: display(path) });
    }
    const { offset, length } = wanted ?? { offset: 0, length: size };
    reply.header('content-length', length);
    if (wanted !== undefined) {
      reply.code(206).header('content-range', `bytes ${offset}-${offset + length - 1}/${size}`);
    }
    if (request.method === 'HEAD') {
      borrowed.release();
      return reply.send();
    }
    return reply.send(await begun(tree.stream(node, offset, length), () => borrowed.release()));
  } catch (error) {
    borrowed.release();
    reply.removeHeader('content-length').removeHeader('etag').removeHeader('accept-ranges');
    throw error;
  }
}
