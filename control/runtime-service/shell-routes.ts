/** Shell sessions over HTTP. Output is frames with offsets, as that of commands. */
import { Readable } from 'node:stream';
import { Type } from '@sinclair/typebox';
import type { ShellResult } from '#runtime';
import { fail } from '../errors.ts';
import { outputFrame } from './output-frames.ts';
import { type AddRoute, ONE_SANDBOX, stopWith } from './route.ts';

const Text = Type.String({ maxLength: 1 << 20 });
const Count = (maximum: number) => Type.Integer({ minimum: 0, maximum });
const Size = Type.Object({ rows: Count(65_535), columns: Count(65_535) }, { additionalProperties: false });
const TimeMs = Count(2 ** 41);
const Offset = Type.Optional(Count(Number.MAX_SAFE_INTEGER));

const ShellBody = Type.Object(
  {
    shell: Type.Optional(Text),
    env: Type.Optional(Type.Array(Text)),
    cwd: Type.Optional(Text),
    user: Type.Optional(Text),
    terminal: Type.Optional(Size),
  },
  { additionalProperties: false },
);
const RunBody = Type.Object({ command: Text, timeoutMs: Type.Optional(TimeMs) }, { additionalProperties: false });
const ExpectBody = Type.Object(
  {
    text: Type.Optional(Text),
    /** As JavaScript writes them. */
    regex: Type.Optional(Type.String({ maxLength: 1000 })),
    from: Offset,
    timeoutMs: Type.Optional(TimeMs),
  },
  { additionalProperties: false },
);
const OutputQuery = Type.Object({ stdout: Offset, stderr: Offset, follow: Type.Optional(Type.Boolean()) });

export function shellRoutes(route: AddRoute): void {
  const shell = `${ONE_SANDBOX}/shells/:id`;
  route('POST', `${ONE_SANDBOX}/shells`, { body: ShellBody }, async ({ sandbox, body, reply }) => {
    const opened = await sandbox().openShell(body);
    reply.code(201);
    return { id: opened.id };
  });
  route('POST', `${shell}/run`, { body: RunBody }, async ({ sandbox, id, body }) => {
    return shellView(await sandbox().shell(id).run(body.command, body));
  });
  route('POST', `${shell}/expect`, { body: ExpectBody }, async ({ sandbox, id, body }) => {
    const { text, regex, ...options } = body;
    const output = await sandbox().shell(id).expect(patternOf(text, regex), options);
    return { outputBase64: output.toString('base64') };
  });
  route('POST', `${shell}/stdin`, {}, async ({ sandbox, id, request }) => {
    const session = sandbox().shell(id);
    if (request.body instanceof Readable) for await (const bytes of request.body) await session.write(bytes as Buffer);
    return {};
  });
  route('GET', `${shell}/output`, { querystring: OutputQuery }, ({ sandbox, id, query, reply }) => {
    const parts = sandbox()
      .shell(id)
      .output({ ...query, signal: stopWith(reply) });
    reply.header('content-type', 'application/octet-stream');
    return reply.send(Readable.from(framesOf(parts), { objectMode: false }));
  });
  route('POST', `${shell}/resize`, { body: Size }, ({ sandbox, id, body }) => {
    sandbox().shell(id).resize(body.rows, body.columns);
    return {};
  });
  route('POST', `${shell}/interrupt`, {}, ({ sandbox, id }) => {
    sandbox().shell(id).interrupt();
    return {};
  });
  route('DELETE', shell, {}, async ({ sandbox, id }) => {
    await sandbox().shell(id).close();
    return {};
  });
}

function patternOf(text: string | undefined, regex: string | undefined): string | RegExp {
  if ((text === undefined) === (regex === undefined)) {
    throw fail('SANDBOX_BAD_REQUEST', { problem: 'expect takes one of text and regex' });
  }
  if (text !== undefined) return text;
  try {
    return new RegExp(regex!);
  } catch (error) {
    throw fail('SANDBOX_BAD_REQUEST', { problem: `regex: ${(error as Error).message}` });
  }
}

async function* framesOf(parts: AsyncIterable<Parameters<typeof outputFrame.part>[0]>): AsyncGenerator<Buffer> {
  for await (const part of parts) yield outputFrame.part(part);
}

function shellView({ stdout, stderr, ...rest }: ShellResult) {
  return { ...rest, stdoutBase64: stdout.toString('base64'), stderrBase64: stderr.toString('base64') };
}
