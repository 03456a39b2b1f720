/** The host's end of a guest's link: every frame once and in order over connections that are cut anywhere, and nothing that a guest can send does harm. */
import { once } from 'node:events';
import * as fs from 'node:fs';
import { createServer, type Server, type Socket } from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, beforeEach, describe, expect, it } from 'vitest';
import { FRAME, frameBytes, PayloadWriter, PROTOCOL_VERSION } from '../backend/agent-wire.ts';
import { freezeCommands } from '../vm/guest/freeze-commands.ts';
import { GUEST_COMMANDS } from '../vm/guest/guest-groups.ts';
import { GuestFailure, GuestLink } from '../vm/guest/guest-link.ts';
import { guestWork } from '../vm/guest/guest-order.ts';
import { PACKET, type Packet, PacketParser, packetBytes } from '../vm/guest/packets.ts';
import { until } from './resident-fixture.ts';

/** A guest as the real one is (runtime/agent/src/guest/link.rs), which can be cut off. */
class Guest {
  readonly got: number[] = [];
  connections = 0;
  /** It reads nothing. */
  deaf = false;
  /** Numbers of frames that it sent and that were not taken. */
  private readonly untaken: { readonly number: number; readonly payload: Buffer }[] = [];
  private session = 0n;
  private received = 0;
  private next = 1;
  private socket: Socket | undefined;
  private readonly server: Server;

  constructor(path: string) {
    this.server = createServer((socket) => {
      this.socket = socket;
      this.connections++;
      const parser = new PacketParser();
      socket.on('error', () => {});
      socket.on('data', (bytes) => {
        for (const packet of parser.push(bytes)) this.handle(packet);
        if (this.deaf) socket.pause();
      });
    }).listen(path);
  }

  get pending(): number {
    return this.untaken.length;
  }

  say(value: number): void {
    const payload = frameBytes(FRAME.fromAgent, 0, new PayloadWriter().u8(153).u32(value).done());
    this.untaken.push({ number: this.next++, payload });
    const { number } = this.untaken.at(-1)!;
    if (this.session !== 0n) this.put(PACKET.frames, number, payload);
  }

  /** In the middle of whatever is on its way. */
  cut(): void {
    this.socket?.destroy();
  }

  raw(bytes: Buffer): void {
    this.socket?.write(bytes);
  }

  close(): void {
    this.cut();
    this.server.close();
  }

  private put(kind: number, number: number, payload: Buffer): void {
    this.socket?.write(packetBytes({ kind, session: this.session, number, taken: this.received, payload }));
  }

  private handle({ kind, session, number, taken, payload }: Packet): void {
    while (this.untaken.length > 0 && this.untaken[0]!.number <= taken) this.untaken.shift();
    if (kind === PACKET.hello) {
      if (session !== this.session) this.received = 0;
      this.session = session;
      const welcome = new PayloadWriter().u32(PROTOCOL_VERSION).bytes('build').bytes('boot').done();
      this.put(PACKET.welcome, this.received, welcome);
      for (const one of this.untaken) this.put(PACKET.frames, one.number, one.payload);
      return;
    }
    if (kind !== PACKET.frames || number !== this.received + 1) return;
    this.received = number;
    this.got.push(payload.readUInt32LE(9 + 1));
    this.put(PACKET.taken, 0, Buffer.alloc(0));
  }
}

function random(seed: number): (below: number) => number {
  let state = seed;
  return (below) => {
    state = (state * 1103515245 + 12345) % 2 ** 31;
    return state % below;
  };
}

describe('the link to a guest', { timeout: 120_000 }, () => {
  let folder: string;
  let guest: Guest;
  beforeEach(() => {
    folder = fs.mkdtempSync(join(tmpdir(), 'dsec-link-'));
    guest = new Guest(join(folder, 's'));
  });
  afterEach(() => {
    guest.close();
    fs.rmSync(folder, { recursive: true, force: true });
  });

  const open = (seen: number[], broken: string[] = []) =>
    new GuestLink(join(folder, 's'), {
      started() {},
      failed() {},
      ended() {},
      frame: (_kind, about) => seen.push(about),
      broken: (problem) => broken.push(problem),
    });

  it('loses and doubles nothing over connections that are cut at any time', async () => {
    const seen: number[] = [];
    const link = open(seen);
    const below = random(5);
    const count = 400;
    for (let n = 1; n <= count; n++) {
      guest.say(n);
      link.toAgent(50, n);
      if (below(10) === 0) guest.cut();
      if (below(3) === 0) await new Promise(setImmediate);
    }
    await until('all has come', () => guest.got.length >= count && seen.length >= count && guest.pending === 0);
    const all = Array.from({ length: count }, (_, n) => n + 1);
    expect(seen).toEqual(all);
    expect(guest.got).toEqual(all);
    link.close();
  });

  it('goes on with another process of the host: what that one had not taken comes again', async () => {
    const first: number[] = [];
    const link = open(first);
    guest.say(1);
    await until('it is taken', () => guest.pending === 0 && first.length === 1);
    link.close();
    guest.say(2);
    const second: number[] = [];
    const next = open(second);
    next.toAgent(50, 9);
    await until('it has come', () => second.length === 1 && guest.got.length === 1);
    expect(second).toEqual([2]);
    expect(guest.got).toEqual([9]);
    next.close();
  });

  it('bears whatever a guest sends', async () => {
    const below = random(11);
    for (let round = 0; round < 60; round++) {
      const seen: number[] = [];
      const broken: string[] = [];
      const link = open(seen, broken);
      guest.say(1);
      await until('it is open', () => seen.length === 1);
      const junk = Buffer.from(Array.from({ length: 1 + below(3000) }, () => below(256)));
      const { session } = link as unknown as { session: bigint };
      const kinds = [PACKET.welcome, PACKET.frames, PACKET.taken, 0, 9, 255];
      const payload = below(2) === 0 ? junk : frameBytes(below(256), below(9), junk.subarray(0, below(40)));
      const packet = packetBytes({ kind: kinds[below(6)]!, session, number: below(6), taken: below(4), payload });
      const isCut = below(4) === 0;
      guest.raw(below(3) === 0 ? junk : packet.subarray(0, isCut ? below(packet.length) : packet.length));
      guest.say(2);
      // Of half a packet the rest is waited for, until the connection is another one.
      guest.cut();
      await until('it goes on, or is done with it', () => seen.includes(2) || broken.length > 0 || guest.pending === 0);
      link.close();
      guest.close();
      fs.rmSync(join(folder, 's'), { force: true });
      guest = new Guest(join(folder, 's'));
      await once((guest as unknown as { server: Server }).server, 'listening');
    }
  });

  it('hears no more of one whose packets are all damaged, each of which costs a sum', async () => {
    const broken: string[] = [];
    const link = open([], broken);
    const { session } = link as unknown as { session: bigint };
    guest.say(1);
    await until('it is open', () => guest.pending === 0);
    const packet = packetBytes({ kind: PACKET.frames, session, number: 2, taken: 0, payload: Buffer.alloc(200, 1) });
    packet[100] = 2;
    for (let n = 0; n < 9; n++) guest.raw(packet);
    await until('it is done with it', () => broken.length > 0);
    expect(broken).toEqual([expect.stringContaining('damaged')]);
    link.close();
  });

  it('keeps little in memory for one that greets again and again and reads nothing, which loses nothing', async () => {
    const link = open([]);
    guest.say(1);
    await until('it is open', () => guest.pending === 0);
    guest.deaf = true;
    const big = Buffer.alloc(100_000);
    for (let n = 1; n <= 20; n++) link.toAgent(50, n, big);
    const { session } = link as unknown as { session: bigint };
    const payload = new PayloadWriter().u32(PROTOCOL_VERSION).bytes('build').bytes('boot').done();
    const connections = guest.connections;
    let most = 0;
    for (let n = 0; n < 200 && guest.connections === connections; n++) {
      guest.raw(packetBytes({ kind: PACKET.welcome, session, number: 0, taken: 0, payload }));
      await new Promise(setImmediate);
      const { socket } = link as unknown as { socket?: Socket };
      most = Math.max(most, socket?.writableLength ?? 0);
    }
    await until('it is connected anew', () => guest.connections > connections);
    expect(most).toBeLessThan(10 << 20);
    guest.deaf = false;
    guest.cut();
    await until('all has come', () => guest.got.length >= 40);
    expect(new Set(guest.got).size).toBe(guest.got.length === 40 ? 21 : 0);
    link.close();
  });

  it('waits for an answer for so long, and no longer', async () => {
    const link = open([]);
    await expect(link.work(Buffer.alloc(8), 50)).rejects.toMatchObject({ code: 'VM_GUEST_SILENT' });
    guest.cut();
    link.toAgent(50, 1);
    await expect(link.settled(0)).rejects.toMatchObject({ code: 'VM_GUEST_SILENT' });
    link.close();
  });

  it('hears nothing while it is held back, over another connection too, and all of it then', async () => {
    const seen: number[] = [];
    const link = open(seen);
    guest.say(1);
    await until('it is open', () => seen.length === 1);
    link.holdBack();
    guest.say(2);
    link.toAgent(50, 9);
    await until('the guest has heard', () => guest.got.length === 1);
    link.reconnect();
    await until('it is connected anew', () => guest.connections === 2);
    guest.say(3);
    expect(seen).toEqual([1]);
    link.hear();
    await until('all has come', () => seen.length === 3 && guest.pending === 0);
    expect([seen, guest.got]).toEqual([[1, 2, 3], [9]]);
    link.close();
  });

  it('finds packets in any stream, cut anywhere', () => {
    const below = random(3);
    for (let round = 0; round < 300; round++) {
      const sent = Array.from({ length: below(5) }, (_, number) => ({
        kind: PACKET.frames,
        session: 5n,
        number,
        taken: 1,
        payload: Buffer.alloc(below(300), below(256)),
      }));
      const noise = () => Buffer.concat([Buffer.from('DSv1'), Buffer.alloc(below(90), below(256))].slice(0, below(3)));
      const stream = Buffer.concat([...sent.flatMap((packet) => [noise(), packetBytes(packet)]), Buffer.alloc(100)]);
      const parser = new PacketParser();
      const found: Packet[] = [];
      for (let at = 0; at < stream.length; ) {
        const length = 1 + below(200);
        found.push(...parser.push(stream.subarray(at, at + length)));
        at += length;
      }
      expect(found.map(({ number, payload }) => [number, payload.length])).toEqual(
        sent.map(({ number, payload }) => [number, payload.length]),
      );
    }
  });
});

describe('commands of a guest that are to stand still', () => {
  const file = `${GUEST_COMMANDS}/cgroup.freeze`;

  it.each([
    ['what is written', 1],
    ['what is read', 2],
  ])('go on when %s fails: what they were told may be done late', async (_what, failing) => {
    const told: Buffer[] = [];
    const late = new GuestFailure(5);
    const work = async (payload: Buffer) => {
      told.push(payload);
      // As of a guest that does not answer: nothing more is waited for.
      if (told.length === failing) throw late;
      if (told.length > failing) return new Promise<Buffer>(() => {});
      return Buffer.alloc(0);
    };
    await expect(freezeCommands({ work }, 'one')).rejects.toBe(late);
    expect([told[0], told.at(-1)]).toEqual([guestWork.write(file, '1'), guestWork.write(file, '0')]);
    expect(told.length).toBe(failing + 1);
  });
});
