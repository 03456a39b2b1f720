/**
 * What a sandbox that stays must do beyond a command's exit: files, signals, time-outs, terminals, output and sessions, as a table: the same for
 * every image and every backend that has what a case needs. `shell`: only where the image has one.
 */
import { execFileSync } from 'node:child_process';
import * as fs from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { expect } from 'vitest';
import type { NodeSandbox } from '../node/node-sandbox.ts';
import type { Capability } from '../sandbox-api/capabilities.ts';
import { say, told, until } from './resident-fixture.ts';
import type { TestImage } from './resident-images.ts';

export interface SandboxCase {
  readonly name: string;
  readonly needs: readonly Capability[];
  readonly shell?: boolean;
  run(box: NodeSandbox, image: TestImage): Promise<void>;
}

/** What ended a file operation. */
const failure = (promise: Promise<unknown>) =>
  promise.then(
    () => 'done',
    (error: { params?: { code?: string } }) => error.params?.code ?? String(error),
  );
const written = async (command: Parameters<typeof told>[0]) => (await told(command, { follow: false })).stdout;
/** Longer than any test. */
const EVER = '100000';

export const SANDBOX_CASES: readonly SandboxCase[] = [
  {
    name: 'files are written, read, listed, renamed and removed',
    needs: ['files'],
    async run({ files }) {
      const content = Buffer.alloc(300_000, Buffer.from([0, 255, 10, 13, 128]));
      await files.mkdir('/tmp/c/b', { parents: true });
      await files.write('/tmp/c/b/x', content, { mode: 0o4751, uid: 1000, gid: 1001 });
      expect((await files.read('/tmp/c/b/x')).equals(content)).toBe(true);
      const status = await files.stat('/tmp/c/b/x');
      expect(status).toMatchObject({ kind: 'file', uid: 1000, gid: 1001, size: 300_000 });
      expect(status.mode & 0o7777).toBe(0o4751);
      await files.rename('/tmp/c/b/x', '/tmp/c/y');
      const names = (await files.list('/tmp/c')).map(({ name, kind }) => `${String(name)} ${kind}`);
      expect(names.sort()).toEqual(['b directory', 'y file']);
      expect(await failure(files.remove('/tmp/c'))).toBe('ENOTEMPTY');
      expect(await failure(files.read('/tmp'))).toBe('EISDIR');
      await files.remove('/tmp/c', { recursive: true });
      expect(await failure(files.stat('/tmp/c'))).toBe('ENOENT');
    },
  },
  {
    name: 'files of a command are files from outside, and the other way round',
    needs: ['files', 'exec'],
    async run(box, { tool }) {
      await box.files.write('/tmp/given', Buffer.from('given\0\n'));
      expect((await told(await box.exec({ args: tool('cat', '/tmp/given') }))).stdout).toBe('given\0\n');
      await box.files.symlink('/../../../../../../tmp/given', '/tmp/up');
      expect(String(await box.files.read('/tmp/up'))).toBe('given\0\n');
      expect(await failure(box.files.read('/proc/self/fd/0'))).toBe('ELOOP');
    },
  },
  {
    name: 'trees go there and back as they are: modes, times, links, holes, names',
    needs: ['files'],
    async run({ files }) {
      const host = fs.mkdtempSync(join(tmpdir(), 'conformance-'));
      try {
        const from = join(host, 'tree');
        fs.mkdirSync(join(from, 'sub'), { recursive: true });
        fs.writeFileSync(join(from, 'sub/file'), 'content\0binary');
        fs.chmodSync(join(from, 'sub/file'), 0o640);
        fs.utimesSync(join(from, 'sub/file'), 1_000_000.25, 1_000_000.25);
        fs.linkSync(join(from, 'sub/file'), join(from, 'hard'));
        fs.symlinkSync('/etc/passwd', join(from, 'absolute'));
        fs.writeFileSync(join(from, 'ü "quoted"\nname'), '');
        const sparse = fs.openSync(join(from, 'sparse'), 'w');
        fs.writeSync(sparse, 'in the middle', 9 << 20);
        fs.ftruncateSync(sparse, 16 << 20);
        fs.closeSync(sparse);
        await files.upload(from, '/tmp/tree');
        expect((await files.stat('/tmp/tree/sparse')).blocks).toBeLessThan(1024);
        const back = join(host, 'back');
        await files.download('/tmp/tree', back);
        expect(execFileSync('diff', ['-r', '--no-dereference', from, back]).toString()).toBe('');
        const facts = (folder: string) =>
          ['sub/file', 'hard'].map((name) => {
            const { mode, mtimeMs, nlink } = fs.lstatSync(join(folder, name));
            return [name, mode & 0o777, Math.round(mtimeMs), nlink];
          });
        expect(facts(back)).toEqual(facts(from));
      } finally {
        fs.rmSync(host, { recursive: true, force: true });
      }
    },
  },
  {
    name: 'a signal ends a command, and is told as one',
    needs: ['exec'],
    async run(box, { tool }) {
      for (const [signal, exitCode] of [
        ['SIGTERM', 143],
        ['SIGKILL', 137],
      ] as const) {
        const command = await box.exec({ args: tool('sleep', EVER) });
        command.kill(signal);
        expect(await command.wait()).toMatchObject({ exitCode, signal, timedOut: false });
      }
    },
  },
  {
    name: 'an exit with 128 + n is no signal',
    needs: ['exec'],
    shell: true,
    async run(box) {
      const result = await (await box.exec({ args: ['sh', '-c', 'exit 143'] })).wait();
      expect([result.exitCode, result.signal]).toEqual([143, undefined]);
    },
  },
  {
    name: 'a command that handles a signal goes on with it',
    needs: ['exec'],
    shell: true,
    async run(box) {
      const script = 'trap "echo got; exit 4" USR1; echo ready; while :; do sleep 0.1; done';
      const command = await box.exec({ args: ['sh', '-c', script] });
      await until('it is ready', async () => (await written(command)) === 'ready\n');
      command.kill('SIGUSR1');
      expect((await command.wait()).exitCode).toBe(4);
      expect((await told(command)).stdout).toBe('ready\ngot\n');
    },
  },
  {
    name: 'a time-out ends a command',
    needs: ['exec'],
    async run(box, { tool }) {
      const command = await box.exec({ args: tool('sleep', EVER), timeoutMs: 200 });
      expect(await command.wait()).toMatchObject({ exitCode: 137, signal: 'SIGKILL', timedOut: true });
    },
  },
  {
    name: 'a time-out ends what left its session, too',
    needs: ['exec', 'files'],
    shell: true,
    async run(box) {
      const child = `echo $$ > /tmp/child.new; mv /tmp/child.new /tmp/child; sleep ${EVER}`;
      const args = ['sh', '-c', `(setsid sh -c '${child}' &); sleep ${EVER}`];
      // Longer when it was too short for the child to begin.
      for (let timeoutMs = 1_000; ; timeoutMs *= 4) {
        const command = await box.exec({ args, timeoutMs });
        expect((await command.wait()).timedOut).toBe(true);
        if ((await failure(box.files.stat('/tmp/child'))) === 'done') break;
        expect(timeoutMs).toBeLessThan(60_000);
      }
      const pid = String(await box.files.read('/tmp/child')).trim();
      expect(pid).toMatch(/^\d+$/);
      await until('the child has gone', async () => (await failure(box.files.stat(`/proc/${pid}/exe`))) === 'ENOENT');
      await box.files.remove('/tmp/child');
    },
  },
  {
    name: 'a child that holds the streams does not hold the call',
    needs: ['exec'],
    shell: true,
    async run(box) {
      const command = await box.exec({ args: ['sh', '-c', `sleep ${EVER} & echo done`] });
      expect(await command.wait()).toMatchObject({ exitCode: 0, stdoutBytes: 5 });
      expect((await told(command)).stdout).toBe('done\n');
      await command.killTree();
    },
  },
  {
    name: 'a command is found by its number, from any offset, and once for one request id',
    needs: ['exec'],
    async run(box, { tool }) {
      const requestId = `once ${Math.random()}`;
      const spec = { args: tool('printf', '%s', '0123456789'), requestId };
      const [one, again] = [await box.exec(spec), await box.exec(spec)];
      expect(again.id).toBe(one.id);
      await one.wait();
      expect(await told(box.command(one.id), { stdout: 4 })).toMatchObject({ stdout: '456789', stderr: '' });
    },
  },
  {
    name: 'a terminal is one to the command',
    needs: ['terminal'],
    async run(box, { tool }) {
      const command = await box.exec({ args: tool('tty'), terminal: { rows: 11, columns: 22 } });
      expect((await told(command)).stdout).toMatch(/^\/dev\/\S+\r\n$/);
      expect((await command.wait()).exitCode).toBe(0);
      const none = await box.exec({ args: tool('tty') });
      expect((await none.wait()).exitCode).toBe(1);
    },
  },
  {
    name: 'a terminal echoes, ends the input at ^D, interrupts at ^C',
    needs: ['terminal'],
    async run(box, { tool }) {
      const terminal = { rows: 24, columns: 80 };
      const reading = await box.exec({ args: tool('cat'), stdin: true, terminal });
      await reading.write(Buffer.from('line\n'));
      await until('it has answered', async () => (await written(reading)) === 'line\r\nline\r\n');
      await reading.write(Buffer.from([4]));
      expect(await reading.wait()).toMatchObject({ exitCode: 0 });
      const stopped = await box.exec({ args: tool('cat'), stdin: true, terminal });
      await stopped.write(Buffer.from('x\n'));
      await until('it runs', async () => (await written(stopped)) === 'x\r\nx\r\n');
      await stopped.write(Buffer.from([3]));
      expect(await stopped.wait()).toMatchObject({ exitCode: 130, signal: 'SIGINT' });
    },
  },
  {
    name: 'a terminal has its size, and its changes',
    needs: ['terminal'],
    shell: true,
    async run(box) {
      const script = 'stty -echo; stty size; read x; stty size';
      const command = await box.exec({ args: ['sh', '-c', script], stdin: true, terminal: { rows: 11, columns: 22 } });
      await until('it has told its size', async () => (await written(command)).includes('11 22'));
      command.resize(33, 44);
      await command.write(Buffer.from('\n'));
      expect((await told(command)).stdout).toBe('11 22\r\n33 44\r\n');
    },
  },
  {
    name: 'a session keeps its folder, variables and functions, and is lost with its shell',
    needs: ['sessions'],
    shell: true,
    async run(box) {
      const session = await box.openShell();
      await session.run('cd /tmp; N=5; f() { echo "f $N $PWD"; }');
      expect(String((await session.run('f')).stdout)).toBe('f 5 /tmp\n');
      expect(await session.run('cat <<E\n$N\nE')).toMatchObject({ exitCode: 0, stdout: Buffer.from('5\n') });
      expect(await session.run('exit 3')).toMatchObject({ exitCode: 3, lost: true });
      await expect(session.run('true')).rejects.toMatchObject({ code: 'RUNTIME_SHELL_LOST' });
    },
  },
  {
    name: 'nothing inside ends or reads the agent',
    needs: ['exec'],
    shell: true,
    async run(box) {
      expect(await say(box, 'kill -9 1; cat /proc/1/environ /proc/1/mem 2>/dev/null | head -c 1; echo .')).toBe('.\n');
      expect(await say(box, 'echo alive')).toBe('alive\n');
    },
  },
];
