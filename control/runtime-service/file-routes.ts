/** Files of a sandbox over HTTP beyond the plain ones: watches, uploads that go on after a break, digests, links. */
import { Readable } from 'node:stream';
import { Type } from '@sinclair/typebox';
import type { FileEvent } from '#runtime';
import { type AddRoute, errorOf, ONE_SANDBOX, stopWith } from './route.ts';

const Text = Type.String({ maxLength: 1 << 16 });
const Count = (maximum: number) => Type.Integer({ minimum: 0, maximum });
const Bytes = Count(Number.MAX_SAFE_INTEGER);
const WatchQuery = Type.Object({ path: Text, recursive: Type.Optional(Type.Boolean()) });
const Upload = {
  path: Text,
  size: Bytes,
  sha256: Type.String({ pattern: '^[0-9a-f]{64}$' }),
  mode: Type.Optional(Count(0o7777)),
  uid: Type.Optional(Count(0xfffffffe)),
  gid: Type.Optional(Count(0xfffffffe)),
  modifiedMs: Type.Optional(Type.Number()),
};
const UploadQuery = Type.Object(Upload);
const PartQuery = Type.Object({ ...Upload, offset: Bytes });
const PathQuery = Type.Object({ path: Text });
/** `from`: what it leads to; `to`: where it is. */
const LinkBody = Type.Object({ from: Text, to: Text }, { additionalProperties: false });

/** So that whoever reads knows that it still watches. */
const ALIVE_MS = 15_000;

export function fileRoutes(route: AddRoute): void {
  const files = `${ONE_SANDBOX}/files`;
  route('GET', `${files}/watch`, { querystring: WatchQuery }, async ({ sandbox, query, reply }) => {
    const watch = await sandbox().watch(query.path, { recursive: query.recursive, signal: stopWith(reply) });
    reply.header('content-type', 'application/x-ndjson');
    return reply.send(Readable.from(linesOf(watch), { objectMode: false }));
  });
  route('GET', `${files}/parts`, { querystring: UploadQuery }, ({ sandbox, query }) =>
    sandbox().files.uploadState(query),
  );
  route('PUT', `${files}/parts`, { querystring: PartQuery }, ({ sandbox, query, request }) => {
    const { offset, ...spec } = query;
    const content = request.body instanceof Readable ? request.body : Readable.from([]);
    return sandbox().files.uploadPart(spec, offset, content as AsyncIterable<Buffer>);
  });
  route('GET', `${files}/link`, { querystring: PathQuery }, async ({ sandbox, query }) => {
    const target = await sandbox().files.readlink(query.path);
    return { target: target.toString(), targetBase64: target.toString('base64') };
  });
  route('POST', `${files}/symlink`, { body: LinkBody }, async ({ sandbox, body }) => {
    await sandbox().files.symlink(body.from, body.to);
    return {};
  });
  route('GET', `${files}/digest`, { querystring: PathQuery }, async ({ sandbox, query }) => ({
    sha256: await sandbox().files.digest(query.path),
  }));
}

/** The first says that it watches; an empty one that nothing has happened. */
async function* linesOf(watch: AsyncIterable<FileEvent>): AsyncGenerator<string> {
  const events = watch[Symbol.asyncIterator]();
  try {
    yield `${JSON.stringify({ event: 'watching' })}\n`;
    for (let next = events.next(); ; ) {
      const one = await soon(next);
      if (one === undefined) {
        yield '\n';
        continue;
      }
      if (one.done === true) return;
      yield `${JSON.stringify(eventView(one.value))}\n`;
      next = events.next();
    }
  } catch (thrown) {
    const { code, message, hint, exit } = errorOf(thrown);
    yield `${JSON.stringify({ error: { code, message, hint, exit } })}\n`;
  } finally {
    await events.return?.();
  }
}

/** Undefined: not yet. */
async function soon<T>(work: Promise<T>): Promise<T | undefined> {
  let timer: NodeJS.Timeout | undefined;
  const quiet = new Promise<undefined>((resolve) => {
    timer = setTimeout(() => resolve(undefined), ALIVE_MS);
    timer.unref();
  });
  try {
    return await Promise.race([work, quiet]);
  } finally {
    clearTimeout(timer);
  }
}

/** `pathBase64` for what is no UTF-8. */
function eventView({ path, ...event }: FileEvent) {
  const text = path.toString();
  return { ...event, path: text, pathBase64: Buffer.from(text).equals(path) ? undefined : path.toString('base64') };
}
