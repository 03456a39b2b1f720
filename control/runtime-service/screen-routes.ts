/**
 * Screens of full machines over HTTP: a picture, keys and mouse, clipboards, the serial console. VNC is port 5900 of such a sandbox (port-routes.ts). docs/vm.md has
 * the routes. Other backends answer RUNTIME_UNSUPPORTED.
 */
import { Readable } from 'node:stream';
import { Type } from '@sinclair/typebox';
import {
  BUTTONS,
  type Capability,
  CLIPBOARD_TYPES,
  FullVmSandbox,
  MOST_CLIPBOARD_BYTES,
  type NodeSandbox,
  SCREEN,
  SELECTIONS,
  unsupported,
} from '#runtime';
import { fail } from '../errors.ts';
import { type AddRoute, ONE_SANDBOX, stopWith } from './route.ts';

const Pixel = Type.Integer({ minimum: 0, maximum: SCREEN.most * 4 });
const Button = Type.Optional(Type.Union(BUTTONS.map((name) => Type.Literal(name))));
const closed = { additionalProperties: false };

const Action = Type.Union([
  Type.Object(
    { type: Type.Literal('key'), keys: Type.Array(Type.String({ maxLength: 20 }), { minItems: 1, maxItems: 8 }) },
    closed,
  ),
  Type.Object({ type: Type.Literal('text'), text: Type.String({ maxLength: 4096 }) }, closed),
  Type.Object({ type: Type.Literal('move'), x: Pixel, y: Pixel }, closed),
  Type.Object(
    {
      type: Type.Literal('click'),
      x: Type.Optional(Pixel),
      y: Type.Optional(Pixel),
      button: Button,
      count: Type.Optional(Type.Integer({ minimum: 1, maximum: 10 })),
    },
    closed,
  ),
  Type.Object({ type: Type.Union([Type.Literal('press'), Type.Literal('release')]), button: Button }, closed),
  Type.Object({ type: Type.Literal('scroll'), steps: Type.Integer({ minimum: -100, maximum: 100 }) }, closed),
]);
const InputBody = Type.Object({ actions: Type.Array(Action, { minItems: 1, maxItems: 100 }) }, closed);
const ClipboardQuery = Type.Object({
  type: Type.Optional(Type.Union(CLIPBOARD_TYPES.map((name) => Type.Literal(name)))),
  selection: Type.Optional(Type.Union(SELECTIONS.map((name) => Type.Literal(name)))),
});
const ConsoleQuery = Type.Object({ follow: Type.Optional(Type.Boolean()) });

/** Of a machine that is to be made. */
export const MachineBody = Type.Object(
  {
    firmware: Type.Optional(Type.Union([Type.Literal('bios'), Type.Literal('uefi')])),
    width: Type.Optional(Type.Integer({ minimum: SCREEN.least, maximum: SCREEN.most })),
    height: Type.Optional(Type.Integer({ minimum: SCREEN.least, maximum: SCREEN.most })),
  },
  closed,
);

export function screenRoutes(route: AddRoute): void {
  route('GET', `${ONE_SANDBOX}/screen`, {}, async ({ sandbox, reply }) => {
    reply.header('content-type', 'image/png').header('cache-control', 'no-store');
    return reply.send(await machineOf(sandbox(), 'screen').screenshot());
  });
  route('POST', `${ONE_SANDBOX}/screen/input`, { body: InputBody }, async ({ sandbox, body }) => {
    await machineOf(sandbox(), 'screen').act(body.actions);
    return {};
  });
  route(
    'GET',
    `${ONE_SANDBOX}/screen/clipboard`,
    { querystring: ClipboardQuery },
    async ({ sandbox, query, reply }) => {
      const { type = 'text/plain', selection = 'clipboard' } = query;
      const bytes = await machineOf(sandbox(), 'clipboard').getClipboard(selection, type);
      if (bytes === undefined) return reply.code(204).send();
      reply.header('content-type', type === 'text/plain' ? 'text/plain; charset=utf-8' : type);
      return reply.header('cache-control', 'no-store').send(bytes);
    },
  );
  route(
    'PUT',
    `${ONE_SANDBOX}/screen/clipboard`,
    { querystring: ClipboardQuery },
    async ({ sandbox, query, request }) => {
      const { type = 'text/plain', selection = 'clipboard' } = query;
      const machine = machineOf(sandbox(), 'clipboard');
      await machine.setClipboard(selection, { type, bytes: await clipboardBytes(request.body) });
      return {};
    },
  );
  route('GET', `${ONE_SANDBOX}/console`, { querystring: ConsoleQuery }, async ({ sandbox, query, reply }) => {
    const machine = machineOf(sandbox(), 'console');
    const serial = await machine.console();
    reply.header('content-type', 'application/octet-stream');
    if (query.follow !== true) return reply.send(serial.recent());
    const stream = new Readable({ read() {} });
    stream.push(serial.recent());
    const end = serial.follow((bytes) => {
      // Whoever reads slowly loses the connection, not the machine its memory.
      if (!stream.push(bytes) && stream.readableLength > 1 << 20) stream.destroy(new Error('read too slowly'));
    });
    stopWith(reply).addEventListener('abort', () => stream.destroy());
    machine.ended.then(() => stream.push(null));
    stream.once('close', end);
    return reply.send(stream);
  });
  route('POST', `${ONE_SANDBOX}/console`, {}, async ({ sandbox, request, reply }) => {
    const serial = await machineOf(sandbox(), 'console').console();
    const gone = stopWith(reply);
    if (request.body instanceof Readable)
      for await (const bytes of request.body) await serial.write(bytes as Buffer, gone);
    return {};
  });
}

/** The bytes of a clipboard; without a body none. @throws SANDBOX_BAD_REQUEST for more than any takes, and for a body that was read as something else */
export async function clipboardBytes(body: unknown): Promise<Buffer> {
  if (body === undefined) return Buffer.alloc(0);
  if (!(body instanceof Readable)) {
    throw fail('SANDBOX_BAD_REQUEST', { problem: 'a clipboard takes bytes: send them as application/octet-stream' });
  }
  const parts: Buffer[] = [];
  let sizeBytes = 0;
  for await (const part of body as AsyncIterable<Buffer>) {
    sizeBytes += part.length;
    if (sizeBytes > MOST_CLIPBOARD_BYTES) {
      throw fail('SANDBOX_BAD_REQUEST', { problem: `a clipboard takes at most ${MOST_CLIPBOARD_BYTES} bytes` });
    }
    parts.push(part);
  }
  return Buffer.concat(parts);
}

/** @throws RUNTIME_UNSUPPORTED */
function machineOf(sandbox: NodeSandbox, capability: Capability): FullVmSandbox {
  if (sandbox instanceof FullVmSandbox) return sandbox;
  throw unsupported(sandbox.backend.name, capability);
}
