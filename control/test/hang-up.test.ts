/** A terminal that goes away ends what runs on it, with the status of the signal. */
import { spawnSync } from 'node:child_process';
import { join } from 'node:path';
import { describe, expect, it } from 'vitest';

const python = spawnSync('python3', ['--version']).status === 0;
if (!python) console.log('skipped: python3, which has terminals, is not installed');

/** Starts a program on a terminal of its own, waits until it is ready, hangs up, and says how it ended. */
const HANG_UP = `
import os, pty, sys
pid, master = pty.fork()
if pid == 0: os.execvp(sys.argv[1], sys.argv[1:])
said = b''
while b'ready' not in said: said += os.read(master, 1000)
os.close(master)
status = os.waitpid(pid, 0)[1]
print(-os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status))
`;

describe.skipIf(!python)('a command whose terminal hangs up', () => {
  it('ends with 129, and does not crash', () => {
    const child = join(import.meta.dirname, 'hang-up-child.ts');
    const ran = spawnSync('python3', ['-c', HANG_UP, process.execPath, '--import', 'tsx', child], { encoding: 'utf8' });
    expect([ran.stdout.trim(), ran.stderr]).toEqual(['129', '']);
  }, 120_000);
});
