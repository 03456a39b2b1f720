/**
 * The narrow door to the database of IAM: SQLite (sqlite.ts) or PostgreSQL (postgres.ts) behind one interface and one dialect.
 *
 * The SQL is what both speak: `?` for parameters, RETURNING, ON CONFLICT, `->>` on JSON. Whole numbers come as numbers. Lists
 * travel as one JSON parameter: `FROM ${db.list}` with it gives rows with one column `value`. Where they differ, the difference is
 * a field here, and no other file asks which one it is.
 */
export type Value = string | number | null;

/** Names of columns, and what they hold. */
export type Columns = Readonly<Record<string, 'TEXT' | 'BIGINT' | 'INTEGER'>>;

export interface Transaction {
  rows<R>(sql: string, ...values: Value[]): Promise<R[]>;
  /** @returns how many rows it changed */
  run(sql: string, ...values: Value[]): Promise<number>;
  /** Many rows at the price of few questions. Values in the order of `columns`. */
  insertMany(table: string, columns: Columns, rows: readonly Value[][]): Promise<void>;
  /**
   * Each row of values is for the row of the table whose key, the first column, is its first value. `condition`: SQL over `TABLE.NAME`, which is there, and
   * `new_NAME`, which was given; columns that are not in `set` are given for that alone.
   * @returns keys of those that were there and met the condition
   */
  updateMany(
    table: string,
    columns: Columns,
    set: readonly string[],
    rows: readonly Value[][],
    condition?: string,
  ): Promise<Set<string>>;
  /** By their `id`. @returns `returning` of those that were there */
  deleteMany<R>(table: string, ids: readonly string[], returning: string): Promise<R[]>;
}

export interface Database {
  /** `json_each(?)`, or what PostgreSQL has for it. */
  readonly list: string;
  /** After a SELECT: keeps the rows from being changed by others until the end of the transaction. */
  readonly forUpdate: string;
  /** What was committed last; sees nothing of a change that is under way. */
  read<R>(sql: string, ...values: Value[]): Promise<R[]>;
  /**
   * One transaction: all of it or nothing, durable when the promise resolves. It is run again from the start when the database had to
   * choose between two, so `work` may have no other effect. SQLite: one at a time, all processes counted.
   * @throws what `work` throws; IAM_DATABASE
   */
  change<T>(work: (transaction: Transaction) => Promise<T>): Promise<T>;
  /** `change`, one at a time among all processes: for what reads much before it writes. Those of `change` go on beside it in PostgreSQL. */
  changeAlone<T>(work: (transaction: Transaction) => Promise<T>): Promise<T>;
  close(): Promise<void>;
}

/** The parameter for `list`. */
export function listOf(values: readonly unknown[]): string {
  return JSON.stringify(values);
}
