/**
 * Sandboxes that stay, over HTTP: what `dsec sandbox create`, `exec`, `cp` and the rest ask the runtime service. It listens on a unix socket of
 * root's alone; docs/sandboxes.md has the routes.
 *
 * Output goes out as frames with offsets (output-frames.ts), so that whoever lost the connection goes on where it was. Input is the body
 * of a request, taken as it comes.
 */
import type { IncomingHttpHeaders } from 'node:http';
import { constants } from 'node:os';
import { Readable } from 'node:stream';
import { type Static, Type } from '@sinclair/typebox';
import { type FastifyInstance, fastify } from 'fastify';
import { compileOnFirstUse, openDiskImage, openImage } from '#imagesvc';
import {
  BACKENDS,
  type CreateOptions,
  type ExecHandle,
  type FileStatus,
  FULL_VM,
  IDLE_ACTIONS,
  type NodeSandbox,
  RUNTIME_NAMES,
  SERVICE_CLASSES,
  USERNS_MODES,
} from '#runtime';
import { storeLayerOpener } from '../disk-layers.ts';
import { fail } from '../errors.ts';
import { PackBody, packedView, packRunning } from '../pack-sandbox.ts';
import { backendView } from './backend-view.ts';
import { fileRoutes } from './file-routes.ts';
import { ForkBody, forkSandbox } from './fork-sandbox.ts';
import { knownStore } from './known-stores.ts';
import { LimitsBody, limitFields, UsageQuery } from './limit-schemas.ts';
import { onMachinePath } from './machine-path.ts';
import { NetworkBody, networkAsked, networkRoutes } from './network-routes.ts';
import { outputFrame } from './output-frames.ts';
import { type PortRouteOptions, portRoutes } from './port-routes.ts';
import { errorOf, ONE_SANDBOX, routeAdder, type Sandboxes, stopWith } from './route.ts';
import { describeRoutes } from './sandbox-openapi.ts';
import { MachineBody, screenRoutes } from './screen-routes.ts';
import { shellRoutes } from './shell-routes.ts';

const Text = Type.String({ maxLength: 1 << 20 });
const Count = (maximum: number) => Type.Integer({ minimum: 0, maximum });
const Size = Type.Object({ rows: Count(65_535), columns: Count(65_535) }, { additionalProperties: false });
const TimeMs = Count(2 ** 41);

/** What keeps a virtual machine's memory small. */
const MemoryBody = Type.Object(
  {
    pmem: Type.Optional(Type.Boolean()),
    reporting: Type.Optional(Type.Boolean()),
    damon: Type.Optional(Type.Boolean()),
  },
  { additionalProperties: false },
);

/** Of a sandbox that is to be made. */
export const createFields = {
  store: Text,
  image: Text,
  workspace: Type.Optional(Text),
  toolkits: Type.Optional(Type.Array(Text, { maxItems: 500 })),
  name: Type.Optional(Text),
  requestId: Type.Optional(Text),
  env: Type.Optional(Type.Array(Text)),
  user: Type.Optional(Text),
  workdir: Type.Optional(Text),
  ttlMs: Type.Optional(TimeMs),
  idleMs: Type.Optional(Type.Integer({ minimum: 1000, maximum: 2 ** 41 })),
  idleAction: Type.Optional(Type.Union(IDLE_ACTIONS.map((action) => Type.Literal(action)))),
  class: Type.Optional(Type.Union(SERVICE_CLASSES.map((name) => Type.Literal(name)))),
  backend: Type.Optional(Type.Union(BACKENDS.map((name) => Type.Literal(name)))),
  runtime: Type.Optional(Type.Union(RUNTIME_NAMES.map((name) => Type.Literal(name)))),
  userns: Type.Optional(Type.Union(USERNS_MODES.map((mode) => Type.Literal(mode)))),
  ...limitFields,
  network: Type.Optional(NetworkBody),
  machine: Type.Optional(MachineBody),
  memory: Type.Optional(MemoryBody),
  dockerDiskBytes: Type.Optional(Type.Integer({ minimum: 1, maximum: 2 ** 44 })),
  lazy: Type.Optional(Type.Boolean()),
  prefetch: Type.Optional(Type.Boolean()),
};
/** `removeAtEnd`: for whoever made it to run one command in. */
const ownFields = { removeAtEnd: Type.Optional(Type.Boolean()) };
const CreateBody = Type.Object({ ...createFields, ...ownFields }, { additionalProperties: false });
type CreateAsked = Static<typeof CreateBody>;
const ExecBody = Type.Object(
  {
    args: Type.Array(Text, { minItems: 1 }),
    env: Type.Optional(Type.Array(Text)),
    cwd: Type.Optional(Text),
    user: Type.Optional(Text),
    stdin: Type.Optional(Type.Boolean()),
    terminal: Type.Optional(Size),
    timeoutMs: Type.Optional(TimeMs),
    background: Type.Optional(Type.Boolean()),
    requestId: Type.Optional(Text),
  },
  { additionalProperties: false },
);
const StopBody = Type.Object({ timeMs: Type.Optional(TimeMs) }, { additionalProperties: false });
const SignalBody = Type.Object(
  { signal: Type.String({ pattern: '^SIG[A-Z0-9]{2,8}$' }) },
  { additionalProperties: false },
);
const CopyBody = Type.Object({ from: Text, to: Text }, { additionalProperties: false });
const PathQuery = Type.Object({
  path: Text,
  recursive: Type.Optional(Type.Boolean()),
  mode: Type.Optional(Count(0o7777)),
});
const ReadQuery = Type.Object({ path: Text, offset: Type.Optional(Count(Number.MAX_SAFE_INTEGER)) });
const OutputQuery = Type.Object({
  stdout: Type.Optional(Count(Number.MAX_SAFE_INTEGER)),
  stderr: Type.Optional(Count(Number.MAX_SAFE_INTEGER)),
  follow: Type.Optional(Type.Boolean()),
});
const RemoveQuery = Type.Object({ force: Type.Optional(Type.Boolean()) });
const StdinQuery = Type.Object({ close: Type.Optional(Type.Boolean()) });

const BODY_BYTES = 8 << 20;

/** Input of any length, as it comes. */
export function takeOctets(app: FastifyInstance): void {
  app.addContentTypeParser('application/octet-stream', (_request, payload, done) => done(null, payload));
}

export async function sandboxApp(node: Sandboxes): Promise<FastifyInstance> {
  const app = fastify({
    logger: false,
    bodyLimit: BODY_BYTES,
    exposeHeadRoutes: false,
    forceCloseConnections: true,
    schemaController: compileOnFirstUse(),
    ajv: { customOptions: { removeAdditional: false, coerceTypes: true } },
  });
  takeOctets(app);
  app.setErrorHandler((thrown, _request, reply) => {
    const error = errorOf(thrown);
    const { code, message, hint, retryable, exit, params } = error;
    reply.code(error.http).send({ error: { code, message, reason: params.ended, hint, retryable, exit } });
  });
  app.setNotFoundHandler((request, reply) => {
    const error = { code: 'NOT_FOUND', message: `there is no ${request.method} ${request.url}`, retryable: false };
    reply.code(404).send({ error });
  });

  await describeRoutes(app);
  const route = routeAdder(app, node);
  route('GET', '/v1/sandboxes', {}, () => node.list().map(sandboxView));
  route('POST', '/v1/sandboxes', { body: CreateBody }, async ({ body, reply }) => {
    const created = await node.create(await createOptions(body));
    reply.code(201);
    return sandboxView(created);
  });
  await sandboxRoutes(app, node, { machinePaths: true });
  return app;
}

/** Of the disks of machines. */
const openStoreLayer = storeLayerOpener();

/** What is asked for, with its images opened. @throws STORE_*, IMAGE_*, SANDBOX_BAD_REQUEST */
export async function createOptions(asked: CreateAsked): Promise<CreateOptions> {
  const { store: url, image, workspace, toolkits = [], network, ...rest } = asked;
  const store = await knownStore(url);
  return {
    ...rest,
    network: networkAsked(network),
    store,
    base: await (asked.backend === FULL_VM ? openDiskImage : openImage)(store, image),
    workspace: workspace === undefined ? undefined : await openImage(store, workspace),
    toolkits: await Promise.all(toolkits.map((toolkit) => openImage(store, toolkit))),
    openStoreLayer,
  };
}

export interface SandboxRouteOptions extends PortRouteOptions {
  /** Whether whoever asks may name paths of this machine, to copy from and to. */
  readonly machinePaths: boolean;
  readonly view?: (sandbox: NodeSandbox) => object;
  /** In place of the sandbox's own `update`: an edge has promised what the limits are of. */
  readonly update?: (
    sandbox: NodeSandbox,
    changes: Static<typeof LimitsBody>,
    headers: IncomingHttpHeaders,
  ) => Promise<object>;
}

/** All that is asked of one sandbox, for an app that takes octets as they come (`takeOctets`). */
export async function sandboxRoutes(
  app: FastifyInstance,
  node: Sandboxes,
  options: SandboxRouteOptions,
): Promise<void> {
  const { machinePaths, view = sandboxView, update = (sandbox, changes) => sandbox.update(changes) } = options;
  const route = routeAdder(app, node);
  const one = ONE_SANDBOX;
  const command = `${one}/commands/:id`;

  route('GET', one, {}, ({ sandbox }) => view(sandbox()));
  route('DELETE', one, { querystring: RemoveQuery }, async ({ name, query }) => {
    await node.remove(name, query);
    return {};
  });
  route('POST', `${one}/stop`, { body: StopBody }, ({ name, body }) => node.stop(name, body));
  route('POST', `${one}/pause`, {}, ({ sandbox }) => sandbox().pause());
  route('POST', `${one}/resume`, {}, async ({ sandbox }) => {
    const resumed = sandbox();
    await resumed.resume();
    return view(resumed);
  });
  route('POST', `${one}/pack-diff`, { body: PackBody }, async ({ sandbox, body, reply }) => {
    return packedView(await packRunning(sandbox(), { ...body, signal: stopWith(reply) }));
  });
  route('POST', `${one}/fork`, { body: ForkBody }, async ({ name, body, reply }) => {
    const { snapshot, sandboxes, notes } = await forkSandbox(node, name, body);
    reply.code(201);
    return { snapshot, notes, sandboxes: sandboxes.map(view) };
  });
  route('PUT', `${one}/limits`, { body: LimitsBody }, ({ sandbox, body, request }) =>
    update(sandbox(), body, request.headers),
  );
  route('GET', `${one}/usage`, { querystring: UsageQuery }, ({ sandbox, query }) => sandbox().usage(query));

  route('GET', `${one}/commands`, {}, ({ sandbox }) => sandbox().commands().map(commandView));
  route('POST', `${one}/commands`, { body: ExecBody }, async ({ sandbox, body, reply }) => {
    const started = await sandbox().exec(body);
    reply.code(201);
    return commandView(started);
  });
  route('GET', command, {}, ({ command }) => commandView(command()));
  route('GET', `${command}/output`, { querystring: OutputQuery }, ({ command, query, reply }) => {
    const stop = stopWith(reply);
    reply.header('content-type', 'application/octet-stream');
    return reply.send(Readable.from(outputFrames(command(), { ...query, signal: stop }), { objectMode: false }));
  });
  route('POST', `${command}/stdin`, { querystring: StdinQuery }, async ({ command, query, request }) => {
    const target = command();
    if (request.body instanceof Readable) {
      for await (const bytes of request.body) await target.write(bytes as Buffer);
    }
    if (query.close !== false) await target.closeStdin();
    return {};
  });
  route('POST', `${command}/signal`, { body: SignalBody }, ({ command, body }) => {
    if (!(body.signal in constants.signals))
      throw fail('SANDBOX_BAD_REQUEST', { problem: `${body.signal} is no signal` });
    command().kill(body.signal as NodeJS.Signals);
    return {};
  });
  route('POST', `${command}/resize`, { body: Size }, ({ command, body }) => {
    command().resize(body.rows, body.columns);
    return {};
  });
  route('POST', `${command}/kill`, {}, async ({ command }) => {
    await command().killTree();
    return {};
  });

  shellRoutes(route);
  networkRoutes(route);

  route('GET', `${one}/files`, { querystring: ReadQuery }, async ({ sandbox, query, reply }) => {
    const { files } = sandbox();
    const { path, offset = 0 } = query;
    const { kind, size, inode, modifiedMs } = await files.stat(path);
    if (kind !== 'file') throw fail('SANDBOX_NO_FILE', { path, kind });
    reply.header('content-type', 'application/octet-stream').header('x-size', size);
    reply.header('etag', `"${inode}-${size}-${modifiedMs}"`);
    return reply.send(Readable.from(whole(files.pieces(path, offset), offset), { objectMode: false }));
  });
  route('PUT', `${one}/files`, { querystring: PathQuery }, async ({ sandbox, query, request }) => {
    const content = request.body instanceof Readable ? (request.body as AsyncIterable<Buffer>) : Buffer.alloc(0);
    return statusView(await sandbox().files.write(query.path, content, { mode: query.mode }));
  });
  route('DELETE', `${one}/files`, { querystring: PathQuery }, async ({ sandbox, query }) => {
    await sandbox().files.remove(query.path, query);
    return {};
  });
  route('GET', `${one}/files/stat`, { querystring: PathQuery }, async ({ sandbox, query }) => {
    return statusView(await sandbox().files.stat(query.path, { follow: false }));
  });
  route('GET', `${one}/files/list`, { querystring: PathQuery }, async ({ sandbox, query }) => {
    const entries = await sandbox().files.list(query.path);
    return entries.map(({ name, ...status }) => ({ ...nameView(name), ...statusView(status) }));
  });
  route('POST', `${one}/files/mkdir`, { querystring: PathQuery }, async ({ sandbox, query }) => {
    await sandbox().files.mkdir(query.path, { parents: query.recursive, mode: query.mode });
    return {};
  });
  route('POST', `${one}/files/rename`, { body: CopyBody }, async ({ sandbox, body }) => {
    await sandbox().files.rename(body.from, body.to);
    return {};
  });
  if (machinePaths) {
    route('POST', `${one}/files/upload`, { body: CopyBody }, async ({ sandbox, body }) => {
      const { files } = sandbox();
      await onMachinePath(body.from, () => files.upload(body.from, body.to));
      return {};
    });
    route('POST', `${one}/files/download`, { body: CopyBody }, async ({ sandbox, body }) => {
      const { files } = sandbox();
      await onMachinePath(body.to, () => files.download(body.from, body.to));
      return {};
    });
  }
  fileRoutes(route);
  screenRoutes(route);
  await portRoutes(app, node, options);
}

export function sandboxView(sandbox: NodeSandbox) {
  const { name, state, end, facts, runningCommands } = sandbox;
  const { id, createdAt, store, base, workspace, toolkits, limits, resident, userns } = facts;
  const { expiresAt, idleMs, idleAction, class: serviceClass = 'ls', pausedAt } = resident ?? {};
  return {
    name,
    id,
    state,
    end,
    createdAt,
    ...backendView(facts),
    store,
    base,
    workspace,
    toolkits,
    expiresAt,
    idleMs,
    idleAction,
    class: serviceClass,
    pausedAt,
    limits,
    network: sandbox.network.view(),
    userns,
    runningCommands,
  };
}

export function commandView(
  command: ExecHandle & { readonly record?: { readonly args: readonly string[]; readonly startedMs: number } },
) {
  const { id, result, record } = command;
  return { id, args: record?.args, startedMs: record?.startedMs, running: result === undefined, result };
}

function statusView({ inode, ...status }: FileStatus) {
  return { ...status, inode: String(inode) };
}

/** `nameBase64` for what is no UTF-8. */
function nameView(name: Buffer) {
  const text = name.toString('utf8');
  return Buffer.from(text).equals(name) ? { name: text } : { name: text, nameBase64: name.toString('base64') };
}

async function* outputFrames(command: ExecHandle, from: Parameters<ExecHandle['output']>[0]): AsyncGenerator<Buffer> {
  for await (const part of command.output(from)) yield outputFrame.part(part);
  if (from?.follow === false) return;
  try {
    yield outputFrame.result(await command.wait());
  } catch (error) {
    const { code, message, hint, exit, params } = errorOf(error);
    yield outputFrame.error({ code, message, reason: params.ended as string | undefined, hint, exit });
  }
}

/** Holes as zeros: the body has as many bytes as the file. */
async function* whole(
  pieces: AsyncIterable<{ offset: number; bytes: Buffer; size: number }>,
  from: number,
): AsyncGenerator<Buffer> {
  const zeros = Buffer.alloc(256 << 10);
  let at = from;
  for await (const { offset, bytes } of pieces) {
    for (; at < offset; at += Math.min(zeros.length, offset - at)) yield zeros.subarray(0, offset - at);
    yield bytes;
    at = offset + bytes.length;
  }
}
