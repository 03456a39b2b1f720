/** The tree of projects. */
import { fail } from '../errors.ts';
import { administer, type Context } from './administer.ts';
import type { Project } from './administration.ts';
import { allows } from './authority.ts';
import type { Transaction } from './database/database.ts';
import { type Identity, RESOURCES } from './iam.ts';
import { checkPath, parentOf, ROOT, within, withinSql } from './project-path.ts';
import { claimOf, handDown, lockChain } from './quotas.ts';

interface ProjectRow {
  path: string;
  created_at: number;
  created_by: string;
}

export function createProject(context: Context, by: Identity, path: string): Promise<Project> {
  checkPath(path);
  const parent = parentOf(path) ?? ROOT;
  return administer(context, by, { action: 'project.create', project: path }, async ({ rows, run, needs, now }) => {
    needs('project.admin', parent);
    await needProject(rows, parent);
    const made = await run(
      'INSERT INTO iam_projects (path, parent, created_at, created_by) VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING',
      path,
      parent,
      now,
      by.principal,
    );
    if (made === 0) throw fail('IAM_EXISTS', { what: `project ${path}` });
    return { result: { path, createdAtMs: now, createdBy: by.principal } };
  });
}

export async function listProjects(context: Context, by: Identity, above: string = ROOT): Promise<Project[]> {
  checkPath(above);
  const authority = await context.authorities.of(by);
  const found = await context.database.read<ProjectRow>(
    `SELECT path, created_at, created_by FROM iam_projects WHERE ${withinSql('path')} ORDER BY path`,
    ...within(above),
  );
  const now = context.now();
  return found
    .filter(({ path }) => allows(authority, 'project.read', path, now))
    .map(({ path, created_at, created_by }) => ({ path, createdAtMs: created_at, createdBy: created_by }));
}

export function removeProject(context: Context, by: Identity, path: string): Promise<void> {
  checkPath(path);
  return administer(context, by, { action: 'project.remove', project: path }, async ({ rows, run, needs, now }) => {
    const parent = parentOf(path);
    needs('project.admin', parent ?? ROOT);
    if (parent === undefined) throw fail('IAM_BAD_REQUEST', { problem: `${ROOT} stays` });
    // Reservations are made under this lock: from here on none comes.
    const chain = await lockChain({ rows }, context.database.forUpdate, path);
    const project = chain.at(-1);
    if (project === undefined || project.path !== path) throw fail('IAM_NOT_FOUND', { what: `project ${path}` });
    const [counts] = await rows<Record<string, number>>(
      `SELECT (SELECT count(*) FROM iam_projects WHERE parent = ?) AS projects,
        (SELECT count(*) FROM iam_reservations WHERE project = ?) AS sandboxes,
        (SELECT count(*) FROM iam_principals WHERE project = ? AND disabled = 0) AS principals`,
      path,
      path,
      path,
    );
    for (const [what, count] of Object.entries(counts ?? {})) {
      if (count > 0) throw fail('IAM_NOT_EMPTY', { project: path, what: `${count} ${what}` });
    }
    await handDown(
      { run },
      chain.slice(0, -1),
      RESOURCES.map((resource) => [resource, -claimOf(project, resource)]),
    );
    await run('DELETE FROM iam_policies WHERE project = ?', path);
    // Kept, for the audit log's sake, but for nothing else: the name may come again.
    await run('UPDATE iam_tokens SET revoked_at = ? WHERE project = ? AND revoked_at IS NULL', now, path);
    await run('UPDATE iam_principals SET project = ? WHERE project = ?', parent, path);
    await run('DELETE FROM iam_released WHERE project = ?', path);
    await run('DELETE FROM iam_projects WHERE path = ?', path);
    return { result: undefined };
  });
}

/** @throws IAM_NOT_FOUND */
export async function needProject(rows: Transaction['rows'], path: string): Promise<void> {
  const found = await rows('SELECT path FROM iam_projects WHERE path = ?', path);
  if (found.length === 0) throw fail('IAM_NOT_FOUND', { what: `project ${path}` });
}
