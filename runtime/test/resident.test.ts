/** Sandboxes that stay: commands that misbehave, output without end, memory, ends of every kind, and a service that dies meanwhile. */
import { execFileSync } from 'node:child_process';
import * as fs from 'node:fs';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { isDsecError } from '#base';
import { findAgent } from '../backend/agent-binary.ts';
import { reclaimSandboxes } from '../index.ts';
import type { NodeSandbox } from '../node/node-sandbox.ts';
import { HEAD, processesOf, ResidentSite, say, TAIL, told, until } from './resident-fixture.ts';
import { canRun } from './sandbox-fixture.ts';

const agent = findAgent();
if (agent === undefined) console.log('skipped: dsec-agent is not built');

const codeOf = (promise: Promise<unknown>) =>
  promise.then(
    () => 'no error',
    (error: unknown) => (isDsecError(error) ? error.code : String(error)),
  );

describe.skipIf(agent === undefined || !canRun())('a sandbox that stays', { timeout: 180_000 }, () => {
  let all: ResidentSite;
  let box: NodeSandbox;
  beforeAll(async () => {
    all = await ResidentSite.open();
    box = await all.create();
  }, 120_000);
  afterAll(() => all.remove(), 120_000);

  describe('commands', () => {
    it('end at their time-out with all that they started, wherever that went', async () => {
      const script = '(setsid sh -c "sleep 1000 & sleep 1000" &) ; setsid sleep 1000 & trap "" TERM; sleep 1000';
      const command = await box.exec({ args: ['sh', '-c', script], timeoutMs: 500 });
      expect(await command.wait()).toMatchObject({ exitCode: 137, signal: 'SIGKILL', timedOut: true });
      await until('all of it has gone', () => processesOf(box).length === 1);
    });

    it('are not held by children that keep their streams open', async () => {
      const command = await box.exec({ args: ['sh', '-c', 'sleep 1000 & echo done'] });
      expect(await command.wait()).toMatchObject({ exitCode: 0, stdoutBytes: 5 });
      expect((await told(command)).stdout).toBe('done\n');
      expect(processesOf(box).length).toBe(2);
      await command.killTree();
      await until('the child has gone', () => processesOf(box).length === 1);
    });

    it('tell a signal as a signal, and 128 + n as an exit', async () => {
      const killed = await box.exec({ args: ['sh', '-c', 'kill -TERM $$'] });
      expect(await killed.wait()).toMatchObject({ exitCode: 143, signal: 'SIGTERM' });
      const exited = await box.exec({ args: ['sh', '-c', 'exit 143'] });
      const result = await exited.wait();
      expect([result.exitCode, result.signal]).toEqual([143, undefined]);
    });

    it('get signals', async () => {
      const command = await box.exec({
        args: ['sh', '-c', 'trap "echo got; exit 4" USR1; echo ready; while :; do sleep 0.1; done'],
      });
      await until('it is ready', async () => (await told(command, { follow: false })).stdout === 'ready\n');
      command.kill('SIGUSR1');
      expect((await command.wait()).exitCode).toBe(4);
      expect((await told(command)).stdout).toBe('ready\ngot\n');
    });

    it('are found again by their number, from any offset', async () => {
      const { id } = await box.exec({ args: ['sh', '-c', 'echo 0123456789; echo abc >&2'] });
      await box.command(id).wait();
      expect(await told(box.command(id), { stdout: 4, stderr: 2 })).toMatchObject({
        stdout: '456789\n',
        stderr: 'c\n',
      });
      expect(() => box.command(99_999)).toThrow(/has no command 99999/);
    });

    it('run once for one request id', async () => {
      const spec = { args: ['sh', '-c', 'echo x >> /tmp/once'], requestId: 'the one' };
      const [a, b] = [await box.exec(spec), await box.exec(spec)];
      expect(a.id).toBe(b.id);
      await a.wait();
      expect(await say(box, 'cat /tmp/once')).toBe('x\n');
    });

    it('have a terminal, its size and its changes', async () => {
      const script = 'stty -echo; stty size; read x; stty size; tty >/dev/null && echo terminal';
      const command = await box.exec({ args: ['sh', '-c', script], stdin: true, terminal: { rows: 11, columns: 22 } });
      await until('it has told its size', async () =>
        (await told(command, { follow: false })).stdout.includes('11 22'),
      );
      command.resize(33, 44);
      await command.write(Buffer.from('\n'));
      expect((await told(command)).stdout).toBe('11 22\r\n33 44\r\nterminal\r\n');
    });

    it('bear input that nobody reads', async () => {
      const command = await box.exec({ args: ['true'], stdin: true });
      await command.write(Buffer.alloc(4 << 20));
      await command.closeStdin();
      expect((await command.wait()).exitCode).toBe(0);
    });

    it('of which many run at once', async () => {
      const texts = await Promise.all(Array.from({ length: 40 }, (_, n) => say(box, `echo ${n}`)));
      expect(texts).toEqual(texts.map((_, n) => `${n}\n`));
    });

    it('find one empty folder behind all folders that are masked: file systems cost every sandbox of a node memory', async () => {
      const rows = (await say(box, 'cat /proc/self/mountinfo')).split('\n').map((row) => row.split(' '));
      const isMask = /^\/(proc\/acpi|sys\/firmware|sys\/kernel\/(debug|tracing))$/;
      const masks = rows.filter(([, , , , path]) => isMask.test(path ?? ''));
      expect(masks.length).toBeGreaterThan(0);
      expect(new Set(masks.map(([, , device]) => device)).size).toBe(1);
      expect(masks.filter(([, , , , , flags]) => !flags?.startsWith('ro,nosuid,nodev,noexec'))).toEqual([]);
    });

    it('cannot reach the agent', async () => {
      expect(await say(box, 'kill -9 1; kill -9 -1 2>/dev/null; echo alive')).toMatch(/^(alive\n)?$/);
      const reads =
        'for f in environ mem maps exe fd/3 root/etc; do cat /proc/1/$f 2>/dev/null | head -c 1; done; echo .';
      expect(await say(box, reads)).toBe('.\n');
      expect(await say(box, 'echo x > /proc/1/mem; ls /proc/1/fd/ >/dev/null; readlink /proc/1/exe; echo .', {})).toBe(
        '.\n',
      );
      expect(await say(box, 'echo alive')).toBe('alive\n');
    });
  });

  describe('output', () => {
    it('without end keeps its head and its tail, and says what is missing', async () => {
      const command = await box.exec({ args: ['sh', '-c', 'yes 0123456 | head -c 16777216; echo; echo the end'] });
      const { stdoutBytes } = await command.wait();
      expect(stdoutBytes).toBe(16_777_216 + 9);
      const { stdout, missing } = await told(command);
      expect(missing).toBe(stdoutBytes - HEAD - TAIL);
      expect(stdout.length).toBe(HEAD + TAIL);
      expect(stdout.slice(0, 16)).toBe('0123456\n0123456\n');
      expect(stdout.endsWith('\nthe end\n')).toBe(true);
    });

    it('loses nothing while somebody reads, however slowly', async () => {
      const command = await box.exec({ args: ['sh', '-c', 'yes abcdefg | head -c 8388608'] });
      let length = 0;
      for await (const part of command.output()) {
        expect(part.missingBytes).toBeUndefined();
        length += part.bytes!.length;
        if (length % (1 << 20) < 65_536) await new Promise((go) => setTimeout(go, 20));
      }
      expect(length).toBe(8 << 20);
    });

    it('stops a command whose reader does not read, and goes on when that has gone', async () => {
      const command = await box.exec({ args: ['yes'] });
      const reader = command.output()[Symbol.asyncIterator]();
      await reader.next();
      const held = HEAD + TAIL + (1 << 19);
      let last = -1;
      await until('it stands still', async () => {
        const now = command.total('stdout');
        const still = now === last && now >= HEAD + TAIL;
        last = now;
        await new Promise((go) => setTimeout(go, 200));
        return still;
      });
      expect(last).toBeLessThanOrEqual(held);
      await reader.return?.(undefined);
      await until('it goes on', () => command.total('stdout') > 4 * held);
      await command.killTree();
      expect((await command.wait()).signal).toBe('SIGKILL');
    });

    it('leaves the agent small', async () => {
      expect(Number(/VmRSS:\s+(\d+)/.exec(await say(box, 'cat /proc/1/status'))?.[1])).toBeLessThan(1536);
    });
  });

  describe('limits', () => {
    it('end a command that takes too much memory, and say so; the sandbox goes on', async () => {
      const small = await all.create({ memoryBytes: 48 << 20 });
      const command = await small.exec({ args: ['sh', '-c', 'dd if=/dev/zero of=/dev/null bs=200M count=1'] });
      const result = await command.wait();
      expect(result.exitCode).toBe(137);
      // The shell may have outlived the one that was chosen.
      expect(result.outOfMemory || result.signal === undefined).toBe(true);
      const alone = await small.exec({ args: ['dd', 'if=/dev/zero', 'of=/dev/null', 'bs=200M', 'count=1'] });
      expect(await alone.wait()).toMatchObject({ signal: 'SIGKILL', outOfMemory: true, timedOut: false });
      expect(await say(small, 'echo on')).toBe('on\n');
      await small.stop({ timeMs: 0 });
    });

    it('hold a fork bomb, which its time-out ends', async () => {
      const small = await all.create({ pids: 64 });
      const bomb = await small.exec({ args: ['sh', '-c', 'f() { f | f & }; f; while :; do f; done'], timeoutMs: 1000 });
      await bomb.wait();
      await bomb.killTree();
      await until('the bomb has gone', () => processesOf(small).length === 1);
      expect(await say(small, 'echo on')).toBe('on\n');
      await small.stop({ timeMs: 0 });
    });
  });

  describe('ends', () => {
    it('when it is stopped, twice too, and its changes stay', async () => {
      const one = await all.create();
      await say(one, 'echo kept > /tmp/kept');
      const polite = await one.exec({ args: ['sleep', '1000'] });
      const stubborn = await one.exec({ args: ['sh', '-c', 'trap "" TERM; echo set; while :; do sleep 0.1; done'] });
      await until('it ignores the signal', () => stubborn.total('stdout') > 0);
      const waiting = codeOf(stubborn.wait());
      const [first, second] = await Promise.all([one.stop({ timeMs: 500 }), one.stop()]);
      expect(polite.result?.signal).toBe('SIGTERM');
      expect([first.reason, second.reason]).toEqual(['stopped', 'stopped']);
      expect(await waiting).toBe('RUNTIME_SANDBOX_GONE');
      expect((await all.node.stop(one.name)).reason).toBe('stopped');
      expect(await codeOf(one.exec({ args: ['true'] }))).toBe('RUNTIME_SANDBOX_GONE');
      expect(() => all.node.get(one.name)).toThrow(/has ended: it was stopped/);
      expect(fs.readFileSync(`${all.site.folders.stateDir}/sandboxes/${one.name}/upper/tmp/kept`, 'utf8')).toBe(
        'kept\n',
      );
    });

    it('when its time is up', async () => {
      const one = await all.create({ ttlMs: 1500 });
      expect((await one.ended).reason).toBe('expired');
    });

    it('when its agent is killed, and says so', async () => {
      const one = await all.create();
      const waiting = codeOf((await one.exec({ args: ['sleep', '1000'] })).wait());
      process.kill(Math.min(...processesOf(one)), 'SIGKILL');
      expect((await one.ended).reason).toBe('killed');
      expect(await waiting).toBe('RUNTIME_SANDBOX_GONE');
    });

    it('leave a name free for a new one only when it is removed', async () => {
      const one = await all.create();
      expect(await codeOf(all.create({ name: one.name }))).toBe('RUNTIME_SANDBOX_EXISTS');
      await one.stop({ timeMs: 0 });
      expect(await codeOf(all.create({ name: one.name }))).toBe('RUNTIME_SANDBOX_EXISTS');
    });

    it('of a creation that fails leave nothing', async () => {
      expect(await codeOf(all.create({ name: 'never', user: 'nobody-here' }))).toBe('RUNTIME_USER');
      expect(all.site.leftovers().folders).not.toContain('never');
      expect(all.site.leftovers().mounts.filter((path) => path.includes('/never/'))).toEqual([]);
    });

    it('are the same for one request id', async () => {
      const [a, b] = await Promise.all([
        all.create({ requestId: 'r', name: 'r' }),
        all.create({ requestId: 'r', name: 'r' }),
      ]);
      expect(a).toBe(b);
      await a.stop({ timeMs: 0 });
    });
  });

  describe('a service that dies', () => {
    it('leaves sandboxes and commands running; the next one has all of their output', async () => {
      const one = await all.create();
      const script = 'n=0; while [ ! -e /tmp/go ]; do n=$((n+1)); echo line $n; sleep 0.01; done; echo last $n; exit 9';
      const { id } = await one.exec({ args: ['sh', '-c', script] });
      const { id: quiet } = await one.exec({ args: ['sh', '-c', 'exit 3'] });
      await one.command(quiet).wait();
      await all.restart();
      const again = all.node.get(one.name);
      expect(again.command(quiet).result?.exitCode).toBe(3);
      expect(await say(again, 'touch /tmp/go; echo here')).toBe('here\n');
      expect((await again.command(id).wait()).exitCode).toBe(9);
      const lines = (await told(again.command(id))).stdout.trim().split('\n');
      const count = lines.length - 1;
      expect(lines).toEqual([...Array.from({ length: count }, (_, n) => `line ${n + 1}`), `last ${count}`]);
      await again.stop({ timeMs: 0 });
    });

    it('is no reason for other commands to take its sandboxes for dead', async () => {
      const one = await all.create();
      all.node.close();
      expect((await reclaimSandboxes(all.site.folders)).kept).not.toContain(one.name);
      await all.restart();
      expect(await say(all.node.get(one.name), 'echo here')).toBe('here\n');
    });

    it('learns afterwards how they ended', async () => {
      const one = await all.create();
      const pid = Math.min(...processesOf(one));
      all.node.close();
      process.kill(pid, 'SIGKILL');
      await all.restart();
      await until('it is known', () => !all.node.list().some(({ name }) => name === one.name));
      expect(() => all.node.get(one.name)).toThrow(/has ended: its agent was ended by signal 9/);
    });
  });

  it('is named as lost when the keeper dies, and nothing of it stays', async () => {
    const one = await all.create();
    const keeper = execFileSync('pgrep', ['-f', `keep ${all.site.folders.runDir}/keeper.sock`])
      .toString()
      .trim();
    process.kill(Number(keeper), 'SIGKILL');
    expect((await one.ended).reason).toBe('lost');
    const next = await all.create();
    expect(await say(next, 'echo here')).toBe('here\n');
    await next.stop();
    expect(all.site.leftovers().mounts).toEqual([]);
    expect(all.site.leftovers().cgroups).toEqual([]);
  });
});
