/** Who may do what, on which project and below it. */
import { randomBytes } from 'node:crypto';
import { fail } from '../errors.ts';
import { type Action, actionsOf } from './actions.ts';
import { administer, type Context, endOfGrant } from './administer.ts';
import type { Policy } from './administration.ts';
import { allows } from './authority.ts';
import { checkName } from './checked-text.ts';
import type { Identity } from './iam.ts';
import { hasLastingAdmin } from './lasting-admin.ts';
import { insertPolicy, policiesWhere, policyOf } from './policy-rows.ts';
import { needPrincipal } from './principals.ts';
import { checkPath, ROOT, within, withinSql } from './project-path.ts';
import { needProject } from './projects.ts';

export function createPolicy(
  context: Context,
  by: Identity,
  asked: { principal: string; project: string; grants: readonly string[]; expiresAtMs?: number },
): Promise<Policy> {
  const { principal, project, grants } = asked;
  checkName('name of a principal', principal);
  checkPath(project);
  const actions = checkGrants(grants);
  const entry = { action: 'policy.create', project, target: principal, detail: { grants: grants.join(' ') } };
  return administer(context, by, entry, async (change) => {
    const { rows, needs, now } = change;
    needs('policy.admin', project);
    const expiresAt = endOfGrant(change, actions, project, asked.expiresAtMs);
    await needProject(rows, project);
    await needPrincipal(rows, principal);
    const row = {
      id: `p${randomBytes(9).toString('hex')}`,
      principal,
      project,
      grants: JSON.stringify(grants),
      expires_at: expiresAt,
      created_at: now,
      granted_by: by.principal,
    };
    await insertPolicy(change, row);
    return { result: policyOf(row) };
  });
}

export async function listPolicies(
  context: Context,
  by: Identity,
  { project = ROOT, principal }: { project?: string; principal?: string } = {},
): Promise<Policy[]> {
  checkPath(project);
  const authority = await context.authorities.of(by);
  const found = await policiesWhere(
    context.database.read.bind(context.database),
    principal === undefined ? withinSql('project') : `${withinSql('project')} AND principal = ?`,
    principal === undefined ? within(project) : [...within(project), principal],
  );
  const now = context.now();
  return found.filter(
    (policy) => policy.principal === by.principal || allows(authority, 'policy.admin', policy.project, now),
  );
}

export function removePolicy(context: Context, by: Identity, id: string): Promise<void> {
  checkName('id of a policy', id);
  const entry = { action: 'policy.remove', project: by.project, target: id };
  return administer(context, by, entry, async ({ rows, run, needs }) => {
    const [policy] = await policiesWhere(rows, 'id = ?', [id]);
    needs('policy.admin', policy?.project ?? ROOT);
    if (policy === undefined) throw fail('IAM_NOT_FOUND', { what: `policy ${id}` });
    const hadAdmin = await hasLastingAdmin(rows);
    await run('DELETE FROM iam_policies WHERE id = ?', id);
    if (hadAdmin && !(await hasLastingAdmin(rows))) {
      throw fail('IAM_LAST_ADMIN', { principal: policy.principal });
    }
    return { result: undefined };
  });
}

/** @throws IAM_BAD_REQUEST */
export function checkGrants(grants: readonly string[]): ReadonlySet<Action> {
  if (grants.length === 0 || grants.length > 64) {
    throw fail('IAM_BAD_REQUEST', { problem: 'grants: 1 to 64 roles or actions' });
  }
  return actionsOf(grants);
}
