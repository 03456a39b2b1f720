/** The conversation with a guest agent, against one that is made here: what comes at once, late, broken, without end. */
import * as fs from 'node:fs';
import { createServer, type Server, type Socket } from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, beforeEach, describe, expect, it } from 'vitest';
import { GuestAgent } from '../vm/full/guest-agent.ts';

type Answer = (line: { execute: string; arguments?: { id?: number } }, socket: Socket) => void;

describe('a guest agent', { timeout: 60_000 }, () => {
  let folder: string;
  let server: Server;
  let agent: GuestAgent;
  let answer: Answer;
  const greet: Answer = ({ execute, arguments: given }, socket) => {
    if (execute !== 'guest-sync-delimited') return;
    // As qemu-ga does: it complains of the delimiter, and both come at once.
    const hello = Buffer.from(`{"error": {"desc": "stray"}}\n{"return": ${given!.id}}\n`);
    const at = hello.indexOf(10) + 1;
    socket.write(Buffer.concat([hello.subarray(0, at), Buffer.from([0xff]), hello.subarray(at)]));
  };

  beforeEach(async () => {
    folder = fs.mkdtempSync(join(tmpdir(), 'dsec-agent-'));
    const path = join(folder, 'agent.sock');
    server = createServer((socket) => {
      let rest = '';
      socket.on('error', () => {});
      socket.on('data', (bytes) => {
        const lines = (rest + bytes.toString('latin1')).split('\n');
        rest = lines.pop()!;
        for (const line of lines) {
          const asked = JSON.parse(line.replace(/^.*\xff/, '')) as Parameters<Answer>[0];
          greet(asked, socket);
          if (asked.execute !== 'guest-sync-delimited') answer(asked, socket);
        }
      });
    });
    await new Promise<void>((resolve) => server.listen(path, resolve));
    agent = new GuestAgent(path, 'machine');
  });
  afterEach(async () => {
    agent.close();
    await new Promise((resolve) => server.close(resolve));
    fs.rmSync(folder, { recursive: true, force: true });
  });

  it('answers one question after the other, and says no', async () => {
    answer = ({ execute }, socket) =>
      void socket.write(execute === 'no' ? '{"error": {"desc": "never"}}\n' : `{"return": "${execute}"}\n`);
    const all = await Promise.allSettled([agent.ask('a'), agent.ask('no'), agent.ask('b')]);
    expect(all.map((one) => (one.status === 'fulfilled' ? one.value : String(one.reason.message)))).toEqual([
      'a',
      'never',
      'b',
    ]);
  });

  it('is asked anew after an answer that never came, and its late answer is nobody’s', async () => {
    answer = ({ execute }, socket) => {
      if (execute === 'slow') setTimeout(() => socket.write('{"return": "late"}\n'), 300);
      else socket.write('{"return": "now"}\n');
    };
    await expect(agent.ask('slow', {}, { timeoutMs: 100 })).rejects.toMatchObject({ code: 'VM_GUEST_AGENT' });
    expect(await agent.ask('quick')).toBe('now');
  });

  it.each([
    ['no JSON', '{{{\n'],
    ['no result', '[]\n'],
    ['a line without end', Buffer.alloc(50 << 20, 'x')],
  ])('that says %s ends the conversation, and no more', async (_, said) => {
    answer = ({ execute }, socket) => void socket.write(execute === 'bad' ? said : '{"return": 1}\n');
    await expect(agent.ask('bad')).rejects.toMatchObject({ code: 'VM_GUEST_AGENT' });
    expect(await agent.ask('good')).toBe(1);
  });

  it('that goes is told of', async () => {
    answer = (_, socket) => void socket.destroy();
    await expect(agent.ask('gone')).rejects.toMatchObject({ code: 'VM_GUEST_AGENT' });
  });
});
