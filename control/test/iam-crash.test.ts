/** Several processes on one database, killed in the middle: what was answered is kept, sums are right, the next one goes on. */
import { type ChildProcess, spawn } from 'node:child_process';
import { once } from 'node:events';
import { join } from 'node:path';
import { createInterface } from 'node:readline';
import { afterAll, beforeAll, describe, expect, test, vi } from 'vitest';
import { migrate } from '../iam/database/migrate.ts';
import { migrations } from '../iam/database/migrations.ts';
import { openPostgres } from '../iam/database/postgres.ts';
import { openSqlite } from '../iam/database/sqlite.ts';
import { bootstrapAdmin, openIam } from '../iam/open-iam.ts';
import { kinds, type TestDatabases } from './iam-databases.ts';

vi.setConfig({ testTimeout: 600_000, hookTimeout: 600_000 });

describe.each(kinds)('processes on one database of %s', (kind, start) => {
  let databases: TestDatabases;
  beforeAll(() => {
    databases = start();
  });
  const children = new Set<ChildProcess>();
  afterAll(() => {
    for (const child of children) child.kill('SIGKILL');
    databases?.stop();
  });

  test('kill -9 while they reserve and release: nothing that was answered is lost, no sum is wrong', async () => {
    const database = await databases.make();
    const iam = await openIam({ database });
    const admin = await iam.authenticate((await bootstrapAdmin(iam)) as string);
    await iam.createProject(admin, 'root/a');
    await iam.createProject(admin, 'root/a/b');
    await iam.setQuota(admin, 'root/a', { sandboxes: 500 });
    const states = new Map<string, string>();
    const failures: string[] = [];
    const round = async (enough: number) => {
      let answers = 0;
      children.clear();
      const running = ['root/a', 'root/a/b'].map((project, i) => {
        const script = join(import.meta.dirname, 'iam-child.ts');
        const child = spawn(process.execPath, ['--import', 'tsx', script, database, project, String(i)], {
          stdio: ['ignore', 'pipe', 'inherit'],
        });
        children.add(child);
        const closed = once(child, 'close');
        createInterface({ input: child.stdout as NodeJS.ReadableStream }).on('line', (line) => {
          const [what = '', id = ''] = line.split(' ');
          if (what === 'failed') failures.push(line);
          else if (what !== 'ready') states.set(id, what);
          answers++;
          // In the middle of whatever they are doing.
          if (answers === enough) for (const one of children) one.kill('SIGKILL');
        });
        return closed;
      });
      await Promise.all(running);
    };
    for (const enough of [100, 300]) await round(enough);
    expect(failures).toEqual([]);
    expect(await iam.doubts()).toEqual([]);

    const database2 = await (kind === 'sqlite' ? openSqlite(database) : openPostgres(database));
    const rows = await database2.read<{ id: string; placed: number }>('SELECT id, placed FROM iam_reservations');
    const live = new Map(rows.map(({ id, placed }) => [id, placed]));
    for (const [id, state] of states) {
      if (state === 'reserved') expect(live.has(id)).toBe(true);
      if (state === 'placed') expect(live.get(id)).toBe(1);
      if (state === 'released') expect(live.has(id)).toBe(false);
    }
    expect([...states.values()].filter((state) => state === 'released').length).toBeGreaterThan(10);
    await database2.close();

    const { used } = await iam.getQuota(admin, 'root/a');
    expect(used.sandboxes).toBe(live.size);
    expect(used.sandboxes).toBeLessThanOrEqual(500);
    // Whatever has no sandbox any more ends by rosters and by the sweep.
    for (let edge = 0; edge < 4; edge++) {
      await iam.reconcile(`e${edge}`, { epoch: 1, writtenAtMs: Date.now() + 3_600_000, reservations: [] });
    }
    await iam.sweep(-1000);
    expect((await iam.getQuota(admin, 'root')).used.sandboxes).toBe(0);
    await iam.close();
  });

  test('a database of a newer version is refused, and left as it is', async () => {
    const name = await databases.make();
    const database = await (kind === 'sqlite' ? openSqlite(name) : openPostgres(name));
    const last = migrations.length;
    const next = { number: last + 1, name: 'a later one', statements: () => ['CREATE TABLE iam_later (x TEXT)'] };
    const statements = () => ['CREATE TABLE iam_x (x TEXT)', 'NONSENSE'];
    const broken = { number: last + 2, name: 'does not work', statements };
    await migrate(database, kind, name, migrations);
    await expect(migrate(database, kind, name, [...migrations, next, broken])).rejects.toMatchObject({
      code: 'IAM_DATABASE',
    });
    // The step that failed left nothing, the one before it is done.
    const done = () => database.read<{ number: number }>('SELECT number FROM iam_migrations ORDER BY number');
    expect((await done()).map(({ number }) => number)).toEqual(Array.from({ length: last + 1 }, (_, at) => at + 1));
    await expect(database.read('SELECT * FROM iam_x')).rejects.toMatchObject({ code: 'IAM_DATABASE' });
    await expect(openIam({ database: name })).rejects.toMatchObject({
      code: 'IAM_DATABASE_NEWER',
      params: { theirs: last + 1, ours: last },
    });
    expect((await done()).length).toBe(last + 1);
    await database.close();
  });

  test('several that open an empty one at the same time make it once', async () => {
    const database = await databases.make();
    const all = await Promise.all(Array.from({ length: 4 }, () => openIam({ database })));
    const secrets = await Promise.all(all.map((iam) => bootstrapAdmin(iam)));
    expect(secrets.filter((secret) => secret !== undefined).length).toBe(1);
    for (const iam of all) await iam.close();
  });
});

test('a database that cannot be opened says so', async () => {
  for (const database of ['/nowhere/iam.db', '/etc', 'postgres://ann:sesame@127.0.0.1:1/x']) {
    const error = await openIam({ database }).catch((thrown) => thrown);
    expect(error).toMatchObject({ code: 'IAM_DATABASE', http: 503 });
    expect(JSON.stringify({ ...error, message: error.message })).not.toContain('sesame');
  }
});
