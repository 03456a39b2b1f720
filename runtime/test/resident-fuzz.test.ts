/** Both ends of the agent's protocol, and the keeper's, given what nobody should send. Seeded: a failure comes again. */
import { randomBytes } from 'node:crypto';
import * as fs from 'node:fs';
import { connect } from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { cgroupTrees } from '../aether/agent-channel.ts';
import { AgentLink } from '../aether/agent-link.ts';
import { AgentStreams } from '../aether/agent-streams.ts';
import { watchFiles } from '../aether/file-watch.ts';
import { KeeperChannel } from '../aether/keeper-channel.ts';
import { connectPort } from '../aether/port-connection.ts';
import { findAgent } from '../backend/agent-binary.ts';
import { AGENT_FRAME, FRAME, frameBytes, PayloadWriter } from '../backend/agent-wire.ts';
import { keeperSocket } from '../node/sandbox-node.ts';
import { ResidentSite, say } from './resident-fixture.ts';
import { canRun } from './sandbox-fixture.ts';

const agent = findAgent();
if (agent === undefined) console.log('skipped: dsec-agent is not built');

/** xorshift32 */
function random(seed: number) {
  let state = seed;
  const next = () => {
    state ^= state << 13;
    state ^= state >>> 17;
    state ^= state << 5;
    return state >>> 0;
  };
  return {
    next,
    below: (n: number) => next() % n,
    bytes: (n: number) => Buffer.from(Array.from({ length: n }, () => next() & 255)),
  };
}

describe.skipIf(agent === undefined)('a keeper of another build', () => {
  it('gives way when it keeps nothing, and stays as long as it does', async () => {
    const folder = fs.mkdtempSync(join(tmpdir(), 'dsec-keeper-'));
    const socket = join(folder, 'keeper.sock');
    const other = { ...agent!, build: 'another' };
    try {
      const first = await KeeperChannel.open(agent!, socket);
      expect(first.build).toBe(agent!.build);
      const id = await first.hold('one', join(folder, 'lock'));
      const same = await KeeperChannel.open(other, socket);
      expect(same.kept.map(({ name }) => name)).toEqual(['one']);
      same.forget(id!);
      same.close();
      // The program is the same here, so its build is too: that another one answers is told by what it keeps.
      await expect.poll(async () => (await KeeperChannel.find(socket)) === undefined, { timeout: 30_000 }).toBe(true);
      const idle = await KeeperChannel.open(agent!, socket);
      const fresh = await KeeperChannel.open(other, socket);
      await idle.closed;
      expect(fresh.kept).toEqual([]);
      fresh.close();
    } finally {
      fs.rmSync(folder, { recursive: true });
    }
  });
});

describe('the host', () => {
  it('bears whatever is said of connections and watches', async () => {
    const { below, bytes } = random(17);
    const kinds = [162, 163, 164, 165, 166, 167, 168];
    let refused = 0;
    for (let round = 0; round < 100; round++) {
      const sent: number[] = [];
      const streams = new AgentStreams((_kind, id) => sent.push(id));
      const connecting = connectPort(streams, { sandbox: 'fuzz', port: 80 }).then(
        (connection) => void connection.resume().end('x'),
        () => {},
      );
      const watching = watchFiles(streams, Buffer.from('/')).then(
        async (watch) => {
          for await (const event of watch) expect(event.path).toBeInstanceOf(Buffer);
        },
        () => {},
      );
      for (let n = 0; n < 60; n++) {
        try {
          streams.receive(kinds[below(kinds.length)]!, sent[below(2)]!, bytes(below(30)));
        } catch (error) {
          expect(error).toMatchObject({ code: 'RUNTIME_AGENT_PROTOCOL' });
          refused++;
        }
      }
      streams.lose(new Error('over'));
      await Promise.all([connecting, watching.catch(() => {})]);
    }
    expect(refused).toBeGreaterThan(0);
  });

  it('bears whatever an agent sends, and asks for its end', () => {
    const folder = fs.mkdtempSync('/tmp/dsec-fuzz-');
    try {
      let cancelled = 0;
      const channel = { toAgent() {}, cancel: () => void cancelled++ };
      const kinds = Object.values(AGENT_FRAME);
      const { below, bytes } = random(7);
      for (let round = 0; round < 20; round++) {
        const link = new AgentLink({
          name: 'fuzz',
          channel,
          commands: join(folder, String(round)),
          defaults: { env: [], user: '', cwd: '/' },
          trees: cgroupTrees(undefined, [], channel),
        });
        link.start({ args: ['x'] }).catch(() => {});
        for (let n = 0; n < 200; n++) link.receive(kinds[below(kinds.length)]!, below(3), bytes(below(40)));
        link.end(new Error('over'), 'over');
      }
      expect(cancelled).toBeGreaterThan(0);
    } finally {
      fs.rmSync(folder, { recursive: true, force: true });
    }
  });
});

describe.skipIf(agent === undefined || !canRun())('the agent and the keeper', { timeout: 180_000 }, () => {
  let all: ResidentSite;
  beforeAll(async () => {
    all = await ResidentSite.open();
  }, 120_000);
  afterAll(() => all.remove(), 120_000);

  it('end one sandbox for what its agent does not understand, and no other', async () => {
    const bystander = await all.create();
    const { below, bytes, next } = random(11);
    const kinds = [50, 51, 52, 53, 54, 55, 56, 57, 58, 60, 61, 62, 63, 64, 65, 66, 0, 99, 255];
    const ends: string[] = [];
    for (let round = 0; round < 12; round++) {
      const victim = await all.create();
      all.node.close();
      const channel = (await KeeperChannel.find(keeperSocket(all.site.folders.runDir)))!;
      const { id } = channel.kept.find(({ name }) => name === victim.facts.id)!;
      for (let n = 0; n < 60; n++) {
        const kind = kinds[below(kinds.length)]!;
        // Signals to everything are no nonsense.
        const payload = kind === 53 ? bytes(4) : bytes(below(60));
        channel.toAgent(id, kind, next(), payload);
      }
      channel.toAgent(id, 255, 0);
      // Said after all that: whoever comes next finds it taken.
      await new Promise((go) => setTimeout(go, 50));
      channel.close();
      await all.restart();
      const left = all.node.list().find(({ name }) => name === victim.name);
      if (left !== undefined) await left.ended;
      ends.push(victim.name);
      expect(() => all.node.get(victim.name)).toThrow(/has ended: its agent exited with 0/);
    }
    expect(await say(all.node.get(bystander.name), 'echo here')).toBe('here\n');
  });

  it('end a connection for what the keeper does not understand, and keep what there is', async () => {
    const bystander = await all.create();
    const path = keeperSocket(all.site.folders.runDir);
    const attempts = [
      randomBytes(300),
      Buffer.from('ffffffff00', 'hex'),
      frameBytes(FRAME.hold, 1, Buffer.from([255, 255, 255, 255])),
      frameBytes(FRAME.taken, 1, Buffer.alloc(1)),
      frameBytes(FRAME.toAgentInGroup, 1, new PayloadWriter().bytes('/tmp/x\0y').done()),
      frameBytes(200, 0, Buffer.alloc(0)),
      frameBytes(FRAME.prepare, 4242, Buffer.alloc(3)),
      frameBytes(FRAME.launch, 4242, Buffer.alloc(3)),
    ];
    all.node.close();
    for (const bytes of attempts) {
      const socket = connect({ path });
      await new Promise((resolve) => {
        socket.once('error', resolve);
        socket.once('connect', () => socket.end(bytes));
        socket.once('close', resolve);
        socket.resume();
      });
    }
    await all.restart();
    expect(await say(all.node.get(bystander.name), 'echo here')).toBe('here\n');
  });
});
