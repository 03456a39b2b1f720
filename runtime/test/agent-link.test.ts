/** What a command asks of the agent before it runs: an agent of this process's own, which counts. */
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, expect, it } from 'vitest';
import { AgentLink } from '../aether/agent-link.ts';
import { AGENT_FRAME, PayloadWriter } from '../backend/agent-wire.ts';

const ENOENT = 2;
const EIO = 5;
const undo: (() => void)[] = [];
afterEach(() => {
  for (const one of undo.splice(0)) one();
});

function linkTo(accounts: { state: string | undefined; errno: number }) {
  const folder = mkdtempSync(join(tmpdir(), 'agent-link-'));
  const asked: number[] = [];
  const link = new AgentLink({
    name: 'one',
    commands: join(folder, 'commands'),
    defaults: { env: [], user: '0:0', cwd: '/' },
    accounts: () => accounts.state,
    channel: {
      toAgent(kind, about) {
        asked.push(kind);
        const answer = (type: number, payload: Buffer) => setImmediate(() => link.receive(type, about, payload));
        if (kind === AGENT_FRAME.file) answer(AGENT_FRAME.fileFailed, new PayloadWriter().u32(accounts.errno).done());
        if (kind !== AGENT_FRAME.exec) return;
        answer(AGENT_FRAME.runs, new PayloadWriter().u32(7).done());
        answer(AGENT_FRAME.exited, new PayloadWriter().u32(0).u64(0n).u64(0n).done());
      },
      cancel: () => {},
    },
    trees: {
      groupOf: () => undefined,
      killAll: async () => {},
      killOthers: async () => {},
      remove: () => {},
      outOfMemoryCount: () => 0,
      thaw: () => {},
    },
  });
  undo.push(() => {
    link.end(new Error('over'), 'over');
    rmSync(folder, { recursive: true, force: true });
  });
  const filesAskedBy = async () => {
    asked.length = 0;
    await (await link.start({ args: ['/bin/true'] })).wait();
    return asked.filter((kind) => kind === AGENT_FRAME.file).length;
  };
  return { link, filesAskedBy };
}

it('accounts that an image does not have are looked for once', async () => {
  const accounts: { state: string | undefined; errno: number } = { state: 'folder absent absent', errno: ENOENT };
  const { filesAskedBy } = linkTo(accounts);
  expect(await filesAskedBy()).toBe(2);
  expect(await filesAskedBy()).toBe(0);
  accounts.state = 'folder absent 1:2:3:4:5';
  expect(await filesAskedBy()).toBe(2);
  accounts.state = undefined;
  expect(await filesAskedBy()).toBe(2);
  expect(await filesAskedBy()).toBe(2);
});

it('accounts that could not be read are read again', async () => {
  const { filesAskedBy } = linkTo({ state: 'folder 1 2', errno: EIO });
  expect(await filesAskedBy()).toBe(2);
  expect(await filesAskedBy()).toBe(2);
});

it('of the commands that have ended the last are kept, and never more than a few beyond that', async () => {
  const { link, filesAskedBy } = linkTo({ state: 'folder absent absent', errno: ENOENT });
  for (let i = 0; i < 300; i++) {
    await filesAskedBy();
    expect(link.list().length).toBeLessThanOrEqual(256 + 17);
  }
  const ids = link.list().map(({ id }) => id);
  expect(ids.length).toBeGreaterThanOrEqual(256);
  expect(ids.at(-1)).toBe(300);
  expect(ids[0]).toBe(300 - ids.length + 1);
});
