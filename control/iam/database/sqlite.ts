/**
 * SQLite in WAL mode. COMMIT writes to the page cache alone (synchronous = NORMAL); what makes it durable is fdatasync of the log file
 * in another thread, once for all that committed before it, while this one goes on. A commit whose power failed before that was
 * promised to nobody.
 *
 * Reads have a connection of their own, which sees what is committed and waits for no writer.
 */
import { chmodSync, closeSync, existsSync, fdatasync, fsyncSync, openSync } from 'node:fs';
import { dirname } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { promisify } from 'node:util';
import type Sqlite from 'better-sqlite3';
import { isDsecError, messageOf, systemCode } from '#base';
import { fail } from '../../errors.ts';
import type { Database, Transaction, Value } from './database.ts';

/** For how long other processes may hold the database. */
const BUSY_MS = 30_000;
/** 16 MiB: a checkpoint costs as much as a group of changes does, so it should be rare. */
const CHECKPOINT_PAGES = 4000;

/** The indexes of some hundred thousand reservations; what is not in it is read from the page cache for each of them. */
const CACHE_KIB = 64 * 1024;

const syncFile = promisify(fdatasync);

interface Durable {
  readonly promise: Promise<void>;
  readonly begun: boolean;
}

/** @throws IAM_DATABASE */
export async function openSqlite(path: string): Promise<Database> {
  const Constructor = await loadSqlite();
  try {
    return new SqliteDatabase(Constructor, path);
  } catch (error) {
    throw fail('IAM_DATABASE', { database: path, problem: messageOf(error) }, error);
  }
}

async function loadSqlite(): Promise<typeof Sqlite> {
  try {
    return (await import('better-sqlite3')).default;
  } catch (error) {
    throw fail('IAM_NO_SQLITE', { problem: messageOf(error).split('\n', 1)[0] ?? '' }, error);
  }
}

class SqliteDatabase implements Database {
  readonly list = 'json_each(?)';
  readonly forUpdate = '';
  readonly #path: string;
  readonly #writer: Connection;
  readonly #reader: Connection;
  readonly #logFile: number;
  #last: Promise<unknown> = Promise.resolve();
  #durable: Durable | undefined;

  constructor(Constructor: typeof Sqlite, path: string) {
    this.#path = path;
    const isNew = !existsSync(path);
    const writer = new Constructor(path, { timeout: BUSY_MS });
    if (isNew) chmodSync(path, 0o600);
    writer.pragma('journal_mode = WAL');
    writer.pragma('synchronous = NORMAL');
    writer.pragma('foreign_keys = ON');
    writer.pragma(`cache_size = -${CACHE_KIB}`);
    writer.pragma('temp_store = MEMORY');
    writer.pragma(`wal_autocheckpoint = ${CHECKPOINT_PAGES}`);
    // The log file is there from the first read of a database in this mode, and stays while somebody has it open.
    writer.exec('SELECT count(*) FROM sqlite_master');
    this.#writer = new Connection(writer);
    const reader = new Constructor(path, { timeout: BUSY_MS });
    reader.pragma('query_only = ON');
    this.#reader = new Connection(reader);
    this.#reader.rows('SELECT count(*) FROM sqlite_master', []);
    this.#logFile = openSync(`${path}-wal`, 'r');
    const folder = openSync(dirname(path), 'r');
    fsyncSync(folder);
    closeSync(folder);
    // From here on a wait must not stand in the way of everything else in this process.
    writer.pragma('busy_timeout = 20');
  }

  async read<R>(sql: string, ...values: Value[]): Promise<R[]> {
    try {
      return this.#reader.rows<R>(sql, values);
    } catch (error) {
      throw this.#problem(error);
    }
  }

  change<T>(work: (transaction: Transaction) => Promise<T>): Promise<T> {
    const done = this.#last.then(() => this.#transact(work));
    this.#last = done.catch(() => {});
    return done.then(async (result) => {
      await this.#sync();
      return result;
    });
  }

  changeAlone<T>(work: (transaction: Transaction) => Promise<T>): Promise<T> {
    return this.change(work);
  }

  async #transact<T>(work: (transaction: Transaction) => Promise<T>): Promise<T> {
    await this.#begin();
    try {
      const result = await work(this.#writer.transaction);
      this.#writer.run('COMMIT', []);
      return result;
    } catch (error) {
      // A full disk may have rolled it back already.
      if (this.#writer.inTransaction) this.#writer.run('ROLLBACK', []);
      throw this.#problem(error);
    }
  }

  async #begin(): Promise<void> {
    const until = Date.now() + BUSY_MS;
    for (;;) {
      try {
        this.#writer.run('BEGIN IMMEDIATE', []);
        return;
      } catch (error) {
        if (systemCode(error)?.startsWith('SQLITE_BUSY') !== true || Date.now() > until) throw this.#problem(error);
        await sleep(5 + Math.random() * 20);
      }
    }
  }

  /** One that has not begun yet is waited for by all who have committed before it begins. */
  async #sync(): Promise<void> {
    const current = this.#durable;
    if (current !== undefined && !current.begun) return current.promise;
    const next = { begun: false, promise: Promise.resolve() };
    next.promise = (current?.promise ?? Promise.resolve())
      .catch(() => {})
      .then(async () => {
        next.begun = true;
        try {
          await syncFile(this.#logFile);
        } catch (error) {
          throw this.#problem(error);
        } finally {
          if (this.#durable === next) this.#durable = undefined;
        }
      });
    this.#durable = next;
    return next.promise;
  }

  #problem(error: unknown): unknown {
    if (isDsecError(error) || systemCode(error) === undefined) return error;
    return fail('IAM_DATABASE', { database: this.#path, problem: messageOf(error) }, error);
  }

  async close(): Promise<void> {
    await this.#last;
    await this.#durable?.promise.catch(() => {});
    closeSync(this.#logFile);
    this.#reader.close();
    this.#writer.close();
  }
}

class Connection {
  readonly #database: Sqlite.Database;
  readonly #prepared = new Map<string, Sqlite.Statement>();
  readonly transaction: Transaction = {
    rows: async <R>(sql: string, ...values: Value[]) => this.rows<R>(sql, values),
    run: async (sql, ...values) => this.run(sql, values),
    // A prepared statement for each row costs half of what one over a JSON list does.
    insertMany: async (table, columns, rows) => {
      const names = Object.keys(columns);
      const statement = this.#statement(`INSERT INTO ${table} (${names}) VALUES (${names.map(() => '?')})`);
      for (const row of rows) statement.run(...row);
    },
    updateMany: async (table, columns, set, rows, condition = '1 = 1') => {
      const names = Object.keys(columns);
      const [key = ''] = names;
      // In the order in which their question marks stand.
      const given = [...set, key];
      const also = condition.replace(/new_(\w+)/g, (_, name: string) => {
        given.push(name);
        return '?';
      });
      const changes = set.map((name) => `${name} = ?`);
      const statement = this.#statement(`UPDATE ${table} SET ${changes} WHERE ${key} = ? AND (${also})`);
      const places = given.map((name) => names.indexOf(name));
      const done = new Set<string>();
      for (const row of rows) {
        const { changes } = statement.run(...places.map((place) => row[place]));
        if (changes > 0) done.add(String(row[0]));
      }
      return done;
    },
    deleteMany: async <R>(table: string, ids: readonly string[], returning: string) => {
      const statement = this.#statement(`DELETE FROM ${table} WHERE id = ? RETURNING ${returning}`);
      return ids.flatMap((id) => statement.all(id) as R[]);
    },
  };

  constructor(database: Sqlite.Database) {
    this.#database = database;
  }

  get inTransaction(): boolean {
    return this.#database.inTransaction;
  }

  rows<R>(sql: string, values: readonly Value[]): R[] {
    return this.#statement(sql).all(...values) as R[];
  }

  run(sql: string, values: readonly Value[]): number {
    return this.#statement(sql).run(...values).changes;
  }

  #statement(sql: string): Sqlite.Statement {
    let statement = this.#prepared.get(sql);
    if (statement === undefined) {
      statement = this.#database.prepare(sql);
      this.#prepared.set(sql, statement);
    }
    return statement;
  }

  close(): void {
    this.#database.close();
  }
}
