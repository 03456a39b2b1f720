/**
 * PostgreSQL, for several apiservers on one database. READ COMMITTED with rows locked by hand (`forUpdate`), always in the same order;
 * a transaction that PostgreSQL ends all the same (deadlock, serialization) is run again.
 */
import { setTimeout as sleep } from 'node:timers/promises';
import type { Pool, PoolClient } from 'pg';
import { isDsecError, messageOf, systemCode } from '#base';
import { fail } from '../../errors.ts';
import type { Columns, Database, Transaction, Value } from './database.ts';

type Parameter = Value | Value[];

const CONNECTIONS = 8;
const TRIES = 20;
/** Any number that other programs on the same database do not lock. */
const ALONE = 0x64736563;
const INT8 = 20;

/** @throws IAM_DATABASE */
export async function openPostgres(url: string): Promise<Database> {
  const { default: pg } = await import('pg');
  const types = {
    // All are below 2^53: limits and sums are checked before they are written.
    getTypeParser: (oid: number, format?: 'text' | 'binary') =>
      oid === INT8 ? Number : pg.types.getTypeParser(oid, format as 'text'),
  };
  const name = withoutPassword(url);
  let pool: Pool;
  try {
    pool = new pg.Pool({
      connectionString: url,
      max: CONNECTIONS,
      types: types as never,
      connectionTimeoutMillis: 10_000,
      keepAlive: true,
      application_name: 'dsec',
    });
    // A server that goes away ends idle connections; the next query makes new ones, or says what is wrong.
    pool.on('error', () => {});
    // While one changes hands nobody listens to it, and an error that nobody hears ends the process. Its next query fails by itself.
    pool.on('connect', (client) => client.on('error', () => {}));
    await pool.query('SELECT 1');
  } catch (error) {
    throw fail('IAM_DATABASE', { database: name, problem: messageOf(error) }, error);
  }
  return new PostgresDatabase(pool, name);
}

class PostgresDatabase implements Database {
  readonly list = 'json_array_elements(?::json) AS list(value)';
  readonly forUpdate = 'FOR UPDATE';
  readonly #pool: Pool;
  readonly #name: string;

  constructor(pool: Pool, name: string) {
    this.#pool = pool;
    this.#name = name;
  }

  async read<R>(sql: string, ...values: Value[]): Promise<R[]> {
    try {
      return (await this.#pool.query(prepared(sql, values))).rows as R[];
    } catch (error) {
      throw this.#problem(error);
    }
  }

  change<T>(work: (transaction: Transaction) => Promise<T>): Promise<T> {
    return this.#transact(work, false);
  }

  changeAlone<T>(work: (transaction: Transaction) => Promise<T>): Promise<T> {
    return this.#transact(work, true);
  }

  async #transact<T>(work: (transaction: Transaction) => Promise<T>, alone: boolean): Promise<T> {
    for (let tries = 1; ; tries++) {
      let client: PoolClient;
      try {
        client = await this.#pool.connect();
      } catch (error) {
        throw this.#problem(error);
      }
      let broken: Error | undefined;
      const onError = (error: Error) => {
        broken = error;
      };
      client.on('error', onError);
      try {
        await client.query('BEGIN');
        if (alone) await client.query(`SELECT pg_advisory_xact_lock(${ALONE})`);
        const result = await work(transactionOf(client));
        await client.query('COMMIT');
        return result;
      } catch (error) {
        await client.query('ROLLBACK').catch((failure: Error) => {
          broken = failure;
        });
        const code = systemCode(error);
        const again = code === '40P01' || code === '40001';
        if (!again || broken !== undefined || tries >= TRIES) throw this.#problem(error);
      } finally {
        client.off('error', onError);
        client.release(broken);
      }
      await sleep(Math.random() * 10 * tries);
    }
  }

  /** Errors of the server and the connection; those of `work` are its own. */
  #problem(error: unknown): unknown {
    if (isDsecError(error)) return error;
    return fail('IAM_DATABASE', { database: this.#name, problem: messageOf(error) }, error);
  }

  async close(): Promise<void> {
    await this.#pool.end();
  }
}

function transactionOf(client: PoolClient): Transaction {
  const rows = async <R>(sql: string, ...values: Parameter[]) =>
    (await client.query(prepared(sql, values))).rows as R[];
  const run = async (sql: string, ...values: Parameter[]) => (await client.query(prepared(sql, values))).rowCount ?? 0;
  return {
    rows,
    run,
    insertMany: async (table, columns, list) => {
      const names = Object.keys(columns);
      await run(`INSERT INTO ${table} (${names}) SELECT * FROM ${unnest(columns)}`, ...byColumn(names, list));
    },
    updateMany: async (table, columns, set, list, condition) => {
      const names = Object.keys(columns);
      const key = names[0];
      const changes = set.map((name) => `${name} = new.${name}`);
      const also = condition === undefined ? '' : ` AND (${condition.replace(/new_(\w+)/g, 'new.$1')})`;
      const done = await rows<{ key: string }>(
        `UPDATE ${table} SET ${changes} FROM ${unnest(columns)} AS new (${names})
         WHERE ${table}.${key} = new.${key}${also} RETURNING ${table}.${key} AS key`,
        ...byColumn(names, list),
      );
      return new Set(done.map(({ key }) => key));
    },
    deleteMany: (table, ids, returning) =>
      rows(`DELETE FROM ${table} WHERE id = ANY (?::text[]) RETURNING ${returning}`, [...ids]),
  };
}

/** One array for each column: the statement is the same however many rows there are. */
function unnest(columns: Columns): string {
  return `UNNEST(${Object.values(columns).map((type) => `?::${type}[]`)})`;
}

function byColumn(names: readonly unknown[], rows: readonly Value[][]): Value[][] {
  return names.map((_, column) => rows.map((row) => row[column] as Value));
}

const statements = new Map<string, { name: string; text: string }>();

/** Parsed and planned once a connection. */
function prepared(sql: string, values: readonly Parameter[]) {
  let statement = statements.get(sql);
  if (statement === undefined) {
    let number = 0;
    statement = { name: `dsec${statements.size}`, text: sql.replace(/\?/g, () => `$${++number}`) };
    statements.set(sql, statement);
  }
  return { ...statement, values: [...values] };
}

function withoutPassword(url: string): string {
  return url.replace(/^([a-z]+:\/\/[^/:@]*):[^@]*@/, '$1@').replace(/([?&]password=)[^&]*/, '$1...');
}
