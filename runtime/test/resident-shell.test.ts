/** Shell sessions: state that stays, and commands that try to take the session with them. */
import { setTimeout as delay } from 'node:timers/promises';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { findAgent } from '../backend/agent-binary.ts';
import type { NodeSandbox } from '../node/node-sandbox.ts';
import type { ShellSession } from '../sandbox-api/shell.ts';
import { processesOf, ResidentSite, until } from './resident-fixture.ts';
import { canRun } from './sandbox-fixture.ts';

const agent = findAgent();
if (agent === undefined) console.log('skipped: dsec-agent is not built');

/** Command, exit status, stdout, stderr where that matters. */
const KEEPS: readonly (readonly [string, number, string, RegExp?])[] = [
  ['cd /work; X=5; f() { echo "f $X $1"; }; export Y=6', 0, ''],
  ['pwd; f 1; sh -c "echo \\$Y"', 0, '/work\nf 5 1\n6\n'],
  ["echo 'unterminated", 2, '', /unterminated|unexpected EOF/i],
  ['echo "also', 2, '', /unterminated|unexpected EOF/i],
  ['if true; then echo half', 2, '', /syntax|unexpected/i],
  ['cat <<EOF\nheredoc $X\nEOF', 0, 'heredoc 5\n'],
  ["cat <<'EOF'\nno $end", 0, 'no $end\n', /.*/s],
  ['echo a # comment', 0, 'a\n'],
  ['echo one\n\necho two; (exit 3)', 3, 'one\ntwo\n'],
  ['no-such-program', 127, '', /not found/],
  ['false', 1, ''],
  ['echo back\\\\slash "q\'q" \'d"d\'', 0, 'back\\slash q\'q d"d\n'],
  ['cat', 0, ''],
  ['(exec >&-; exec 2>&-); echo still', 0, 'still\n'],
  ['echo forged 0 >&4', 1, '', /4|bad|file descriptor/i],
  ['ls /proc/self/fd', 0, '0\n1\n2\n3\n'],
  ['pwd', 0, '/work\n'],
];

describe.skipIf(agent === undefined || !canRun()).each(['busybox', 'debian-like'])('a shell session on %s', (image) => {
  let all: ResidentSite;
  let box: NodeSandbox;
  beforeAll(async () => {
    all = await ResidentSite.open(image);
    box = await all.create();
  }, 120_000);
  afterAll(() => all.remove(), 120_000);
  const text = async (session: ShellSession, command: string) => (await session.run(command)).stdout.toString();

  it('keeps its state, whatever the commands are', { timeout: 120_000 }, async () => {
    const session = await box.openShell();
    for (const [command, exitCode, stdout, stderr] of KEEPS) {
      const result = await session.run(command, { timeoutMs: 30_000 });
      const found = { command, exitCode: result.exitCode, stdout: String(result.stdout), lost: result.lost };
      expect(found).toEqual({
        command,
        exitCode: command.startsWith('echo forged') ? result.exitCode : exitCode,
        stdout,
        lost: false,
      });
      if (stderr !== undefined) expect(String(result.stderr)).toMatch(stderr);
      else expect(String(result.stderr)).toBe('');
    }
    await session.close();
    await until('it has gone', () => processesOf(box).length === 1);
  });

  it.each(['exit 3', 'exec sh -c "exit 3"', 'kill -9 $$', 'set -e; false'])(
    'says that it is lost after: %s',
    async (command) => {
      const session = await box.openShell();
      const result = await session.run(command, { timeoutMs: 30_000 });
      expect(result.lost).toBe(true);
      expect(result.exitCode).toBe(command.includes('kill') ? 137 : command.includes('set') ? 1 : 3);
      await expect(session.run('true')).rejects.toMatchObject({ code: 'RUNTIME_SHELL_LOST' });
    },
  );

  it('several at once have nothing in common', async () => {
    const sessions = await Promise.all([1, 2, 3].map(() => box.openShell()));
    await Promise.all(sessions.map((session, n) => session.run(`N=${n}; cd /tmp; mkdir -p d${n}; cd d${n}`)));
    expect(await Promise.all(sessions.map((session) => text(session, 'echo $N; pwd')))).toEqual(
      sessions.map((_, n) => `${n}\n/tmp/d${n}\n`),
    );
    await Promise.all(sessions.map((session) => session.close()));
    await until('all have gone', () => processesOf(box).length === 1);
  });

  it('does one command after the other, in their order', async () => {
    const session = await box.openShell();
    const results = await Promise.all(Array.from({ length: 20 }, (_, n) => session.run(`echo ${n}; L="$L ${n}"`)));
    expect(results.map(({ stdout }) => String(stdout))).toEqual(results.map((_, n) => `${n}\n`));
    expect(await text(session, 'echo $L')).toBe(`${results.map((_, n) => n).join(' ')}\n`);
    await session.close();
  });

  it('survives an interrupt, a time-out, and a command that does not care', { timeout: 120_000 }, async () => {
    const session = await box.openShell();
    const sleeping = session.run('X=kept; sleep 1000');
    await until('it sleeps', () => processesOf(box).length === 3);
    session.interrupt();
    expect((await sleeping).exitCode).toBe(130);
    expect(await session.run('sleep 1000', { timeoutMs: 200 })).toMatchObject({ timedOut: true, lost: false });
    const deaf = 'sh -c \'trap "" INT TERM; while :; do sleep 0.1; done\'';
    expect(await session.run(deaf, { timeoutMs: 200 })).toMatchObject({ timedOut: true, lost: false });
    expect(await text(session, 'echo $X')).toBe('kept\n');
    // The shell itself goes round in circles: no program to kill.
    expect(await session.run('while :; do :; done', { timeoutMs: 200 })).toMatchObject({ timedOut: true, lost: true });
  });

  it('takes long commands and long output', { timeout: 120_000 }, async () => {
    const session = await box.openShell();
    expect(await text(session, `V='${'x'.repeat(300_000)}'; echo \${#V}`)).toBe('300000\n');
    const result = await session.run('yes | head -c 9000000; echo end');
    expect(result.stdout.subarray(-6).toString()).toBe('y\nend\n');
    expect(result.missingBytes).toBe(9_000_004 - result.stdout.length);
    await session.close();
  });

  it('on a terminal answers what it is asked', { timeout: 120_000 }, async () => {
    const session = await box.openShell({ terminal: { rows: 5, columns: 50 } });
    const asking = session.run('stty size; printf "name? "; read name; echo "hello $name"');
    await session.expect('name? ');
    session.resize(6, 60);
    await session.write(Buffer.from('you\n'));
    expect(String((await asking).stdout)).toBe('5 50\r\nname? hello you\r\n');
    expect(String((await session.run('stty size')).stdout)).toBe('6 60\r\n');
    const sleeping = session.run('sleep 1000');
    await until('it sleeps', () => processesOf(box).length === 3);
    await delay(50);
    session.interrupt();
    expect((await sleeping).exitCode).toBe(130);
    await expect(session.expect('never', { timeoutMs: 50 })).rejects.toMatchObject({ code: 'RUNTIME_SHELL_EXPECT' });
    await session.close();
  });
});
