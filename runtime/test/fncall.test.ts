import { spawn } from 'node:child_process';
import { readFileSync } from 'node:fs';
import { setTimeout as delay } from 'node:timers/promises';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import type { Image } from '#imagesvc';
import { findAgent } from '../backend/agent-binary.ts';
import {
  FnCallNode,
  type FnCallTask,
  type Pool,
  type PoolOptions,
  reclaimSandboxes,
  type TaskResult,
} from '../index.ts';
import { fillCompiler, fillTaskRoot, hostPython } from './fncall-images.ts';
import { LOOK, MARK, PLANT } from './fncall-traces.ts';
import { canRun, NOTHING, Site } from './sandbox-fixture.ts';

const python = canRun() && findAgent() !== undefined ? hostPython() : undefined;
const SOME = Number(process.env.DSEC_FNCALL_TASKS ?? 150);
const TIME = 240_000;

/** Processes that a process has started, and theirs. */
function below(pid: number): number[] {
  const own = readFileSync(`/proc/${pid}/task/${pid}/children`, 'utf8').split(' ').filter(Boolean).map(Number);
  return own.flatMap((child) => [child, ...below(child)]);
}

describe.skipIf(python === undefined)('FnCall', () => {
  const site = new Site();
  const notes: string[] = [];
  let node: FnCallNode;
  let image: Image;
  const pools = new Map<string, Pool>();

  beforeAll(async () => {
    await site.open();
    image = await site.image('tasks', [(folder) => fillTaskRoot(folder, python), fillCompiler], {
      Env: ['OF_IMAGE=1'],
    });
    node = new FnCallNode({ folders: site.folders, note: (text) => notes.push(text) });
  }, TIME);
  afterAll(async () => {
    await node?.close();
    expect(site.leftovers()).toEqual(NOTHING);
    await site.remove();
  }, TIME);

  function pool(kind: 'cold' | 'warm' | 'root'): Pool {
    const options: Record<string, PoolOptions> = {
      cold: { ceiling: 1, queueMs: 120_000 },
      warm: { ceiling: 1, queueMs: 120_000, python: { imports: ['json', 'random'] } },
      root: { ceiling: 1, queueMs: 120_000, userns: 'host' },
    };
    const found = pools.get(kind) ?? node.poolFor({ store: site.store, base: image }, options[kind]);
    pools.set(kind, found);
    return found;
  }
  const run = (kind: 'cold' | 'warm' | 'root', task: Partial<FnCallTask>): Promise<TaskResult> =>
    node.run(pool(kind), { language: 'python', ...task });
  const output = ({ run: step }: TaskResult) => step?.stdout.toString();

  it.each(['cold', 'warm'] as const)(
    'gives input, files, arguments and environment, and takes files back: %s',
    async (kind) => {
      const result = await run(kind, {
        code: 'import os, sys, helper\nprint(sys.stdin.read(), sys.argv[1:], os.environ["MINE"], os.environ["OF_IMAGE"], helper.x, os.getcwd(), __name__)\nos.makedirs("out/deep")\nopen("out/deep/a.bin", "wb").write(bytes(range(256)))\nopen("b.txt", "w").write("b")\nos.symlink("/etc/passwd", "link.txt")',
        files: [{ path: 'helper.py', content: Buffer.from('x = 5') }],
        stdin: Buffer.from('in'),
        args: ['one', 'two words'],
        env: { MINE: 'm' },
        fetch: ['*.txt', 'out/**', 'nothing'],
      });
      expect(result.problem).toBeUndefined();
      expect(result.run!.stderr.toString()).toBe('');
      expect(output(result)).toBe("in ['one', 'two words'] m 1 5 /work __main__\n");
      expect(result.status).toBe('finished');
      expect(result.files.map(({ path }) => path)).toEqual(['b.txt', 'out/deep/a.bin']);
      expect(result.files[1]!.content.equals(Buffer.from(Array.from({ length: 256 }, (_, i) => i)))).toBe(true);
      expect(result.run!.peakMemoryBytes).toBeGreaterThan(0);
    },
    TIME,
  );

  it.each(['cold', 'warm'] as const)(
    'tells how a program ends: %s',
    async (kind) => {
      const failed = await run(kind, { code: 'print("a")\n1 / 0' });
      expect([failed.status, failed.run!.exitCode, output(failed)]).toEqual(['runtime_error', 1, 'a\n']);
      expect(failed.run!.stderr.toString()).toMatch(
        /^Traceback \(most recent call last\):\n {2}File ".*main\.py", line 2, in <module>\n/,
      );
      expect((await run(kind, { code: 'import sys; sys.exit(3)' })).run!.exitCode).toBe(3);
      expect((await run(kind, { code: 'import sys; sys.exit("no")' })).run!.stderr.toString()).toBe('no\n');
      const killed = await run(kind, { code: 'import os, signal; os.kill(os.getpid(), signal.SIGSEGV)' });
      expect([killed.status, killed.run!.signal, killed.run!.exitCode]).toEqual([
        'runtime_error',
        'SIGSEGV',
        undefined,
      ]);
      const wrong = await run(kind, { code: 'print(' });
      expect(wrong.run!.stderr.toString()).toMatch(/^ {2}File ".*main\.py", line 1\n/);
      const late = await run(kind, {
        code: 'import atexit, threading, time\natexit.register(print, "exit")\nthreading.Thread(target=lambda: (time.sleep(0.05), print("thread"))).start()',
      });
      expect(output(late)).toBe('thread\nexit\n');
    },
    TIME,
  );

  it.each(['cold', 'warm'] as const)(
    'holds limits: %s',
    async (kind) => {
      const wall = await run(kind, {
        code: 'print("begun", flush=True)\nimport time; time.sleep(100)',
        limits: { wallMs: 2_000 },
      });
      expect([wall.status, output(wall)]).toEqual(['time_limit', 'begun\n']);
      const cpu = await run(kind, {
        code: 'import os\nfor _ in range(3): os.fork()\nwhile True: pass',
        limits: { cpuMs: 300, wallMs: 60_000 },
      });
      expect(cpu.status).toBe('time_limit');
      const memory = await run(kind, { code: 'x = bytearray(200 << 20)', limits: { memoryBytes: 64 << 20 } });
      expect(memory.status).toBe('memory_limit');
      expect(memory.run!.peakMemoryBytes).toBeGreaterThan(60 << 20);
      const pids = await run(kind, {
        code: 'import os\ntry:\n  while True:\n    if os.fork() == 0: os.read(os.pipe()[0], 1)\nexcept OSError as e: print(type(e).__name__)',
        limits: { pids: 20 },
      });
      expect(output(pids)).toBe('BlockingIOError\n');
      const full = await run(kind, {
        code: 'try:\n  open("x", "wb").write(bytes(8 << 20))\nexcept OSError as e: print(e.errno)',
        limits: { diskBytes: 1 << 20 },
      });
      expect(output(full)).toBe('28\n');
      const long = await run(kind, { code: 'print("x" * 100_000)', limits: { outputBytes: 1000 } });
      expect([long.status, long.run!.stdout.length, long.run!.stdoutBytes]).toEqual(['finished', 1000, 100_001]);
      const endless = await run(kind, {
        code: 'while True: print("x" * 100_000)',
        limits: { outputBytes: 0, wallMs: 60_000 },
      });
      expect(endless.status).toBe('output_limit');
    },
    TIME,
  );

  it(
    'compiles, tells what the compiler says, and hands what it made to another task',
    async () => {
      const code = '#include <stdio.h>\nint main(void) { int n; scanf("%d", &n); printf("%d\\n", n * 2); return 0; }';
      const good = await run('cold', { language: 'c', code, stdin: Buffer.from('21'), limits: { compileMs: 120_000 } });
      expect(good.compile!.stderr.toString()).toBe('');
      expect([good.status, output(good), good.compile!.status]).toEqual(['finished', '42\n', 'finished']);
      const bad = await run('cold', {
        language: 'c',
        code: 'int main(void) { return x; }',
        limits: { compileMs: 120_000 },
      });
      expect([bad.status, bad.run]).toEqual(['compile_error', undefined]);
      expect(bad.compile!.stderr.toString()).toContain("'x' undeclared");
      const made = await run('cold', {
        language: 'c',
        code,
        compileOnly: true,
        fetch: ['main'],
        limits: { compileMs: 120_000 },
      });
      expect([made.status, made.files.map(({ path }) => path)]).toEqual(['finished', ['main']]);
      const ran = await run('warm', {
        language: 'sh',
        code: './main',
        files: [{ ...made.files[0]!, mode: 0o755 }],
        stdin: Buffer.from('4'),
      });
      expect(output(ran)).toBe('8\n');
    },
    TIME,
  );

  it(
    'refuses what is no task, and says what an image lacks',
    async () => {
      const code = 'RUNTIME_FNCALL_TASK';
      await expect(run('cold', {})).rejects.toMatchObject({ code });
      await expect(
        run('cold', { code: '', files: [{ path: '../x', content: Buffer.alloc(0) }] }),
      ).rejects.toMatchObject({ code });
      await expect(run('cold', { code: '', limits: { memoryBytes: 1 } })).rejects.toMatchObject({ code });
      await expect(run('cold', { code: '', env: { 'A=B': '' } })).rejects.toMatchObject({ code });
      await expect(run('cold', { code: '', fetch: ['/etc/../x'] })).rejects.toMatchObject({ code });
      await expect(run('cold', { code: '', language: 'klingon' })).rejects.toMatchObject({
        code: 'RUNTIME_FNCALL_LANGUAGE',
      });
      const lacking = await run('cold', { code: 'fn main() {}', language: 'rust' });
      expect([lacking.status, lacking.problem]).toEqual(['sandbox_error', 'rustc could not be run: ENOENT']);
      const content = Buffer.alloc(5000);
      for (const path of ['/etc/passwd', '/proc/self/oom_score_adj', '//etc/passwd', '/work', '/workplace/x']) {
        await expect(run('cold', { code: '', files: [{ path, content }] })).rejects.toMatchObject({ code });
        await expect(run('cold', { code: '', fetch: [path] })).rejects.toMatchObject({ code });
      }
      await expect(run('cold', { code: '', fetch: ['/**/x'] })).rejects.toMatchObject({ code });
      const files = Array.from({ length: 16 }, (_, i) => ({ path: `f${i}`, content }));
      await expect(run('cold', { code: '', files, limits: { diskBytes: 65_536 } })).rejects.toMatchObject({ code });
      await expect(run('cold', { code: '', limits: { wallMs: 3_000_000 } })).rejects.toMatchObject({ code });
      const large = Buffer.alloc(9 << 20, 7);
      const taken = await run('cold', {
        code: 'import hashlib; print(len(open("large", "rb").read()))',
        files: [{ path: 'large', content: large }],
        fetch: ['large', 'l*', '/work/**/**/**/large'],
      });
      expect(taken.files.length).toBe(1);
      expect([output(taken), taken.files[0]!.content.equals(large)]).toEqual([`${large.length}\n`, true]);
    },
    TIME,
  );

  it(
    'gives back what there is room for, and no part of a file',
    async () => {
      const code = 'open("a", "w").write("a")\nopen("b", "wb").truncate(33 << 20)';
      const result = await run('cold', { code, fetch: ['?'] });
      expect(result.files.map(({ path }) => path)).toEqual(['a']);
      expect(result.problem).toBe(`files to fetch: they are larger than ${32 << 20} bytes together`);
    },
    TIME,
  );

  it(
    'lets no task find the interpreter that waits, nor what leads to the container',
    async () => {
      const look = { language: 'sh', code: 'cat /proc/[0-9]*/comm' };
      expect(output(await run('warm', look))).toBe(output(await run('cold', look)));
      const code =
        'import os\nprint(sorted(os.listdir("/proc/self/fd")))\nprint([line for line in open("/proc/self/status") if line.startswith("Seccomp:")])';
      expect(output(await run('warm', { code }))).toBe("['0', '1', '2', '3']\n['Seccomp:\\t2\\n']\n");
      const small = await run('warm', { code: 'x = bytearray(20 << 20)', limits: { memoryBytes: 4 << 20 } });
      expect(small.status).toBe('memory_limit');
    },
    TIME,
  );

  it(
    'has forks that are as an interpreter of their own: streams, time zone, and namespaces that they cannot enter',
    async () => {
      const code = `
import ctypes, os, sys, time
for one in (sys.stdin, sys.stdout, sys.stderr):
    print(one.fileno(), one.isatty(), one.seekable(), one.encoding, one.errors, one.line_buffering, one.write_through, one is getattr(sys, f'__std{["in", "out", "err"][one.fileno()]}__'))
print(time.tzname, time.timezone, os.environ.get('TZ'))
libc = ctypes.CDLL(None, use_errno=True)
place = os.open('/proc/self/ns/net', os.O_RDONLY)
print(libc.setns(place, 0), ctypes.get_errno(), libc.unshare(0x20000), ctypes.get_errno())
print(sys.stdin.readline(), sys.stdin.read(), sep='|')
print(sorted(os.listdir('/proc/self/fd')) == ['0', '1', '2', str(place), str(place + 1)])`;
      const task = { code, stdin: Buffer.from('one\ntwo\nthree'), env: { TZ: 'MST7' } };
      const [cold, warm] = [await run('cold', task), await run('warm', task)];
      expect(warm.run!.stderr.toString()).toBe('');
      expect(output(warm)).toBe(output(cold));
      expect(output(warm)).toContain("('MST', 'MST') 25200 MST7\n-1 1 -1 1\none\n|two\nthree\n");
      const unbuffered = { code: 'import sys; print(sys.stdout.write_through)', env: { PYTHONUNBUFFERED: '1' } };
      expect(output(await run('warm', unbuffered))).toBe('True\n');
    },
    TIME,
  );

  it(
    'has no interpreter that waits as root of the machine',
    async () => {
      const open = node.poolFor({ store: site.store, base: image }, { ceiling: 1, userns: 'host', python: {} });
      await expect(node.run(open, { language: 'python', code: '' })).rejects.toMatchObject({
        code: 'RUNTIME_FNCALL_UNAVAILABLE',
      });
    },
    TIME,
  );

  it.each(['cold', 'warm', 'root'] as const)(
    'leaves nothing of a task for the next one: %s',
    async (kind) => {
      const before = output(await run(kind, { code: LOOK }));
      expect(before).toContain('processes');
      const planted = await run(kind, { code: PLANT, limits: { wallMs: 60_000 } });
      const text = output(planted)!;
      expect(planted.run!.stderr.toString()).toBe('');
      for (const one of [
        '/tmp/planted',
        '/dev/shm/planted',
        '/work/json.py',
        'shmget',
        'semget',
        'msgget',
        'mq_open',
        'nice',
      ]) {
        expect(text).toContain(`done ${one}\n`);
      }
      for (const one of [
        '/etc/cron.d/planted',
        '/root/.bashrc',
        '/usr/bin/planted',
        '/planted',
        '/dev/planted',
        'add_key',
        'mount',
        'host name',
        '/proc/sys/kernel/core_pattern',
      ]) {
        expect(text).toContain(`refused ${one}\n`);
      }
      expect(output(await run(kind, { code: LOOK }))).toBe(before);
      const shell = await run(kind, {
        language: 'bash',
        code: 'bash -i -c "echo $HOME" 2>/dev/null; bash -l -c "echo ok"',
      });
      expect(output(shell)).toBe('/home/sandbox\nok\n');
      // All of it by one container, which was found clean.
      expect(pool(kind).state).toMatchObject({ replaced: 0 });
    },
    TIME,
  );

  it(
    'gives each fork of an interpreter its own randomness, and process id',
    async () => {
      const code =
        'import os, random, ssl, uuid\nprint(random.random(), os.getpid() > 1, uuid.uuid4(), ssl.RAND_bytes(8).hex())';
      const seen = await Promise.all(Array.from({ length: 5 }, () => run('warm', { code })));
      const words = seen.flatMap((one) =>
        output(one)!
          .trim()
          .split(' ')
          .filter((word) => word !== 'True'),
      );
      expect(new Set(words).size).toBe(15);
    },
    TIME,
  );

  it(
    `no trace of another in ${SOME} tasks, each of which leaves some`,
    async () => {
      const marks = Array.from({ length: SOME }, (_, i) => String(i));
      const kinds = ['warm', 'cold'] as const;
      const one = async (mark: string, i: number) => {
        const result = await run(kinds[i % 10 === 0 ? 1 : 0]!, {
          code: MARK,
          args: [mark],
          limits: { wallMs: 60_000 },
        });
        expect(output(result), result.run?.stderr.toString()).toBe(`${mark} []\n`);
      };
      for (let at = 0; at < marks.length; at += 50) {
        await Promise.all(marks.slice(at, at + 50).map((mark, i) => one(mark, at + i)));
      }
      expect(pool('warm').state.replaced).toBe(0);
    },
    Math.max(TIME, SOME * 200),
  );

  it(
    'bounds the queue, tells how long to stay away, and grows and shrinks with what is asked',
    async () => {
      const small = node.poolFor(
        { store: site.store, base: image },
        { floor: 1, ceiling: 2, queue: 2, queueMs: 120_000, idleMs: 50 },
      );
      const slow = { language: 'sh', code: 'cat', stdin: Buffer.alloc(0) };
      const calls = Array.from({ length: 8 }, () =>
        node.run(small, { ...slow, code: 'sleep 2' }).then(
          (result) => result.status,
          (error) => error,
        ),
      );
      const ends = await Promise.all(calls);
      const refused = ends.filter((end) => end?.code === 'RUNTIME_FNCALL_BUSY');
      expect(ends.filter((end) => end === 'finished').length + refused.length).toBe(8);
      expect(refused.length).toBeGreaterThan(0);
      expect(refused[0]).toMatchObject({ http: 429, retryable: true });
      expect(refused[0].params.retryAfter).toBeGreaterThan(0);
      while (small.state.ready !== 1 || small.state.busy > 0) await delay(20);
      const impatient = node.poolFor({ store: site.store, base: image }, { ceiling: 1, queueMs: 1 });
      await expect(node.run(impatient, slow)).rejects.toMatchObject({ code: 'RUNTIME_FNCALL_BUSY' });
    },
    TIME,
  );

  it(
    'replaces a container that dies at a task, and tells so',
    async () => {
      const fragile = node.poolFor(
        { store: site.store, base: image },
        { floor: 1, ceiling: 1, queueMs: 120_000, tasks: 3 },
      );
      const stop = new AbortController();
      const asked = node.run(fragile, { language: 'sh', code: 'sleep 100', limits: { wallMs: 200_000 } }, stop.signal);
      while (fragile.state.busy === 0) await delay(10);
      await delay(50);
      stop.abort(new Error('gone'));
      expect((await asked).status).toBe('sandbox_error');
      for (let i = 0; i < 4; i++)
        expect(output(await node.run(fragile, { language: 'sh', code: 'echo ok' }))).toBe('ok\n');
    },
    TIME,
  );

  it(
    'replaces a container that dies while it waits',
    async () => {
      const waiting = node.poolFor({ store: site.store, base: image }, { floor: 1, ceiling: 1, queueMs: 120_001 });
      await waiting.warm();
      const { ready } = waiting as unknown as {
        ready: { container: { launcher: { child: { pid: number } } } }[];
      };
      process.kill(ready[0]!.container.launcher.child.pid, 'SIGKILL');
      while (waiting.state.replaced === 0) await delay(10);
      expect(output(await node.run(waiting, { language: 'sh', code: 'echo ok' }))).toBe('ok\n');
      const gone = AbortSignal.abort(new Error('gone'));
      await expect(node.run(waiting, { language: 'sh', code: '' }, gone)).rejects.toThrow('gone');
      expect(waiting.state).toMatchObject({ replaced: 1, tasks: 1 });
    },
    TIME,
  );

  it(
    'gives a task to another container when its own ends before it has begun, and not afterwards',
    async () => {
      const pair = node.poolFor({ store: site.store, base: image }, { floor: 1, ceiling: 1, queueMs: 120_004 });
      await pair.warm();
      interface Inside {
        readonly launcher: { readonly child: { readonly pid: number } };
        readonly waiting: { readonly begun: boolean } | undefined;
      }
      const { ready, busy } = pair as unknown as { ready: { container: Inside }[]; busy: Set<Inside> };
      const first = ready[0]!.container.launcher.child.pid;
      // It reads no order any more.
      for (const pid of below(first)) process.kill(pid, 'SIGSTOP');
      const unread = node.run(pair, { language: 'sh', code: 'echo ok' });
      while ([...busy][0]?.waiting === undefined) await delay(5);
      process.kill(first, 'SIGKILL');
      expect([(await unread).status, output(await unread)]).toEqual(['finished', 'ok\n']);
      expect(pair.state).toMatchObject({ replaced: 1, tasks: 2 });

      const begun = node.run(pair, { language: 'sh', code: 'sleep 1000', limits: { wallMs: 500_000 } });
      while ([...busy][0]?.waiting?.begun !== true) await delay(5);
      process.kill([...busy][0]!.launcher.child.pid, 'SIGKILL');
      const { status, run: step, problem } = await begun;
      expect([status, step]).toEqual(['sandbox_error', undefined]);
      expect(problem).toContain('a container for tasks');
      while (pair.state.replaced < 2) await delay(10);
      expect(pair.state.tasks).toBe(3);
    },
    TIME,
  );

  it(
    'bounds pools that nobody named, and gives up those that nobody uses',
    async () => {
      const few = new FnCallNode({ folders: site.folders, mostImplicit: 2, mostImplicitContainers: 1 });
      try {
        const of = (queueMs: number) => few.poolFor({ store: site.store, base: image }, { queueMs });
        const task = { language: 'sh', code: 'echo ok' };
        for (const queueMs of [120_001, 120_002, 120_003]) {
          // Each in the place of the one before.
          expect(output(await few.run(of(queueMs), task))).toBe('ok\n');
        }
        expect(few.pools().map(({ options }) => options.queueMs)).toEqual([120_002, 120_003]);
        const stop = new AbortController();
        const long = { language: 'sh', code: 'sleep 300', limits: { wallMs: 400_000 } };
        const calls = [of(120_002), of(120_003)].map((one) => few.run(one, long, stop.signal).catch(() => undefined));
        while (few.pools().some(({ busy, waiting }) => busy + waiting === 0)) await delay(10);
        expect(() => of(120_004)).toThrow(expect.objectContaining({ code: 'RUNTIME_FNCALL_BUSY' }));
        stop.abort(new Error('gone'));
        await Promise.all(calls);
      } finally {
        await few.close();
      }
    },
    TIME,
  );

  it(
    'lets what runs and waits in a pool that is changed end in it',
    async () => {
      const environment = { store: site.store, base: image };
      const before = await node.definePool('changing', environment, { ceiling: 1, queueMs: 120_000 });
      const calls = [1, 2].map(() => node.run(before, { language: 'sh', code: 'sleep 1; echo ok' }));
      while (before.state.busy === 0) await delay(10);
      const after = await node.definePool('changing', environment, { ceiling: 2, queueMs: 120_000 });
      expect(after).not.toBe(before);
      expect((await Promise.all(calls)).map(output)).toEqual(['ok\n', 'ok\n']);
      await node.removePool('changing');
    },
    TIME,
  );

  it(
    'says why a pool has no container',
    async () => {
      const broken = node.poolFor(
        { store: site.store, base: image },
        { ceiling: 1, python: { imports: ['no_such_module'] } },
      );
      await expect(node.run(broken, { language: 'python', code: '' })).rejects.toMatchObject({
        code: 'RUNTIME_FNCALL_CONTAINER',
        message: expect.stringContaining("No module named 'no_such_module'"),
      });
    },
    TIME,
  );

  it(
    'leaves nothing when the process that has the pools is killed',
    async () => {
      const script = new URL('./fncall-child.ts', import.meta.url).pathname;
      const order = JSON.stringify({
        storeUrl: site.storeUrl,
        image: 'tasks',
        folders: { ...site.folders, stateDir: `${site.root}/state2` },
      });
      const child = spawn(process.execPath, ['--import', 'tsx', script, order], {
        stdio: ['ignore', 'pipe', 'inherit'],
      });
      const ended = new Promise((resolve) => child.once('exit', resolve));
      await new Promise<void>((resolve, reject) => {
        child.stdout.once('data', () => resolve());
        child.once('exit', (code) => reject(new Error(`it ended with ${code}`)));
      });
      child.kill('SIGKILL');
      await ended;
      const folders = { ...site.folders, stateDir: `${site.root}/state2` };
      const { removed, problems } = await reclaimSandboxes(folders);
      expect(problems).toEqual([]);
      expect(removed.length).toBe(2);
    },
    TIME,
  );
});
