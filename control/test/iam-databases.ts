/** Databases to test IAM on: SQLite in a folder, and a PostgreSQL cluster of our own, on a unix socket, that is gone afterwards. */
import { spawnSync } from 'node:child_process';
import { chownSync, mkdtempSync, readdirSync, readFileSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import pg from 'pg';

export interface TestDatabases {
  readonly kind: 'sqlite' | 'postgres';
  /** An empty one each time, as `openIam` takes it. */
  make(): Promise<string>;
  /** Ends every connection there is, whatever it is in the middle of. */
  cut?(): Promise<void>;
  stop(): void;
}

function programs(): string | undefined {
  const versions = '/usr/lib/postgresql';
  try {
    const newest = readdirSync(versions).sort((a, b) => Number(b) - Number(a))[0];
    return newest === undefined ? undefined : join(versions, newest, 'bin');
  } catch {
    return undefined;
  }
}

/** Why there is no PostgreSQL to test on. */
export function postgresMissing(): string | undefined {
  if (programs() === undefined) return 'there is no /usr/lib/postgresql (apt-get install postgresql)';
  if (process.getuid?.() === 0 && userOfPostgres() === undefined) return 'there is no user postgres to run it as';
  return undefined;
}

/** It refuses to run as root. */
function userOfPostgres(): { uid: number; gid: number } | undefined {
  if (process.getuid?.() !== 0) return undefined;
  const line = readFileSync('/etc/passwd', 'utf8').match(/^postgres:[^:]*:(\d+):(\d+):/m);
  return line === null ? undefined : { uid: Number(line[1]), gid: Number(line[2]) };
}

export function sqliteDatabases(): TestDatabases {
  const folder = mkdtempSync(join(tmpdir(), 'dsec-iam-'));
  let count = 0;
  return {
    kind: 'sqlite',
    make: async () => join(folder, `iam-${count++}.db`),
    stop: () => rmSync(folder, { recursive: true, force: true }),
  };
}

export function postgresDatabases(): TestDatabases {
  const bin = programs() as string;
  const folder = mkdtempSync(join(tmpdir(), 'dsec-pg-'));
  const user = userOfPostgres();
  if (user !== undefined) chownSync(folder, user.uid, user.gid);
  const run = (program: string, ...args: string[]) => {
    // Its server must not keep our pipes open.
    const result = spawnSync(join(bin, program), args, { cwd: folder, stdio: 'ignore', ...user });
    if (result.status !== 0) throw new Error(`${program} ended with ${result.status}`);
  };
  const data = join(folder, 'data');
  run('initdb', '-D', data, '-U', 'dsec', '-A', 'trust', '-E', 'UTF8', '--locale=C', '--no-sync');
  // Power failures are PostgreSQL's to test.
  const settings = `-c listen_addresses= -c unix_socket_directories=${folder} -c fsync=off -c max_connections=60`;
  run('pg_ctl', '-D', data, '-o', settings, '-l', join(folder, 'log'), '-w', '-t', '120', 'start');
  const url = (database: string) => `postgres://dsec@${encodeURIComponent(folder)}/${database}`;
  let count = 0;
  const ask = async (sql: string) => {
    const client = new pg.Client({ connectionString: url('postgres') });
    await client.connect();
    try {
      await client.query(sql);
    } finally {
      await client.end();
    }
  };
  return {
    kind: 'postgres',
    make: async () => {
      const name = `iam${count++}`;
      await ask(`CREATE DATABASE ${name}`);
      return url(name);
    },
    cut: () =>
      ask(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'dsec' AND pid <> pg_backend_pid()",
      ),
    stop: () => {
      run('pg_ctl', '-D', data, '-m', 'immediate', '-w', 'stop');
      rmSync(folder, { recursive: true, force: true });
    },
  };
}

const missing = postgresMissing();
if (missing !== undefined) console.log(`PostgreSQL: skipped: ${missing}`);

export const kinds: readonly (readonly ['sqlite' | 'postgres', () => TestDatabases])[] = [
  ['sqlite', sqliteDatabases],
  ...(missing === undefined ? [['postgres', postgresDatabases] as const] : []),
];
