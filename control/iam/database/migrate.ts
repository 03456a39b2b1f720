/** Brings a database to the form that this version works with (migrations.ts), whichever of several processes comes first. */
import { fail } from '../../errors.ts';
import type { Database } from './database.ts';
import { type Migration, migrations, type Words } from './migrations.ts';

const SQLITE: Words = {
  binary: '',
  counter: 'INTEGER PRIMARY KEY AUTOINCREMENT',
  clustered: 'WITHOUT ROWID',
  appendOnly: (table) =>
    ['UPDATE', 'DELETE'].map(
      (change) =>
        `CREATE TRIGGER ${table}_no_${change.toLowerCase()} BEFORE ${change} ON ${table} BEGIN SELECT RAISE(ABORT, '${table} is append only'); END`,
    ),
};

const POSTGRES: Words = {
  binary: 'COLLATE "C"',
  counter: 'BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY',
  clustered: '',
  appendOnly: (table) => [
    `CREATE FUNCTION ${table}_append_only() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION '${table} is append only'; END $$`,
    `CREATE TRIGGER ${table}_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON ${table} FOR EACH STATEMENT EXECUTE FUNCTION ${table}_append_only()`,
  ],
};

/** @throws IAM_DATABASE_NEWER, IAM_DATABASE */
export async function migrate(
  database: Database,
  kind: 'sqlite' | 'postgres',
  name: string,
  steps: readonly Migration[] = migrations,
  now: () => number = Date.now,
): Promise<void> {
  const words = kind === 'sqlite' ? SQLITE : POSTGRES;
  await database.changeAlone(async ({ run }) => {
    await run(
      'CREATE TABLE IF NOT EXISTS iam_migrations (number INTEGER PRIMARY KEY, name TEXT NOT NULL, at BIGINT NOT NULL)',
    );
  });
  const newest = steps.at(-1)?.number ?? 0;
  for (const step of steps) {
    await database.changeAlone(async ({ rows, run }) => {
      const [{ last }] = (await rows<{ last: number }>(
        'SELECT COALESCE(max(number), 0) AS last FROM iam_migrations',
      )) as [{ last: number }];
      if (last > newest) throw fail('IAM_DATABASE_NEWER', { database: name, theirs: last, ours: newest });
      if (last >= step.number) return;
      for (const statement of step.statements(words)) await run(statement);
      await run('INSERT INTO iam_migrations (number, name, at) VALUES (?, ?, ?)', step.number, step.name, now());
    });
  }
}
