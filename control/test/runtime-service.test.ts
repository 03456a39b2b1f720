/** `dsec run` through the runtime service: the same as without it, and nothing left, whoever dies. */
import { type ChildProcess, execFileSync, spawn, spawnSync } from 'node:child_process';
import * as fs from 'node:fs';
import { connect, createServer, type Socket } from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { setTimeout as delay } from 'node:timers/promises';
import { afterAll, afterEach, beforeAll, describe, expect, it } from 'vitest';
import { readMountInfo, umount } from '#linux';
import { findAgent, listSandboxes, reclaimSandboxes } from '#runtime';
import { runCommand } from './command-run.ts';

const root = join(import.meta.dirname, '../..');
const dsec = join(root, 'bin/dsec');
const agent = findAgent();
const can = process.getuid?.() === 0 && agent !== undefined && fs.existsSync('/bin/busybox');
if (!can) console.log('skipped: not root, or no dsec-agent, or no busybox');

/** In place of node: says that the service has declined. */
const DECLINED = 'declined';

describe.skipIf(!can)('the runtime service', () => {
  let folder: string;
  let env: NodeJS.ProcessEnv;
  let service: ChildProcess | undefined;
  let log = '';
  const socket = () => join(folder, 'run/runtime.sock');
  const saved = { ...process.env };

  beforeAll(async () => {
    folder = fs.realpathSync(fs.mkdtempSync(join(tmpdir(), 'dsec-service-')));
    Object.assign(process.env, {
      DSEC_STORE: join(folder, 'store'),
      DSEC_RUN: join(folder, 'run'),
      DSEC_STATE: join(folder, 'state'),
      DSEC_CACHE: join(folder, 'cache'),
    });
    env = { ...process.env };
    const tree = join(folder, 'tree');
    fs.mkdirSync(join(tree, 'bin'), { recursive: true });
    fs.copyFileSync('/bin/busybox', join(tree, 'bin/busybox'));
    for (const name of ['sh', 'cat', 'echo', 'sleep', 'true', 'env', 'tty', 'stty', 'kill']) {
      fs.symlinkSync('busybox', join(tree, 'bin', name));
    }
    await runCommand('convert', `dir:${tree}`, '--name', 'bb:1');
    fs.writeFileSync(join(folder, 'node'), `#!/bin/sh\necho ${DECLINED}\nexit 99\n`, { mode: 0o755 });
    await startService();
  });
  afterEach(async () => {
    if (service === undefined) await startService();
    await until(() => listSandboxes().every(({ state }) => state === 'kept'));
  });
  afterAll(async () => {
    if (service !== undefined) await stopService('SIGTERM');
    for (const row of readMountInfo().reverse()) {
      if (row.mountPoint.startsWith(`${folder}/`)) umount(row.mountPoint, { lazy: true });
    }
    process.env = saved;
    fs.rmSync(folder, { recursive: true, force: true });
  });

  async function startService(): Promise<void> {
    const child = spawn(
      process.execPath,
      ['--import', 'tsx', join(import.meta.dirname, 'service-child.ts'), 'serve', 'runtime'],
      {
        cwd: root,
        env,
        stdio: ['ignore', 'pipe', 'pipe'],
      },
    );
    log = '';
    for (const stream of [child.stdout, child.stderr])
      stream.on('data', (bytes) => {
        log += bytes;
      });
    service = child;
    child.once('exit', () => {
      if (service === child) service = undefined;
    });
    await until(() => log.includes('runtime service at') || child.exitCode !== null);
    expect(log).toContain(`runtime service at unix:${socket()}`);
  }
  async function stopService(signal: NodeJS.Signals): Promise<void> {
    const child = service!;
    const ended = new Promise((resolve) => child.once('exit', resolve));
    child.kill(signal);
    await ended;
    service = undefined;
  }

  interface Client {
    readonly child: ChildProcess;
    readonly ended: Promise<{ code: number | null; stdout: string; stderr: string }>;
    stdout(): string;
  }
  const client = (
    args: readonly (string | Buffer)[],
    options: { env?: NodeJS.ProcessEnv; cwd?: string; input?: string; script?: string } = {},
  ): Client => {
    const { script = dsec } = options;
    const child = spawn(agent!.path, ['client', socket(), join(folder, 'node'), script, ...(args as string[])], {
      env: options.env ?? env,
      cwd: options.cwd ?? '/',
    });
    child.stdin.on('error', () => {});
    if (options.input !== undefined) child.stdin.end(options.input);
    let stdout = '';
    let stderr = '';
    child.stdout.on('data', (bytes) => {
      stdout += bytes;
    });
    child.stderr.on('data', (bytes) => {
      stderr += bytes;
    });
    const ended = new Promise<{ code: number | null; stdout: string; stderr: string }>((resolve) => {
      child.once('close', (code) => resolve({ code, stdout, stderr }));
    });
    return { child, ended, stdout: () => stdout };
  };
  const run = (...args: string[]) => client(['run', ...args], { input: '' }).ended;
  const left = () => ({
    sandboxes: listSandboxes().map(({ name }) => name),
    mounts: readMountInfo()
      .filter((row) => row.mountPoint.startsWith(`${folder}/`))
      .map((row) => row.mountPoint),
  });
  const NOTHING = { sandboxes: [], mounts: [] };
  const descriptors = (pid: number) => fs.readdirSync(`/proc/${pid}/fd`).length;
  const launcherPid = () =>
    Number(fs.readFileSync(`/proc/${service!.pid}/task/${service!.pid}/children`, 'latin1').trim().split(' ').at(-1));

  it('passes streams, arguments and the exit status through', async () => {
    const one = client(['run', 'bb:1', '--', 'sh', '-c', 'cat; echo "$1" >&2; exit 42', 'sh', 'a  b'], { input: 'in' });
    expect(await one.ended).toEqual({ code: 42, stdout: 'in', stderr: 'a  b\n' });
    expect(left()).toEqual(NOTHING);
  });

  it.each([
    [['run', 'bb:1', '--', 'nope']],
    [['run', 'none:1', '--', 'true']],
    [['run', '--bogus', 'bb:1']],
    [['run']],
    [['run', 'bb:1', '--name', 'UP', '--', 'true']],
    [['run', 'bb:1', '-t', '--', 'true']],
    [['run', 'bb:1', '--user', 'nobody', '--', 'true']],
    [['run', 'bb:1', '--env', '=x', '--', 'true']],
    [['run', 'bb:1', '--network', 'other', '--', 'true']],
    [['run', 'bb:1', '--workdir', '/bin/sh', '--', 'true']],
    [['run', '--json', 'none:1']],
  ])('says the same as without it: dsec %j', async (args) => {
    const through = await client(args, { input: '' }).ended;
    const alone = spawnSync(
      process.execPath,
      ['--import', 'tsx', join(import.meta.dirname, 'service-child.ts'), ...args],
      { encoding: 'utf8', env, cwd: root },
    );
    expect(through).toEqual({ code: alone.status, stdout: alone.stdout, stderr: alone.stderr });
    expect(through.code).toBeGreaterThan(0);
  });

  it('prints its help, and what came of it as JSON', async () => {
    const help = await run('--help');
    expect([help.code, help.stdout.includes('Usage: dsec run'), help.stderr]).toEqual([0, true, '']);
    const { stderr } = await run('bb:1', '--json', '--', 'sh', '-c', 'exit 3');
    expect(JSON.parse(stderr)).toMatchObject({ exitCode: 3, layers: 1 });
  });

  it('hands on the client’s variables, not its own', async () => {
    const one = client(['run', 'bb:1', '-e', 'MINE', '--', 'env'], {
      input: '',
      env: { ...env, MINE: 'of the client' },
    });
    expect((await one.ended).stdout).toContain('MINE=of the client\n');
  });

  it('keeps what is to be kept, under its name', async () => {
    const { stderr } = await run('bb:1', '--keep', '--name', 'kept', '--', 'sh', '-c', 'echo x > /f');
    expect(stderr).toContain('dsec: kept as kept;');
    expect(listSandboxes()).toMatchObject([{ name: 'kept', state: 'kept', backend: 'dsec' }]);
    expect((await run('bb:1', '--name', 'kept', '--', 'true')).stderr).toContain('sandbox kept exists already');
    await runCommand('sandbox', 'rm', 'kept');
    expect(left()).toEqual(NOTHING);
  });

  it.each(['SIGINT', 'SIGTERM', 'SIGHUP', 'SIGQUIT', 'SIGUSR1', 'SIGUSR2', 'SIGALRM'] as const)(
    'passes %s on',
    async (signal) => {
      const name = signal.slice(3);
      const one = client([
        'run',
        'bb:1',
        '--',
        'sh',
        '-c',
        `trap 'echo got ${name}; exit 9' ${name}; echo ready; while :; do sleep 0.05; done`,
      ]);
      await until(() => one.stdout().includes('ready'));
      one.child.kill(signal);
      expect(await one.ended).toEqual({ code: 9, stdout: `ready\ngot ${name}\n`, stderr: '' });
    },
  );

  it.each([
    ['SIGTERM', 143],
    ['SIGINT', 130],
    ['SIGUSR1', 138],
  ] as const)('ends by %s what does not care for it', async (signal, code) => {
    const one = client(['run', 'bb:1', '--', 'sh', '-c', 'echo ready; exec sleep 1000']);
    await until(() => one.stdout().includes('ready'));
    await until(() => /sleep/.test(execFileSync('ps', ['-eo', 'args'], { encoding: 'utf8' })));
    one.child.kill(signal);
    expect((await one.ended).code).toBe(code);
    expect(left()).toEqual(NOTHING);
  });

  it('stops a sandbox of another process', async () => {
    const one = client(['run', 'bb:1', '--name', 'other', '--', 'sleep', '1000']);
    await until(() => fs.existsSync(join(folder, 'state/sandboxes/other/bundle/pid')));
    await runCommand('sandbox', 'stop', 'other');
    expect((await one.ended).code).toBe(143);
    expect(left()).toEqual(NOTHING);
  });

  it('gives it the client’s terminal', async () => {
    const line = `stty rows 31 cols 91; exec ${agent!.path} client ${socket()} ${folder}/node ${dsec} run -t bb:1 -- sh -c 'tty; stty size; exit 5'`;
    // Its input stays open: script ends what it runs when that ends.
    const script = spawn('script', ['-qec', line, '/dev/null'], { env, stdio: ['pipe', 'pipe', 'inherit'] });
    let text = '';
    script.stdout.on('data', (bytes) => {
      text += bytes;
    });
    const status = await new Promise((resolve) => script.once('close', resolve));
    expect([status, text.replaceAll('\r', '')]).toEqual([5, '/dev/pts/0\n31 91\n']);
  });

  it('runs twenty at once, and holds nothing afterwards', async () => {
    await run('bb:1', '--', 'true');
    const before = [descriptors(service!.pid!), descriptors(launcherPid())];
    for (let round = 0; round < 2; round++) {
      const all = await Promise.all(
        Array.from({ length: 20 }, (_, i) => run('bb:1', '--', 'sh', '-c', `echo ${i}; exit ${i}`)),
      );
      expect(all.map(({ code, stdout, stderr }) => [code, stdout, stderr])).toEqual(
        Array.from({ length: 20 }, (_, i) => [i, `${i}\n`, '']),
      );
    }
    expect(left()).toEqual(NOTHING);
    await until(() => descriptors(service!.pid!) <= before[0]! && descriptors(launcherPid()) <= before[1]!);
  });

  it('ends the sandbox of a client that dies, and keeps what was to be kept', async () => {
    const script = '(setsid sleep 1000 &); echo x > /f; echo ready; sleep 1000';
    const one = client(['run', 'bb:1', '--name', 'gone', '--', 'sh', '-c', script]);
    const two = client(['run', 'bb:1', '--name', 'stays', '--keep', '--', 'sh', '-c', script]);
    for (const each of [one, two]) {
      await until(() => each.stdout().includes('ready'));
      each.child.kill('SIGKILL');
    }
    await until(() => listSandboxes().length === 1 && listSandboxes()[0]!.state === 'kept');
    expect(fs.readFileSync(join(folder, 'state/sandboxes/stays/upper/f'), 'utf8')).toBe('x\n');
    await runCommand('sandbox', 'rm', 'stays');
    expect(left()).toEqual(NOTHING);
  });

  it('goes on when its launcher is killed', async () => {
    const one = client(['run', 'bb:1', '--', 'sh', '-c', 'echo ready; sleep 1000']);
    await until(() => one.stdout().includes('ready'));
    process.kill(launcherPid(), 'SIGKILL');
    const { code, stderr } = await one.ended;
    expect([code, stderr]).toEqual([125, expect.stringContaining('the runtime service has ended')]);
    await until(() => log.includes('another one is started') && listSandboxes().length === 0);
    await untilAsync(async () => (await run('bb:1', '--', 'echo', 'again')).stdout === 'again\n');
    expect(left()).toEqual(NOTHING);
  });

  it('has told its client before it begins: whoever dies, the command is not done twice', async () => {
    for (let round = 0; round < 5; round++) {
      const one = client(['run', 'bb:1', '--', 'sh', '-c', 'echo ready; sleep 1000']);
      one.child.stdout!.once('data', () => process.kill(launcherPid(), 'SIGKILL'));
      expect(await one.ended).toEqual({
        code: 125,
        stdout: 'ready\n',
        stderr: expect.stringContaining('the runtime service has ended'),
      });
      await untilAsync(async () => (await run('bb:1', '--', 'echo', 'again')).stdout === 'again\n');
    }
    expect(left()).toEqual(NOTHING);
  });

  it('does nothing for one that has lost its patience', async () => {
    service!.kill('SIGSTOP');
    const one = client(['run', 'bb:1', '--', 'echo', 'twice']);
    try {
      await one.ended;
    } finally {
      service!.kill('SIGCONT');
    }
    expect(await run('bb:1', '--', 'echo', 'next')).toMatchObject({ code: 0, stdout: 'next\n' });
    expect(await one.ended).toEqual({ code: 99, stdout: `${DECLINED}\n`, stderr: '' });
    expect(left()).toEqual(NOTHING);
  });

  it('is killed: its sandboxes end, their clients are told, the next command removes what is left', async () => {
    const clients = Array.from({ length: 5 }, () =>
      client(['run', 'bb:1', '--', 'sh', '-c', 'echo ready; sleep 1000']),
    );
    for (const one of clients) await until(() => one.stdout().includes('ready'));
    await stopService('SIGKILL');
    for (const { code } of await Promise.all(clients.map(({ ended }) => ended))) expect(code).toBe(125);
    expect((await reclaimSandboxes()).removed).toHaveLength(5);
    expect(left()).toEqual(NOTHING);
    // The socket file is still there, and nobody listens.
    expect(await run('bb:1', '--', 'true')).toMatchObject({ code: 99, stdout: `${DECLINED}\n` });
  });

  it('ends with SIGTERM: short commands may finish, the others are ended', async () => {
    const one = client(['run', 'bb:1', '--', 'sh', '-c', 'echo ready; cat; echo done']);
    await until(() => one.stdout().includes('ready'));
    service!.kill('SIGTERM');
    await until(() => log.includes('SIGTERM: ending'));
    expect(fs.existsSync(socket())).toBe(false);
    one.child.stdin!.end();
    expect(await one.ended).toEqual({ code: 0, stdout: 'ready\ndone\n', stderr: '' });
    await until(() => service === undefined);
    expect(left()).toEqual(NOTHING);
  });

  it.each([
    ['another DSEC_ variable', () => client(['run', 'bb:1'], { env: { ...env, DSEC_STATE: '/other' } })],
    ['another checkout', () => client(['run', 'bb:1'], { script: '/usr/local/bin/dsec' })],
    ['a store named from its own folder', () => client(['run', '--store', 'store', 'bb:1'], { cwd: folder })],
    ['another runtime', () => client(['run', '--runtime', 'crun', 'bb:1'])],
    ['another command', () => client(['images'])],
    [
      'a remote store with other credentials',
      () => client(['run', '--store', 's3://b/p', 'x'], { env: { ...env, AWS_PROFILE: 'x' } }),
    ],
  ])('declines %s', async (_what, start) => {
    expect(await (start as () => Client)().ended).toEqual({ code: 99, stdout: `${DECLINED}\n`, stderr: '' });
  });

  it('declines what is not UTF-8', () => {
    const line = `exec ${agent!.path} client ${socket()} ${folder}/node ${dsec} run bb:1 -- echo "$(printf '\\377')"`;
    expect(spawnSync('sh', ['-c', line], { encoding: 'utf8', env }).stdout).toBe(`${DECLINED}\n`);
  });

  it('is root’s alone, and one at a time', async () => {
    expect(fs.statSync(socket()).mode & 0o777).toBe(0o600);
    const foreign = spawnSync(
      'setpriv',
      ['--reuid', '65534', '--clear-groups', agent!.path, 'client', socket(), '/bin/echo', dsec, 'run'],
      { encoding: 'utf8' },
    );
    expect(foreign.stdout).toBe(`${dsec} run\n`);
    const second = () =>
      spawnSync(
        process.execPath,
        ['--import', 'tsx', join(import.meta.dirname, 'service-child.ts'), 'serve', 'runtime'],
        { encoding: 'utf8', env, cwd: root },
      );
    const lock = `${socket()}.lock`;
    const pid = fs.readFileSync(lock, 'utf8').trim();
    const known = second();
    expect([known.status, known.stderr]).toEqual([
      1,
      expect.stringContaining(`runs already at ${socket()}, process ${pid}\n`),
    ]);
    expect(known.stderr).toContain(`end that one: kill ${pid}; or`);
    // An older version wrote nothing there.
    fs.writeFileSync(lock, '');
    const unknown = second();
    fs.writeFileSync(lock, `${pid}\n`);
    expect(unknown.stderr).toContain(`runs already at ${socket()}\n`);
    expect(unknown.stderr).toContain('end that one; or');
    await expect(runCommand('serve', 'runtime', '--jobs', '3')).rejects.toMatchObject({ code: 'CLI_USAGE' });
  });

  it('does not wait for one that takes nothing', async () => {
    const path = join(folder, 'deaf.sock');
    const taken: Socket[] = [];
    const deaf = createServer({ pauseOnConnect: true }, (one) => taken.push(one)).listen(path);
    await new Promise((resolve) => deaf.once('listening', resolve));
    // More than the socket holds.
    const large = Object.fromEntries(Array.from({ length: 10 }, (_, i) => [`LARGE${i}`, 'x'.repeat(100_000)]));
    const child = spawn(agent!.path, ['client', path, join(folder, 'node'), dsec, 'run', 'bb:1'], {
      env: { ...env, ...large },
      stdio: 'ignore',
    });
    expect(await new Promise((resolve) => child.once('close', resolve))).toBe(99);
    for (const one of taken) one.destroy();
    deaf.close();
  });

  it('bears noise at its door', async () => {
    for (const bytes of [
      Buffer.alloc(0),
      Buffer.from('GET / HTTP/1.1\r\n\r\n'),
      Buffer.alloc(64 << 10, 0xff),
      Buffer.from([5, 0, 0, 0, 30, 0, 0, 0, 0, 1, 2, 3, 4, 5]),
    ]) {
      await new Promise<void>((resolve) => {
        const one = connect(socket());
        one.on('error', () => {});
        one.once('close', () => resolve());
        one.write(bytes);
        setTimeout(() => one.destroy(), 50);
      });
    }
    expect((await run('bb:1', '--', 'echo', 'still')).stdout).toBe('still\n');
  });

  it('starts by bin/dsec, which goes to the service by itself', () => {
    const { status, stdout } = spawnSync(dsec, ['run', 'bb:1', '--', 'echo', 'hello'], { encoding: 'utf8', env });
    expect([status, stdout]).toEqual([0, 'hello\n']);
  });
});

async function until(condition: () => boolean): Promise<void> {
  const deadline = Date.now() + 60_000;
  while (!condition()) {
    if (Date.now() > deadline) throw new Error(`never came true: ${condition}`);
    await delay(10);
  }
}

async function untilAsync(condition: () => Promise<boolean>): Promise<void> {
  const deadline = Date.now() + 60_000;
  while (!(await condition())) {
    if (Date.now() > deadline) throw new Error(`never came true: ${condition}`);
    await delay(50);
  }
}
