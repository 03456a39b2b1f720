/** The conversation with a guest agent, against one that is made here: what comes at once, late, broken, without end. */
import * as fs from 'node:fs';
import { createServer, type Server, type Socket } from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest';
import { AGENT_FRAME, PayloadReader, PayloadWriter } from '../backend/agent-wire.ts';
import { copyIn, copyOut, removeCopies } from '../vm/full/disk-copy.ts';
import { GuestAgent } from '../vm/full/guest-agent.ts';
import { MachineCommands } from '../vm/full/machine-commands.ts';
import { machineFiles } from '../vm/full/machine-files.ts';

interface Asked {
  readonly execute: string;
  readonly arguments?: { readonly id?: number; readonly pid?: number; readonly 'buf-b64'?: string };
}
type Answer = (line: Asked, socket: Socket) => void;

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
          const asked = JSON.parse(line.replace(/^.*\xff/, '')) as Asked;
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

  it('keeps nothing of what nobody asked for, and takes long lines in small pieces', async () => {
    const long = 'x'.repeat(300_000);
    answer = async ({ execute }, socket) => {
      if (execute === 'noise') socket.write(`{"return": 1}\n${`${long}\n`.repeat(20)}`);
      else if (execute === 'flood')
        socket.write(Buffer.concat([Buffer.from('{"return": 2}\n'), Buffer.alloc(8 << 20, 'x')]));
      else if (execute !== 'long') socket.write('{"return": 4}\n');
      else {
        const said = `{"return": "${long}"}\n`;
        for (let at = 0; at < said.length; at += 1000) {
          socket.write(said.slice(at, at + 1000));
          await new Promise((resolve) => setImmediate(resolve));
        }
      }
    };
    expect(await agent.ask('noise')).toBe(1);
    expect(Reflect.get(agent, 'early')).toEqual([]);
    expect(await agent.ask('long').catch(() => agent.ask('long'))).toBe(long);
    expect(await agent.ask('flood')).toBe(2);
    await vi.waitFor(() => expect(Reflect.get(agent, 'socket')).toBeUndefined());
    expect(Reflect.get(agent, 'begun')).toHaveLength(0);
    expect(await agent.ask('any')).toBe(4);
  });

  it('is asked nothing while it is frozen, and thawed first', async () => {
    const order: string[] = [];
    answer = ({ execute }, socket) => {
      order.push(execute);
      socket.write('{"return": 0}\n');
    };
    const frozen = agent.whileFrozen(async () => {
      await new Promise((resolve) => setTimeout(resolve, 50));
      order.push('copied');
      throw new Error('no room');
    });
    const asked = agent.ask('guest-exec-status');
    await expect(frozen).rejects.toThrow('no room');
    await asked;
    agent.thawIf(async () => true);
    agent.thawIf(async () => false);
    await agent.ask('guest-exec');
    const [freeze, thaw] = ['guest-fsfreeze-freeze', 'guest-fsfreeze-thaw'];
    expect(order).toEqual([freeze, 'copied', thaw, 'guest-exec-status', thaw, 'guest-exec']);
  });

  it('is given again what it did not write', async () => {
    let written = '';
    let count = 3;
    answer = ({ execute, arguments: given }, socket) => {
      if (execute !== 'guest-file-write') return void socket.write('{"return": 7}\n');
      written += Buffer.from(given!['buf-b64']!, 'base64').toString().slice(0, count);
      socket.write(`{"return": {"count": ${count}}}\n`);
    };
    const files = machineFiles({ withAgent: (work) => work(agent), unsupported: () => new Error('unsupported') });
    await files.write('/a', Buffer.from('abcdef'));
    expect(written).toBe('abcdef');
    count = 0;
    await expect(files.write('/a', Buffer.from('abcdef'))).rejects.toMatchObject({ code: 'RUNTIME_FILE' });
  });

  describe('with commands', () => {
    let commands: MachineCommands;
    let told: { readonly kind: number; readonly payload: Buffer }[];
    let lost: string[];

    const start = (flags = 0) => {
      const payload = new PayloadWriter().u8(flags).u16(0).u16(0).bytes('');
      payload.list(['/bin/program'], (one) => payload.bytes(one));
      commands.toAgent(AGENT_FRAME.exec, 1, payload.done());
    };
    const kinds = () => told.map(({ kind }) => kind);
    const known = () => (Reflect.get(commands, 'all') as ReadonlyMap<number, unknown>).size;

    beforeEach(() => {
      told = [];
      lost = [];
      commands = new MachineCommands();
      commands.attach({
        agent: () => agent,
        receive: (kind, _, payload) => void told.push({ kind, payload }),
        refuse: (_, error) => void lost.push(error.message),
        lose: (_, reason) => void lost.push(reason),
        hasEnded: false,
      });
    });

    it.each(['-1', '1.5', '0', '4294967296', '1e99', '"1"', 'null'])(
      'a process numbered %s costs only its command',
      async (pid) => {
        answer = (_, socket) => void socket.write(`{"return": {"pid": ${pid}}}\n`);
        start();
        await vi.waitFor(() => expect(lost).toEqual(['an answer without a process']));
        expect(known()).toBe(0);
      },
    );

    it('frees output that it has given away, and input', async () => {
      const output = Buffer.alloc(600_000, 'o').toString('base64');
      answer = ({ execute }, socket) => {
        const answers = {
          'guest-exec': { pid: 5 },
          'guest-exec-status': { exited: true, exitcode: 3, 'out-data': output },
        };
        socket.write(`${JSON.stringify({ return: answers[execute as keyof typeof answers] })}\n`);
      };
      start(2);
      commands.toAgent(AGENT_FRAME.stdin, 1, Buffer.from('input'));
      commands.toAgent(AGENT_FRAME.stdinClose, 1);
      await vi.waitFor(() => expect(kinds()).toContain(AGENT_FRAME.exited));
      // Half of it may be sent so far.
      expect(known()).toBe(1);
      commands.toAgent(AGENT_FRAME.credit, 1, new PayloadWriter().u8(1).u64(1_000_000n).done());
      expect(known()).toBe(0);
      const bytes = told.filter(({ kind }) => kind === AGENT_FRAME.data).map(({ payload }) => payload.length - 9);
      expect(bytes.reduce((sum, size) => sum + size)).toBe(600_000);
      expect(kinds().filter((kind) => kind === AGENT_FRAME.endOfStream)).toHaveLength(2);
      const exited = told.find(({ kind }) => kind === AGENT_FRAME.exited)!;
      expect(new PayloadReader(exited.payload).u32()).toBe(3 << 8);
    });

    it('forgets one that it does not know any more, and one with too much input', async () => {
      answer = ({ execute }, socket) =>
        void socket.write(execute === 'guest-exec' ? '{"return": {"pid": 5}}\n' : '{"error": {"desc": "what?"}}\n');
      start();
      await vi.waitFor(() => expect(lost).toEqual(['the guest agent does not know what became of it']));
      expect(known()).toBe(0);
      start(2);
      commands.toAgent(AGENT_FRAME.stdin, 1, Buffer.alloc((8 << 20) + 1));
      expect(kinds().at(-1)).toBe(AGENT_FRAME.refused);
      expect(known()).toBe(0);
    });
  });
});

describe('copies of a full machine’s disk', () => {
  it('have what the firmware remembers; what was left behind is removed', async () => {
    const folder = fs.mkdtempSync(join(tmpdir(), 'dsec-disk-'));
    const [parent, child] = [join(folder, 'parent'), join(folder, 'child')];
    try {
      fs.mkdirSync(join(parent, 'machine'), { recursive: true });
      fs.mkdirSync(child);
      fs.writeFileSync(join(parent, 'disk.qcow2'), 'disk');
      fs.writeFileSync(join(parent, 'machine', 'uefi-variables.fd'), 'boot order');
      fs.writeFileSync(join(parent, 'fork-old.qcow2.uefi'), '');
      await copyOut(parent, join(parent, 'fork-new.qcow2'));
      expect(fs.readdirSync(parent)).toEqual(['disk.qcow2', 'fork-new.qcow2', 'fork-new.qcow2.uefi', 'machine']);
      await copyIn(join(parent, 'fork-new.qcow2'), child);
      expect(fs.readFileSync(join(child, 'disk.qcow2'), 'utf8')).toBe('disk');
      expect(fs.readFileSync(join(child, 'machine', 'uefi-variables.fd'), 'utf8')).toBe('boot order');
      await removeCopies(parent);
      expect(fs.readdirSync(parent)).toEqual(['disk.qcow2', 'machine']);
    } finally {
      fs.rmSync(folder, { recursive: true, force: true });
    }
  });
});
