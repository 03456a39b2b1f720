/**
 * What has happened to those who ran agents' code, done on purpose, on each backend: in each case the sandbox that does it, or its
 * end, is named for what it is, and its neighbour notices nothing.
 */
import { execFileSync } from 'node:child_process';
import { once } from 'node:events';
import * as fs from 'node:fs';
import { createServer } from 'node:net';
import { join } from 'node:path';
import { afterAll, afterEach, beforeAll, describe, expect, it } from 'vitest';
import { type Image, readUpper } from '#imagesvc';
import { atLeast } from '#linux';
import { findAgent } from '../backend/agent-binary.ts';
import { cgroupsOf, membersOf } from '../backend/cgroup-cleanup.ts';
import type { NodeSandbox } from '../node/node-sandbox.ts';
import { HEAD, ResidentSite, say, told, until } from './resident-fixture.ts';
import { TEST_IMAGES } from './resident-images.ts';
import { canRun } from './sandbox-fixture.ts';

const EPERM = 1;
const EACCES = 13;

/** Undefined where no static program can be made. */
function attackProgram(folder: string): string | undefined {
  const program = join(folder, 'attack');
  try {
    execFileSync('gcc', ['-static', '-O1', '-w', '-o', program, new URL('./attack.c', import.meta.url).pathname]);
    return program;
  } catch {
    console.log('skipped: no gcc with a static libc');
    return undefined;
  }
}

const usable = canRun() && findAgent() !== undefined;

describe.skipIf(!usable).each(['dsec', 'crun'])('an incident in a sandbox by %s', { timeout: 180_000 }, (runtime) => {
  let site: ResidentSite;
  let image: Image;
  let neighbour: NodeSandbox;
  let hasAttack = false;
  beforeAll(async () => {
    site = await ResidentSite.open();
    const attack = attackProgram(site.site.root);
    hasAttack = attack !== undefined;
    const fill = (folder: string) => {
      TEST_IMAGES[0]!.fill(folder);
      if (attack !== undefined) fs.copyFileSync(attack, join(folder, 'bin/attack'));
      if (attack !== undefined) fs.chmodSync(join(folder, 'bin/attack'), 0o755);
      for (const name of ['grep', 'timeout', 'find', 'touch', 'xargs', 'seq']) {
        if (!fs.existsSync(join(folder, 'bin', name))) fs.symlinkSync('busybox', join(folder, 'bin', name));
      }
    };
    image = await site.site.image('incident:1', [fill]);
    neighbour = await create({ name: 'neighbour' });
  }, 120_000);
  afterEach(async () => {
    expect(await say(neighbour, 'echo fine')).toBe('fine\n');
    expect(neighbour.state).toBe('running');
  }, 120_000);
  afterAll(() => site?.remove(), 120_000);

  const create = (options: Parameters<ResidentSite['create']>[0] = {}) =>
    site.create({ base: image, runtime, ...options });

  /** It works on, and nothing of it was ended. */
  async function works(sandbox: NodeSandbox): Promise<void> {
    expect(sandbox.state).toBe('running');
    const command = await sandbox.exec({ args: ['sh', '-c', 'echo alive; exit 3'] });
    expect((await told(command)).stdout).toBe('alive\n');
    expect(await command.wait()).toMatchObject({ exitCode: 3 });
  }

  it('greps all of /proc', async () => {
    const sandbox = await create();
    // Of its own pagemap alone it would read for days; that costs nobody else, and ends in time.
    const command = await sandbox.exec({ args: ['grep', '-rs', 'nothing-like-it', '/proc'], timeoutMs: 5_000 });
    expect(await say(neighbour, 'echo meanwhile')).toBe('meanwhile\n');
    expect(await command.wait()).toMatchObject({ timedOut: true });
    for (const file of ['kpagecgroup', 'kpagecount', 'kpageflags', 'kcore', 'kmsg', 'keys', 'timer_list'])
      expect([file, await say(sandbox, `head -c 1 /proc/${file} 2>/dev/null | wc -c`)]).toEqual([file, '0\n']);
    await works(sandbox);
    await sandbox.stop({ timeMs: 0 });
  });

  it('forges messages to its agent, reads its memory and logs, traces and starves it', async () => {
    if (!hasAttack) return;
    const sandbox = await create();
    const lines = (await say(sandbox, 'attack')).trim().split('\n');
    const got = Object.fromEntries(lines.map((line) => line.split(' '))) as Record<string, string>;
    // Not one of its descriptors, by path or by pidfd.
    expect(lines.filter((line) => /^(fd|getfd)-/.test(line))).toEqual([]);
    const refused = Object.entries(got).filter(([, errno]) => errno !== '0');
    const allowed = Object.keys(got).filter((name) => !refused.some(([one]) => one === name));
    expect(allowed.sort()).toEqual(['done', 'own-affinity', 'own-priority']);
    for (const name of ['swapext', 'fssetxattr', 'move-ext', 'shutdown', 'freeze', 'upper-half', 'prlimit', 'affinity'])
      expect([name, got[name]]).toEqual([name, String(EPERM)]);
    for (const name of ['mem', 'environ', 'exe-link', 'exe-open'])
      expect([String(EPERM), String(EACCES)]).toContain(got[name]);
    // Neither its files nor its channel have a name inside.
    const found = await say(
      sandbox,
      'find / -xdev \\( -type s -o -name "*.sock" -o -name "*.log" \\) 2>/dev/null; true',
    );
    expect(found).toBe('');
    await works(sandbox);
    await sandbox.stop({ timeMs: 0 });
  });

  it('makes a socket to the hypervisor by a 32-bit call', async () => {
    if (!hasAttack || process.arch !== 'x64') return;
    const sandbox = await create();
    const command = await sandbox.exec({ args: ['attack', 'socketcall'] });
    const { stdout } = await told(command);
    const { exitCode } = await command.wait();
    // EAFNOSUPPORT; or there are no 32-bit calls at all.
    expect([stdout, exitCode]).toEqual(runtime === 'dsec' ? ['socketcall-vsock 97\n', 0] : ['', 128 + 31]);
    await works(sandbox);
    await sandbox.stop({ timeMs: 0 });
  });

  it("connects to an abstract socket of the machine's, with the machine's network", async () => {
    if (!hasAttack || runtime !== 'dsec' || !atLeast(6, 12)) return;
    const name = `dsec-test-${process.pid}`;
    const server = createServer().listen(`\0${name}`);
    await once(server, 'listening');
    const ran = await site.site.run(image, ['attack', 'abstract', name], { network: 'host' });
    server.close();
    // By Landlock: it has the namespace of the network that the socket is in.
    expect(ran.stdout.toString()).toBe(`abstract ${EPERM}\n`);
  });

  it('replaces its shell and its tools', async () => {
    const sandbox = await create();
    const fake = "printf '#!/bin/busybox sh\\necho owned\\nexit 0\\n' > /tmp/fake; chmod 755 /tmp/fake";
    await say(sandbox, `${fake}; for f in sh bash env id cat true; do rm -f /bin/$f; cp /tmp/fake /bin/$f; done`);
    const plain = await sandbox.exec({ args: ['/bin/busybox', 'sh', '-c', '/bin/id -u; exit 5'] });
    expect((await told(plain)).stdout).toBe('owned\n');
    expect(await plain.wait()).toMatchObject({ exitCode: 5 });
    const real = await sandbox.exec({ args: ['/bin/busybox', 'id', '-u'], user: '7:7' });
    expect((await told(real)).stdout).toBe('7\n');
    expect((await sandbox.files.read('/bin/sh')).toString()).toContain('owned');
    await sandbox.files.write('/tmp/note', Buffer.from('still here'));
    expect((await sandbox.files.read('/tmp/note')).toString()).toBe('still here');
    const shell = await sandbox.openShell().catch((error: { code?: string }) => error);
    if ('run' in shell) await expect(shell.run('echo hi')).rejects.toMatchObject({ code: 'RUNTIME_SHELL_LOST' });
    else expect(shell.code).toMatch(/^RUNTIME_/);
    await sandbox.stop({ timeMs: 0 });
  });

  it('writes without end', async () => {
    const sandbox = await create();
    const endless = await sandbox.exec({ args: ['sh', '-c', 'yes | head -c 40000000; yes'] });
    const size = () =>
      fs
        .readdirSync(commandsOf(sandbox), { recursive: true, encoding: 'utf8' })
        .reduce((sum, name) => sum + sizeOf(sandbox, name), 0);
    await until('the first of it is on disk', () => size() >= HEAD);
    await works(sandbox);
    await endless.killTree();
    const result = await endless.wait();
    expect(result.signal).toBe('SIGKILL');
    const { stdout, missing } = await told(endless);
    expect(stdout.length + missing).toBeGreaterThanOrEqual(result.stdoutBytes);
    expect(size()).toBeLessThan(16 << 20);
    await sandbox.stop({ timeMs: 0 });
  });

  it('forks without end', async () => {
    const sandbox = await create({ pids: 100 });
    const bomb = await sandbox.exec({
      args: ['sh', '-c', 'f() { f | f & f & }; (f) & exec sleep 1000'],
      timeoutMs: 3_000,
    });
    expect(await bomb.wait()).toMatchObject({ timedOut: true });
    await until('nothing of it is left', () => processesIn(sandbox).length === 1);
    await works(sandbox);
    await sandbox.stop({ timeMs: 0 });
  });

  it('fills its disk', async () => {
    const sandbox = await create({ diskBytes: 32 << 20, inodes: 2_000 });
    const fill = await sandbox.exec({ args: ['sh', '-c', 'dd if=/dev/zero of=/big bs=1M count=200'] });
    const { stderr } = await told(fill);
    expect((await fill.wait()).exitCode).not.toBe(0);
    expect(stderr).toMatch(/no space|quota/i);
    await works(sandbox);
    const many = await sandbox.exec({
      args: [
        'sh',
        '-c',
        'rm /big; mkdir /many; cd /many; i=0; while echo > $i; do i=$((i+1)); done 2>&1 | head -1; ls | wc -l',
      ],
    });
    const { stdout } = await told(many);
    expect(stdout).toMatch(/no space|quota/i);
    expect(Number(stdout.trim().split('\n').at(-1))).toBeLessThanOrEqual(2_000);
    await works(sandbox);
    expect(await say(neighbour, 'dd if=/dev/zero of=/mine bs=1M count=40 2>/dev/null && rm /mine && echo wrote')).toBe(
      'wrote\n',
    );
    expect((await sandbox.stop({ timeMs: 0 })).reason).toBe('stopped');
  });

  it('kills process 1', async () => {
    const sandbox = await create();
    await say(sandbox, 'for s in 1 2 3 6 9 11 15 17 19 31; do kill -$s 1; done; kill -9 -1; true');
    await works(sandbox);
    const [agent] = processesIn(sandbox);
    process.kill(agent!, 'SIGKILL');
    expect(await sandbox.ended).toMatchObject({ reason: 'killed' });
    await expect(sandbox.exec({ args: ['true'] })).rejects.toMatchObject({ code: 'RUNTIME_SANDBOX_GONE' });
  });

  it('leaves what is packed owned as it was inside', async () => {
    const sandbox = await create();
    await say(sandbox, 'echo a > /root-made; rm /etc/group; chown 5:6 /work; echo b > /high; chown 65534:70000 /high');
    await sandbox.stop({ timeMs: 0 });
    const owners: Record<string, string> = {};
    await readUpper(join(site.site.folders.stateDir, 'sandboxes', sandbox.name, 'upper'), {
      entry(entry) {
        owners[entry.path] = `${entry.uid}:${entry.gid}`;
      },
      data() {},
      hole() {},
      fileEnd() {},
    });
    expect(owners).toMatchObject({ 'root-made': '0:0', work: '5:6', high: '65534:70000' });
  });

  function commandsOf(sandbox: NodeSandbox): string {
    return join(site.site.folders.stateDir, 'sandboxes', sandbox.name, 'commands');
  }
  function sizeOf(sandbox: NodeSandbox, name: string): number {
    return fs.statSync(join(commandsOf(sandbox), name), { throwIfNoEntry: false })?.size ?? 0;
  }
  function processesIn(sandbox: NodeSandbox): number[] {
    return [...new Set(cgroupsOf(sandbox.facts.id).flatMap((group) => membersOf(group)))];
  }
});
