/** Sandboxes that stay, against who means harm inside: its agent held up or turned against itself, its time stretched, its streams taken. */
import { execFileSync, spawn } from 'node:child_process';
import * as fs from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { AgentFiles } from '../aether/agent-files.ts';
import { commandGroupsOf, groupOf } from '../aether/command-group.ts';
import { findAgent } from '../backend/agent-binary.ts';
import { PayloadReader, PayloadWriter } from '../backend/agent-wire.ts';
import { reclaimSandboxes } from '../index.ts';
import type { NodeSandbox } from '../node/node-sandbox.ts';
import { HEAD, processesOf, ResidentSite, say, TAIL, told, until } from './resident-fixture.ts';
import { canRun } from './sandbox-fixture.ts';

const agent = findAgent();
if (agent === undefined) console.log('skipped: dsec-agent is not built');

const failure = (promise: Promise<unknown>) =>
  promise.then(
    () => 'done',
    (error: { params?: { code?: string }; code?: string }) => error.params?.code ?? error.code ?? String(error),
  );

describe('copies out of a sandbox', () => {
  let host: string;
  beforeAll(() => {
    host = fs.mkdtempSync(join(tmpdir(), 'dsec-hostile-'));
  });
  afterAll(() => fs.rmSync(host, { recursive: true, force: true }));
  const [FOLDER, FILE, LINK] = [0o040755, 0o100644, 0o120777];
  const status = (out: PayloadWriter, mode: number, size = 0) =>
    out.u32(mode).u32(0).u32(0).u32(1).u64(BigInt(size)).u64(0n).u64(BigInt(mode)).u64(0n).u32(0).u64(0n);
  /** An agent's answers: operation and path -> payload. */
  const filesOf = (answer: (operation: number, path: string, rest: PayloadReader) => PayloadWriter) =>
    new AgentFiles(async (payload) => {
      const reader = new PayloadReader(payload);
      const operation = reader.u8();
      return answer(operation, reader.bytes().toString(), reader).done();
    });

  it('do not go through a link that had the same name in the same listing', async () => {
    const victim = join(host, 'victim');
    fs.mkdirSync(victim);
    const files = filesOf((operation, path) => {
      const out = new PayloadWriter();
      if (operation === 1) return status(out, FOLDER);
      if (operation === 11) return { done: () => Buffer.from(victim) } as PayloadWriter;
      if (operation === 2) return status(out, FILE, 0).u64(0n);
      const entries: [string, number][] =
        path === '/x' ? [...[['a', LINK] as [string, number]], ['a', FOLDER]] : [['evil', FILE]];
      out.u64(0n);
      out.list(entries, ([name, mode]) => status(out.bytes(name), mode));
      return out;
    });
    await files.download('/x', join(host, 'twice'));
    expect(fs.readdirSync(victim)).toEqual([]);
    expect(fs.readdirSync(join(host, 'twice/a'))).toEqual(['evil']);
  });

  it('of a file that never ends have the size that it had first', async () => {
    let size = 1000;
    const files = filesOf((operation, _path, rest) => {
      if (operation === 1) return status(new PayloadWriter(), FILE, size);
      const at = rest.u64();
      size += 4096;
      const head = status(new PayloadWriter(), FILE, size).u64(at).done();
      return { done: () => Buffer.concat([head, Buffer.alloc(4096)]) } as PayloadWriter;
    });
    await files.download('/x', join(host, 'endless'));
    expect(fs.statSync(join(host, 'endless')).size).toBe(5096);
  });
});

describe.skipIf(agent === undefined || !canRun())('a sandbox that means harm', { timeout: 180_000 }, () => {
  let all: ResidentSite;
  let box: NodeSandbox;
  let host: string;
  beforeAll(async () => {
    all = await ResidentSite.open();
    box = await all.create();
    host = join(all.site.root, 'host');
    fs.mkdirSync(host);
  }, 120_000);
  afterAll(() => all.remove(), 120_000);
  const agentOf = (sandbox: NodeSandbox) => Math.min(...processesOf(sandbox));

  it('writes nowhere on this machine by what it was copied as before', async () => {
    const victim = join(host, 'victim');
    fs.mkdirSync(victim);
    await say(box, `mkdir -p /tmp/out; ln -s ${victim} /tmp/out/a; ln -s ${victim}/file /tmp/out/b`);
    await box.files.download('/tmp/out', join(host, 'out'));
    await say(box, 'cd /tmp/out; rm a b; mkdir a; echo evil > a/evil; echo evil > b; chmod 777 a b');
    const mode = fs.statSync(victim).mode;
    await box.files.download('/tmp/out', join(host, 'out'));
    expect([fs.readdirSync(victim), fs.statSync(victim).mode]).toEqual([[], mode]);
    expect(fs.readFileSync(join(host, 'out/a/evil'), 'utf8')).toBe('evil\n');
    await say(box, `rm -rf /tmp/out; ln -s ${victim} /tmp/link; mkdir /tmp/out; echo evil > /tmp/out/evil`);
    fs.symlinkSync(victim, join(host, 'top'));
    await box.files.download('/tmp/out', `${join(host, 'top')}/`);
    expect(fs.readdirSync(victim)).toEqual([]);
  });

  it('has files of long names, and they are copied', async () => {
    await say(box, `mkdir /tmp/long; echo x > /tmp/long/${'n'.repeat(255)}`);
    await box.files.download('/tmp/long', join(host, 'long'));
    expect(fs.readdirSync(join(host, 'long'))).toEqual(['n'.repeat(255)]);
  });

  it('does not end by a path that no file can have', async () => {
    expect(await failure(box.files.rename('/etc/passwd', '/a\0b'))).toBe('EINVAL');
    expect(await failure(box.files.symlink('a\0b', '/tmp/nul'))).toBe('EINVAL');
    expect(await failure(box.exec({ args: ['true'], env: ['A=\0'] }))).not.toBe('done');
    expect(await failure(box.exec({ args: ['true'], env: ['A\0=b'] }))).not.toBe('done');
    expect(await failure(box.exec({ args: ['true'], env: ['novalue', ''] }))).not.toBe('RUNTIME_SANDBOX_GONE');
    expect(await say(box, 'echo on')).toBe('on\n');
  });

  it('has no link by which its agent writes to its own memory or to what it shares', async () => {
    await say(
      box,
      'ln -s /proc/self/mem /tmp/mem; ln -s /proc/self/oom_score_adj /tmp/adj; ln -s /proc/self/exe /tmp/exe',
    );
    expect(await failure(box.files.write('/tmp/mem', Buffer.from('x')))).toBe('EACCES');
    expect(await failure(box.files.write('/tmp/adj', Buffer.from('500')))).toBe('EACCES');
    expect(await failure(box.files.write('/tmp/exe', Buffer.from('x')))).toBe('ELOOP');
    fs.writeFileSync(join(host, 'small'), 'small');
    expect(await failure(box.files.upload(join(host, 'small'), '/tmp/mem'))).toBe('EACCES');
    expect(fs.readFileSync(`/proc/${agentOf(box)}/oom_score_adj`, 'utf8')).not.toBe('500\n');
    expect(await say(box, 'echo on')).toBe('on\n');
  });

  it('gives its commands no descriptor of its agent, and no look at it', async () => {
    const script =
      'for n in /proc/self/fd/*; do basename $n; done; cat /proc/1/environ /proc/1/maps /proc/1/mem; ls -l /proc/1/exe /proc/1/fd/ /proc/1/root; kill -9 1; kill -STOP 1';
    const command = await box.exec({ args: ['sh', '-c', script] });
    const { stdout } = await told(command);
    // The last one is the folder itself.
    expect(stdout.split('\n').filter((name) => Number(name) > 3 || name.includes('->'))).toEqual([]);
    expect(await say(box, 'echo on')).toBe('on\n');
  });

  it('gives commands of a session none of those that the session is fed and answers by', async () => {
    const shell = await box.openShell();
    const { stdout } = await shell.run('sh -c "cd /proc/self/fd; ls -l" | sed -n "s/.* \\([0-9]*\\) -> .*/\\1/p"');
    expect(
      String(stdout)
        .split('\n')
        .filter((name) => Number(name) > 3),
    ).toEqual([]);
    expect(String(stdout)).toContain('0\n1\n2\n');
    await shell.close();
  });

  it('does not hold its agent up by a lease on a file', async () => {
    await say(box, 'echo content > /dev/shm/leased');
    const path = `/proc/${agentOf(box)}/root/dev/shm/leased`;
    // A write lease: whoever opens it waits, or is told to try again.
    const script =
      'open(F, "+<", $ARGV[0]) or die; $SIG{IO} = sub {}; fcntl(F, 1024, 1) or die; $| = 1; print "held"; sleep 1000 while 1';
    const holder = spawn('perl', ['-e', script, path], { stdio: ['ignore', 'pipe', 'inherit'] });
    try {
      await new Promise((resolve) => holder.stdout.once('data', resolve));
      expect(await failure(box.files.read('/dev/shm/leased'))).toBe('EAGAIN');
      expect(await say(box, 'echo on')).toBe('on\n');
    } finally {
      holder.kill('SIGKILL');
    }
  });

  it('does not keep a command from ending, by taking what it wrote out of its pipe', async () => {
    const bytes = HEAD + TAIL + 40_000;
    const thief = 'exec 4</proc/self/fd/1; (while kill -0 $$; do sleep 0.1; done; cat <&4 >/tmp/stolen) 2>/dev/null &';
    const script = `${thief} head -c ${bytes} /dev/zero`;
    const command = await box.exec({ args: ['sh', '-c', script], timeoutMs: 20_000 });
    // A reader that does not read holds the rest in the pipe.
    const reader = command.output()[Symbol.asyncIterator]();
    await reader.next();
    const stolen = () => box.files.stat('/tmp/stolen').catch(() => undefined);
    await until('the rest was taken', async () => (await stolen())?.size === 40_000);
    await reader.return?.(undefined);
    expect(await command.wait()).toMatchObject({ exitCode: 0, timedOut: false });
    await until('the thief has gone', () => processesOf(box).length === 1);
  });

  it('does not keep a command on a terminal from ending, by writing to that for ever', async () => {
    const writer = 'trap "" HUP; exec >$T 2>&1 <$T; while :; do echo x; done';
    const script = `T=$(tty); export T; setsid sh -c '${writer}' & sleep 1; exit 3`;
    const command = await box.exec({ args: ['sh', '-c', script], terminal: { rows: 24, columns: 80 } });
    expect((await command.wait()).exitCode).toBe(3);
    await command.killTree();
  });

  it('runs commands whatever its accounts say', async () => {
    const accounts = await box.files.read('/etc/passwd');
    await box.files.write('/etc/passwd', Buffer.from('root:x:0:0::/ro\0ot:/bin/sh\n'));
    expect(await say(box, 'echo $HOME')).toBe('/\n');
    await box.files.write('/etc/passwd', accounts);
  });

  it('ends when its time is up, also when its agent does not see to it', async () => {
    const short = await all.create({ ttlMs: 3_000 });
    process.kill(agentOf(short), 'SIGSTOP');
    expect(await short.ended).toMatchObject({ reason: 'expired' });
  });

  it('goes on when its agent may open nothing more', async () => {
    const pid = String(agentOf(box));
    const limit = /^Max open files +(\d+) +(\d+)/m.exec(fs.readFileSync(`/proc/${pid}/limits`, 'utf8'))!;
    execFileSync('prlimit', ['--pid', pid, '--nofile=3:']);
    expect(await failure(box.exec({ args: ['true'] }))).not.toBe('done');
    execFileSync('prlimit', ['--pid', pid, `--nofile=${limit[1]}:${limit[2]}`]);
    expect(await say(box, 'echo on')).toBe('on\n');
  });

  it('is not frozen for ever by a service that died at it', async () => {
    const frozen = await all.create();
    const command = await frozen.exec({ args: ['sleep', '1000'] });
    const group = groupOf(commandGroupsOf(frozen.facts.id)!, command.id);
    const file = fs.existsSync(`${group}/freezer.state`) ? 'freezer.state' : 'cgroup.freeze';
    fs.writeFileSync(`${group}/${file}`, file === 'freezer.state' ? 'FROZEN' : '1');
    await all.restart();
    box = all.node.get(box.name);
    expect(await all.node.stop(frozen.name, { timeMs: 0 })).toMatchObject({ reason: 'stopped' });
  });

  it('is not frozen for ever when nobody is left', async () => {
    const other = await ResidentSite.open();
    const frozen = await other.create();
    const command = await frozen.exec({ args: ['sleep', '1000'] });
    const group = groupOf(commandGroupsOf(frozen.facts.id)!, command.id);
    const file = fs.existsSync(`${group}/freezer.state`) ? 'freezer.state' : 'cgroup.freeze';
    fs.writeFileSync(`${group}/${file}`, file === 'freezer.state' ? 'FROZEN' : '1');
    other.node.close();
    const parent = /^PPid:\s+(\d+)/m.exec(fs.readFileSync(`/proc/${agentOf(frozen)}/status`, 'utf8'))![1];
    process.kill(Number(parent), 'SIGKILL');
    await until('all is undone', async () => {
      await reclaimSandboxes(other.site.folders);
      return processesOf(frozen).length === 0 && !fs.existsSync(group);
    });
    await other.restart();
    await other.remove();
  });
});

describe.skipIf(agent === undefined || !canRun())('a sandbox that fills the disk', { timeout: 180_000 }, () => {
  let all: ResidentSite;
  let small: string;
  beforeAll(async () => {
    all = await ResidentSite.open();
    small = join(all.site.root, 'small');
    fs.mkdirSync(small);
    execFileSync('mount', ['-t', 'tmpfs', '-o', 'size=4m,mode=700', 'dsec-test', small]);
    Object.assign(all.site.folders, { stateDir: small });
    await all.restart();
  }, 120_000);
  afterAll(async () => {
    await Promise.all(all.node.list().map((sandbox) => sandbox.stop({ timeMs: 0 })));
    execFileSync('umount', ['-l', small]);
    await all.remove();
  }, 120_000);

  const filler = () => join(small, 'filler');
  const fill = () => execFileSync('sh', ['-c', `cat /dev/zero > ${filler()} 2>/dev/null || true`]);

  it('makes others wait with what they write, and ends none of them', async () => {
    const [full, other] = [await all.create(), await all.create()];
    const ticking = await other.exec({ args: ['sh', '-c', 'while read word; do echo $word; done'], stdin: true });
    await ticking.write(Buffer.from('one\n'));
    await until('it says so', () => ticking.total('stdout') === 4);
    const filling = await full.exec({ args: ['sh', '-c', 'dd if=/dev/zero of=/big bs=4096 2>/dev/null'] });
    expect((await filling.wait()).exitCode).toBe(1);
    fill();
    await ticking.write(Buffer.alloc(20_000, 'two\n'));
    await ticking.closeStdin();
    // One whose line in the journal has no room; a short one may still fit.
    expect(await failure(other.exec({ args: ['true', 'x'.repeat(8000)] }))).not.toBe('done');
    fs.rmSync(filler());
    await full.files.remove('/big');
    expect(await ticking.wait()).toMatchObject({ exitCode: 0, stdoutBytes: 20_004 });
    expect((await told(ticking)).stdout.length).toBe(20_004);
    expect([full.state, other.state]).toEqual(['running', 'running']);
  });

  it('can be resumed, and is not paused where that cannot be recorded', async () => {
    const box = await all.create();
    await box.exec({ args: ['sleep', '1000'] });
    await box.pause();
    fill();
    await box.resume();
    expect(box.state).toBe('running');
    expect(await failure(box.pause())).toBe('RUNTIME_RECORD_WRITE');
    expect(box.state).toBe('running');
    fs.rmSync(filler());
    expect(await say(box, 'echo on')).toBe('on\n');
    expect((await box.pause()).pausedAt).toMatch(/^\d/);
    await box.stop({ timeMs: 0 });
  });

  it('and stays full ends commands that write, with the reason, and no sandbox', async () => {
    const [full, other] = [await all.create(), await all.create()];
    await full.exec({ args: ['sleep', '1000'] });
    const waiting = await other.exec({ args: ['cat'], stdin: true });
    fill();
    await waiting.write(Buffer.alloc(20_000));
    await expect(waiting.wait()).rejects.toThrow(/its output cannot be kept in .* no space left/);
    expect(await full.stop({ timeMs: 0 })).toMatchObject({ reason: 'stopped' });
    fs.rmSync(filler());
    expect(await say(other, 'echo on')).toBe('on\n');
  });
});
