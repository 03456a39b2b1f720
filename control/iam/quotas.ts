/**
 * Limits of projects, and how they are handed down.
 *
 * The rule, for each resource by itself: what a project sets aside for those below it (`delegated`) is the sum, over its children, of the
 * child's limit, or, where the child has none, of what that child has set aside in its turn. It never exceeds the project's own limit.
 * A limit is a cap: a reservation needs room in its project and in every one above it.
 */
import { fail } from '../errors.ts';
import { administer, type Context } from './administer.ts';
import type { Quota } from './administration.ts';
import { amountsOf, COLUMNS, columns, limitsOf, type Row, UNLIMITED } from './amounts.ts';
import { allows } from './authority.ts';
import type { Transaction } from './database/database.ts';
import { type Identity, RESOURCES, type Resource } from './iam.ts';
import { chainOf, checkPath, parentOf, ROOT, within, withinSql } from './project-path.ts';

export interface Account {
  readonly path: string;
  readonly limits: Partial<Record<Resource, number>>;
  readonly delegated: Record<Resource, number>;
}

/** What the parent has to set aside for it. */
export function claimOf({ limits, delegated }: Account, resource: Resource): number {
  return limits[resource] ?? delegated[resource];
}

/** From the top to the project itself, as far as they exist. The order is that of all locks. */
export async function lockChain(
  { rows }: Pick<Transaction, 'rows'>,
  forUpdate: string,
  path: string,
): Promise<Account[]> {
  const marks = chainOf(path).map(() => '?');
  const found = await rows<Row>(
    `SELECT path, ${columns('limit_')}, ${columns('delegated_')} FROM iam_projects
     WHERE path IN (${marks.join(', ')}) ORDER BY path ${forUpdate}`,
    ...chainOf(path),
  );
  return found.map((row) => ({
    path: String(row.path),
    limits: limitsOf(row),
    delegated: amountsOf(row, 'delegated_'),
  }));
}

/**
 * The claim of what lies right below the last of `chain` has grown by so much: goes up to the first project with a limit of its own.
 * @throws IAM_QUOTA_PARENT
 */
export async function handDown(
  { run }: Pick<Transaction, 'run'>,
  chain: readonly Account[],
  growth: readonly (readonly [Resource, number])[],
): Promise<void> {
  for (const [resource, more] of growth) {
    if (more === 0) continue;
    for (const { path, limits, delegated } of [...chain].reverse()) {
      const sum = delegated[resource] + more;
      const limit = limits[resource] ?? UNLIMITED;
      if (more > 0 && sum > limit) {
        throw fail('IAM_QUOTA_PARENT', { project: path, resource, delegated: sum, limit });
      }
      await run(`UPDATE iam_projects SET delegated_${COLUMNS[resource]} = ? WHERE path = ?`, sum, path);
      if (limits[resource] !== undefined) break;
    }
  }
}

export function setQuota(
  context: Context,
  by: Identity,
  project: string,
  asked: Readonly<Partial<Record<Resource, number | null>>>,
): Promise<Quota> {
  checkPath(project);
  for (const [resource, limit] of Object.entries(asked)) {
    if (!(RESOURCES as readonly string[]).includes(resource)) {
      throw fail('IAM_BAD_REQUEST', { problem: `"${resource}" is none of ${RESOURCES.join(', ')}` });
    }
    if (limit !== null && limit !== undefined && (!Number.isSafeInteger(limit) || limit < 0)) {
      throw fail('IAM_BAD_REQUEST', { problem: `${resource} ${limit}: not a whole number from 0 to 2^53 - 1` });
    }
  }
  const named = RESOURCES.filter((resource) => asked[resource] !== undefined);
  const detail = Object.fromEntries(named.map((resource) => [resource, asked[resource] ?? 'none']));
  return administer(context, by, { action: 'quota.set', project, detail }, async ({ rows, run, needs }) => {
    needs('quota.admin', parentOf(project) ?? ROOT);
    const chain = await lockChain({ rows }, context.database.forUpdate, project);
    const account = chain.at(-1);
    if (account?.path !== project) throw fail('IAM_NOT_FOUND', { what: `project ${project}` });
    const growth = named.map((resource) => {
      const limit = asked[resource] ?? undefined;
      const delegated = account.delegated[resource];
      if (limit !== undefined && limit < delegated) {
        throw fail('IAM_QUOTA_DELEGATED', { project, resource, delegated, limit });
      }
      return [resource, (limit ?? delegated) - claimOf(account, resource)] as const;
    });
    await handDown({ run }, chain.slice(0, -1), growth);
    for (const resource of named) {
      await run(
        `UPDATE iam_projects SET limit_${COLUMNS[resource]} = ? WHERE path = ?`,
        asked[resource] ?? null,
        project,
      );
    }
    const [quota] = await quotasWhere(rows, 'path = ?', [project]);
    return { result: quota as Quota };
  });
}

export async function getQuota(context: Context, by: Identity, project: string): Promise<Quota> {
  checkPath(project);
  const authority = await context.authorities.of(by);
  if (!allows(authority, 'project.read', project, context.now())) {
    throw fail('IAM_DENIED', { principal: by.principal, action: 'project.read', project });
  }
  const [quota] = await quotasWhere(context.database.read.bind(context.database), 'path = ?', [project]);
  if (quota === undefined) throw fail('IAM_NOT_FOUND', { what: `project ${project}` });
  return quota;
}

export async function listQuotas(context: Context, by: Identity, project: string = ROOT): Promise<Quota[]> {
  checkPath(project);
  const authority = await context.authorities.of(by);
  const read = context.database.read.bind(context.database);
  const found = await quotasWhere(read, withinSql('path'), within(project));
  const now = context.now();
  return found.filter((quota) => allows(authority, 'project.read', quota.project, now));
}

async function quotasWhere(rows: Transaction['rows'], condition: string, values: string[]): Promise<Quota[]> {
  const found = await rows<Row>(
    `SELECT path, ${columns('limit_')}, ${columns('delegated_')}, ${columns('used_')} FROM iam_projects
     WHERE ${condition} ORDER BY path`,
    ...values,
  );
  return found.map((row) => ({
    project: String(row.path),
    limits: limitsOf(row),
    delegated: amountsOf(row, 'delegated_'),
    used: amountsOf(row, 'used_'),
  }));
}

/** For tests and for doubts: what is kept as sums is what it is the sum of. @returns what does not hold, none when all does */
export async function auditSums(rows: Transaction['rows']): Promise<string[]> {
  const projects = await quotasWhere(rows, '1 = 1', []);
  const live = await rows<Row>(
    `SELECT project, ${RESOURCES.map((r) => `sum(${COLUMNS[r]}) AS ${COLUMNS[r]}`).join(', ')} FROM iam_reservations GROUP BY project`,
  );
  const wrong: string[] = [];
  const byPath = new Map(projects.map((quota) => [quota.project, quota]));
  for (const row of live)
    if (!byPath.has(String(row.project))) wrong.push(`reservations of ${row.project}, which is gone`);
  for (const { project, limits, delegated, used } of projects) {
    const children = projects.filter((other) => parentOf(other.project) === project);
    const below = live.filter((row) => chainOf(String(row.project)).includes(project)).map((row) => amountsOf(row));
    for (const resource of RESOURCES) {
      const claims = children.reduce((sum, child) => sum + (child.limits[resource] ?? child.delegated[resource]), 0);
      if (claims !== delegated[resource])
        wrong.push(`${project}: delegated ${resource} ${delegated[resource]}, not ${claims}`);
      if (delegated[resource] > (limits[resource] ?? UNLIMITED))
        wrong.push(`${project}: delegated ${resource} above its limit`);
      const sum = below.reduce((total, amounts) => total + amounts[resource], 0);
      if (sum !== used[resource]) wrong.push(`${project}: used ${resource} ${used[resource]}, not ${sum}`);
    }
  }
  return wrong;
}
