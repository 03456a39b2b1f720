/** A PostgreSQL cluster of a benchmark's own: on a unix socket in a scratch folder, with its defaults for durability. */
import { spawnSync } from 'node:child_process';
import { chownSync, readdirSync, readFileSync } from 'node:fs';
import { join } from 'node:path';
import { fail } from './errors.ts';

const VERSIONS = '/usr/lib/postgresql';
/** Of /proc/PID/stat, in ticks of 10 ms. */
const TICK_MS = 10;

export interface PostgresServer {
  readonly url: string;
  readonly version: string;
  /** Of the server and all it started. */
  cpuMs(): number;
  stop(): void;
}

export function postgresMissing(): string | undefined {
  if (newest() === undefined) return 'PostgreSQL is missing (apt-get install postgresql)';
  if (process.getuid?.() === 0 && userOfPostgres() === undefined)
    return 'there is no user postgres to run PostgreSQL as';
  return undefined;
}

function newest(): string | undefined {
  try {
    return readdirSync(VERSIONS).sort((a, b) => Number(b) - Number(a))[0];
  } catch {
    return undefined;
  }
}

/** It refuses to run as root. */
function userOfPostgres(): { uid: number; gid: number } | undefined {
  if (process.getuid?.() !== 0) return undefined;
  const line = readFileSync('/etc/passwd', 'utf8').match(/^postgres:[^:]*:(\d+):(\d+):/m);
  return line === null ? undefined : { uid: Number(line[1]), gid: Number(line[2]) };
}

/** `folder`: empty, and one that others may pass through. */
export function startPostgres(folder: string): PostgresServer {
  const version = newest() ?? '';
  const user = userOfPostgres();
  if (user !== undefined) chownSync(folder, user.uid, user.gid);
  const run = (program: string, ...args: string[]) => {
    const command = join(VERSIONS, version, 'bin', program);
    const { status } = spawnSync(command, args, { cwd: folder, stdio: 'ignore', ...user });
    if (status !== 0)
      throw fail('BENCH_COMMAND', { command, status: status ?? 'a signal', output: join(folder, 'log') });
  };
  const data = join(folder, 'data');
  run('initdb', '-D', data, '-U', 'dsec', '-A', 'trust', '-E', 'UTF8', '--locale=C');
  const settings = `-c listen_addresses= -c unix_socket_directories=${folder}`;
  run('pg_ctl', '-D', data, '-o', settings, '-l', join(folder, 'log'), '-w', '-t', '120', 'start');
  const main = Number(readFileSync(join(data, 'postmaster.pid'), 'utf8').split('\n', 1)[0]);
  return {
    url: `postgres://dsec@${encodeURIComponent(folder)}/postgres`,
    version,
    cpuMs: () => cpuMsOf(main),
    stop: () => run('pg_ctl', '-D', data, '-m', 'fast', '-w', 'stop'),
  };
}

/** Of a process, its children, and those that it waited for. */
function cpuMsOf(main: number): number {
  let ticks = 0;
  for (const name of readdirSync('/proc')) {
    if (!/^\d+$/.test(name)) continue;
    try {
      const stat = readFileSync(`/proc/${name}/stat`, 'latin1');
      const fields = stat
        .slice(stat.lastIndexOf(')') + 2)
        .split(' ')
        .map(Number);
      const [parent, user, system, userOfEnded, systemOfEnded] = [1, 11, 12, 13, 14].map((i) => fields[i] ?? 0);
      if (Number(name) === main) ticks += userOfEnded! + systemOfEnded!;
      if (Number(name) === main || parent === main) ticks += user! + system!;
    } catch {
      // It has ended.
    }
  }
  return ticks * TICK_MS;
}
