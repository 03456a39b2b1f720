/** Traces of images: what their starts read (docs/traces.md). Recorded on a node, kept here, fetched ahead by every node. */
import { Type } from '@sinclair/typebox';
import { openImage } from '../../catalog/catalog.ts';
import { MAX_TRACE_BYTES, traceFrom, traceJson } from '../../trace/trace.ts';
import { checkTraceName, keepTrace, listTraces, readTrace, removeTrace, traceOf } from '../../trace/trace-store.ts';
import type { App, Shared } from '../app-types.ts';
import { ImageParams, TraceBody, TraceParams } from '../schemas.ts';

const TraceRow = Type.Object({
  name: Type.String(),
  digest: Type.String(),
  chunks: Type.Optional(Type.Integer()),
  bytes: Type.Optional(Type.Number()),
  files: Type.Optional(Type.Integer()),
  command: Type.Optional(Type.Array(Type.String())),
});
const Anything = Type.Record(Type.String(), Type.Unknown());

export function traceRoutes(app: App, { store }: Shared): void {
  const rowOf = (row: Awaited<ReturnType<typeof keepTrace>>) => ({ ...row, command: row.command && [...row.command] });

  app.get(
    '/v1/images/:image/traces',
    {
      config: { role: 'read' },
      schema: {
        operationId: 'listTraces',
        summary: 'List the traces of an image, by name',
        tags: ['traces'],
        params: ImageParams,
        response: { 200: Type.Object({ traces: Type.Array(TraceRow) }) },
      },
    },
    async (request) => {
      const image = await openImage(store, request.params.image);
      return { traces: (await listTraces(store, image.manifestDigest)).map(rowOf) };
    },
  );

  app.get(
    '/v1/images/:image/merged-trace',
    {
      config: { role: 'read' },
      schema: {
        operationId: 'readMergedTrace',
        summary: 'Read all traces of an image as one, as they are used',
        tags: ['traces'],
        params: ImageParams,
        response: { 200: Anything },
      },
    },
    async (request) => traceJson(await traceOf(store, await openImage(store, request.params.image))),
  );

  app.get(
    '/v1/images/:image/traces/:trace',
    {
      config: { role: 'read' },
      schema: {
        operationId: 'readTrace',
        summary: 'Read a trace',
        tags: ['traces'],
        params: TraceParams,
        response: { 200: Anything },
      },
    },
    async (request) => {
      const { image: name, trace } = request.params;
      return traceJson(await readTrace(store, await openImage(store, name), trace));
    },
  );

  app.put(
    '/v1/images/:image/traces/:trace',
    {
      config: { role: 'write' },
      bodyLimit: MAX_TRACE_BYTES,
      schema: {
        operationId: 'keepTrace',
        summary: 'Keep a trace with an image, in place of one of the same name',
        description: 'It must be of this very image: of its manifest digest and its blobs.',
        tags: ['traces'],
        params: TraceParams,
        body: TraceBody,
        response: { 200: TraceRow },
      },
    },
    async (request) => {
      const { image: name, trace } = request.params;
      checkTraceName(trace);
      const image = await openImage(store, name);
      return rowOf(await keepTrace(store, image, trace, traceFrom(request.body, trace)));
    },
  );

  app.delete(
    '/v1/images/:image/traces/:trace',
    {
      config: { role: 'admin' },
      schema: {
        operationId: 'removeTrace',
        summary: 'Remove a trace',
        tags: ['traces'],
        params: TraceParams,
        response: { 200: Type.Object({ image: Type.String(), removed: Type.String() }) },
      },
    },
    async (request) => {
      const { image: name, trace } = request.params;
      const image = await openImage(store, name);
      await removeTrace(store, image, trace);
      return { image: image.name, removed: trace };
    },
  );
}
