/** FnCall through the runtime service and `dsec serve fncall`: routes, command line, and programs that speak SandboxFusion. */
import { execFile } from 'node:child_process';
import * as fs from 'node:fs';
import * as http from 'node:http';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { promisify } from 'node:util';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { readMountInfo, umount } from '#linux';
import { findAgent, listSandboxes, textOf } from '#runtime';
import { type ServingFnCall, serveFnCall } from '../fncall/serve-fncall.ts';
import { base64Bytes } from '../fncall/task-schemas.ts';
import { RuntimeService } from '../runtime-service/service.ts';
import { runCommand } from './command-run.ts';
import { fillTaskRoot, hostPython } from './fncall-root.ts';

const root = join(import.meta.dirname, '../..');
const python = process.getuid?.() === 0 && findAgent() !== undefined ? hostPython() : undefined;
if (python === undefined) console.log('skipped: not root, no dsec-agent, or no Python');
const TIME = 240_000;
interface Answer {
  readonly status?: string;
  readonly error?: { readonly code: string };
}
const execute = promisify(execFile);

describe.skipIf(python === undefined)('FnCall for callers', () => {
  const saved = { ...process.env };
  const notes: string[] = [];
  let folder: string;
  let service: RuntimeService;
  let serving: ServingFnCall;

  const start = () =>
    RuntimeService.start({
      self: { root, env: { ...process.env }, isFresh: () => true },
      note: (text) => notes.push(text),
    });

  beforeAll(async () => {
    folder = fs.realpathSync(fs.mkdtempSync(join(tmpdir(), 'dsec-fncall-')));
    for (const name of ['store', 'run', 'state', 'cache'])
      process.env[`DSEC_${name.toUpperCase()}`] = join(folder, name);
    process.env.XDG_CONFIG_HOME = join(folder, 'config');
    fs.mkdirSync(join(folder, 'tree'));
    fillTaskRoot(join(folder, 'tree'), python);
    await runCommand('convert', `dir:${join(folder, 'tree')}`, '--name', 'tasks:1');
    service = await start();
    const pools = { default: { image: 'tasks:1', floor: 1, ceiling: 2, python: {} } };
    serving = await serveFnCall({ listen: '127.0.0.1:0', storeUrl: join(folder, 'store'), logLevel: 'silent', pools });
  }, TIME);
  afterAll(async () => {
    await serving?.close(0);
    await service?.close(0);
    expect(listSandboxes()).toEqual([]);
    for (const row of readMountInfo().reverse()) {
      if (row.mountPoint.startsWith(`${folder}/`)) umount(row.mountPoint, { lazy: true });
    }
    process.env = saved;
    fs.rmSync(folder, { recursive: true, force: true });
  }, TIME);

  async function post(path: string, body: object): Promise<{ status: number; body: Answer; headers: Headers }> {
    const answer = await fetch(`${serving.url}${path}`, {
      method: 'POST',
      headers: { 'content-type': 'application/json' },
      body: JSON.stringify(body),
    });
    return { status: answer.status, body: (await answer.json()) as Answer, headers: answer.headers };
  }

  it(
    'runs a task, as text where it is text',
    async () => {
      const code =
        'import sys\nsys.stdout.buffer.write(bytes([255, 0]))\nprint("é", file=sys.stderr)\nopen("a", "wb").write(bytes([254]))\nopen("b", "w").write("b")';
      const { status, body } = await post('/v1/fncall/run', { language: 'py', code, fetch: ['?'] });
      expect(status).toBe(200);
      expect(body).toMatchObject({
        status: 'finished',
        pool: 'default',
        run: { status: 'finished', exitCode: 0, stdoutBase64: '/wA=', stdoutBytes: 2, stderr: 'é\n' },
        files: [
          { path: 'a', contentBase64: '/g==' },
          { path: 'b', content: 'b' },
        ],
      });
    },
    TIME,
  );

  it(
    'makes a task of what another one made, which its caller never has',
    async () => {
      const code = "printf '#!/bin/sh\\necho made $1\\n' > main";
      const from = { language: 'sh', code, fetch: ['main'] };
      const task = { language: 'command', args: ['./main', 'well'] };
      const { status, body } = await post('/v1/fncall/run', { ...task, from });
      expect([status, body]).toMatchObject([200, { status: 'finished', run: { stdout: 'made well\n' }, files: [] }]);
      const failed = await post('/v1/fncall/run', { ...task, from: { ...from, code: 'echo no >&2; exit 3' } });
      expect(failed.body).toMatchObject({
        status: 'runtime_error',
        problem: 'the task that it is made from did not end well',
        run: { exitCode: 3, stderr: 'no\n' },
      });
      for (const [wrong, code] of [
        [{ ...from, fetch: [] }, 'SANDBOX_BAD_REQUEST'],
        [{ ...from, fetch: ['other'] }, 'SANDBOX_BAD_REQUEST'],
        [{ ...from, pool: 'none' }, 'RUNTIME_FNCALL_NO_POOL'],
        [{ ...from, from }, 'SERVICE_BAD_REQUEST'],
        [{ ...from, store: 'file:///' }, 'SERVICE_BAD_REQUEST'],
      ] as const) {
        const answer = await post('/v1/fncall/run', { ...task, from: wrong });
        expect([answer.status >= 400, answer.body.error?.code]).toEqual([true, code]);
      }
    },
    TIME,
  );

  it(
    'refuses a pool with a graphics processor where there is none',
    async () => {
      const saved = process.env.PATH;
      process.env.PATH = folder;
      const define = (...flags: string[]) => runCommand('fncall', 'pool', 'gpu', '--image', 'tasks:1', ...flags);
      await expect(define('--gpu', 'exclusive')).rejects.toMatchObject({ code: 'RUNTIME_GPU_NONE' });
      process.env.PATH = saved;
      await expect(define('--gpu-profile', '1g.10gb')).rejects.toMatchObject({ code: 'CLI_USAGE' });
      await expect(define('--gpu', 'some')).rejects.toMatchObject({ code: 'CLI_USAGE' });
    },
    TIME,
  );

  it(
    'refuses what it does not understand, and says what is wrong',
    async () => {
      for (const [body, status, code] of [
        [{ language: 'python' }, 400, 'RUNTIME_FNCALL_TASK'],
        [{ language: 'python', code: '', unknown: 1 }, 400, 'SERVICE_BAD_REQUEST'],
        [{ language: 'python', code: '', stdinBase64: '*' }, 400, 'SANDBOX_BAD_REQUEST'],
        [{ language: 'klingon', code: '' }, 400, 'RUNTIME_FNCALL_LANGUAGE'],
        [{ language: 'python', code: '', pool: 'none' }, 404, 'RUNTIME_FNCALL_NO_POOL'],
        [{ language: 'python', code: '', image: 'nowhere:1' }, 404, 'CATALOG_NOT_FOUND'],
      ] as const) {
        const answer = await post('/v1/fncall/run', body);
        expect([answer.status, answer.body.error?.code]).toEqual([status, code]);
      }
    },
    TIME,
  );

  it(
    'lets callers that nobody knows run tasks, and change nothing',
    async () => {
      const pool = { method: 'PUT', headers: { 'content-type': 'application/json' }, body: '{"image":"tasks:1"}' };
      expect((await fetch(`${serving.url}/v1/fncall/pools/mine`, pool)).status).toBe(404);
      expect((await fetch(`${serving.url}/v1/fncall/pools/default`, { method: 'DELETE' })).status).toBe(404);
      expect((await fetch(`${serving.url}/v1/fncall/pools`)).status).toBe(200);
      const stored = await post('/v1/fncall/run', { language: 'sh', code: '', image: 'x', store: folder });
      expect([stored.status, stored.body.error?.code]).toEqual([400, 'SANDBOX_BAD_REQUEST']);
      const status = await new Promise((resolve, reject) => {
        const asked = http.get(
          `${serving.url}/v1/fncall/pools`,
          { headers: { host: 'elsewhere.example:80' } },
          (answer) => {
            answer.resume();
            resolve(answer.statusCode);
          },
        );
        asked.once('error', reject);
      });
      expect(status).toBe(400);
    },
    TIME,
  );

  it('reads base64 with spaces in one go, and tells text from what only looks like it', () => {
    expect(base64Bytes('aGVs\nbG8=\n', 'x').toString()).toBe('hello');
    expect(() => base64Bytes(`${' '.repeat(4 << 20)}*`, 'x')).toThrow('no base64');
    expect(textOf(Buffer.from('\u001b[1mbold'))).toBe('\u001b[1mbold');
    expect(textOf(Buffer.alloc(10_000))).toBeUndefined();
  });

  it(
    'tells a busy pool’s callers when to come again',
    async () => {
      await serving.host.define('narrow', { image: 'tasks:1', ceiling: 1, queue: 0, queueMs: 1 });
      const calls = await Promise.all(
        [1, 2, 3, 4].map(() => post('/v1/fncall/run', { pool: 'narrow', language: 'sh', code: 'sleep 1' })),
      );
      const refused = calls.filter(({ status }) => status === 429);
      expect(refused.length).toBeGreaterThan(0);
      expect(Number(refused[0]!.headers.get('retry-after'))).toBeGreaterThan(0);
      await serving.host.remove('narrow');
    },
    TIME,
  );

  it(
    'answers POST /run_code as SandboxFusion does',
    async () => {
      const good = await post('/run_code', {
        code: 'print(open("d/in.txt").read(), input())\nopen("out.bin", "wb").write(b"\\x00\\xff")',
        language: 'python',
        stdin: 'line',
        files: { 'd/in.txt': Buffer.from('file').toString('base64'), 'nothing.txt': null },
        fetch_files: ['out.bin', 'missing'],
        compile_timeout: 10,
        run_timeout: 10,
        memory_limit_MB: 256,
      });
      expect(good.body).toMatchObject({
        status: 'Success',
        compile_result: null,
        run_result: { status: 'Finished', return_code: 0, stdout: 'file line\n', stderr: '' },
        files: { 'out.bin': 'AP8=' },
      });
      const failed = await post('/run_code', { code: 'raise SystemExit(4)', language: 'python' });
      expect(failed.body).toMatchObject({ status: 'Failed', run_result: { status: 'Finished', return_code: 4 } });
      const late = await post('/run_code', { code: 'while True: pass', language: 'python', run_timeout: 0.5 });
      expect(late.body).toMatchObject({ status: 'Failed', run_result: { status: 'TimeLimitExceeded' } });
      const unknown = await post('/run_code', { code: '', language: 'lean' });
      expect([unknown.status, unknown.body.status]).toEqual([200, 'SandboxError']);
    },
    TIME,
  );

  it(
    'serves a program that posts to a URL, as verl does',
    async () => {
      const program = `
import json, sys, urllib.request
payload = json.dumps({"compile_timeout": 10, "run_timeout": 10, "code": "print(int(input()) * 2)", "stdin": "21", "memory_limit_MB": 1024,
                      "language": "python", "files": {}, "fetch_files": []})
request = urllib.request.Request(sys.argv[1], payload.encode(), {"Content-Type": "application/json", "Accept": "application/json"})
answer = json.load(urllib.request.urlopen(request, timeout=60))
assert answer["status"] == "Success", answer
assert answer["run_result"]["stdout"] == "42\\n", answer
print("ok")`;
      const { stdout } = await execute('/usr/bin/python3', ['-c', program, `${serving.url}/run_code`]);
      expect(stdout).toBe('ok\n');
    },
    TIME,
  );

  const client = process.env.DSEC_SANDBOX_FUSION_PYTHON;
  if (client === undefined)
    console.log(
      'skipped: SandboxFusion’s own client: $DSEC_SANDBOX_FUSION_PYTHON names no Python that has sandbox_fusion',
    );
  it.skipIf(client === undefined)(
    'serves SandboxFusion’s own client',
    async () => {
      const program = `
import sys
from sandbox_fusion import RunCodeRequest, run_code, set_endpoint
set_endpoint(sys.argv[1])
answer = run_code(RunCodeRequest(code='print(input())', language='python', stdin='hello', run_timeout=10))
assert answer.status == 'Success' and answer.run_result.stdout == 'hello\\n', answer
answer = run_code(RunCodeRequest(code='1/0', language='python'))
assert answer.status == 'Failed' and answer.run_result.return_code == 1, answer
print('ok')`;
      const { stdout } = await execute(client!, ['-c', program, serving.url]);
      expect(stdout).toMatch(/ok\n$/);
    },
    TIME,
  );

  it(
    'has a command line, and pools that outlive the service',
    async () => {
      expect(JSON.parse((await runCommand('fncall', 'pools', '--json')).text)).toEqual([]);
      await expect(runCommand('fncall', 'run', '--language', 'python', '--code', '1')).rejects.toMatchObject({
        code: 'RUNTIME_FNCALL_NO_POOL',
      });
      await runCommand(
        'fncall',
        'pool',
        'default',
        '--image',
        'tasks:1',
        '--floor',
        '1',
        '--ceiling',
        '2',
        '--python',
        '--env',
        'POOL=1',
      );
      fs.writeFileSync(
        join(folder, 'main.py'),
        'import os, sys\nprint(os.environ["POOL"], os.environ["MINE"])\nopen("made.txt", "w").write("made")\nsys.exit(7)',
      );
      const run = await runCommand(
        'fncall',
        'run',
        join(folder, 'main.py'),
        '--env',
        'MINE=2',
        '--fetch',
        '*.txt',
        '--to',
        join(folder, 'out'),
      );
      expect([run.exitCode, run.text]).toEqual([7, '1 2\n']);
      expect(fs.readFileSync(join(folder, 'out/made.txt'), 'utf8')).toBe('made');
      const slow = await runCommand(
        'fncall',
        'run',
        '--language',
        'python',
        '--code',
        'while True: pass',
        '--timeout',
        '500ms',
        '--json',
      );
      expect([slow.exitCode, JSON.parse(slow.text).status]).toEqual([124, 'time_limit']);
      expect((await runCommand('fncall', 'run', '--language', 'sh', '--code', 'kill -TERM $$')).exitCode).toBe(143);
      await service.close(0);
      service = await start();
      const again = await runCommand('fncall', 'run', '--language', 'sh', '--code', 'echo $POOL').catch(
        (error) => error,
      );
      // The pool is restored behind the socket; who comes at once may be early.
      for (
        let i = 0;
        again.code === 'RUNTIME_FNCALL_NO_POOL' && i < 1000 && !service.fncall.node.hasPool('default');
        i++
      ) {
        await new Promise((resolve) => setTimeout(resolve, 20));
      }
      expect((await runCommand('fncall', 'run', '--language', 'sh', '--code', 'echo $POOL')).text).toBe('1\n');
      expect((await runCommand('fncall', 'languages')).text).toContain('python');
      expect((await runCommand('fncall', 'rm', 'default')).text).toBe('default\n');
      await expect(runCommand('fncall', 'rm', 'default')).rejects.toMatchObject({ code: 'RUNTIME_FNCALL_NO_POOL' });
    },
    TIME,
  );
});
