/** Clipboards of guests: the protocol of SPICE's agents byte by byte, an agent that does what it should, and some that do not. */
import { once } from 'node:events';
import * as fs from 'node:fs';
import { createServer, type Server, type Socket } from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, beforeEach, describe, expect, it } from 'vitest';
import { checkedContent, MOST_CLIPBOARD_BYTES, readClipboard } from '../vm/full/clipboard-file.ts';
import { GuestClipboard } from '../vm/full/guest-clipboard.ts';
import {
  VDAGENT,
  type VdAgentMessage,
  VdAgentReader,
  vdAgentMessage,
  vdAgentNumbers,
} from '../vm/full/vdagent-wire.ts';
import { until } from './resident-fixture.ts';

const KNOWN: readonly number[] = Object.values(VDAGENT);
const reader = (limit = 1 << 20) => new VdAgentReader((type) => (KNOWN.includes(type) ? limit : 0));
const all = (from: VdAgentReader, bytes: Buffer) => [...from.take(bytes)];

describe('the protocol of agents', () => {
  it('has these bytes', () => {
    const grab = Buffer.from('010000001c0000000100000007000000000000000000000008000000' + '0000000001000000', 'hex');
    expect(vdAgentMessage(VDAGENT.grab, vdAgentNumbers(0, 1))).toEqual(grab);
    expect(all(reader(), grab)).toEqual([{ type: VDAGENT.grab, sizeBytes: 8, body: vdAgentNumbers(0, 1) }]);
  });

  it('sends no chunk of more than 2048 bytes', () => {
    const body = Buffer.from(Array.from({ length: 10_000 }, (_, at) => at % 251));
    const sent = vdAgentMessage(VDAGENT.clipboard, body);
    for (let at = 0; at < sent.length; at += 8 + sent.readUInt32LE(at + 4)) {
      expect(sent.readUInt32LE(at)).toBe(1);
      expect(sent.readUInt32LE(at + 4)).toBeLessThanOrEqual(2048);
    }
    expect(all(reader(), sent)).toEqual([{ type: VDAGENT.clipboard, sizeBytes: body.length, body }]);
  });

  it('is read however it is cut, with several messages in a chunk and others between', () => {
    const one = vdAgentMessage(VDAGENT.release, vdAgentNumbers(1)).subarray(8);
    const unknown = vdAgentMessage(99, Buffer.alloc(100, 1)).subarray(8);
    const empty = vdAgentMessage(VDAGENT.capabilities, Buffer.alloc(0)).subarray(8);
    const content = Buffer.concat([one, unknown, empty, one]);
    const ofServer = Buffer.concat([vdAgentNumbers(2, 5), Buffer.alloc(5, 0xff)]);
    const sent = Buffer.concat([vdAgentNumbers(1, content.length), content, ofServer, vdAgentNumbers(1, 0)]);
    const expected = [VDAGENT.release, VDAGENT.capabilities, VDAGENT.release];
    for (let size = 1; size <= sent.length; size++) {
      const cut = reader();
      const got: number[] = [];
      for (let at = 0; at < sent.length; at += size) {
        for (const { type } of cut.take(sent.subarray(at, at + size))) got.push(type);
      }
      expect(got, `in pieces of ${size}`).toEqual(expected);
    }
  });

  it('keeps nothing that is larger than its limit, and goes on behind it', () => {
    const large = vdAgentMessage(VDAGENT.clipboard, Buffer.alloc(101));
    const small = vdAgentMessage(VDAGENT.clipboard, Buffer.alloc(100));
    expect(all(reader(100), Buffer.concat([large, small]))).toEqual([
      { type: VDAGENT.clipboard, sizeBytes: 101, body: undefined },
      { type: VDAGENT.clipboard, sizeBytes: 100, body: Buffer.alloc(100) },
    ]);
    // Sizes that nobody has: what is passed over is counted, not kept.
    const endless = Buffer.concat([vdAgentNumbers(1, 0xffffffff, 1, 4, 0, 0, 0xffffffff), Buffer.alloc(1000)]);
    expect(all(reader(100), endless)).toEqual([]);
  });

  it('ends with nonsense', () => {
    expect(() => all(reader(), vdAgentNumbers(3, 0))).toThrow('a chunk of port 3');
    expect(() => all(reader(), vdAgentNumbers(1, 20, 2, 4, 0, 0, 0))).toThrow('a message of protocol 2');
  });

  it('bears whatever comes: every stream ends in messages within their limits, or in an error', () => {
    let state = 1;
    const random = (below: number) => {
      for (const shift of [13, -17, 5]) state = (state ^ (shift < 0 ? state >>> -shift : state << shift)) >>> 0;
      return state % below;
    };
    const kinds: Record<string, number> = { messages: 0, errors: 0 };
    for (let round = 0; round < 3000; round++) {
      const parts = Array.from({ length: 1 + random(4) }, () =>
        vdAgentMessage(random(12), Buffer.alloc(random(300), random(256))),
      );
      const stream = Buffer.concat(parts);
      for (let flips = random(4); flips > 0; flips--) stream[random(stream.length)] = random(256);
      const hostile = reader(200);
      const got: VdAgentMessage[] = [];
      try {
        for (let at = 0; at < stream.length; ) {
          const size = 1 + random(64);
          got.push(...hostile.take(stream.subarray(at, at + size)));
          at += size;
        }
        kinds.messages! += got.length;
      } catch (error) {
        expect((error as Error).message).toMatch(/^a (chunk of port|message of protocol) \d+$/);
        kinds.errors!++;
      }
      for (const { type, body, sizeBytes } of got) {
        expect(KNOWN).toContain(type);
        expect(body === undefined ? sizeBytes > 200 : body.length === sizeBytes && sizeBytes <= 200).toBe(true);
      }
    }
    expect(Math.min(...Object.values(kinds))).toBeGreaterThan(100);
  });
});

/** The guest's end: what QEMU's port would be, with an agent that says what a test has it say. */
class FakeAgent {
  readonly heard: VdAgentMessage[] = [];
  connections = 0;
  /** It hears nothing on so many connections: what comes is lost while a guest opens its port anew. */
  deafFor = 0;
  capabilities = (1 << 5) | (1 << 6);
  /** Of the guest: what it gives when it is asked. */
  content: Buffer | undefined;
  /** Of this selection it gives nothing. */
  withheld: number | undefined;
  socket: Socket | undefined;
  readonly server: Server;

  constructor(path: string) {
    this.server = createServer((socket) => {
      this.connections++;
      this.socket = socket;
      const incoming = reader(MOST_CLIPBOARD_BYTES + 8);
      socket.on('error', () => {});
      const isDeaf = this.connections <= this.deafFor;
      socket.on('data', (bytes) => {
        if (isDeaf) return;
        for (const message of incoming.take(bytes)) this.hear(message);
      });
    }).listen(path);
  }

  say(type: number, body: Buffer): void {
    this.socket?.write(vdAgentMessage(type, body));
  }

  offer(...types: number[]): void {
    this.say(VDAGENT.grab, vdAgentNumbers(0, ...types));
  }

  private hear(message: VdAgentMessage): void {
    this.heard.push(message);
    const { type, body } = message;
    if (type === VDAGENT.capabilities && body!.readUInt32LE(0) === 1) {
      this.say(VDAGENT.capabilities, vdAgentNumbers(0, this.capabilities));
    }
    if (type === VDAGENT.request && body![0] === this.withheld) {
      this.say(VDAGENT.clipboard, Buffer.concat([body!.subarray(0, 4), vdAgentNumbers(0)]));
    } else if (type === VDAGENT.request && this.content !== undefined) {
      this.say(VDAGENT.clipboard, Buffer.concat([body!, this.content]));
    }
  }
}

describe('the clipboard of a guest', () => {
  let folder: string;
  let agent: FakeAgent;
  let clipboard: GuestClipboard;
  const open = (more: object = {}) => {
    const places = { socket: join(folder, 'port'), file: join(folder, 'clipboard.json') };
    clipboard = new GuestClipboard({ id: 'desk', ...places, againMs: 5, ...more });
    return clipboard;
  };
  const grabs = () => agent.heard.filter(({ type }) => type === VDAGENT.grab).map(({ body }) => body!);
  const last = (type: number) => agent.heard.findLast((message) => message.type === type)?.body;

  beforeEach(async () => {
    folder = fs.mkdtempSync(join(tmpdir(), 'dsec-clipboard-'));
    agent = new FakeAgent(join(folder, 'port'));
    await once(agent.server, 'listening');
  });
  afterEach(async () => {
    clipboard.close();
    agent.socket?.destroy();
    agent.server.close();
    await once(agent.server, 'close');
    fs.rmSync(folder, { recursive: true });
  });

  it('is given when the guest asks, and only what was put there', async () => {
    await open().set('clipboard', { type: 'text/plain', bytes: Buffer.from('from here\n') });
    await until('it is offered', () => grabs().length === 1);
    expect(grabs()).toEqual([vdAgentNumbers(0, 1)]);
    agent.say(VDAGENT.request, vdAgentNumbers(0, 1));
    await until('it is given', () => last(VDAGENT.clipboard) !== undefined);
    expect(last(VDAGENT.clipboard)).toEqual(Buffer.concat([vdAgentNumbers(0, 1), Buffer.from('from here\n')]));
    agent.heard.length = 0;
    // A picture, and of the other clipboard: nothing.
    for (const body of [vdAgentNumbers(0, 2), vdAgentNumbers(1, 1)]) agent.say(VDAGENT.request, body);
    await until('both are answered', () => agent.heard.length === 2);
    expect(agent.heard.map(({ body }) => body)).toEqual([vdAgentNumbers(0, 0), vdAgentNumbers(1, 0)]);
    expect(String(await clipboard.get('clipboard', 'text/plain'))).toBe('from here\n');
    expect(await clipboard.get('clipboard', 'image/png')).toBeUndefined();
    expect(await clipboard.get('primary', 'text/plain')).toBeUndefined();
  });

  it('is asked for when the guest offers, of the types that it offers', async () => {
    await open().set('clipboard', { type: 'text/plain', bytes: Buffer.from('x') });
    agent.content = Buffer.from('of the guest');
    agent.offer(1, 2, 77);
    await until('its own is forgotten', () => !fs.existsSync(join(folder, 'clipboard.json')));
    expect(String(await clipboard.get('clipboard', 'text/plain'))).toBe('of the guest');
    agent.offer(77);
    agent.say(VDAGENT.release, vdAgentNumbers(1));
    await until('nothing of it is known', async () => (await clipboard.get('clipboard', 'text/plain')) === undefined);
  });

  it('is offered again by the next one, and what the guest had is shown', async () => {
    await open().set('primary', { type: 'text/plain', bytes: Buffer.from('kept') });
    agent.content = Buffer.from('of the guest');
    agent.offer(1);
    await until('it is offered', async () => (await clipboard.get('clipboard', 'text/plain')) !== undefined);
    await clipboard.keep();
    clipboard.close();
    agent.heard.length = 0;
    agent.content = undefined;
    await until('it has gone', () => agent.socket!.destroyed || agent.socket!.readableEnded);
    open();
    expect(String(await clipboard.get('clipboard', 'text/plain'))).toBe('of the guest');
    await until('the other is offered', () => grabs().length > 0);
    expect(grabs()).toEqual([vdAgentNumbers(1, 1)]);
  });

  it('is offered, and nobody asks for anything, though its agent has lost what was said to it first', async () => {
    const kept = { clipboard: { type: 'text/plain', isGuests: false, base64: Buffer.from('kept').toString('base64') } };
    fs.writeFileSync(join(folder, 'clipboard.json'), JSON.stringify(kept));
    agent.deafFor = 2;
    open({ answerMs: 300 });
    await until('it is offered', () => grabs().length > 0);
    expect(grabs()[0]).toEqual(vdAgentNumbers(0, 1));
    expect(agent.connections).toBeGreaterThan(2);
  });

  it('loses nothing that is put there while another change is being written', async () => {
    await open().set('clipboard', { type: 'text/plain', bytes: Buffer.from('first') });
    const inside = clipboard as unknown as { saving: Promise<void>; offered: Map<string, unknown> };
    let write!: () => void;
    inside.saving = new Promise((resolve) => {
      write = resolve;
    });
    const put = clipboard.set('primary', { type: 'text/plain', bytes: Buffer.from('second') });
    agent.offer(1);
    await until('the guest has offered', () => inside.offered.has('clipboard'));
    write();
    await put;
    await inside.saving;
    expect([...readClipboard(join(folder, 'clipboard.json'))]).toEqual([
      ['primary', { type: 'text/plain', bytes: Buffer.from('second'), isGuests: false }],
    ]);
  });

  it('keeps of what the guest offers all that it gives', async () => {
    expect(await open().get('clipboard', 'text/plain')).toBeUndefined();
    agent.content = Buffer.from('selected');
    agent.withheld = 0;
    agent.offer(1);
    agent.say(VDAGENT.grab, vdAgentNumbers(1, 1));
    await until('both are offered', async () => (await clipboard.get('primary', 'text/plain')) !== undefined);
    await clipboard.keep();
    expect([...readClipboard(join(folder, 'clipboard.json'))]).toEqual([
      ['primary', { type: 'text/plain', bytes: Buffer.from('selected'), isGuests: true }],
    ]);
  });

  it('leaves nothing of what cannot be kept, and says so', async () => {
    await open().set('clipboard', { type: 'text/plain', bytes: Buffer.from('kept') });
    const file = join(folder, 'clipboard.json');
    fs.rmSync(file);
    // It takes the place of no folder.
    fs.mkdirSync(file);
    const put = clipboard.set('primary', { type: 'text/plain', bytes: Buffer.from('lost') });
    await expect(put).rejects.toMatchObject({ code: 'RUNTIME_RECORD_WRITE', http: 507 });
    expect(fs.readdirSync(folder).sort()).toEqual(['clipboard.json', 'port']);
    expect(await clipboard.get('primary', 'text/plain')).toBeUndefined();
    expect(String(await clipboard.get('clipboard', 'text/plain'))).toBe('kept');
  });

  it('has lines as its guest has them', async () => {
    agent.capabilities |= 1 << 9;
    await open().set('clipboard', { type: 'text/plain', bytes: Buffer.from('a\nb\n') });
    agent.say(VDAGENT.request, vdAgentNumbers(0, 1));
    await until('it is given', () => last(VDAGENT.clipboard) !== undefined);
    expect(String(last(VDAGENT.clipboard)!.subarray(8))).toBe('a\r\nb\r\n');
    agent.content = Buffer.from('c\r\nd');
    agent.offer(1);
    await until('it is the guest’s', async () => String(await clipboard.get('clipboard', 'text/plain')) === 'c\nd');
  });

  it('has one clipboard alone where its agent knows no others', async () => {
    agent.capabilities = 1 << 5;
    await open().set('clipboard', { type: 'text/plain', bytes: Buffer.from('x') });
    await until('it is offered', () => grabs().length === 1);
    expect(grabs()).toEqual([vdAgentNumbers(1)]);
    await expect(clipboard.get('primary', 'text/plain')).rejects.toMatchObject({ code: 'VM_CLIPBOARD' });
  });

  it('refuses what is too large, what the guest does not give, and what does not come', async () => {
    expect(await open().get('clipboard', 'text/plain')).toBeUndefined();
    agent.content = Buffer.alloc(MOST_CLIPBOARD_BYTES + 1);
    agent.offer(1);
    await until('too large', async () => {
      const error = await clipboard.get('clipboard', 'text/plain').catch((thrown: Error) => thrown);
      return error instanceof Error && error.message.includes(`${MOST_CLIPBOARD_BYTES + 1} bytes, more than`);
    });
    agent.content = Buffer.from('small');
    expect(String(await clipboard.get('clipboard', 'text/plain'))).toBe('small');
    agent.content = undefined;
    clipboard.close();
    expect(await open({ answerMs: 2000 }).get('clipboard', 'text/plain')).toBeUndefined();
    agent.offer(1);
    await until('it is asked, in vain', async () => {
      const said = await clipboard.get('clipboard', 'text/plain').catch((thrown: Error) => thrown);
      return said instanceof Error && said.message.includes('does not answer');
    });
    await until('it is connected anew', () => agent.connections === 3);
    expect(await clipboard.get('clipboard', 'text/plain')).toBeUndefined();
  });

  it('goes on after nonsense, and after a guest that asks and does not read', async () => {
    await open().set('clipboard', { type: 'text/plain', bytes: Buffer.alloc(MOST_CLIPBOARD_BYTES, 'x') });
    agent.socket!.write(Buffer.alloc(64, 0xff));
    await until('it is connected anew', () => agent.connections === 2);
    expect((await clipboard.get('clipboard', 'text/plain'))?.length).toBe(MOST_CLIPBOARD_BYTES);
    const flooding = agent.socket!;
    flooding.pause();
    const question = vdAgentMessage(VDAGENT.request, vdAgentNumbers(0, 1));
    flooding.write(Buffer.concat(Array.from({ length: 50 }, () => question)));
    await until('it is cut off', () => agent.connections === 3);
    flooding.destroy();
    expect((await clipboard.get('clipboard', 'text/plain'))?.length).toBe(MOST_CLIPBOARD_BYTES);
  });

  it('takes text in UTF-8 and PNG, up to its limit', () => {
    const png = Buffer.concat([Buffer.from([0x89, 0x50, 0x4e, 0x47, 0x0d, 0x0a, 0x1a, 0x0a]), Buffer.alloc(16)]);
    expect(checkedContent({ type: 'image/png', bytes: png }).bytes).toBe(png);
    for (const content of [
      { type: 'text/plain', bytes: Buffer.from([0xc3]) },
      { type: 'image/png', bytes: Buffer.from('text') },
      { type: 'text/plain', bytes: Buffer.alloc(MOST_CLIPBOARD_BYTES + 1) },
    ] as const) {
      expect(() => checkedContent(content)).toThrow(expect.objectContaining({ code: 'VM_INPUT' }));
    }
  });
});
