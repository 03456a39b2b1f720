/** QEMU's monitor protocol against what speaks it well, badly, and not at all. */
import { mkdtempSync, rmSync } from 'node:fs';
import { createServer, type Server, type Socket } from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, beforeEach, expect, test } from 'vitest';
import { Monitor } from '../vm/qemu/monitor.ts';

const GREETING = '{"QMP": {"version": {}, "capabilities": []}}\r\n';
let folder: string;
let path: string;
let server: Server | undefined;
const sockets = new Set<Socket>();

beforeEach(() => {
  folder = mkdtempSync(join(tmpdir(), 'dsec-qmp-'));
  path = join(folder, 'qmp');
});
afterEach(async () => {
  for (const socket of sockets) socket.destroy();
  sockets.clear();
  await new Promise((done) => (server === undefined ? done(undefined) : server.close(done)));
  server = undefined;
  rmSync(folder, { recursive: true });
});

type Question = { readonly execute: string; readonly arguments?: unknown; readonly id: number };

/** Greets, takes the negotiation, and hands the rest on. */
async function serve(answer: (question: Question, socket: Socket) => void, greeting = GREETING): Promise<void> {
  server = createServer((socket) => {
    sockets.add(socket);
    socket.on('error', () => {});
    socket.write(greeting);
    let text = '';
    socket.on('data', (bytes) => {
      text += bytes.toString();
      for (let end = text.indexOf('\n'); end !== -1; end = text.indexOf('\n')) {
        const question = JSON.parse(text.slice(0, end)) as Question;
        text = text.slice(end + 1);
        if (question.execute === 'qmp_capabilities') socket.write(`{"return": {}, "id": ${question.id}}\n`);
        else answer(question, socket);
      }
    });
  });
  await new Promise<void>((done) => server!.listen(path, done));
}

test('answers go to their questions, in whatever order and however cut', async () => {
  const asked: Question[] = [];
  await serve((question, socket) => {
    asked.push(question);
    if (asked.length < 2) return;
    const text = [...asked]
      .reverse()
      .map(({ id, execute }) => JSON.stringify({ return: { of: execute }, id }))
      .join('\n');
    for (const byte of `${text}\n`) socket.write(byte);
  });
  const monitor = await Monitor.connect(path, 'box');
  const [a, b] = await Promise.all([monitor.execute('a'), monitor.execute('b', { x: 1 })]);
  expect([a, b]).toEqual([{ of: 'a' }, { of: 'b' }]);
  expect(asked[1]!.arguments).toEqual({ x: 1 });
  monitor.close();
});

test('an error is the command’s, and events are told', async () => {
  await serve(({ id }, socket) => {
    socket.write('{"event": "STOP", "data": {"a": 1}, "timestamp": {}}\n');
    socket.write(`{"error": {"class": "GenericError", "desc": "no such thing"}, "id": ${id}}\n`);
  });
  const monitor = await Monitor.connect(path, 'box');
  const events: unknown[] = [];
  monitor.onEvent((event) => events.push(event));
  await expect(monitor.execute('x')).rejects.toMatchObject({
    code: 'VM_MONITOR',
    message: 'machine box: x: no such thing',
  });
  expect(events).toEqual([{ name: 'STOP', data: { a: 1 } }]);
  monitor.close();
});

test('the end of the connection answers what is open, and what comes later', async () => {
  await serve((_question, socket) => socket.destroy());
  const monitor = await Monitor.connect(path, 'box');
  await expect(monitor.execute('x')).rejects.toMatchObject({ code: 'VM_MONITOR' });
  await monitor.closed;
  await expect(monitor.execute('y')).rejects.toMatchObject({ code: 'VM_MONITOR' });
});

test('no answer is told after the time', async () => {
  await serve(() => {});
  const monitor = await Monitor.connect(path, 'box');
  await expect(monitor.execute('x', undefined, { timeoutMs: 20 })).rejects.toThrow('no answer within 0.02 s');
  monitor.close();
});

test('a line without end ends the connection before it fills the memory', async () => {
  await serve((_question, socket) => {
    const part = Buffer.alloc(64 * 1024, 'x');
    for (let i = 0; i < 80; i++) socket.write(part);
  });
  const monitor = await Monitor.connect(path, 'box');
  await expect(monitor.execute('x')).rejects.toThrow('a line of more than');
  await monitor.closed;
});

test('whoever does not greet is not waited for without end', async () => {
  await serve(() => {}, '');
  await expect(Monitor.connect(path, 'box', { timeoutMs: 20 })).rejects.toMatchObject({ code: 'VM_MONITOR' });
});

test('garbage of every kind: each question is answered, and nothing throws elsewhere', async () => {
  let seed = 20;
  const random = (below: number) => {
    seed = (seed * 1103515245 + 12345) % 2 ** 31;
    return seed % below;
  };
  const pieces = [
    '{}\n',
    '[]\n',
    'null\n',
    '1\n',
    '"QMP"\n',
    '{"return": 1}\n',
    '{"id": 99, "return": {}}\n',
    '{"id": "2", "return": {}}\n',
    '{"id": 2}\n',
    '{"id": 2, "error": 5}\n',
    '{"id": 2, "error": {"desc": {}}}\n',
    '{"event": 5}\n',
    '{"event": "X", "data": []}\n',
    '{"QMP": null}\n',
    '\n\r\n',
    '{"id": 2, "ret',
    '\u0000\u0001\n',
    '{"__proto__": {"id": 2}}\n',
  ];
  await serve((_question, socket) => {
    for (let i = 0; i < 30; i++) {
      const piece = pieces[random(pieces.length)]!;
      const bytes = Buffer.from(piece);
      if (random(4) === 0) bytes[random(bytes.length)] = random(256);
      socket.write(bytes);
    }
    socket.end();
  });
  for (let round = 0; round < 40; round++) {
    const monitor = await Monitor.connect(path, 'box');
    monitor.onEvent(({ name, data }) => expect([typeof name, typeof data]).toEqual(['string', 'object']));
    await monitor.execute('x').catch((error: unknown) => expect(error).toMatchObject({ code: 'VM_MONITOR' }));
    await monitor.closed;
  }
});
