/** Users, services and agents. They are disabled, never removed: the audit log names them for ever. */
import { fail } from '../errors.ts';
import { actionsOf } from './actions.ts';
import { administer, type Context, endOfGrant } from './administer.ts';
import type { Principal } from './administration.ts';
import { allows } from './authority.ts';
import { checkName } from './checked-text.ts';
import type { Transaction } from './database/database.ts';
import { type Identity, KINDS, type PrincipalKind } from './iam.ts';
import { hasLastingAdmin } from './lasting-admin.ts';
import { policiesWhere } from './policy-rows.ts';
import { checkPath, ROOT, within, withinSql } from './project-path.ts';
import { needProject } from './projects.ts';

interface PrincipalRow {
  name: string;
  kind: PrincipalKind;
  project: string;
  disabled: number;
  created_at: number;
  created_by: string;
}

const COLUMNS = 'name, kind, project, disabled, created_at, created_by';

export function createPrincipal(
  context: Context,
  by: Identity,
  { name, kind, project }: { name: string; kind: PrincipalKind; project: string },
): Promise<Principal> {
  checkName('name of a principal', name);
  checkPath(project);
  if (!KINDS.includes(kind)) throw fail('IAM_BAD_REQUEST', { problem: `kind: one of ${KINDS.join(', ')}` });
  const entry = { action: 'principal.create', project, target: name };
  return administer(context, by, entry, async ({ rows, run, needs, now }) => {
    needs('policy.admin', project);
    await needProject(rows, project);
    const made = await run(
      'INSERT INTO iam_principals (name, kind, project, created_at, created_by) VALUES (?, ?, ?, ?, ?) ON CONFLICT DO NOTHING',
      name,
      kind,
      project,
      now,
      by.principal,
    );
    if (made === 0) throw fail('IAM_EXISTS', { what: `principal ${name}` });
    return { result: { name, kind, project, disabled: false, createdAtMs: now, createdBy: by.principal } };
  });
}

export async function listPrincipals(context: Context, by: Identity, project: string = ROOT): Promise<Principal[]> {
  checkPath(project);
  const authority = await context.authorities.of(by);
  const found = await context.database.read<PrincipalRow>(
    `SELECT ${COLUMNS} FROM iam_principals WHERE ${withinSql('project')} ORDER BY name`,
    ...within(project),
  );
  const now = context.now();
  return found
    .filter((row) => row.name === by.principal || allows(authority, 'project.read', row.project, now))
    .map(principalOf);
}

export function disablePrincipal(context: Context, by: Identity, name: string, disabled: boolean): Promise<Principal> {
  checkName('name of a principal', name);
  const entry = { action: disabled ? 'principal.disable' : 'principal.enable', project: by.project, target: name };
  return administer(context, by, entry, async (change) => {
    const { rows, run, needs, now } = change;
    const principal = await findPrincipal(rows, name);
    // Who may not know it learns nothing by asking.
    needs('policy.admin', principal?.project ?? ROOT);
    if (principal === undefined) throw fail('IAM_NOT_FOUND', { what: `principal ${name}` });
    if (principal.disabled && !disabled) {
      // It would have again what it had: that is given, too.
      for (const { project, grants, expiresAtMs } of await policiesWhere(rows, 'principal = ?', [name])) {
        if (expiresAtMs !== undefined && expiresAtMs <= now) continue;
        endOfGrant(change, actionsOf(grants), project, expiresAtMs ?? Number.POSITIVE_INFINITY);
      }
    }
    const hadAdmin = await hasLastingAdmin(rows);
    await run('UPDATE iam_principals SET disabled = ? WHERE name = ?', disabled ? 1 : 0, name);
    if (hadAdmin && !(await hasLastingAdmin(rows))) throw fail('IAM_LAST_ADMIN', { principal: name });
    return { result: { ...principal, disabled } };
  });
}

export async function findPrincipal(rows: Transaction['rows'], name: string): Promise<Principal | undefined> {
  const [row] = await rows<PrincipalRow>(`SELECT ${COLUMNS} FROM iam_principals WHERE name = ?`, name);
  return row === undefined ? undefined : principalOf(row);
}

/** @throws IAM_NOT_FOUND */
export async function needPrincipal(rows: Transaction['rows'], name: string): Promise<Principal> {
  const principal = await findPrincipal(rows, name);
  if (principal === undefined) throw fail('IAM_NOT_FOUND', { what: `principal ${name}` });
  return principal;
}

function principalOf({ name, kind, project, disabled, created_at, created_by }: PrincipalRow): Principal {
  return { name, kind, project, disabled: disabled !== 0, createdAtMs: created_at, createdBy: created_by };
}
