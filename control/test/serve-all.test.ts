/** `dsec serve all` with real sandboxes: everything over the API, each service killed in turn while creations and commands are under way. */
import { type ChildProcess, spawn } from 'node:child_process';
import * as fs from 'node:fs';
import { connect } from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { readMountInfo, umount } from '#linux';
import { runtimeFolders } from '#runtime';
import { runCommand } from './command-run.ts';
import { bundled, canServeEdge, until } from './edge-site.ts';

if (!canServeEdge) console.log('skipped: not root, or no dsec-agent, or no busybox');

const root = join(import.meta.dirname, '../..');

describe.skipIf(!canServeEdge)('dsec serve all', { timeout: 300_000 }, () => {
  let folder: string;
  let env: NodeJS.ProcessEnv;
  let child: ChildProcess;
  let url = '';
  let token = '';
  let said = '';
  const before = { ...process.env };
  const program = canServeEdge ? bundled() : '';

  const dsec = (args: readonly string[], input?: string) =>
    new Promise<{ out: string; err: string; exit: number | null }>((resolve) => {
      const run = spawn(process.execPath, [program, ...args], { cwd: root, env });
      let out = '';
      let err = '';
      run.stdout.on('data', (bytes) => {
        out += bytes;
      });
      run.stderr.on('data', (bytes) => {
        err += bytes;
      });
      run.stdin.end(input);
      run.once('close', (exit) => resolve({ out, err, exit }));
    });

  const serve = async () => {
    said = '';
    const limits = ['--pressure', 'cpu=1,memory=1,io=1', '--reserve', 'memory=0,disk=0', '--id', 'one'];
    const args = ['serve', 'all', '--listen', url === '' ? '127.0.0.1:0' : new URL(url).host, '--drain', '2s'];
    child = spawn(process.execPath, [program, ...args, ...limits], {
      cwd: root,
      env,
      stdio: 'pipe',
    });
    for (const stream of [child.stdout, child.stderr]) {
      stream?.on('data', (bytes) => {
        said += bytes;
      });
    }
    await until('the cluster serves', () => /^next:/m.test(said) || child.exitCode !== null);
    url = /^cluster at (\S+): /m.exec(said)?.[1] ?? '';
    if (url === '') throw new Error(`it did not start: ${said}`);
    token = fs.readFileSync(join(folder, 'state/cluster/admin-token'), 'utf8').trim();
    await until('the edge is known', async () => (await ask('/v1/nodes')).body.nodes[0]?.report?.state === 'healthy');
  };

  // biome-ignore lint/suspicious/noExplicitAny: what is asked for is a test's to know
  const ask = async (path: string, method = 'GET', body?: object): Promise<{ status: number; body: any }> => {
    const answer = await fetch(`${url}${path}`, {
      method,
      headers: {
        authorization: `Bearer ${token}`,
        ...(body === undefined ? {} : { 'content-type': 'application/json' }),
      },
      body: body === undefined ? undefined : JSON.stringify(body),
    });
    return { status: answer.status, body: JSON.parse(await answer.text()) };
  };
  const create = (more: object = {}) => ask('/v1/sandboxes', 'POST', { image: 'bb:1', ttlMs: 600_000, ...more });
  const used = async () => (await ask('/v1/quotas')).body.quotas[0].used.sandboxes as number;
  const listed = async () => (await ask('/v1/sandboxes')).body.sandboxes as { id: string }[];
  const pidOf = (service: string) => {
    const children = fs.readFileSync(`/proc/${child.pid}/task/${child.pid}/children`, 'utf8').trim().split(' ');
    const found = children.find((pid) => {
      const words = fs.readFileSync(`/proc/${pid}/cmdline`, 'utf8').split('\0');
      return words[words.indexOf('serve') + 1] === service;
    });
    return Number(found);
  };

  beforeAll(async () => {
    folder = fs.realpathSync(fs.mkdtempSync(join(tmpdir(), 'dsec-all-')));
    Object.assign(process.env, {
      DSEC_STORE: join(folder, 'store'),
      DSEC_RUN: join(folder, 'run'),
      DSEC_STATE: join(folder, 'state'),
      DSEC_CACHE: join(folder, 'cache'),
      XDG_CONFIG_HOME: join(folder, 'config'),
    });
    env = { ...process.env };
    const tree = join(folder, 'tree');
    for (const path of ['bin', 'tmp', 'etc']) fs.mkdirSync(join(tree, path), { recursive: true });
    fs.copyFileSync('/bin/busybox', join(tree, 'bin/busybox'));
    for (const name of ['sh', 'cat', 'echo', 'sleep', 'nc', 'ls', 'seq', 'wc', 'stty'])
      fs.symlinkSync('busybox', join(tree, 'bin', name));
    await runCommand('convert', `dir:${tree}`, '--name', 'bb:1');
    expect(runtimeFolders().stateDir).toContain(folder);
    await serve();
  }, 180_000);
  afterAll(async () => {
    if (child !== undefined && child.exitCode === null) {
      for (const { id } of await listed().catch(() => [])) await ask(`/v1/sandboxes/${id}?force=true`, 'DELETE');
      const ended = new Promise((resolve) => child.once('exit', resolve));
      child.kill('SIGTERM');
      await ended;
    }
    for (const row of readMountInfo().reverse()) {
      if (row.mountPoint.startsWith(`${folder}/`)) umount(row.mountPoint, { lazy: true });
    }
    process.env = before;
    fs.rmSync(program, { force: true });
    fs.rmSync(folder, { recursive: true, force: true });
  }, 180_000);

  it('makes a token and a context at its first start, which the command line finds', async () => {
    expect(fs.statSync(join(folder, 'state/cluster/admin-token')).mode & 0o777).toBe(0o600);
    expect(fs.statSync(join(folder, 'config/dsec/contexts.json')).mode & 0o777).toBe(0o600);
    expect(said).not.toContain(token);
    // As when it is started alone.
    const words = fs.readFileSync(`/proc/${pidOf('apiserver')}/cmdline`, 'utf8').split('\0');
    expect(words).toContain('--max-semi-space-size=64');
    const run = await dsec(['sandbox', 'run', 'bb:1', '--', 'sh', '-c', 'cat; echo bad >&2; exit 3'], 'from here');
    expect(run).toEqual({ out: 'from here', err: 'bad\n', exit: 3 });
    expect(await listed()).toEqual([]);
    expect(await used()).toBe(0);
  });

  it('stops and removes by the name alone, and says which one', async () => {
    await create({ name: 'short' });
    const stopped = await dsec(['sandbox', 'stop', 'short', '--time', '0']);
    expect(stopped).toMatchObject({ err: '', exit: 0 });
    expect(stopped.out).toMatch(/^short\.one: .*dsec sandbox rm short\.one removes what it changed$/m);
    expect(await dsec(['sandbox', 'rm', 'short'])).toEqual({ out: 'short.one: removed\n', err: '', exit: 0 });
    expect(await dsec(['sandbox', 'rm', 'short'])).toMatchObject({ out: '', err: expect.stringContaining('short') });
    expect(await used()).toBe(0);
  });

  it('does over the API what it does on one machine: files, ports, packing, forks', async () => {
    const { body: made } = await create({ name: 'work' });
    const { id } = made;
    expect(id).toBe('work.one');
    const from = join(folder, 'from');
    fs.mkdirSync(join(from, 'below'), { recursive: true });
    fs.writeFileSync(join(from, 'below/file'), 'x'.repeat(100_000), { mode: 0o640 });
    fs.symlinkSync('below/file', join(from, 'link'));
    expect(await dsec(['sandbox', 'cp', from, `${id}:/tmp/there`])).toMatchObject({ err: '', exit: 0 });
    expect(await dsec(['sandbox', 'cp', `${id}:/tmp/there`, join(folder, 'back')])).toMatchObject({ err: '', exit: 0 });
    expect(fs.readFileSync(join(folder, 'back/below/file'), 'utf8')).toBe('x'.repeat(100_000));
    expect(fs.statSync(join(folder, 'back/below/file')).mode & 0o777).toBe(0o640);
    expect(fs.readlinkSync(join(folder, 'back/link'))).toBe('below/file');
    const server =
      'printf "HTTP/1.1 200 OK\\r\\nContent-Length: 2\\r\\nConnection: close\\r\\n\\r\\nok" | nc -l -p 80 > /tmp/heard';
    await ask(`/v1/sandboxes/${id}/commands`, 'POST', { args: ['sh', '-c', server], background: true });
    await until('the service inside answers', async () => {
      const answer = await fetch(`${url}/v1/sandboxes/${id}/ports/80/x`, {
        headers: { authorization: `Bearer ${token}` },
      });
      return answer.status === 200 && (await answer.text()) === 'ok';
    });
    const heard = await dsec(['sandbox', 'exec', id, '--', 'cat', '/tmp/heard']);
    expect(heard.out).toContain('GET /x HTTP/1.1');
    // Neither the caller's token nor the cluster's gets into a sandbox.
    expect(heard.out.toLowerCase()).not.toContain('authorization');
    await ask(`/v1/sandboxes/${id}/commands`, 'POST', {
      args: ['nc', '-l', '-p', '81', '-e', 'cat'],
      background: true,
    });
    const echoed = await new Promise<string>((resolve, reject) => {
      const attempt = (left: number) => {
        const socket = connect(Number(new URL(url).port), '127.0.0.1');
        socket.write(
          `POST /v1/sandboxes/${id}/ports/81 HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer ${token}\r\nConnection: Upgrade\r\nUpgrade: dsec-tcp\r\n\r\nping`,
        );
        let text = '';
        socket.on('data', (bytes) => {
          text += bytes;
          if (text.includes('ping')) socket.destroy();
        });
        socket.on('error', () => {});
        socket.once('close', () => {
          if (text.includes('ping')) resolve(text);
          else if (left === 0) reject(new Error(text));
          else setTimeout(attempt, 200, left - 1);
        });
      };
      attempt(100);
    });
    expect(echoed).toContain('101 Switching Protocols');
    const packed = await ask(`/v1/sandboxes/${id}/pack-diff`, 'POST', { name: 'packed:1' });
    expect(packed.body.name).toBe('root/packed:1');
    const forked = await ask(`/v1/sandboxes/${id}/fork`, 'POST', { count: 2, requestId: 'f' });
    expect(forked.body.sandboxes).toHaveLength(2);
    const again = await ask(`/v1/sandboxes/${id}/fork`, 'POST', { count: 2, requestId: 'f' });
    expect(again.body.sandboxes.map((one: { id: string }) => one.id)).toEqual(
      forked.body.sandboxes.map((one: { id: string }) => one.id),
    );
    expect(await used()).toBe(3);
    for (const { id: one } of await listed()) {
      expect((await ask(`/v1/sandboxes/${one}/stop`, 'POST', {})).status).toBe(200);
      expect((await ask(`/v1/sandboxes/${one}/stop`, 'POST', {})).status).toBe(200);
      expect((await ask(`/v1/sandboxes/${one}`, 'DELETE')).status).toBe(200);
    }
    expect(await used()).toBe(0);
    expect((await ask(`/v1/sandboxes/${id}`)).body.error.code).toBe('SANDBOX_GONE');
    expect((await ask(`/v1/sandboxes/${id}/files/upload`, 'POST', { from: '/etc/passwd', to: '/x' })).status).toBe(410);
  });

  it('has contexts, nodes and drain on the command line', async () => {
    const contexts = JSON.parse((await dsec(['context', 'ls', '--json'])).out);
    expect(contexts).toMatchObject({ current: 'local-cluster', contexts: [{ name: 'local-cluster', url }] });
    const other = [
      'context',
      'set',
      'other',
      '--url',
      'http://127.0.0.1:1',
      '--token-file',
      join(folder, 'state/cluster/admin-token'),
    ];
    expect(await dsec([...other, '--use'])).toMatchObject({ exit: 0 });
    expect((await dsec(['sandbox', 'ls'])).exit).toBe(6);
    expect(await dsec(['context', 'use', 'local-cluster'])).toMatchObject({ exit: 0 });
    expect((await dsec(['context', 'use', 'never'])).exit).not.toBe(0);
    expect(await dsec(['sandbox', 'ls', '--json'])).toMatchObject({ out: '[]\n', exit: 0 });
    expect(await dsec(['context', 'rm', 'other'])).toMatchObject({ exit: 0 });
    // No token is shown.
    expect(JSON.stringify(contexts)).not.toContain(token);

    const nodes = async () =>
      JSON.parse((await dsec(['nodes', '--json'])).out) as { edge: string; report: { state: string } }[];
    expect(await nodes()).toMatchObject([{ edge: 'one', alive: true, report: { state: 'healthy' } }]);
    expect((await dsec(['nodes'])).out).toMatch(/one/);
    expect(await dsec(['drain', 'one'])).toMatchObject({ exit: 0 });
    await until('it drains', async () => (await nodes())[0]?.report.state === 'draining');
    const refused = await dsec(['sandbox', 'run', 'bb:1', '--', 'echo', 'no']);
    expect(refused.exit).not.toBe(0);
    expect(refused.err).toContain('draining');
    expect((await dsec(['drain', 'never'])).exit).not.toBe(0);
    expect(await dsec(['drain', 'one', '--off'])).toMatchObject({ exit: 0 });
    await until('it takes sandboxes again', async () => (await nodes())[0]?.report.state === 'healthy');
  });

  it('pages through a list on the command line', async () => {
    const made = await Promise.all(['p1', 'p2', 'p3'].map((name) => create({ name })));
    const first = await dsec(['sandbox', 'ls', '--json', '--limit', '2']);
    expect(JSON.parse(first.out).map(({ name }: { name: string }) => name)).toEqual(['p1.one', 'p2.one']);
    const [, from = ''] = /--continue (\S+)/.exec(first.err) ?? [];
    const rest = await dsec(['sandbox', 'ls', '--json', '--limit', '2', '--continue', from]);
    expect(JSON.parse(rest.out).map(({ name }: { name: string }) => name)).toEqual(['p3.one']);
    expect(rest.err).toBe('');
    for (const { body } of made) await ask(`/v1/sandboxes/${body.id}?force=true`, 'DELETE');
  });

  it('has terminals over the API: their size, input, Ctrl-C', async () => {
    const { id } = (await create({ name: 'terminal' })).body;
    const path = `/v1/sandboxes/${id}/commands`;
    const asked = { args: ['sh', '-i'], stdin: true, terminal: { rows: 30, columns: 100 }, env: ['PS1=$ '] };
    const { body: shell } = await ask(path, 'POST', asked);
    const type = async (text: string) => {
      const answer = await fetch(`${url}${path}/${shell.id}/stdin?close=false`, {
        method: 'POST',
        headers: { authorization: `Bearer ${token}`, 'content-type': 'application/octet-stream' },
        body: text,
      });
      expect(answer.status).toBe(200);
    };
    const screen = async () => {
      const answer = await fetch(`${url}${path}/${shell.id}/output?follow=false`, {
        headers: { authorization: `Bearer ${token}` },
      });
      return Buffer.from(await answer.arrayBuffer()).toString('latin1');
    };
    await type('stty size\n');
    await until('its size is shown', async () => (await screen()).includes('30 100'));
    expect((await ask(`${path}/${shell.id}/resize`, 'POST', { rows: 41, columns: 87 })).status).toBe(200);
    await type('stty size\n');
    await until('its new size is shown', async () => (await screen()).includes('41 87'));
    // One job, which is in the foreground when it has said so: what comes earlier might meet the shell alone.
    await type("sh -c 'echo going $((40 + 1)); exec sleep 1000'\n");
    await until('it runs', async () => (await screen()).includes('going 41'));
    // The kernel's terminal makes it SIGINT of what is in the foreground.
    await type('\x03');
    await type('echo after $((6 * 7))\n');
    await until('the shell goes on after Ctrl-C', async () => (await screen()).includes('after 42'));
    await type('exit 5\n');
    await until('the shell has ended', async () => (await ask(`${path}/${shell.id}`)).body.running === false);
    expect((await ask(`${path}/${shell.id}`)).body.result.exitCode).toBe(5);
    await ask(`/v1/sandboxes/${id}?force=true`, 'DELETE');
  });

  it('loses no sandbox and doubles none, whichever service is killed meanwhile', async () => {
    for (const service of ['edge', 'watcher', 'apiserver']) {
      const ids = Array.from({ length: 8 }, (_, at) => `kill ${service} ${at}`);
      const answers = new Map<string, string>();
      const asking = ids.map(async (requestId) => {
        for (let tries = 0; tries < 200; tries++) {
          const answer = await create({ requestId }).catch(() => undefined);
          if (answer?.status === 201) {
            answers.set(requestId, answer.body.id);
            const args = ['sh', '-c', 'echo $((6 * 7))'];
            const path = `/v1/sandboxes/${answer.body.id}`;
            const started = await ask(`${path}/commands`, 'POST', { args }).catch(() => undefined);
            // An error, or the right answer.
            if (started !== undefined && started.status !== 201) expect(started.body.error.code).toMatch(/^[A-Z_]+$/);
            return;
          }
          if (answer !== undefined && !answer.body.error.retryable) throw new Error(JSON.stringify(answer.body));
          await new Promise((go) => setTimeout(go, 150));
        }
        throw new Error(`${requestId} was never answered`);
      });
      await new Promise((go) => setTimeout(go, 60));
      process.kill(pidOf(service), 'SIGKILL');
      await Promise.all(asking);
      expect(new Set(answers.values()).size).toBe(ids.length);
      await until('the edge is heard again', async () => {
        const nodes = await ask('/v1/nodes').catch(() => undefined);
        return nodes?.body.nodes?.[0]?.report?.state === 'healthy';
      });
      expect((await listed()).map(({ id }) => id).sort()).toEqual([...answers.values()].sort());
      // One request id is one sandbox, also now.
      expect((await create({ requestId: ids[0] })).body.id).toBe(answers.get(ids[0]!));
      await until('quota counts what lives', async () => (await used()) === ids.length);
      for (const id of answers.values()) {
        expect((await ask(`/v1/sandboxes/${id}?force=true`, 'DELETE')).status).toBe(200);
      }
      expect(await used()).toBe(0);
    }
  });

  it('leaves sandboxes when it ends, and has them when it starts again, after a kill too', async () => {
    const { id } = (await create({ name: 'stays' })).body;
    for (const signal of ['SIGTERM', 'SIGKILL'] as const) {
      const services = ['edge', 'watcher', 'apiserver'].map(pidOf);
      const ended = new Promise((resolve) => child.once('exit', resolve));
      child.kill(signal);
      await ended;
      await until('all of it has ended', () => services.every((pid) => !fs.existsSync(`/proc/${pid}`)));
      await serve();
      expect((await listed()).map((one) => one.id)).toEqual([id]);
      const run = await dsec(['sandbox', 'exec', id, '--', 'echo', 'still there']);
      expect(run).toEqual({ out: 'still there\n', err: '', exit: 0 });
    }
    await ask(`/v1/sandboxes/${id}?force=true`, 'DELETE');
    expect(await used()).toBe(0);
  });
});
