/** Tasks that want to do harm to others, at a pool that has no container to spare: what they get, and that the next one notices nothing. */
import { writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import type { Image } from '#imagesvc';
import { findAgent } from '../backend/agent-binary.ts';
import { FnCallNode, type FnCallTask, type Pool } from '../index.ts';
import { fillTaskRoot, hostPython } from './fncall-images.ts';
import { canRun, NOTHING, Site } from './sandbox-fixture.ts';

const python = canRun() && findAgent() !== undefined ? hostPython() : undefined;
const TIME = 240_000;
const LIMITS = { wallMs: 60_000, pids: 40, memoryBytes: 96 << 20 };

const FORKS = `import os
while True:
    try: os.fork()
    except OSError: pass`;
const FILLS = `import os
for _ in range(3): os.fork()
while True: os.write(1, b'x' * 65536); os.write(2, b'y' * 65536)`;
const KILLS = `import os, signal
for pid in [1, os.getppid(), 2, -1]:
    try: os.kill(pid, signal.SIGKILL)
    except OSError: pass
    try: os.kill(1, signal.SIGSTOP)
    except OSError: pass
print('alive')`;
const KILLS_GROUP = 'import os, signal\nprint("before", flush=True)\nos.kill(0, signal.SIGKILL)';
/** In a session of its own, ignoring what it can, with standard output open. */
const HOLDS = `import os, signal, time
print('said', flush=True)
if os.fork() == 0:
    os.setsid()
    for number in range(1, 32):
        try: signal.signal(number, signal.SIG_IGN)
        except OSError: pass
    while True: time.sleep(1000)`;
const STOPS = 'import os, signal\nprint("before", flush=True)\nos.kill(os.getpid(), signal.SIGSTOP)';
const SLEEPS = `import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
for _ in range(8):
    if os.fork() == 0: break
while True: time.sleep(1000)`;
/** A module whose thread writes without end, as long as what it writes to takes it. */
const TALKS = `import os, threading, time
said = 0
def talk():
    global said
    while True:
        said += os.write(1, b'x' * 4096)
        time.sleep(0.001)
threading.Thread(target=talk, daemon=True).start()`;
const PIPE_BYTES = 65_536;

describe.skipIf(python === undefined)('tasks that attack', () => {
  const site = new Site();
  const notes: string[] = [];
  let node: FnCallNode;
  let image: Image;
  beforeAll(async () => {
    await site.open();
    image = await site.image('tasks', [
      (tree) => {
        fillTaskRoot(tree, python);
        writeFileSync(join(tree, python!.library, 'talkative.py'), TALKS);
      },
    ]);
    node = new FnCallNode({ folders: site.folders, note: (text) => notes.push(text) });
  }, TIME);
  afterAll(async () => {
    await node?.close();
    expect(site.leftovers()).toEqual(NOTHING);
    await site.remove();
  }, TIME);

  const pools = new Map<string, Pool>();
  function pool(kind: 'cold' | 'warm'): Pool {
    const options = { ceiling: 1, queueMs: 200_000, ...(kind === 'warm' ? { python: {} } : {}) };
    const found = pools.get(kind) ?? node.poolFor({ store: site.store, base: image }, options);
    pools.set(kind, found);
    return found;
  }
  const run = (kind: 'cold' | 'warm', code: string, limits: FnCallTask['limits'] = {}) =>
    node.run(pool(kind), { language: 'python', code, limits: { ...LIMITS, ...limits } });

  it.each(['cold', 'warm'] as const)(
    'end, and the next one has all it wants: %s',
    async (kind) => {
      const results = await Promise.all([
        run(kind, FORKS, { wallMs: 1_000 }),
        run(kind, 'print(1)'),
        run(kind, FILLS, { outputBytes: 1000 }),
        run(kind, KILLS),
        run(kind, KILLS_GROUP),
        run(kind, HOLDS),
        run(kind, STOPS, { wallMs: 1_000 }),
        run(kind, SLEEPS, { wallMs: 1_000 }),
        run(kind, 'x = []\nwhile True: x.append(bytearray(1 << 20))'),
        run(kind, 'import os, sys\nprint(len([one for one in os.listdir("/proc") if one.isdigit()]))'),
      ]);
      const told = results.map(({ status, run: step }) => [status, step?.signal, step?.stdout.toString().slice(0, 8)]);
      expect(told).toEqual([
        // Some kernels count what the bomb takes as memory first.
        [expect.stringMatching(/^(time|memory)_limit$/), 'SIGKILL', ''],
        ['finished', undefined, '1\n'],
        ['output_limit', 'SIGKILL', expect.stringMatching(/^x{8}$/)],
        // Whom it may not name it does not reach; what it reaches is itself alone.
        expect.arrayContaining([expect.stringMatching(/^(finished|runtime_error)$/)]),
        ['runtime_error', 'SIGKILL', 'before\n'],
        ['finished', undefined, 'said\n'],
        ['time_limit', 'SIGKILL', expect.stringMatching(/^(before\n)?$/)],
        ['time_limit', 'SIGKILL', ''],
        ['memory_limit', 'SIGKILL', ''],
        ['finished', undefined, '2\n'],
      ]);
      expect(results[2]!.run!.stdout.length).toBe(1000);
      expect([pool(kind).state.replaced, notes]).toEqual([0, []]);
    },
    TIME,
  );

  it(
    'never have a module of the interpreter that stays wait for somebody to read what it writes',
    async () => {
      const environment = { store: site.store, base: image };
      const talks = node.poolFor(environment, { ceiling: 1, queueMs: 200_000, python: { imports: ['talkative'] } });
      const said = async () => {
        const result = await node.run(talks, { language: 'python', code: 'import talkative\nprint(talkative.said)' });
        return Number(result.run!.stdout.toString());
      };
      const first = await said();
      for (let last = first; last <= first + 2 * PIPE_BYTES; last = await said()) expect(last).toBeGreaterThan(0);
      expect(talks.state.replaced).toBe(0);
    },
    TIME,
  );

  it(
    'keep others waiting no longer than the queue has time and room for',
    async () => {
      const environment = { store: site.store, base: image };
      const small = node.poolFor(environment, { floor: 1, ceiling: 1, queue: 3, queueMs: 150_000 });
      await small.warm();
      const burst = Array.from({ length: 40 }, () =>
        node.run(small, { language: 'sh', code: 'sleep 1000', limits: { wallMs: 500 } }).then(
          ({ status }) => status,
          ({ code, http, params }) => ({ code, http, retryAfter: params.retryAfter }),
        ),
      );
      const ends = await Promise.all(burst);
      expect(ends.slice(0, 4)).toEqual(Array(4).fill('time_limit'));
      for (const end of ends.slice(4)) {
        expect(end).toEqual({ code: 'RUNTIME_FNCALL_BUSY', http: 429, retryAfter: expect.any(Number) });
        const { retryAfter } = end as { retryAfter: number };
        expect(Number.isInteger(retryAfter) && retryAfter >= 1 && retryAfter <= 60).toBe(true);
      }
      expect(small.state).toMatchObject({ waiting: 0, refused: 36, replaced: 0 });
      const late = node.poolFor(environment, { ceiling: 1, queueMs: 1 });
      const slow = { language: 'sh', code: 'sleep 1' };
      await expect(Promise.all([node.run(late, slow), node.run(late, slow)])).rejects.toMatchObject({
        code: 'RUNTIME_FNCALL_BUSY',
        message: expect.stringContaining('no container was free for 1 ms'),
      });
    },
    TIME,
  );
});
